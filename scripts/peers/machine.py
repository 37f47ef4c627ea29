"""Where a run takes place, and what else the machine does meanwhile."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FEATURES = re.compile(
    r"avx2|avx512f|avx512_bf16|avx512_vnni|avx512_fp16|avx_vnni|amx_\w+|asimd|bf16|i8mm|sve\w*"
)
_STEAL = 8
"""Fields of the cpu line of /proc/stat that count up to this one; later ones are in them."""
_IDLE = (3, 4)


def cpu_features() -> list[str]:
    """Those of the processor that matter to matrix products, by the names Linux gives them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return [flag for flag in line[1].split() if FEATURES.fullmatch(flag)] if line else []


def usable_cpus(count: int) -> list[int]:
    """The first `count` that this process may run on; fewer where there are fewer."""
    return sorted(os.sched_getaffinity(0))[:count]


@dataclass(slots=True)
class Watch:
    """How many cores other processes keep busy while one of our children runs and ends."""

    _began: float = field(default_factory=time.monotonic)
    _busy: float = field(default_factory=lambda: _busy_seconds())
    _own: float = field(default_factory=lambda: _own_seconds())

    def others(self) -> float:
        own = _own_seconds() - self._own
        elapsed = time.monotonic() - self._began
        return max(0.0, _busy_seconds() - self._busy - own) / elapsed


def _busy_seconds() -> float:
    """Of all cores since the machine started, with what a hypervisor gave to others."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    ticks = sum(int(f) for i, f in enumerate(fields[:_STEAL]) if i not in _IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """CPU time of this process and of its children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def without_folders(words: Sequence[str]) -> str:
    """A command line in which absolute paths are cut down to their last part."""
    return " ".join(re.sub(r"(^|=)/(?:\S*/)?([^/\s]+)/?$", r"\1.../\2", word) for word in words)

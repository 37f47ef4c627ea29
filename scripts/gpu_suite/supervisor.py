"""Runs the sections in processes of their own, so that no crash and no hang ends the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from gpu_suite.results import Results
from gpu_suite.sections import BY_NAME, Section, limit
from gpu_suite.worker import DEVICE_LOST, NO_DEVICE

GRACE = 15.0
"""Seconds that a section may take beyond its limit before its process is killed: it looks at the
clock only between measurements."""
RESERVE = 6.0
"""Seconds at the end of a run for the summary."""
POLL = 0.2
START_LIMIT = 60.0
"""Seconds for a process to begin its first section."""
LOG = "log.txt"
MOST_LOG = 8 * 2**20
_FOLDER = Path(__file__).resolve().parent


@dataclass(slots=True)
class Supervisor:
    out: Path
    budget: float
    dry: bool
    cache: Path
    """Of compiled programs."""
    _results: Results = field(init=False)
    _origin: float = field(init=False)
    _until: float = field(init=False)
    _names: tuple[str, ...] = field(init=False)

    def run(self, names: Sequence[str]) -> None:
        """Sections of these names, in their order; all that they have to say is in the results."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._origin = time.monotonic()
        self._until = self._origin + self.budget - RESERVE
        self._names = tuple(names)
        self._results = Results(self.out, self._origin)
        self._results.row("run", "budget", seconds=self.budget, dry=self.dry, sections=list(names))
        sections = [BY_NAME[name] for name in names]
        for _, group in groupby(sections, key=lambda section: section.process):
            if not self._run_group(list(group)):
                break
        self._shorten_log()
        self._results.row("run", "elapsed", seconds=time.monotonic() - self._origin)

    def _run_group(self, waiting: list[Section]) -> bool:
        """Sections of one process, and of a new one after each that took it down. False if there is
        no device.
        """
        while waiting:
            if time.monotonic() + (0.0 if self.dry else waiting[0].least) > self._until:
                name = waiting.pop(0).name
                self._results.row(name, name, "skipped", reason="no time left")
                continue
            before = len(self._results.rows(status=None))
            status, why = self._run_process(waiting)
            if status == NO_DEVICE:
                return False
            rows = self._results.rows(status=None)[before:]
            over = {r["section"] for r in rows if r["status"] == "end" or _is_skip(r)}
            left = [section for section in waiting if section.name not in over]
            # A process that ended by itself after an error has recorded it.
            if left and (status not in (0, DEVICE_LOST) or len(left) == len(waiting)):
                name = left.pop(0).name
                self._results.row(name, name, "error", error=why, log=self._log_tail())
            waiting = left
        return True

    def _run_process(self, sections: list[Section]) -> tuple[int, str]:
        """Exit status, and what went wrong."""
        limits = {s.name: self._limit(s) for s in sections}
        command = [
            *(sys.executable, "-m", "gpu_suite.worker"),
            *("--sections", ",".join(f"{name}={most:.1f}" for name, most in limits.items())),
            *("--until", str(self._until), "--origin", str(self._origin)),
            *("--out", str(self.out), "--cache", str(self.cache)),
            *(["--dry"] if self.dry else []),
        ]
        with (self.out / LOG).open("ab") as log:
            process = subprocess.Popen(
                command,
                env=self._environment(sections[0]),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        current, begun = "", time.monotonic()
        while process.poll() is None:
            time.sleep(POLL)
            started = [r["section"] for r in self._results.rows(status="start")]
            now = time.monotonic()
            if started and started[-1] in limits and started[-1] != current:
                current, begun = started[-1], now
            over_time = now > begun + limits.get(current, START_LIMIT) + GRACE
            if over_time or now > self._until + RESERVE / 2:
                os.killpg(process.pid, signal.SIGKILL)  # its own children, too
                process.wait()
                return -signal.SIGKILL, f"killed after {now - begun:.0f} s: over its time"
        status = process.returncode
        return status, f"the process ended with status {status}"

    def _limit(self, section: Section) -> float:
        left = self._until - time.monotonic()
        return left if self.dry else min(left, limit(section, self._names, self.budget))

    def _environment(self, section: Section) -> dict[str, str]:
        root = _FOLDER.parent.parent
        paths = [str(_FOLDER.parent), str(root), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **section.environment,
        }
        flags = [os.environ.get("XLA_FLAGS", ""), section.environment.get("XLA_FLAGS", "")]
        environment["XLA_FLAGS"] = " ".join(flag for flag in flags if flag)
        for strict in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
            environment.pop(strict, None)  # JAX's own attention does not run under these
        if self.dry:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
            environment["XLA_FLAGS"] = ""  # so that all sections share their compiled programs
        return environment

    def _log_tail(self) -> str:
        path = self.out / LOG
        return path.read_text(encoding="utf-8", errors="replace")[-2000:] if path.exists() else ""

    def _shorten_log(self) -> None:
        path = self.out / LOG
        if path.exists() and path.stat().st_size > MOST_LOG:
            path.write_bytes(path.read_bytes()[-MOST_LOG:])


def _is_skip(row: dict[str, Any]) -> bool:
    """Of a whole section."""
    return bool(row["status"] == "skipped" and row["name"] == row["section"])

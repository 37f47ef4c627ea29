"""What a section is given: where to record, how long it has, and whether this is the real thing."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_suite.results import Results

LONGEST_TEXT = 3000
"""Characters of a traceback that are kept: its end."""
HUNG = 5
"""Exit status of a process whose device does not answer any more."""
PATIENCE = 25.0
"""Seconds that the device may take over what should take a second at most."""


@dataclass(slots=True)
class Context:
    """Of one section. Times are `time.monotonic()`, which all processes of a machine share."""

    section: str
    results: Results
    deadline: float
    dry: bool
    """Tiny shapes, kernels interpreted: proves the code, measures nothing."""
    cache: Path
    """A folder for compiled programs, for all processes of the run."""

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def late(self, needed: float = 0.0) -> bool:
        """Whether something that takes so many seconds must not be begun."""
        return self.seconds_left() < needed

    def row(self, name: str, status: str = "ok", **values: Any) -> None:
        self.results.row(self.section, name, status, **values)

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Around what runs on the device and may not come back: a kernel that waits for ever cannot
        be ended but with its process.
        """
        timer = threading.Timer(PATIENCE * (20 if self.dry else 1), self._give_up, [name])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, name: str) -> None:
        self.row(name, "error", error=f"the device had not answered after {PATIENCE:.0f} s")
        os._exit(HUNG)

    def skip(self, name: str) -> None:
        self.row(name, "skipped", reason="the section's time is up")

    def fail(self, name: str, error: BaseException, **values: Any) -> None:
        """Record an exception: `unsupported` if something was refused, else `error`."""
        if isinstance(error, NotImplementedError) and str(error):
            self.row(name, "unsupported", reason=str(error)[:LONGEST_TEXT], **values)
            return
        text = "".join(traceback.format_exception(error))
        self.row(name, "error", error=repr(error)[:500], traceback=text[-LONGEST_TEXT:], **values)
        if device_is_lost(error):
            raise DeviceLostError(repr(error)[:500]) from error


class DeviceLostError(RuntimeError):
    """After such an error every later call of the process fails too: it must be started anew."""


def device_is_lost(error: BaseException) -> bool:
    text = repr(error)
    signs = (
        "CUDA_ERROR_ILLEGAL",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_MISALIGNED",
        "an illegal",
    )
    return any(sign in text for sign in signs)

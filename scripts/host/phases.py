"""Where the time of an engine's steps goes: clocks around the parts of the loop.

The clock is the CPU time of the thread, so that other programs on the machine count for little.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from jaxpaged.engine import Engine

PHASES = ("plan", "pack", "launch", "read", "update", "text", "output", "rest")
"""Schedule; fill the arrays; what is around the launch; unpack the results; give the tokens to the
scheduler; detokenise, and look for stop strings; build what `step` returns; the loop itself."""
clock = time.thread_time_ns


class PhaseClock:
    """Counts the nanoseconds of each phase of each step. The device's stub is left out."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[dict[str, int]] = []
        """Nanoseconds by phase, `total` and `device` (the stub)."""
        self._engine = engine
        self._stack: list[list[Any]] = []
        self._now: dict[str, int] = {}
        runner: Any = engine.runner
        self._wrap(engine.scheduler, "schedule", "plan")
        self._wrap(runner, "pack", "pack")
        self._wrap(engine, "_launch", "launch")
        self._wrap(runner.programs, "step", "device")
        self._wrap(runner, "read", "read")
        self._wrap(engine, "_finish_step", "text")
        self._wrap(engine.scheduler, "update", "update")
        self._wrap(engine, "_report", "output")

    def _wrap(self, owner: Any, name: str, phase: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner = [0]
            self._stack.append(inner)
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                taken = clock() - start
                self._stack.pop()
                self._now[phase] = self._now.get(phase, 0) + taken - inner[0]
                if self._stack:
                    self._stack[-1][0] += taken

        setattr(owner, name, timed)

    def step(self, **options: Any) -> list[Any]:
        """One step of the engine, timed."""
        self._now = {}
        inner = [0]
        self._stack.append(inner)
        start = clock()
        outputs = self._engine.step(**options)
        total = clock() - start
        self._stack.pop()
        self._now["rest"] = total - inner[0]
        self._now["total"] = total - self._now.get("device", 0)
        self.steps.append(self._now)
        return outputs

    def medians(self) -> dict[str, float]:
        """Microseconds a step by phase, `total` and `device`."""
        return {
            name: statistics.median([step.get(name, 0) for step in self.steps]) / 1e3
            for name in (*PHASES, "total", "device")
        }

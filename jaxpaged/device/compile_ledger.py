"""Which programs were compiled, when, and whether that was promised not to happen."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from jax import monitoring

_log = logging.getLogger(__name__)
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@contextmanager
def known_deprecations() -> Iterator[None]:
    """Around what lowers programs: JAX 0.11 and later say at each lowering that Pallas Triton is
    deprecated. That is ours to act on; users would read it as theirs.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
        )
        yield


@contextmanager
def _first_calls(hits: list[str]) -> Iterator[None]:
    """Add an entry to `hits` for each program that the persistent cache has."""

    def listen(event: str, **_: object) -> None:
        if event == _CACHE_HIT_EVENT:
            hits.append(event)

    monitoring.register_event_listener(listen)
    try:
        with known_deprecations():
            yield
    finally:
        monitoring.unregister_event_listener(listen)


@dataclass(frozen=True, slots=True)
class CompileRecord:
    """One program: its name, the milliseconds of tracing and compiling, and whether the cache had
    it.
    """

    program: str
    milliseconds: float
    cache_hit: bool
    after_warmup: bool


@dataclass(slots=True)
class CompileLedger:
    """Counts traces: functions under jit call `traced` while they are traced, which happens once
    per program.
    """

    records: list[CompileRecord] = field(default_factory=list)
    warm: bool = False
    """Set when warm-up is over: from then on a compile is a fault, and a warning."""
    _traces: int = 0

    def traced(self) -> None:
        self._traces += 1

    @contextmanager
    def watch(self, program: str) -> Iterator[None]:
        """Around a call that may compile `program`. Costs two integer reads when it does not."""
        before, start = self._traces, time.perf_counter()
        hits: list[str] = []
        # After warm-up it is for the record only, and each call would pay for it.
        try:
            with nullcontext() if self.warm else _first_calls(hits):
                yield
        finally:
            if self._traces != before:
                milliseconds = 1e3 * (time.perf_counter() - start)
                self.records.append(CompileRecord(program, milliseconds, bool(hits), self.warm))
                if self.warm:
                    _log.warning("Compiled %s after warm-up (%.0f ms).", program, milliseconds)

    @property
    def compiles(self) -> int:
        return len(self.records)

    @property
    def seconds(self) -> float:
        """Tracing and compiling, of all programs together."""
        return 1e-3 * sum(record.milliseconds for record in self.records)

    @property
    def after_warmup(self) -> int:
        return sum(record.after_warmup for record in self.records)

"""Which programs were compiled, when, and whether that was promised not to happen."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

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
def cache_hits() -> Iterator[Callable[[], int]]:
    """A function that counts the programs which the persistent cache had for the calling thread."""
    hits: list[int] = []

    def listen(event: str, **_: object) -> None:
        if event == _CACHE_HIT_EVENT:
            hits.append(threading.get_ident())

    monitoring.register_event_listener(listen)
    try:
        yield lambda: hits.count(threading.get_ident())
    finally:
        monitoring.unregister_event_listener(listen)


@contextmanager
def without_cache() -> Iterator[None]:
    """The persistent cache is off inside, for the whole process."""
    settings: Any = jax.config  # which declares no names
    before = settings.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # or JAX goes by what it saw at its first compile
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@dataclass(frozen=True, slots=True)
class CompileRecord:
    """One program: its name, the milliseconds of tracing and compiling, and whether a cache or an
    ahead-of-time artefact had it.
    """

    program: str
    milliseconds: float
    cache_hit: bool
    after_warmup: bool


@contextmanager
def _first_calls() -> Iterator[Callable[[], int]]:
    with cache_hits() as count, known_deprecations():
        yield count


@dataclass(slots=True)
class CompileLedger:
    """What became ready to run. Functions under jit call `traced` while they are traced, which
    happens once per program.
    """

    records: list[CompileRecord] = field(default_factory=list)
    warm: bool = False
    """Set when warm-up is over: from then on a compile is a fault, and a warning."""
    _traces: int = 0

    def traced(self) -> None:
        self._traces += 1

    @property
    def traces(self) -> int:
        """Programs that were traced: fewer than `compiles` where executables were loaded."""
        return self._traces

    @contextmanager
    def watch(self, program: str) -> Iterator[None]:
        """Around a call that may compile `program`. Costs two integer reads when it does not."""
        before, start = self._traces, time.perf_counter()
        # After warm-up it is for the record only, and each call would pay for it.
        with nullcontext(int) if self.warm else _first_calls() as count:
            try:
                yield
            finally:
                if self._traces != before:
                    self.add(program, 1e3 * (time.perf_counter() - start), cache_hit=count() > 0)

    def add(self, program: str, milliseconds: float, *, cache_hit: bool) -> None:
        """A program has become ready to run."""
        self.records.append(CompileRecord(program, milliseconds, cache_hit, self.warm))
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

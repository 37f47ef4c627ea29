"""Compiles a section's programs side by side before anything is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor, TimeoutError, as_completed
from dataclasses import dataclass, field
from typing import Any

import jax

from gpu_suite.context import Context

THREADS = 12
MOST_OF_THE_TIME = 0.6
"""Share of the time left that compiling may take: what is ready then is worth measuring."""


@dataclass(frozen=True, slots=True)
class Program:
    """A function and what it will be called with (arrays, or their shapes)."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    """Recorded with its result."""


@dataclass(frozen=True, slots=True)
class Compiled:
    name: str
    call: Callable[..., Any]
    seconds: float
    temporary_bytes: int


def compile_all(ctx: Context, programs: Iterable[Program]) -> dict[str, Compiled]:
    """By name. A program that cannot be compiled is recorded and left out; so is what the
    section's time does not allow.
    """
    waiting = list(programs)
    done: dict[str, Compiled] = {}
    pool = ThreadPoolExecutor(1 if ctx.dry else min(THREADS, os.cpu_count() or 1))
    futures = {pool.submit(_compile, program): program for program in waiting}
    start = time.monotonic()
    try:
        most = max(0.1, MOST_OF_THE_TIME * ctx.seconds_left())
        for future in as_completed(futures, timeout=most):
            program = futures[future]
            try:
                done[program.name] = future.result()
            except CancelledError:
                ctx.skip(program.name)
            except Exception as error:
                ctx.fail(program.name, error, stage="compile", **program.facts)
    except TimeoutError:
        for future, program in futures.items():
            if not future.done():
                ctx.skip(program.name)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    ctx.row(
        "compiled",
        programs=len(done),
        seconds=time.monotonic() - start,
        program_seconds=sum(one.seconds for one in done.values()),
        slowest=max(done.values(), key=lambda one: one.seconds).name if done else None,
    )
    return done


def _compile(program: Program) -> Compiled:
    start = time.perf_counter()
    jitted = jax.jit(program.function, donate_argnums=program.donate)
    compiled = jitted.lower(*program.arguments).compile()
    analysis = compiled.memory_analysis()
    temporary = 0 if analysis is None else int(analysis.temp_size_in_bytes)
    return Compiled(program.name, compiled, time.perf_counter() - start, temporary)

"""Device time of a function: many calls inside one program, less the same loop without them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gpu_suite.compiling import Compiled

REPEATS = 7
TARGET_SECONDS = 0.015
"""Of one timed program: long beside the launch, short beside the section's budget."""
MOST_ITERATIONS = 1000


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float
    """Of one call: the median of the repeats."""
    spread: float
    """(Longest - shortest) / median of the repeats."""
    iterations: int


def iterations_for(floor_seconds: float, *, dry: bool) -> int:
    """How often to call what takes at least so long."""
    if dry:
        return 2
    return max(3, min(MOST_ITERATIONS, round(TARGET_SECONDS / max(floor_seconds, 1e-6))))


def loop(function: Callable[..., Any], iterations: int) -> Callable[..., Any]:
    """`run(zero, carry, *rest)`: calls `carry = function(zero, carry, *rest)` in one program. The
    trip count is a constant, so that the host need not ask the device whether to go on.
    """

    def run(zero: Any, carry: Any, *rest: Any) -> Any:
        return lax.fori_loop(0, iterations, lambda _, held: function(zero, held, *rest), carry)

    return run


def feed(q: jax.Array, zero: jax.Array, out: jax.Array) -> jax.Array:
    """`q` unchanged in value, but not known before `out` is: the next call cannot start early.
    `zero` is an argument of the program, or the compiler would see through it.
    """
    if out.shape == q.shape:
        return q + (zero * out.astype(jnp.float32)).astype(q.dtype)
    return q + (zero * out.astype(jnp.float32).ravel()[0]).astype(q.dtype)


def time_program(
    program: Compiled,
    arguments: tuple[Any, ...],
    iterations: int,
    *,
    empty: tuple[Compiled, tuple[Any, ...]] | None = None,
    repeats: int = REPEATS,
) -> Timing:
    """Seconds of one iteration. `arguments` must not be donated."""
    total = _samples(program.call, arguments, repeats)
    base = 0.0 if empty is None else statistics.median(_samples(empty[0].call, empty[1], repeats))
    middle = statistics.median(total)
    net = max(middle - base, 1e-9)
    return Timing(net / iterations, (max(total) - min(total)) / middle, iterations)


def time_donating(
    program: Compiled, zero: Any, carry: Any, rest: tuple[Any, ...], iterations: int
) -> Timing:
    """As `time_program` for a program that is donated its carry and gives it back."""
    carry = jax.block_until_ready(program.call(zero, carry, *rest))
    total = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        carry = jax.block_until_ready(program.call(zero, carry, *rest))
        total.append(time.perf_counter() - start)
    middle = statistics.median(total)
    return Timing(middle / iterations, (max(total) - min(total)) / middle, iterations)


def latency(call: Callable[..., Any], arguments: tuple[Any, ...], repeats: int = 30) -> float:
    """Seconds from the call to its result, dispatch included: the median."""
    return statistics.median(_samples(call, arguments, repeats))


def _samples(call: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> list[float]:
    jax.block_until_ready(call(*arguments))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        samples.append(time.perf_counter() - start)
    return samples

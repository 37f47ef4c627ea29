"""What computes the common parts of a layer: XLA, unless a device's own routines are in force while
a program is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The rows of a step's token axis that are not padding, of which there is some because programs
    have fixed shapes: [0, counts[0]) and [first, first + counts[1]) of `total`.
    """

    counts: jax.Array  # i32[2]
    first: int
    total: int

    def mask(self) -> jax.Array:
        """bool [total]."""
        row = lax.iota(jnp.int32, self.total)
        end = jnp.where(row < self.first, self.counts[0], self.first + self.counts[1])
        return row < end


class Routines(Protocol):
    """A row's result depends on that row alone, to the last bit. None: XLA is to do it.

    Where `live` is given, the other rows of a result are whatever was in its memory.
    """

    def product(
        self,
        x: jax.Array,
        weight: jax.Array,
        live: LiveRows | None = None,
        *,
        onto: jax.Array | None = None,
    ) -> jax.Array | None:
        """x [T, E], rounded to the type of `weight` [O, E]: f32 [T, O], added to `onto` if that is
        given.
        """
        return None

    def gated_product(
        self, x: jax.Array, weight: jax.Array, activation: str, live: LiveRows | None = None
    ) -> jax.Array | None:
        """x [T, E] times `weight` [I, 2, E], the activation of the first times the second of each
        pair, rounded to the weight's type: [T, I].
        """
        return None

    def rms_norm(
        self,
        x: jax.Array,
        weight: jax.Array,
        *,
        eps: float,
        offset: float,
        live: LiveRows | None = None,
    ) -> jax.Array | None:
        """f32 [T, E] over its root mean square, times `offset` + `weight` [E]: f32 [T, E]."""
        return None

    def rotate(
        self, qkv: jax.Array, table: jax.Array, dtype: jax.typing.DTypeLike, live: LiveRows | None
    ) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """Queries [T, K * G, H], keys and values [T, K, H] of `dtype` from f32 [T, K, G + 2, H],
        the first two turned as `rope.apply_rope` does with `table` [2, T, D / 2].
        """
        return None


class _XLA(Routines):
    """Leaves all of it to XLA."""


XLA: Routines = _XLA()
_in_force: ContextVar[Routines] = ContextVar("routines", default=XLA)
"""Of the program that this thread traces, as with `order`."""
_live: ContextVar[LiveRows | None] = ContextVar("live_rows", default=None)


@contextmanager
def routines(chosen: Routines) -> Iterator[None]:
    """Trace what is inside with `chosen`."""
    token = _in_force.set(chosen)
    try:
        yield
    finally:
        _in_force.reset(token)


def routines_in_force() -> Routines:
    return _in_force.get()


@contextmanager
def live_rows(live: LiveRows | None) -> Iterator[None]:
    """In what is traced inside, arrays of `live.total` rows are of the step's tokens in their
    order, of which only the live ones matter. None: all do.
    """
    token = _live.set(live)
    try:
        yield
    finally:
        _live.reset(token)


def live_among(rows: int) -> LiveRows | None:
    """Of an array with so many rows; None if all of them matter, or nothing is known."""
    live = _live.get()
    return live if live is not None and live.total == rows else None

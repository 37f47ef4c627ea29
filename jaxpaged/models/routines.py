"""What computes the common parts of a layer: XLA, unless a device's own routines are in force while
a program is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import jax


class Routines(Protocol):
    """A row's result depends on that row alone, to the last bit. None: XLA is to do it."""

    def product(self, x: jax.Array, weight: jax.Array) -> jax.Array | None:
        """x [T, E], rounded to the type of `weight` [O, E]: f32 [T, O]."""
        ...

    def rms_norm(
        self, x: jax.Array, weight: jax.Array, *, eps: float, offset: float
    ) -> jax.Array | None:
        """f32 [T, E] over its root mean square, times `offset` + `weight` [E]: f32 [T, E]."""
        ...


class _XLA:
    def product(self, x: jax.Array, weight: jax.Array) -> jax.Array | None:
        return None

    def rms_norm(
        self, x: jax.Array, weight: jax.Array, *, eps: float, offset: float
    ) -> jax.Array | None:
        return None


XLA: Routines = _XLA()
_in_force: ContextVar[Routines] = ContextVar("routines", default=XLA)
"""Of the program that this thread traces, as with `order`."""


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

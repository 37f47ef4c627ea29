"""In which order the layers add up. XLA decides, unless a fixed order is in force while a program
is traced: then the device's own routines do, which do not look at the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import jax


class FixedOrder(Protocol):
    """Routines whose result for a row depends on that row alone, to the last bit."""

    def product(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x [T, B, E] times weight [B, O, E] of the same type: f32 [T, B, O]."""
        ...

    def row_sums(self, x: jax.Array) -> jax.Array:
        """f32 [T, E] -> [T, 1]."""
        ...


_in_force: ContextVar[FixedOrder | None] = ContextVar("fixed_order", default=None)
"""Of the program that this thread traces: layers are far from whoever knows, and a parameter would
go through all of them."""


@contextmanager
def fixed_order(order: FixedOrder | None) -> Iterator[None]:
    """Trace what is inside with `order`; None leaves it to XLA."""
    token = _in_force.set(order)
    try:
        yield
    finally:
        _in_force.reset(token)


def order_in_force() -> FixedOrder | None:
    """None where XLA decides."""
    return _in_force.get()

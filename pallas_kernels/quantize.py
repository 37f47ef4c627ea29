"""The 8-bit KV cache: one float32 scale for each token and KV head, taken from the new row itself.

vLLM calls this scheme `int8_per_token_head` and `fp8_per_token_head`; it is symmetric, dynamic
quantisation with a group of one head. Nothing has to be calibrated, a token's bits never change
once they are written, and a head's scale is a factor of its scores (K) and of its weights (V), so
that kernels need not touch the elements. One scale costs 4 bytes beside `head_dim` bytes.

The functions here run as they stand in `reference` and inside the GPU kernel that writes. The one
operation that processors do not agree on is a division for each row: the kernel's gives the bits of
a CPU; XLA on a GPU takes an approximate reciprocal, so that `reference` there may choose the other
neighbour where a value lies just between two.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

SMALLEST_SCALE = 2.0**-100
"""Of rows that are (next to) zero. Far enough from the smallest float32 that no step of the
arithmetic meets a denormal number, which processors round in different ways.
"""
_LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}

Division = Callable[[jax.Array, jax.Array], jax.Array]


def quantize(
    values: jax.Array, dtype: jnp.dtype, *, divide: Division = lax.div
) -> tuple[jax.Array, jax.Array]:
    """`values` [..., H] of any float type as `dtype` (int8 or float8_e4m3fn) [..., H], and the
    float32 scales [..., 1] that they have to be multiplied with to get them back.

    The largest element of a row becomes 127 or 448; an error is at most half a step (int8) or 1/16
    of the element (float8). int8 rounds halves away from zero, float8 to even. A row with a NaN or
    an infinity is stored as zeros with the scale NaN, so that all of it reads as NaN: 8 bits could
    not keep it apart from a good row in another way. `divide` is for where `lax.div` is not rounded
    as IEEE 754 asks.
    """
    dtype = jnp.dtype(dtype)
    limit = _LARGEST[dtype]
    x = values.astype(jnp.float32)
    size = jnp.abs(x)
    # Whatever `max` does with a NaN (on a GPU it passes over it), it never sees one.
    finite = size < jnp.inf
    top = jnp.where(finite, size, jnp.inf).max(axis=-1, keepdims=True)
    scale = jnp.maximum(top * (1.0 / limit), SMALLEST_SCALE)
    good = top < jnp.inf
    scale = jnp.where(good, scale, jnp.nan)
    inverse = jnp.where(good, divide(jnp.ones_like(scale), scale), 0.0)
    # The multiplication may come out one rounding above the limit, where float8 would be NaN. The
    # clipping also stands between it and the addition below, so that nobody fuses the two.
    scaled = jnp.clip(jnp.where(finite, x, 0.0) * inverse, -limit, limit)
    if dtype == jnp.int8:
        scaled = scaled + jnp.where(scaled < 0.0, -0.5, 0.5)
    return scaled.astype(dtype), scale


def dequantize(stored: jax.Array, scale: jax.Array) -> jax.Array:
    """`stored` [..., H] times its scale [...], in float32."""
    return stored.astype(jnp.float32) * scale[..., None]

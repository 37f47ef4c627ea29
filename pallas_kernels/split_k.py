"""Split-K: several programs share the context of one row, and their results are put together."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.softmax import LOWEST


def combine_splits(partial: jax.Array, lse: jax.Array) -> jax.Array:
    """The attention over a whole context from that over its shares.

    Args: `partial` f32 [D, S, N, HV], each normalised; `lse` f32 [D, S, N], base 2, the lowest
    value where a share is empty; what `partial` holds there does not matter. Returns f32
    [D, N, HV], zeros where all shares are empty, NaN where one of them is.
    """
    # Share by share, not with reductions: XLA makes one or two kernels of this, not three.
    shares = [(lse[:, share, :, None], partial[:, share]) for share in range(lse.shape[1])]
    top = functools.reduce(jnp.maximum, (height for height, _ in shares))
    total, summed = jnp.zeros_like(top), jnp.zeros_like(partial[:, 0])
    for height, values in shares:
        weight = jnp.where(height < LOWEST / 2, 0.0, jnp.exp2(height - top))
        total += weight
        summed += jnp.where(weight > 0.0, weight * values, 0.0)
    return summed / jnp.where(total == 0.0, 1.0, total)

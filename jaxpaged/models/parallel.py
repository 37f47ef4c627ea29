"""Tensor parallelism (Shoeybi et al., 2019): what the layers say to the other devices.

With more than one device the whole step runs under `shard_map`: a weight is the device's slice, so
layers take their sizes from the weights, and activations are whole. A layer ends each of its two
halves with `all_sum`; there is no other communication in a layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.models.order import order_in_force
from jaxpaged.sharding import TENSOR_AXIS


def all_sum(x: jax.Array, devices: int) -> jax.Array:
    """The sum of the devices' partial results."""
    if devices == 1:
        return x
    if order_in_force() is None:
        summed: jax.Array = lax.psum(x, TENSOR_AXIS)
        return summed
    # Libraries choose how they reduce, and so the order, by the size of the message.
    parts: jax.Array = lax.all_gather(x, TENSOR_AXIS)
    total = parts[0]
    for device in range(1, devices):
        total = total + parts[device]
    return total


def all_columns(x: jax.Array, devices: int) -> jax.Array:
    """[R, V / devices] -> [R, V]: the devices' columns side by side."""
    return lax.all_gather(x, TENSOR_AXIS, axis=1, tiled=True) if devices > 1 else x


def first_of_mine(count: int, devices: int) -> jax.Array | int:
    """i32 []: index of the first of this device's `count` rows of a weight that is cut by rows."""
    return lax.axis_index(TENSOR_AXIS) * count if devices > 1 else 0


def look_up(table: jax.Array, ids: jax.Array, devices: int) -> jax.Array:
    """Rows f32 [T, E] of a table cut by rows, for i32 [T]. Each device has some; the others add
    zeros, so the sum is exact.
    """
    if devices == 1:
        return jnp.take(table, ids, axis=0, mode="clip").astype(jnp.float32)
    rows = table.shape[0]
    local = ids - first_of_mine(rows, devices)
    mine = (local >= 0) & (local < rows)
    found = jnp.take(table, local, axis=0, mode="clip").astype(jnp.float32)
    return all_sum(jnp.where(mine[:, None], found, 0.0), devices)

"""The paged KV pools on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import LayerKV
from jaxpaged.sharding import LogicalAxes, named_sharding

POOL_AXES: LogicalAxes = ("slots", "kv_heads", "head_dim")
_INT32_LIMIT = 2**31 - 1


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """16-bit floats are stored as uint16 on CPU: XLA:CPU would convert the whole pool around each
    scatter.
    """
    if platform == "cpu" and jnp.dtype(dtype).itemsize == 2:
        return np.dtype(np.uint16)
    return np.dtype(dtype)


def block_bytes(model: ModelConfig, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one block over all layers, K and V."""
    return model.kv_bytes_per_token * block_size * jnp.dtype(dtype).itemsize


def max_blocks(model: ModelConfig, block_size: int) -> int:
    """The most blocks whose element offsets within one pool fit 32 bits, which device code counts
    in.
    """
    return _INT32_LIMIT // (block_size * model.num_kv_heads * model.head_dim)


def make_pools(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: jnp.dtype, mesh: Mesh
) -> list[LayerKV]:
    """Zeroed K and V pools [blocks x block_size, K, H], one pair a layer; block 0 stays zero."""
    platform = mesh.devices.flat[0].platform
    shape = (num_blocks * block_size, model.num_kv_heads, model.head_dim)
    stored, sharding = storage_dtype(dtype, platform), named_sharding(mesh, POOL_AXES)

    def zeros() -> jax.Array:
        return jnp.zeros(shape, stored, device=sharding)

    return [(zeros(), zeros()) for _ in range(model.num_layers)]

"""The paged KV pools on the device, and which layer uses which.

Layers of one kind (one attention window, or none) form groups of equal size. Every group has its
own block table; the blocks of all groups come from the same pool of ids. The n-th layers of all
groups share the n-th pair of arrays: at one block id it holds the KV of the group that owns the
block. A model whose layers all attend alike has one group, and one pair of arrays for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import LayerKV
from jaxpaged.sharding import LogicalAxes, named_sharding

POOL_AXES: LogicalAxes = ("slots", "kv_heads", "head_dim")
LATENT_AXES: LogicalAxes = ("slots", None, "latent")
_INT32_LIMIT = 2**31 - 1
_GROUP_COST = 0.005
"""What one more block table costs, as a share of the pool: it only breaks near ties."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Groups of layers. `windows[g]` is the window of group g in tokens (None: full attention)."""

    windows: tuple[int | None, ...]
    group_of: tuple[int, ...]
    """Layer -> its group, that is its block table."""
    pool_of: tuple[int, ...]
    """Layer -> its pair of arrays."""

    @property
    def num_pools(self) -> int:
        return max(self.pool_of) + 1

    @classmethod
    def of(cls, model: ModelConfig) -> KVLayout:
        """The grouping that leaves the fewest array places unused."""
        by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(model.layer_windows):
            by_window.setdefault(window, []).append(layer)
        size = _group_size([len(layers) for layers in by_window.values()])
        windows: list[int | None] = []
        group_of, pool_of = [0] * model.num_layers, [0] * model.num_layers
        for window, layers in by_window.items():
            for place, layer in enumerate(layers):
                if place % size == 0:
                    windows.append(window)
                group_of[layer], pool_of[layer] = len(windows) - 1, place % size
        return cls(tuple(windows), tuple(group_of), tuple(pool_of))


def _group_size(counts: list[int]) -> int:
    """Layers in a group, for so many layers of each kind."""
    used = sum(counts)

    def cost(size: int) -> float:
        groups = sum(-(-count // size) for count in counts)
        return groups * size / used + _GROUP_COST * groups

    return min(range(max(counts), 0, -1), key=cost)


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """16-bit floats are stored as uint16 on CPU: XLA:CPU would convert the whole pool around each
    scatter.
    """
    if platform == "cpu" and jnp.dtype(dtype).itemsize == 2:
        return np.dtype(np.uint16)
    return np.dtype(dtype)


def pool_axes(model: ModelConfig) -> LogicalAxes:
    """A latent cache serves all heads, so every device has all of it."""
    return LATENT_AXES if model.kv_shape.latent else POOL_AXES


def _cuts(model: ModelConfig) -> int:
    """Devices that the pools are cut over."""
    return 1 if model.kv_shape.latent else model.tensor_parallel


def block_bytes(model: ModelConfig, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one block on one device, over all pools: of the layers of one group, K and V."""
    per_token = KVLayout.of(model).num_pools * model.kv_shape.elements // _cuts(model)
    return per_token * block_size * jnp.dtype(dtype).itemsize


def max_blocks(model: ModelConfig, block_size: int) -> int:
    """The most blocks whose element offsets within one pool fit 32 bits, which device code counts
    in.
    """
    shape = model.kv_shape
    widest = shape.heads // _cuts(model) * max(shape.key_dim, shape.value_dim)
    return _INT32_LIMIT // (block_size * widest)


def make_pools(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: jnp.dtype, mesh: Mesh
) -> list[LayerKV]:
    """Zeroed K and V pools [blocks x block_size, K, H], or only K where it holds V; block 0 stays
    zero.
    """
    stored = storage_dtype(dtype, mesh.devices.flat[0].platform)
    sharding, shape = named_sharding(mesh, pool_axes(model)), model.kv_shape
    dims = (shape.key_dim,) if shape.latent else (shape.key_dim, shape.value_dim)

    def zeros(dim: int) -> jax.Array:
        return jnp.zeros((num_blocks * block_size, shape.heads, dim), stored, device=sharding)

    return [tuple(zeros(dim) for dim in dims) for _ in range(KVLayout.of(model).num_pools)]

"""The paged KV pools on the device, and which layer uses which.

Layers of one kind (one attention window, or none) form groups of equal size. Every group has its
own block table; the blocks of all groups come from the same pool of ids. The n-th layers of all
groups share the n-th pair of arrays: at one block id it holds the KV of the group that owns the
block. A model whose layers all attend alike has one group, and one pair of arrays for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpaged.models.config import ModelConfig
from jaxpaged.sharding import LogicalAxes, named_sharding, partition_spec
from pallas_kernels.paged_kv import PagedKV, is_8_bit

POOL_AXES: LogicalAxes = ("slots", "kv_heads", "head_dim")
LATENT_AXES: LogicalAxes = ("slots", None, "latent")
CACHE_DTYPES = {"int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn}
"""What `kv_cache_dtype` may name beside "auto"."""
SCALE_BYTES = 4
"""Of one float32 scale; 8-bit caches have one for every token and head, in K and in V."""
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


def cache_dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """The type for the setting `kv_cache_dtype`, of a model that computes in `dtype`."""
    chosen: jnp.dtype = np.dtype(CACHE_DTYPES.get(name, dtype))
    return chosen


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """16-bit floats are stored as uint16 on CPU, 8-bit ones as uint8: XLA:CPU would convert the
    whole pool around each scatter.
    """
    if platform == "cpu" and jnp.issubdtype(dtype, jnp.floating):
        unsigned = {1: np.uint8, 2: np.uint16}.get(jnp.dtype(dtype).itemsize)
        return np.dtype(unsigned or dtype)
    return np.dtype(dtype)


def _pool_axes(model: ModelConfig) -> LogicalAxes:
    """A latent cache serves all heads, so every device has all of it."""
    return LATENT_AXES if model.kv_shape.latent else POOL_AXES


def _paged_kv(model: ModelConfig, dtype: jnp.dtype, of_pool: Any, of_scales: Any) -> PagedKV:
    """One layer's cache of type `dtype`: `of_pool(elements of a head)` where it has a pool,
    `of_scales()` where it has scales.
    """
    shape, scaled = model.kv_shape, is_8_bit(dtype)
    values, value_scales = not shape.latent, scaled and not shape.latent
    return PagedKV(
        of_pool(shape.key_dim),
        of_pool(shape.value_dim) if values else None,
        of_scales() if scaled else None,
        of_scales() if value_scales else None,
    )


def pool_specs(model: ModelConfig, dtype: jnp.dtype) -> PagedKV:
    """How one layer's cache is cut over the mesh: by heads, the scales along with their pools."""
    axes = _pool_axes(model)
    pool, scales = partition_spec(axes), partition_spec(axes[:2])
    return _paged_kv(model, dtype, lambda _: pool, lambda: scales)


def _cuts(model: ModelConfig) -> int:
    """Devices that the pools are cut over."""
    return 1 if model.kv_shape.latent else model.tensor_parallel


def block_bytes(model: ModelConfig, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one block on one device, over all pools: of the layers of one group, K and V, with
    their scales where the cache has 8 bits.
    """
    shape = model.kv_shape
    per_token = shape.elements * jnp.dtype(dtype).itemsize
    if is_8_bit(dtype):
        per_token += SCALE_BYTES * shape.heads * (1 if shape.latent else 2)
    return KVLayout.of(model).num_pools * block_size * (per_token // _cuts(model))


def max_blocks(model: ModelConfig, block_size: int) -> int:
    """The most blocks whose element offsets within one pool fit 32 bits, which device code counts
    in, whatever the elements' size. (Scales are fewer than elements.)
    """
    shape = model.kv_shape
    widest = shape.heads // _cuts(model) * max(shape.key_dim, shape.value_dim)
    return _INT32_LIMIT // (block_size * widest)


def make_pools(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: jnp.dtype, mesh: Mesh
) -> list[PagedKV]:
    """Zeroed K and V pools [blocks x block_size, K, H], or only K where it holds V, with scales
    [blocks x block_size, K] where `dtype` has 8 bits; block 0 stays zero.
    """
    stored = storage_dtype(dtype, mesh.devices.flat[0].platform)
    axes, rows = _pool_axes(model), (num_blocks * block_size, model.kv_shape.heads)
    of_pool, of_scales = named_sharding(mesh, axes), named_sharding(mesh, axes[:2])

    def pool(dim: int) -> jax.Array:
        return jnp.zeros((*rows, dim), stored, device=of_pool)

    def scales() -> jax.Array:
        return jnp.zeros(rows, jnp.float32, device=of_scales)

    return [_paged_kv(model, dtype, pool, scales) for _ in range(KVLayout.of(model).num_pools)]


def copy_blocks(
    pools: list[PagedKV], sources: jax.Array, destinations: jax.Array, *, block_size: int
) -> list[PagedKV]:
    """Copy whole blocks i32[N] to others in every pool, with their scales; runs under jit with the
    pools donated. All sources are read before any destination is written. A destination beyond the
    pool is padding; the others differ.
    """
    offset = jnp.arange(block_size, dtype=jnp.int32)[None, :]

    def copy(array: jax.Array) -> jax.Array:
        read = (sources[:, None] * block_size + offset).reshape(-1)
        write = (destinations[:, None] * block_size + offset).reshape(-1)
        return array.at[write].set(array[read], mode="drop", unique_indices=True)

    copied: list[PagedKV] = jax.tree.map(copy, pools)
    return copied

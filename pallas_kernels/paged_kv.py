"""What the attention kernels are given: the cache of one layer, and prompt tokens cut into tiles.

Legend, here and in the kernels: `D` decode rows, `P` prompt tokens, `R` rows of the block table,
`M` its width, `N` query heads, `K` KV heads, `G = N / K`, `H` head_dim, `S` slots of a pool
(num_blocks x block_size), `NT` tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKV:
    """K and V of one layer in a pool of slots; slot = block id x block_size + offset.

    In an 8-bit cache a stored element times the scale of its slot and head is its value.
    """

    k: jax.Array
    """[S, K, H] in the layout `nhd`; see `PoolLayout` for the others."""
    v: jax.Array | None
    """[S, K, HV], or None: the values are the first HV elements of the keys (a latent cache)."""
    k_scale: jax.Array | None = None
    """f32, the shape of `k` without its last axis; None for caches of 16 and 32 bits."""
    v_scale: jax.Array | None = None
    """As `k_scale`; None also where `v` is: then `k_scale` serves both."""

    @property
    def quantized(self) -> bool:
        return self.k_scale is not None

    def value_dim(self, given: int | None) -> int:
        """HV; `given` is needed where the values are part of the keys."""
        if self.v is not None:
            return int(self.v.shape[-1])
        assert given is not None, "values that are part of the keys need value_dim"
        return given


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillTiles:
    """Prompt tokens of a step in tiles of at most `tile` consecutive tokens of one row. Tiles that
    are in use stand first; the others have length 0.
    """

    row: jax.Array
    """i32 [NT] row of the block table."""
    start: jax.Array
    """i32 [NT] the tile's first token among the P. Tiles follow each other without gaps."""
    length: jax.Array
    """i32 [NT] tokens; 0 for padding."""
    position: jax.Array
    """i32 [NT] absolute position of the first token."""
    token_tile: jax.Array
    """i32 [P] for each token, its tile's index x `tile` + its place in the tile."""
    count: jax.Array
    """i32 [] tiles in use."""


def is_8_bit(dtype: jnp.dtype) -> bool:
    """Caches of such types have scales."""
    return jnp.dtype(dtype).itemsize == 1

"""How the axes of a KV pool are ordered. Kernels index pools through `row_index` alone."""

from __future__ import annotations

import enum
from typing import Any


class PoolLayout(enum.Enum):
    """`NHD` is what the engine uses; the others are there to be compared on a device."""

    NHD = "nhd"
    """K and V apart, [S, K, H]: one token's head is contiguous, heads follow each other."""
    HND = "hnd"
    """K and V apart, [blocks, K, block_size, H]: one head's block is contiguous."""
    COMBINED = "combined"
    """One pool [S, 2 K, H] with each head's K and V side by side; `PagedKV.v` is None."""

    def shape(self, blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        """Of a pool (of both, where they are combined)."""
        if self is PoolLayout.HND:
            return blocks, heads, block_size, dim
        combined = 2 if self is PoolLayout.COMBINED else 1
        return blocks * block_size, combined * heads, dim

    def kv_heads(self, k_pool: Any) -> int:
        """KV heads of a pool of keys."""
        heads: int = k_pool.shape[1]
        return heads // 2 if self is PoolLayout.COMBINED else heads

    def row_index(
        self, block: Any, offset: Any, head: Any, *, block_size: int, values: bool
    ) -> tuple[Any, ...]:
        """Indices of all axes but the last, for tokens at `offset` in `block`."""
        if self is PoolLayout.HND:
            return block, head, offset
        slot = block * block_size + offset
        if self is PoolLayout.COMBINED:
            return slot, 2 * head + int(values)
        return slot, head

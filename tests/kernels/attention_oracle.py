"""Paged attention cases for every backend, and what the answer must be, in float64 numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int32]
GARBAGE_BLOCKS = (-7, 2**30, -(2**31), 2**31 - 1)
"""Ids that stand behind the end of a table: nobody may believe them."""


@dataclass(frozen=True)
class PagedCase:
    """Sequences whose K and V lie scattered over a pool, with NaN in every slot nobody owns."""

    keys: list[Floats]  # one [L, K, H] per sequence
    values: list[Floats]
    k_pool: Floats  # [S, K, H]
    v_pool: Floats
    tables: Ints  # [R, M]
    group: int

    @property
    def lengths(self) -> list[int]:
        return [len(k) for k in self.keys]

    def queries(self, count: int, rng: np.random.Generator) -> Floats:
        kv_heads, dim = self.k_pool.shape[1:]
        return normal(rng, (count, kv_heads * self.group, dim)).astype(self.k_pool.dtype)

    def expected(
        self,
        q: Floats,
        row: int,
        position: int,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Floats:
        """Dense attention of one query token [N, H] of sequence `row`, float64 [N, H]."""
        first = 0 if window is None else max(0, position - window + 1)
        span = slice(first, position + 1)
        k = np.repeat(self.keys[row][span].astype(np.float64), self.group, axis=1)
        v = np.repeat(self.values[row][span].astype(np.float64), self.group, axis=1)
        scores = np.einsum("nh,lnh->nl", q.astype(np.float64), k) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return np.einsum("nl,lnh->nh", weights, v)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32)


def paged_case(
    lengths: list[int],
    *,
    block_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    seed: int = 0,
    dtype: npt.DTypeLike = np.float32,
    table_width: int | None = None,
    num_blocks: int | None = None,
) -> PagedCase:
    """Pages in random order; NaN in block 0, unowned pages and the tails of last pages."""
    rng = np.random.default_rng(seed)
    pages = [-(-length // block_size) for length in lengths]
    blocks = sum(pages) + 4 if num_blocks is None else num_blocks
    width = max(pages) + 2 if table_width is None else table_width
    owned = 1 + rng.permutation(blocks - 1)
    nan_blocks = [0, *(int(b) for b in owned[sum(pages) :])]
    pools = [np.full((blocks * block_size, kv_heads, head_dim), np.nan, dtype) for _ in range(2)]
    tables = rng.choice([*nan_blocks, *GARBAGE_BLOCKS], (len(lengths), width)).astype(np.int32)
    keys, values, used = [], [], 0
    for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        mine = owned[used : used + count]
        used += count
        tables[row, :count] = mine
        positions = np.arange(length)
        slots = mine[positions // block_size] * block_size + positions % block_size
        for pool, kept in zip(pools, (keys, values), strict=True):
            kept.append(normal(rng, (length, kv_heads, head_dim)).astype(dtype))
            pool[slots] = kept[-1]
    return PagedCase(keys, values, pools[0], pools[1], tables, group)


@dataclass(frozen=True)
class Tiles:
    """Tile lists as `paged_prefill` takes them, and the (row, position) of every prompt token."""

    tile_row: Ints
    tile_start: Ints
    tile_len: Ints
    tile_position: Ints
    token_tile: Ints
    num_tiles: int
    tokens: list[tuple[int, int]]

    @property
    def arrays(self) -> tuple[Ints, ...]:
        fields = (self.tile_row, self.tile_start, self.tile_len, self.tile_position)
        return (*fields, self.token_tile, np.int32(self.num_tiles))


def tiles_for(
    chunks: list[tuple[int, int, int]], *, tile: int, num_tokens: int, num_tiles: int
) -> Tiles:
    """Cut chunks (row, first position, tokens) into tiles; the rest of both axes is padding."""
    fields = np.zeros((4, num_tiles), np.int32)
    token_tile = np.zeros(num_tokens, np.int32)
    tokens: list[tuple[int, int]] = []
    used = 0
    for row, first, count in chunks:
        for start in range(0, count, tile):
            size = min(tile, count - start)
            fields[:, used] = row, len(tokens), size, first + start
            for i in range(size):
                token_tile[len(tokens)] = used * tile + i
                tokens.append((row, first + start + i))
            used += 1
    return Tiles(*fields, token_tile, used, tokens)

"""Small paged cases in which everything that must not be read is poisoned, and their answers in
float64 on the host, where no tensor core rounds anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.paged_kv import PagedKV, PrefillTiles
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.reference import TILES_PER_GROUP

Array = np.ndarray[Any, Any]
GARBAGE_BLOCKS = (-7, 2**30, -(2**31), 2**31 - 1)
"""Ids behind the end of a table."""
SPARE_BLOCKS = 5
DTYPES: dict[str, Any] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
LARGEST = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences in a pool. `keys` and `values` are what the stored elements stand for, float64."""

    kv: PagedKV
    tables: Array  # i32 [R, M]
    keys: list[Array]  # one [L, K, H] a sequence
    values: list[Array]  # one [L, K, HV] a sequence
    block_size: int
    group: int
    dtype: Any

    @property
    def lengths(self) -> list[int]:
        return [len(k) for k in self.keys]

    def queries(self, rng: np.random.Generator, count: int) -> Array:
        kv_heads, dim = self.keys[0].shape[1:]
        shape = (count, kv_heads * self.group, dim)
        return rng.standard_normal(shape, np.float32).astype(self.dtype)

    def slots(self, row: int) -> Array:
        length, size = self.lengths[row], self.block_size
        pos = np.arange(length)
        blocks: Array = self.tables[row, pos // size].astype(np.int64)
        return blocks * size + pos % size


def make_case(
    rng: np.random.Generator,
    lengths: Sequence[int],
    *,
    group: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: str = "bfloat16",
    cache: str | None = None,
    latent: int | None = None,
    layout: PoolLayout = PoolLayout.NHD,
) -> Case:
    """`cache`: int8 or fp8, else the dtype's own; `latent`: the values are so many first elements
    of the keys.
    """
    per_row = [-(-length // block_size) for length in lengths]
    blocks = 1 + sum(per_row) + SPARE_BLOCKS
    order = 1 + rng.permutation(blocks - 1)
    width = max(per_row) + 2
    tables = rng.choice(np.asarray(GARBAGE_BLOCKS, np.int64), (len(lengths), width))
    used = np.zeros(blocks * block_size, bool)
    start = 0
    for row, count in enumerate(per_row):
        tables[row, :count] = order[start : start + count]
        start += count
    tables = tables.astype(np.int32)
    everywhere = np.arange(block_size)
    for row, length in enumerate(lengths):
        slots = (tables[row, : per_row[row], None] * block_size + everywhere).ravel()
        used[slots[:length]] = True
    stored = [_pool(rng, used, kv_heads, dim, dtype, cache) for _ in range(1 if latent else 2)]
    kv = _arrange([(pool, scale) for pool, scale, _ in stored], layout, block_size)
    real = [values for _, _, values in stored]
    case = Case(kv, tables, [], [], block_size, group, DTYPES[dtype])
    for row, length in enumerate(lengths):
        pos = np.arange(length)
        slots = tables[row, pos // block_size].astype(np.int64) * block_size + pos % block_size
        case.keys.append(real[0][slots])
        case.values.append(real[0][slots][..., :latent] if latent else real[1][slots])
    return case


def _pool(
    rng: np.random.Generator, used: Array, heads: int, dim: int, dtype: str, cache: str | None
) -> tuple[Array, Array | None, Array]:
    """(stored, scales, what it stands for in float64), poisoned where not used."""
    raw = rng.standard_normal((used.size, heads, dim), np.float32)
    if cache is None:
        pool = raw.astype(DTYPES[dtype])
        real = pool.astype(np.float64)
        pool[~used] = np.nan
        return pool, None, real
    scale = (np.abs(raw).max(axis=-1) / LARGEST[cache]).astype(np.float32)
    scaled = raw / scale[..., None]
    pool = (np.rint(scaled) if cache == "int8" else scaled).astype(DTYPES[cache])
    real = pool.astype(np.float64) * scale[..., None]
    if cache == "fp8":
        pool[~used] = np.nan
    scale[~used] = np.nan
    return pool, scale, real


def _arrange(
    stored: list[tuple[Array, Array | None]], layout: PoolLayout, block_size: int
) -> PagedKV:
    pools = [arrange_pool(pool, layout, block_size) for pool, _ in stored]
    scales = [None if scale is None else jnp.asarray(scale) for _, scale in stored]
    if layout is PoolLayout.COMBINED:
        slots, heads, dim = stored[0][0].shape
        both = np.stack([pool for pool, _ in stored], axis=2).reshape(slots, 2 * heads, dim)
        return PagedKV(jnp.asarray(both), None)
    if len(pools) == 1:
        return PagedKV(jnp.asarray(pools[0]), None, scales[0], None)
    return PagedKV(jnp.asarray(pools[0]), jnp.asarray(pools[1]), scales[0], scales[1])


def arrange_pool(pool: Array, layout: PoolLayout, block_size: int) -> Array:
    """[S, K, H] as the layout has it (not for COMBINED, which is of two pools)."""
    if layout is not PoolLayout.HND:
        return pool
    slots, heads, dim = pool.shape
    return pool.reshape(slots // block_size, block_size, heads, dim).swapaxes(1, 2)


def make_tiles(chunks: Sequence[tuple[int, int]], tile: int) -> tuple[PrefillTiles, int]:
    """(tiles, tokens) for chunks (past, length), one a row; tokens include a few in no tile."""
    rows: list[tuple[int, int, int, int]] = []
    token_tile: list[int] = []
    start = 0
    for row, (past, length) in enumerate(chunks):
        for first in range(0, length, tile):
            count = min(tile, length - first)
            token_tile += [len(rows) * tile + i for i in range(count)]
            rows.append((row, start + first, count, past + first))
        start += length
    tokens = -(-(start + 1) // 8) * 8 if len(chunks) > 1 else start
    used = len(rows)
    rows += [(0, 0, 0, 0)] * (-used % TILES_PER_GROUP)
    columns = [jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True)]
    token_tile += [0] * (tokens - start)
    places = jnp.asarray(token_tile, jnp.int32)
    tiles = PrefillTiles(
        row=columns[0],
        start=columns[1],
        length=columns[2],
        position=columns[3],
        token_tile=places,
        count=jnp.asarray(used, jnp.int32),
    )
    return tiles, tokens


def attend(
    q: Array,  # [T, N, H]
    keys: Array,  # [L, K, H]
    values: Array,  # [L, K, HV]
    positions: Array,  # [T]
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Array:  # float64 [T, N, HV]
    """Dense attention of tokens at `positions` over one sequence."""
    tokens, heads, _ = q.shape
    length, kv_heads, dim_out = values.shape
    group = heads // kv_heads
    place = np.arange(length)[None, :]
    visible = place <= positions[:, None]
    if window is not None:
        visible &= place > positions[:, None] - window
    out = np.empty((tokens, heads, dim_out))
    for head in range(kv_heads):
        mine = slice(head * group, (head + 1) * group)
        scores = q[:, mine].astype(np.float64) @ keys[:, head].T * scale  # [T, G, L]
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores = np.where(visible[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[:, mine] = weights @ values[:, head]
    return out


def relative_error(out: Array, expected: Array) -> float:
    """||out - expected|| / ||expected||; NaN if `out` holds any."""
    return float(np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected))

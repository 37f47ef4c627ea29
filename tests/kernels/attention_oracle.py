"""Paged attention cases for every backend, and what the answer must be, in float64 numpy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from pallas_kernels.paged_kv import PagedKV, PrefillTiles, is_8_bit
from pallas_kernels.pool_layout import PoolLayout

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int32]
GARBAGE_BLOCKS = (-7, 2**30, -(2**31), 2**31 - 1)
"""Ids that stand behind the end of a table: nobody may believe them."""
POISONS = (np.nan, np.inf, -np.inf, 3e38)
"""What may stand in slots that nobody owns."""
_POOLS = ("k_pool", "v_pool", "k_scale", "v_scale")
STORED_LARGEST = {np.dtype(np.int8): 127.0, np.dtype(ml_dtypes.float8_e4m3fn): 448.0}


@dataclass(frozen=True)
class PagedCase:
    """Sequences whose K and V lie scattered over a pool, with poison in every slot nobody owns."""

    keys: list[Floats]
    """One [L, K, H] per sequence: what the cache says, that is, out of an 8-bit one what was
    stored times its scale."""
    values: list[Floats]
    k_pool: Floats
    """[S, K, H]"""
    v_pool: Floats | None
    """[S, K, HV]; None in a latent cache."""
    tables: Ints
    """[R, M]"""
    group: int
    block_size: int
    dtype: np.dtype[np.floating]
    """Of queries."""
    k_scale: npt.NDArray[np.float32] | None = None
    """[S, K]"""
    v_scale: npt.NDArray[np.float32] | None = None

    @property
    def lengths(self) -> list[int]:
        return [len(k) for k in self.keys]

    @property
    def latent(self) -> bool:
        return self.v_pool is None

    @property
    def value_dim(self) -> int:
        return self.values[0].shape[-1]

    def slots(self, row: int) -> Ints:
        """Where the tokens of a sequence lie."""
        positions = np.arange(self.lengths[row])
        blocks = self.tables[row, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def kv(self, layout: PoolLayout = PoolLayout.NHD, *, as_integers: bool = False) -> PagedKV:
        """The pools on the device; `as_integers`: small floats as the engine has them on CPU.
        In every layout, scales have the shape of their pools without the last axis.
        """
        pools = [getattr(self, name) for name in _POOLS]
        if as_integers:
            pools = [x if x is None else _integers(x) for x in pools]
        if layout is PoolLayout.HND:
            pools = [x if x is None else _heads_first(x, self.block_size) for x in pools]
        elif layout is PoolLayout.COMBINED:
            assert not self.latent, "a latent cache has no values to combine"
            pools = [_side_by_side(*pools[:2]), None, _side_by_side(*pools[2:]), None]
        return PagedKV(*(x if x is None else jnp.asarray(x) for x in pools))

    def empty(self) -> PagedCase:
        """The same tables over pools in which only poison stands."""
        names = [n for n in _POOLS if getattr(self, n) is not None]
        # Block 0 belongs to nobody.
        pools = {n: np.broadcast_to(getattr(self, n)[:1], getattr(self, n).shape) for n in names}
        return dataclasses.replace(self, **pools)

    def queries(self, count: int, rng: np.random.Generator) -> Floats:
        kv_heads, dim = self.k_pool.shape[1:]
        return normal(rng, (count, kv_heads * self.group, dim)).astype(self.dtype)

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
        """Dense attention of one query token [N, H] of sequence `row`, float64 [N, HV]."""
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


def _integers(pool: Floats) -> Floats:
    """Floats of 8 and 16 bits as integers of their size."""
    if pool.dtype.itemsize > 2 or pool.dtype == np.int8:
        return pool
    return pool.view(f"u{pool.dtype.itemsize}")


def _heads_first(pool: Floats, block_size: int) -> Floats:
    """[S, K, ...] as [blocks, K, block_size, ...]."""
    return pool.reshape(-1, block_size, *pool.shape[1:]).swapaxes(1, 2)


def _side_by_side(k: Floats | None, v: Floats | None) -> Floats | None:
    """[S, K, ...] each as [S, 2 K, ...], K and V of a head beside each other."""
    if k is None or v is None:
        return None
    return np.stack([k, v], axis=2).reshape(len(k), -1, *k.shape[2:])


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32)


def quantized(
    values: npt.NDArray[np.float32], dtype: npt.DTypeLike
) -> tuple[Floats, npt.NDArray[np.float32]]:
    """[..., H] in 8 bits, and its scales [...]."""
    largest = STORED_LARGEST[np.dtype(dtype)]
    scale = (np.abs(values).max(axis=-1) / largest).astype(np.float32)
    scaled = values / scale[..., None]
    return (np.rint(scaled) if np.dtype(dtype) == np.int8 else scaled).astype(dtype), scale


def paged_case(
    lengths: list[int],
    *,
    block_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    value_dim: int | None = None,
    latent: bool = False,
    seed: int = 0,
    page_seed: int = 0,
    dtype: npt.DTypeLike = np.float32,
    cache_dtype: npt.DTypeLike | None = None,
    table_width: int | None = None,
    num_blocks: int | None = None,
    poison: float = np.nan,
) -> PagedCase:
    """Pages in random order; poison in block 0, unowned pages and the tails of last pages.

    `seed` is for what the pages hold, `page_seed` for where they lie. `cache_dtype` None: the cache
    has q's `dtype`. Poison of an 8-bit cache is in its scales too.
    """
    rng, pages_rng = np.random.default_rng(seed), np.random.default_rng((seed, page_seed))
    stored = np.dtype(dtype if cache_dtype is None else cache_dtype)
    pages = [-(-length // block_size) for length in lengths]
    blocks = sum(pages) + 4 if num_blocks is None else num_blocks
    width = max(pages) + 2 if table_width is None else table_width
    owned = 1 + pages_rng.permutation(blocks - 1)
    free_blocks = [0, *(int(b) for b in owned[sum(pages) :])]
    tables = pages_rng.choice([*free_blocks, *GARBAGE_BLOCKS], (len(lengths), width)).astype(
        np.int32
    )
    dims = [head_dim] if latent else [head_dim, value_dim or head_dim]
    pools = [np.full((blocks * block_size, kv_heads, d), as_poison(poison, stored)) for d in dims]
    scales = [np.full((blocks * block_size, kv_heads), poison, np.float32) for _ in dims]
    kept: list[list[Floats]] = [[] for _ in dims]
    used = 0
    for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        mine = owned[used : used + count]
        used += count
        tables[row, :count] = mine
        positions = np.arange(length)
        slots = mine[positions // block_size] * block_size + positions % block_size
        for dim, pool, scale, kind in zip(dims, pools, scales, kept, strict=True):
            new = normal(rng, (length, kv_heads, dim))
            if is_8_bit(stored):
                new *= np.exp2(rng.integers(-3, 4, (length, kv_heads, 1))).astype(np.float32)
                pool[slots], scale[slots] = quantized(new, stored)
                kind.append(pool[slots].astype(np.float32) * scale[slots][..., None])
            else:
                pool[slots] = new.astype(stored)
                kind.append(pool[slots])
    if latent:
        kept.append([keys[..., :value_dim] for keys in kept[0]])
    v_pool, v_scale = (None, None) if latent else (pools[1], scales[1])
    k_scale, v_scale = (scales[0], v_scale) if is_8_bit(stored) else (None, None)
    q_dtype = np.dtype(dtype)
    return PagedCase(
        *(kept[0], kept[1], pools[0], v_pool, tables, group, block_size, q_dtype, k_scale, v_scale)
    )


def sink_case(cache_dtype: npt.DTypeLike) -> PagedCase:
    """A float16 model whose first token, with values next to zero, takes most of the weight."""
    length, sizes = 512, {"block_size": 16, "kv_heads": 1, "group": 1, "head_dim": 64}
    case = paged_case([length], **sizes, dtype=np.float16, cache_dtype=cache_dtype)
    assert case.v_pool is not None and case.k_scale is not None and case.v_scale is not None
    rng, slots = np.random.default_rng(0), case.slots(0)
    keys, values = normal(rng, (2, length, 1, 64)) * np.float32(0.05)
    keys[0, 0, 0], values[1:], values[0] = 9.0, values[1:] + np.float32(0.05), values[0] / 128
    stored: list[list[Floats]] = []
    pools = (case.k_pool, case.k_scale), (case.v_pool, case.v_scale)
    for new, (pool, scale) in zip((keys, values), pools, strict=True):
        pool[slots], scale[slots] = quantized(new, cache_dtype)
        stored.append([pool[slots].astype(np.float32) * scale[slots][..., None]])
    return dataclasses.replace(case, keys=stored[0], values=stored[1])


def sink_query(case: PagedCase) -> Floats:
    """[1, 1, H], with a score of 9 for the first token and around 0 for the others, unscaled."""
    q = np.zeros((1, 1, case.k_pool.shape[-1]), case.dtype)
    q[0, 0, 0] = 1.0
    return q


def latent_case(
    lengths: list[int],
    *,
    block_size: int,
    group: int,
    key_dim: int,
    value_dim: int,
    **others: Any,
) -> PagedCase:
    """One KV head whose values are the first `value_dim` elements of its keys; the rest as for
    `paged_case`.
    """
    return paged_case(
        lengths,
        block_size=block_size,
        kv_heads=1,
        group=group,
        head_dim=key_dim,
        value_dim=value_dim,
        latent=True,
        **others,
    )


def as_poison(value: float, dtype: np.dtype[np.floating]) -> np.generic:
    """The value, or what comes nearest to it in a cache of this type."""
    if dtype == np.int8:
        return np.int8(-128)
    if dtype == ml_dtypes.float8_e4m3fn:  # its largest are 448 and NaN
        return dtype.type(np.nan if np.isnan(value) else np.clip(value, -448, 448))
    finite = not np.isfinite(value) or dtype.itemsize == 4
    return dtype.type(value if finite else ml_dtypes.finfo(dtype).max)


@dataclass(frozen=True)
class Tiles:
    """Tiles as `paged_prefill` takes them, and the (row, position) of every prompt token."""

    arrays: PrefillTiles
    tokens: list[tuple[int, int]]


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
    arrays = (*fields, token_tile, np.int32(used))
    return Tiles(PrefillTiles(*(jnp.asarray(x) for x in arrays)), tokens)

"""Paged attention of one query token a row on Hopper, in Pallas Mosaic GPU.

A CTA serves one KV head of one row and one share of its context. The G query heads of the KV head
are the rows of one wgmma, padded to 64: multiplications are wasted, but they are far too few to
matter beside the bytes of the cache. Shares are summed in float32 and combined with their
log-sum-exp, as in Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_tiles as tiles
from pallas_kernels.mosaic_compat import interpreter, plgpu
from pallas_kernels.mosaic_support import check_supported
from pallas_kernels.mosaic_tiles import ROWS, TileShape
from pallas_kernels.paged_kv import PagedKV
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.split_k import combine_splits
from pallas_kernels.tuning import DecodeConfig


@dataclass(frozen=True)
class _Plan:
    """All that is known when the kernel is traced."""

    shape: TileShape
    depth: int
    splits: int
    min_split_tiles: int
    query_rows: int  # G rounded up to 8, the rows of a swizzle tile
    scale: float
    window: int | None
    soft_cap: float | None
    interpret: bool


def paged_decode(
    q: jax.Array,
    kv: PagedKV,
    block_tables: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    value_dim: int | None = None,
    config: DecodeConfig,
    layout: PoolLayout = PoolLayout.NHD,
    interpret: bool = False,
    detect_races: bool = False,
) -> jax.Array:
    """Attention of one query token a row over its paged context; see `reference.paged_decode`.
    Padding rows may stand anywhere. `config.num_stages` tiles of K and V are in flight, or as many
    as fit; `num_warps` and `carry_pages` mean nothing here. `detect_races` with `interpret` only.

    Raises NotImplementedError with the reason for what this backend does not do.
    """
    group = check_supported(
        q, kv, block_size=block_size, block_kv=config.block_kv, layout=layout, interpret=interpret
    )
    rows, num_heads, dim = q.shape
    kv_heads = num_heads // group
    shape = TileShape(config.block_kv, block_size, dim, q.dtype, layout)
    padded = -(-group // 8) * 8
    longest = -(-block_tables.shape[1] * block_size // config.block_kv)
    min_split_tiles = max(1, config.min_split_tokens // config.block_kv)
    plan = _Plan(
        shape=shape,
        depth=shape.depth(config.num_stages, ROWS * dim * q.dtype.itemsize),
        splits=max(1, min(config.splits, -(-longest // min_split_tiles))),
        min_split_tiles=min_split_tiles,
        query_rows=padded,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    grouped = q.reshape(rows, kv_heads, group, dim)
    if padded != group:
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    out_dtype = q.dtype if plan.splits == 1 else jnp.float32
    partials = (rows, plan.splits, kv_heads, padded)
    assert kv.v is not None
    out, lse = plgpu.kernel(
        functools.partial(_decode_kernel, plan=plan, out_dtype=out_dtype),
        out_type=(
            jax.ShapeDtypeStruct((*partials, dim), out_dtype),
            jax.ShapeDtypeStruct(partials, jnp.float32),
        ),
        grid=(rows, plan.splits, kv_heads),
        grid_names=("row", "split", "head"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter(detect_races=detect_races) if interpret else None,
    )(positions, block_tables, grouped, shape.pages(kv.k), shape.pages(kv.v))
    out, lse = out[:, :, :, :group], lse[:, :, :, :group]
    out = out.reshape(rows, plan.splits, num_heads, dim)
    if plan.splits == 1:
        unsplit: jax.Array = out[:, 0]
        return unsplit
    return combine_splits(out, lse.reshape(rows, plan.splits, num_heads)).astype(q.dtype)


def _decode_kernel(
    positions: Any,  # i32 [D]
    block_tables: Any,  # i32 [D, M]
    q: Any,  # [D, K, query_rows, H]
    k_pool: Any,
    v_pool: Any,
    out: Any,  # [D, splits, K, query_rows, H]
    lse: Any,  # f32 [D, splits, K, query_rows]
    *,
    plan: _Plan,
    out_dtype: Any,
) -> None:
    shape, depth = plan.shape, plan.depth
    result = tiles.swizzled((ROWS, shape.head_dim), out_dtype)
    staging = tiles.swizzled((ROWS, shape.block_kv), shape.dtype) if plan.interpret else None
    pl.run_scoped(
        functools.partial(
            _decode_block, positions, block_tables, q, k_pool, v_pool, out, lse, plan=plan
        ),
        tiles.swizzled((ROWS, shape.head_dim), shape.dtype),
        # The result is written when the last tile has been used: it may lie where they were.
        plgpu.RefUnion(tiles.ring_buffers(shape, depth), result),
        plgpu.SMEM((ROWS,), jnp.float32),
        tiles.ring_barriers(shape, depth, consumers=1),
        plgpu.Barrier(num_arrivals=1),
        staging,
        collective_axes="warpgroup",
    )


def _decode_block(
    positions: Any,
    block_tables: Any,
    q: Any,
    k_pool: Any,
    v_pool: Any,
    out: Any,
    lse: Any,
    q_smem: Any,
    ring_or_result: Any,
    lse_smem: Any,
    barriers: Any,
    q_full: Any,
    staging: Any,
    *,
    plan: _Plan,
) -> None:
    shape = plan.shape
    split, row = lax.axis_index("split"), lax.axis_index("row")
    head = lax.axis_index("head")
    (k_smem, v_smem), result = ring_or_result
    ring = tiles.Ring(plan.depth, k_smem, v_smem, *barriers)
    end = positions[row] + 1  # 0 in padding rows
    start = 0 if plan.window is None else jnp.maximum(end - plan.window, 0)
    first, count = _share(start, end, split, plan)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _memory() -> None:
        plgpu.copy_gmem_to_smem(q.at[row, head], q_smem.at[pl.ds(0, plan.query_rows)], q_full)

        def page_of(position: Any) -> Any:
            live = (position < end) & (position + shape.piece > start)
            column = jnp.minimum(lax.div(position, shape.block_size), block_tables.shape[1] - 1)
            return jnp.where(live, block_tables[row, column], 0)

        tiles.fill_ring(
            ring, shape, k_pool, v_pool, head, first=first, count=count, page_of=page_of
        )

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _compute() -> None:
        plgpu.barrier_wait(q_full)

        def step(i: Any, carry: tiles.Carry) -> tiles.Carry:
            slot = lax.rem(i, plan.depth)
            tile_start = (first + i) * shape.block_kv
            low, high = start - tile_start, end - tile_start
            plgpu.barrier_wait(ring.k_full.at[slot])
            scores = tiles.scores_of(
                q_smem, ring.k.at[slot], scale=plan.scale, soft_cap=plan.soft_cap
            )
            plgpu.barrier_arrive(ring.k_free.at[slot])
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            scores = jnp.where((column >= low) & (column < high), scores, -jnp.inf)
            probs, (acc, top, total) = tiles.softmax_step(scores, carry)
            v = ring.v.at[slot]
            plgpu.barrier_wait(ring.v_full.at[slot])

            @pl.when((low > 0) | (high < shape.block_kv))
            def _edge() -> None:
                tiles.zero_rows_outside(v, low, high)

            acc = tiles.add_values(acc, probs, v, staging)
            plgpu.barrier_arrive(ring.v_free.at[slot])
            return acc, top, total

        carry = lax.fori_loop(0, count, step, tiles.empty_carry(shape.head_dim))
        values, lse_smem[...] = tiles.normalize(carry)
        result[...] = values.astype(result.dtype)
        plgpu.commit_smem()
        used = pl.ds(0, plan.query_rows)
        plgpu.copy_smem_to_gmem(lse_smem.at[used], lse.at[row, split, head])

        # `combine_splits` does not read what an empty share would have written.
        @pl.when((count > 0) | (plan.splits == 1))
        def _store() -> None:
            plgpu.copy_smem_to_gmem(result.at[used], out.at[row, split, head])

        plgpu.wait_smem_to_gmem(0)


def _share(start: Any, end: Any, split: Any, plan: _Plan) -> tuple[Any, Any]:
    """First tile and number of tiles of one of the splits of the context [start, end)."""
    block_kv = plan.shape.block_kv
    first = lax.div(jnp.asarray(start, jnp.int32), block_kv)
    last = lax.div(end + (block_kv - 1), block_kv)
    per_split = lax.div(last - first + (plan.splits - 1), plan.splits)
    per_split = jnp.maximum(per_split, plan.min_split_tiles)
    mine = first + split * per_split
    return mine, jnp.clip(last - mine, 0, per_split)

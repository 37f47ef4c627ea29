"""Causal attention of prompt chunks over their paged context on Hopper, in Pallas Mosaic GPU.

A CTA serves one tile of tokens and one KV head, with one or two warpgroups that compute. Each has
as many tokens as fit 64 rows, a row being one of the G heads of a token, and all of them use the
same tiles of K and V (as in FlashAttention-3, Shah et al., 2024, but for its exchange of turns).

XLA brings q into tiles before, and takes the tokens out of them afterwards: a tile may begin at any
token, and TMA reads and writes swizzled shared memory in groups of 8 rows. That costs little beside
the projections around it, which touch as many bytes and multiply besides.
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
from pallas_kernels.mosaic_tiles import ROWS, Carry, TileShape
from pallas_kernels.paged_kv import PagedKV, PrefillTiles
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.tuning import PrefillConfig

MAX_WARPGROUPS = 2
MAX_DIM_OF_TWO = 128
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 232, 40
"""Of a thread, where three warpgroups share a multiprocessor and begin with 168 each."""


@dataclass(frozen=True)
class _Plan:
    """All that is known when the kernel is traced."""

    shape: TileShape
    depth: int
    warpgroups: int
    tokens: int  # of one warpgroup
    group: int
    scale: float
    window: int | None
    soft_cap: float | None
    interpret: bool


def tile_size(group: int, config: PrefillConfig) -> int:
    """Tokens of a tile for `group` query heads per KV head."""
    return max(1, config.block_rows // ROWS) * max(1, ROWS // group)


def paged_prefill(
    q: jax.Array,
    kv: PagedKV,
    block_tables: jax.Array,
    tiles: PrefillTiles,
    *,
    tile: int,
    block_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    value_dim: int | None = None,
    config: PrefillConfig,
    layout: PoolLayout = PoolLayout.NHD,
    interpret: bool = False,
    detect_races: bool = False,
) -> jax.Array:
    """Causal attention of new tokens over their paged context, which includes themselves (already
    written); see `reference.paged_prefill`. `tile` is `tile_size(group, config)`. Tokens in no tile
    give zeros. `config.num_stages` tiles of K and V are in flight, or as many as fit; `num_warps`
    means nothing here. `detect_races` with `interpret` only.

    Raises NotImplementedError with the reason for what this backend does not do.
    """
    group = check_supported(
        q, kv, block_size=block_size, block_kv=config.block_kv, layout=layout, interpret=interpret
    )
    if config.block_rows not in (ROWS, MAX_WARPGROUPS * ROWS):
        raise NotImplementedError(
            f"block_rows {config.block_rows}: the Mosaic GPU prefill takes 64 and 128 (one or two "
            "warpgroups that compute); choose another configuration, or use the attention backend "
            "'pallas_triton'"
        )
    dim = q.shape[-1]
    if config.block_rows > ROWS and dim > MAX_DIM_OF_TWO:
        raise NotImplementedError(
            f"block_rows {config.block_rows} with head_dim {dim}: two warpgroups that compute have "
            f"registers for at most {MAX_DIM_OF_TWO}; choose block_rows 64, or use the attention "
            "backend 'pallas_triton'"
        )
    assert tile == tile_size(group, config), (tile, group, config)
    kv_heads = q.shape[1] // group
    warpgroups = config.block_rows // ROWS
    shape = TileShape(config.block_kv, block_size, dim, q.dtype, layout)
    depth = shape.depth(config.num_stages, config.block_rows * dim * q.dtype.itemsize)
    plan = _Plan(
        shape=shape,
        depth=depth,
        warpgroups=warpgroups,
        tokens=tile // warpgroups,
        group=group,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    tile_q = _into_tiles(q, tiles, plan)
    assert kv.v is not None
    out = plgpu.kernel(
        functools.partial(_prefill_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(tile_q.shape, q.dtype),
        grid=(tiles.row.shape[0], kv_heads),
        grid_names=("tile", "head"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter(detect_races=detect_races) if interpret else None,
    )(
        tiles.row,
        tiles.length,
        tiles.position,
        block_tables,
        tile_q,
        shape.pages(kv.k),
        shape.pages(kv.v),
    )
    return _from_tiles(out, tiles, plan)


def _into_tiles(q: jax.Array, tiles: PrefillTiles, plan: _Plan) -> jax.Array:
    """q [P, N, H] as [NT, K, warpgroups, ROWS, H]; what belongs to no token is anything."""
    size = plan.warpgroups * plan.tokens
    token = tiles.start[:, None] + lax.iota(jnp.int32, size)[None, :]
    rows = jnp.take(q, token, axis=0, mode="clip")
    kv_heads, dim = q.shape[1] // plan.group, q.shape[2]
    rows = rows.reshape(-1, plan.warpgroups, plan.tokens, kv_heads, plan.group, dim)
    rows = rows.transpose(0, 3, 1, 2, 4, 5)
    rows = rows.reshape(*rows.shape[:3], plan.tokens * plan.group, dim)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, ROWS - rows.shape[3]), (0, 0)))


def _from_tiles(out: jax.Array, tiles: PrefillTiles, plan: _Plan) -> jax.Array:
    """[P, N, H] of [NT, K, warpgroups, ROWS, H], with zeros for tokens in no tile."""
    count, kv_heads, _, _, dim = out.shape
    rows = out[:, :, :, : plan.tokens * plan.group]
    rows = rows.reshape(count, kv_heads, plan.warpgroups, plan.tokens, plan.group, dim)
    rows = rows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, kv_heads * plan.group, dim)
    used = lax.iota(jnp.int32, tiles.token_tile.shape[0]) < tiles.length.sum()
    taken = jnp.take(rows, tiles.token_tile, axis=0, mode="clip")
    return jnp.where(used[:, None, None], taken, jnp.zeros((), out.dtype))


def _prefill_kernel(*refs: Any, plan: _Plan) -> None:
    shape = plan.shape
    rows = (plan.warpgroups, ROWS)
    pl.run_scoped(
        functools.partial(_prefill_block, *refs, plan=plan),
        tiles.swizzled((*rows, shape.head_dim), shape.dtype),
        tiles.ring_buffers(shape, plan.depth),
        tiles.ring_barriers(shape, plan.depth, consumers=plan.warpgroups),
        plgpu.Barrier(num_arrivals=plan.warpgroups),
        plgpu.Barrier(num_arrivals=1, num_barriers=plan.depth) if plan.warpgroups > 1 else None,
        tiles.swizzled((*rows, shape.block_kv), shape.dtype) if plan.interpret else None,
        collective_axes="warpgroup",
    )


def _prefill_block(
    tile_row: Any,  # i32 [NT]
    tile_length: Any,  # i32 [NT]
    tile_position: Any,  # i32 [NT]
    block_tables: Any,  # i32 [R, M]
    q: Any,  # [NT, K, warpgroups, ROWS, H]
    k_pool: Any,
    v_pool: Any,
    out: Any,  # as q
    q_smem: Any,  # [warpgroups, ROWS, H]; the result, too
    ring_smem: Any,
    barriers: Any,
    q_full: Any,
    edge_done: Any,
    staging: Any,
    *,
    plan: _Plan,
) -> None:
    shape = plan.shape
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    ring = tiles.Ring(plan.depth, *ring_smem, *barriers)
    length, position = tile_length[tile], tile_position[tile]
    end = jnp.where(length > 0, position + length, 0)
    start = 0 if plan.window is None else jnp.maximum(position - (plan.window - 1), 0)
    start = jnp.minimum(start, end)
    first = lax.div(start, jnp.int32(shape.block_kv))
    count = lax.div(end + (shape.block_kv - 1), shape.block_kv) - first
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == plan.warpgroups)
    def _memory() -> None:
        if plan.warpgroups > 1:
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        for i in range(plan.warpgroups):
            plgpu.copy_gmem_to_smem(q.at[tile, head, i], q_smem.at[i], q_full)
        row = tile_row[tile]

        def page_of(at: Any) -> Any:
            live = (at < end) & (at + shape.piece > start)
            column = jnp.minimum(lax.div(at, shape.block_size), block_tables.shape[1] - 1)
            return jnp.where(live, block_tables[row, column], 0)

        tiles.fill_ring(
            ring, shape, k_pool, v_pool, head, first=first, count=count, page_of=page_of
        )

    @pl.when(warpgroup < plan.warpgroups)
    def _compute() -> None:
        if plan.warpgroups > 1:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        my_q = q_smem.at[warpgroup]
        my_staging = None if staging is None else staging.at[warpgroup]
        my_first = position + warpgroup * plan.tokens
        plgpu.barrier_wait(q_full)

        def step(i: Any, carry: Carry, *, masked: bool) -> Carry:
            slot = lax.rem(i, plan.depth)
            tile_start = (first + i) * shape.block_kv
            plgpu.barrier_wait(ring.k_full.at[slot])
            scores = tiles.scores_of(
                my_q, ring.k.at[slot], scale=plan.scale, soft_cap=plan.soft_cap
            )
            plgpu.barrier_arrive(ring.k_free.at[slot])
            if masked:
                scores = _mask(scores, my_first - tile_start, end - tile_start, plan)
            probs, (acc, top, total) = tiles.softmax_step(scores, carry)
            v = ring.v.at[slot]
            plgpu.barrier_wait(ring.v_full.at[slot])
            if masked:
                _zero_edges(v, start - tile_start, end - tile_start, slot)
            acc = tiles.add_values(acc, probs, v, my_staging)
            plgpu.barrier_arrive(ring.v_free.at[slot])
            return acc, top, total

        def _zero_edges(v: Any, low: Any, high: Any, slot: Any) -> None:
            if plan.warpgroups == 1:
                tiles.zero_rows_outside(v, low, high)
                return

            # One warpgroup does it for both.
            @pl.when(warpgroup == 0)
            def _write() -> None:
                tiles.zero_rows_outside(v, low, high)
                plgpu.barrier_arrive(edge_done.at[slot])

            @pl.when(warpgroup > 0)
            def _read() -> None:
                plgpu.barrier_wait(edge_done.at[slot])

        masked, whole = functools.partial(step, masked=True), functools.partial(step, masked=False)
        carry = tiles.empty_carry(shape.head_dim)
        whole_from, whole_to = _whole_tiles(position, end, first, count, plan)
        if plan.window is not None:
            carry = lax.fori_loop(0, whole_from, masked, carry)
        carry = lax.fori_loop(whole_from, whole_to, whole, carry)
        carry = lax.fori_loop(whole_to, count, masked, carry)
        values, _ = tiles.normalize(carry)
        my_q[...] = values.astype(shape.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(my_q, out.at[tile, head, warpgroup])
        plgpu.wait_smem_to_gmem(0)


def _whole_tiles(position: Any, end: Any, first: Any, count: Any, plan: _Plan) -> tuple[Any, Any]:
    """Which of the `count` tiles of context all tokens see whole: they need no mask."""
    block_kv = plan.shape.block_kv
    to = jnp.clip(lax.div(position + 1, block_kv) - first, 0, count)
    if plan.window is None:
        return 0, to
    oldest = jnp.maximum(end - plan.window, 0)  # that the last token sees
    since = lax.div(oldest + (block_kv - 1), block_kv) - first
    return jnp.clip(since, 0, to), to


def _mask(scores: Any, query: Any, end: Any, plan: _Plan) -> Any:
    """-inf where a row must not look. `query`, the position of the warpgroup's first token, and
    `end`, that of the context, count from the first column.
    """
    rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    own = lax.broadcast_in_dim(query + lax.div(rows, plan.group), scores.shape, [0])
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    visible = (column <= own) & (column < end)
    if plan.window is not None:
        visible &= column > own - plan.window
    return jnp.where(visible, scores, -jnp.inf)

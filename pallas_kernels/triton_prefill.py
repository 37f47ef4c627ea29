"""Attention of prompt chunks over a paged cache, in Pallas Triton (NVIDIA GPUs).

For the letters in shapes see `paged_kv`. A program serves one tile of tokens and the query heads of
one KV head (or a block of them, where there are many): their tokens x heads are the rows of its
matrices, so that K and V are read once for all of them. It walks over the context in tiles of
`block_kv` tokens, gathers K and V through the block table, and keeps an online softmax in base 2
(Milakov and Gimelshein, 2018; FlashAttention-2, Dao, 2023). Only tiles at the causal edge, and with
a window at its far edge, are masked.

Two things are for the sake of the compiler's software pipeline: the page ids of the next tile are
read one tile ahead and carried along, without which only one tile of K and V is ever in flight; and
head dims that are no power of two are handled as a sum of such, 80 as 64 + 16, which costs no
padding in shared memory and no multiplications by zero.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_math
from pallas_kernels.paged_kv import PagedKV, PrefillTiles
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.softmax import LOG2_E, LOWEST
from pallas_kernels.support import check_supported, is_latent
from pallas_kernels.tuning import PrefillConfig

MAX_PROGRAM_HEADS = 16
"""Query heads of one program. More would leave a tile few tokens, and so many tiles."""
MIN_DOT = 16
"""The tensor cores take no narrower operands."""
MAX_PAGES = 8
"""Up to so many pages of a tile have their ids read one by one."""
WIDE, WIDE_PIECE = 256, 128
"""More columns than the first are handled in pieces of the second: else the compiler runs out of
registers for a latent cache."""

Pages: TypeAlias = tuple[jax.Array, ...]
"""Page ids of a tile of context: i32 [] one by one, or one array i32 [block_kv, 1]."""
Carry: TypeAlias = tuple[Pages, jax.Array, jax.Array, tuple[jax.Array, ...]]


def _program_heads(group: int, config: PrefillConfig) -> int:
    """Query heads of one program: the whole group, or equal parts of it."""
    most = min(MAX_PROGRAM_HEADS, config.block_rows)
    return pl.cdiv(group, pl.cdiv(group, most))


def tile_size(group: int, config: PrefillConfig) -> int:
    """Tokens of one tile for G query heads per KV head."""
    return config.block_rows // _program_heads(group, config)


@dataclass(frozen=True)
class _Pieces:
    """Columns [first, first + dim) of a head as powers of two, none narrower than a dot takes."""

    first: int
    dim: int

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first column, width) of each. The last may reach past the end."""
        spans, start, left = [], self.first, self.dim
        while left > 0:
            width = max(MIN_DOT, 1 << (left.bit_length() - 1))
            if self.dim > WIDE:
                width = min(width, WIDE_PIECE)
            spans.append((start, width))
            start, left = start + width, left - width
        return tuple(spans)

    def columns(self, span: tuple[int, int]) -> tuple[jax.Array, jax.Array | None]:
        """i32 [1, width] columns, and which of them exist (None: all)."""
        start, width = span
        columns = start + lax.broadcasted_iota(jnp.int32, (1, width), 1)
        end = self.first + self.dim
        return columns, (None if start + width <= end else columns < end)


@dataclass(frozen=True)
class _Plan:
    """What a kernel is compiled for."""

    config: PrefillConfig
    layout: PoolLayout
    block_size: int
    group: int
    heads: int  # query heads of one program
    keys: tuple[_Pieces, ...]
    values: _Pieces
    latent: bool  # the values are the first of the keys' pieces
    scale: float
    window: int | None
    soft_cap: float | None
    uniform: bool
    interpret: bool

    @property
    def head_blocks(self) -> int:
        return pl.cdiv(self.group, self.heads)

    @property
    def tile(self) -> int:
        return tile_size(self.group, self.config)


@dataclass(frozen=True)
class _Tile:
    """One tile of tokens, read from the tile list; all are i32 scalars."""

    row: jax.Array  # of the block table
    start: jax.Array  # first token among the P
    length: jax.Array
    first: jax.Array  # absolute position of the first token
    head: jax.Array  # KV head
    head_block: jax.Array

    @property
    def last(self) -> jax.Array:
        """Absolute position of the last token, and so of its context."""
        return self.first + self.length - 1


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
    uniform: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of new tokens over their paged context, which includes themselves (already
    written).

    Args: `q` [P, N, H]; `block_tables` i32 [R, M]; `tiles` of at most `tile` tokens, which must be
    `tile_size(G, config)`. Returns [P, N, HV] in q's type, zeros for tokens that are in no tile.
    `uniform` masks every tile of context, not only those at the edges: a token's sums then go
    through one piece of code, whatever tokens are in its tile.
    Raises NotImplementedError for what the kernel cannot do (see `support`).
    """
    tokens, num_heads, head_dim = q.shape
    latent = is_latent(kv, layout)
    kv_heads = layout.kv_heads(kv.k)
    group = num_heads // kv_heads
    check_supported(
        q.dtype,
        kv,
        block_size=block_size,
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        layout=layout,
    )
    if scale <= 0.0:
        raise NotImplementedError(
            f"scale {scale}: the GPU kernels take a softmax scale above 0; "
            "use the attention backend 'reference'"
        )
    if tile != tile_size(group, config):
        raise ValueError(
            f"tile is {tile}, but {config} with {group} query heads per KV head takes tiles of "
            f"{tile_size(group, config)} tokens; cut the prompts with triton_prefill.tile_size"
        )
    values = _Pieces(0, head_dim if layout is PoolLayout.COMBINED else kv.value_dim(value_dim))
    beside = _Pieces(values.dim, head_dim - values.dim)
    plan = _Plan(
        config=config,
        layout=layout,
        block_size=block_size,
        group=group,
        heads=_program_heads(group, config),
        keys=(values, beside) if latent else (_Pieces(0, head_dim),),
        values=values,
        latent=latent,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        uniform=uniform,
        interpret=interpret,
    )
    out = jax.ShapeDtypeStruct((tokens, num_heads, values.dim), q.dtype)
    num_tiles = tiles.row.shape[0]
    if tokens == 0 or num_tiles == 0:
        return jnp.zeros(out.shape, out.dtype)
    call = pl.pallas_call(
        functools.partial(_prefill_kernel, plan=plan),
        out_shape=out,
        # Neighbours in time share K and V pages: heads first. One program more than tiles, so that
        # there is always one to write the zeros.
        grid=(kv_heads * plan.head_blocks, num_tiles + 1),
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_prefill",
    )
    tile_list = (tiles.row, tiles.start, tiles.length, tiles.position, tiles.count.reshape(1))
    result: jax.Array = call(q, kv, block_tables, tile_list)
    return result


def _prefill_kernel(
    q_ref: Any, kv: Any, tables_ref: Any, tile_list: Any, out_ref: Any, *, plan: _Plan
) -> None:
    rows_ref, starts_ref, lengths_ref, positions_ref, count_ref = tile_list
    head, head_block = pl.program_id(0), jnp.int32(0)
    if plan.head_blocks > 1:
        head, head_block = head // plan.head_blocks, head % plan.head_blocks
    program, count = pl.program_id(1), count_ref[0]

    @pl.when(program < count)
    def attend() -> None:
        # The last tiles of a prompt have the longest contexts: they start first, so that no long
        # one begins when the others end.
        index = count - 1 - program
        tile = _Tile(
            row=rows_ref[index],
            start=starts_ref[index],
            length=lengths_ref[index],
            first=positions_ref[index],
            head=head,
            head_block=head_block,
        )
        _store(out_ref, tile, _attend(q_ref, kv, tables_ref, tile, plan), plan)

    @pl.when(program >= count)
    def fill() -> None:
        before = jnp.maximum(count - 1, 0)
        end = jnp.where(count > 0, starts_ref[before] + lengths_ref[before], 0)
        idle = pl.num_programs(1) - count
        tokens = q_ref.shape[0]
        zeros = tuple(
            jnp.zeros((plan.config.block_rows, width), out_ref.dtype)
            for _, width in plan.values.spans
        )

        def write(turn: jax.Array, carry: None) -> None:
            start = end + (program - count + turn * idle) * plan.tile
            length = jnp.minimum(tokens - start, plan.tile)
            tile = _Tile(head, start, length, start, head, head_block)
            _store(out_ref, tile, zeros, plan)
            return carry

        chunks = (tokens - end + plan.tile - 1) // plan.tile
        turns = (chunks - (program - count) + idle - 1) // idle
        lax.fori_loop(0, turns, write, None)


def _rows(tile: _Tile, plan: _Plan) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each row, as i32 [rows, 1]: its token in the tile, its query head, and whether both
    exist.
    """
    row = lax.broadcasted_iota(jnp.int32, (plan.config.block_rows, 1), 0)
    token, head = row // plan.heads, tile.head_block * plan.heads + row % plan.heads
    return token, tile.head * plan.group + head, (token < tile.length) & (head < plan.group)


def _store(out_ref: Any, tile: _Tile, out: tuple[jax.Array, ...], plan: _Plan) -> None:
    token, head, live = _rows(tile, plan)
    for span, piece in zip(plan.values.spans, out, strict=True):
        columns, exist = plan.values.columns(span)
        mask = live if exist is None else live & exist
        plt.store(
            out_ref.at[tile.start + token, head, columns],
            piece.astype(out_ref.dtype),
            mask=jnp.broadcast_to(mask, piece.shape),
        )


def _attend(
    q_ref: Any, kv: Any, tables_ref: Any, tile: _Tile, plan: _Plan
) -> tuple[jax.Array, ...]:  # [rows, width] for each piece of the values
    token, head, live = _rows(tile, plan)
    q = []
    for pieces in plan.keys:
        for span in pieces.spans:
            columns, exist = pieces.columns(span)
            mask = live if exist is None else live & exist
            shape = plan.config.block_rows, span[1]
            at = q_ref.at[tile.start + token, head, columns]
            q.append(triton_math.load(at, jnp.broadcast_to(mask, shape)))
    rows = plan.config.block_rows
    walk = _Walk(q, tile.first + token, kv, tables_ref, tile, plan)
    carry: Carry = (
        walk.page_ids(walk.begin),
        jnp.full((rows, 1), LOWEST, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        tuple(jnp.zeros((rows, width), jnp.float32) for _, width in plan.values.spans),
    )
    if plan.uniform:
        carry = lax.fori_loop(walk.begin, walk.end, walk.masked, carry)
    else:
        if plan.window is not None:
            carry = lax.fori_loop(walk.begin, walk.full_begin, walk.masked, carry)
        carry = lax.fori_loop(walk.full_begin, walk.full_end, walk.unmasked, carry)
        carry = lax.fori_loop(walk.full_end, walk.end, walk.masked, carry)
    _, _, total, acc = carry
    share = 1.0 / jnp.where(total == 0.0, 1.0, total)
    return tuple(piece * share for piece in acc)


class _Walk:
    """A tile's way over its context, in tiles of `block_kv` positions: [begin, full_begin) and
    [full_end, end) are masked, [full_begin, full_end) are seen whole by all rows.
    """

    def __init__(
        self,
        q: list[jax.Array],
        q_pos: jax.Array,  # i32 [rows, 1]
        kv: Any,
        tables_ref: Any,
        tile: _Tile,
        plan: _Plan,
    ) -> None:
        self.q, self.q_pos, self.kv, self.tables_ref = q, q_pos, kv, tables_ref
        self.tile, self.plan = tile, plan
        width = plan.config.block_kv
        self.end = tile.last // width + 1
        self.begin = self.full_begin = jnp.int32(0)
        self.full_end = (tile.first + 1) // width
        if plan.window is not None:
            self.begin = jnp.maximum(tile.first - plan.window + 1, 0) // width
            seen_by_last = jnp.maximum(tile.last - plan.window + 1, 0)
            self.full_begin = jnp.minimum((seen_by_last + width - 1) // width, self.end)
            self.full_end = jnp.maximum(self.full_end, self.full_begin)

    def masked(self, index: jax.Array, carry: Carry) -> Carry:
        return self._step(index, carry, masked=True)

    def unmasked(self, index: jax.Array, carry: Carry) -> Carry:
        return self._step(index, carry, masked=False)

    def _positions(self, index: jax.Array, axis: int) -> jax.Array:
        width = self.plan.config.block_kv
        shape = (width, 1) if axis == 0 else (1, width)
        return index * width + lax.broadcasted_iota(jnp.int32, shape, axis)

    def _alive(self, positions: jax.Array) -> jax.Array:
        """Whether some row of the tile sees them. Other slots, and other entries of the block
        table, hold anything.
        """
        alive = positions <= self.tile.last
        if self.plan.window is not None:
            alive &= positions > self.tile.first - self.plan.window
        return alive

    def page_ids(self, index: jax.Array) -> Pages:
        """Of a tile of context, also of the one behind the last, which is not used."""
        row, plan = self.tile.row, self.plan
        width, block_size = plan.config.block_kv, plan.block_size
        if width > MAX_PAGES * block_size:
            pos = self._positions(index, 0)
            return (
                triton_math.load(self.tables_ref.at[row, _page(pos, block_size)], self._alive(pos)),
            )
        earliest = jnp.int32(0)
        if plan.window is not None:
            earliest = jnp.maximum(self.tile.first - plan.window + 1, 0)
        starts = [index * width + i * block_size for i in range(max(1, width // block_size))]
        # Entries for positions that nobody sees hold anything: those at the ends are read instead.
        seen = [jnp.clip(start, earliest, self.tile.last) for start in starts]
        return tuple(self.tables_ref[row, _page(position, block_size)] for position in seen)

    def _slot_pages(self, pages: Pages) -> jax.Array:
        """The page of every token of a tile of context: i32 [block_kv, 1], or [] if it is one."""
        place = lax.broadcasted_iota(jnp.int32, (self.plan.config.block_kv, 1), 0)
        found = pages[-1]
        for i in reversed(range(len(pages) - 1)):
            found = jnp.where(place < (i + 1) * self.plan.block_size, pages[i], found)
        return found

    def _step(self, index: jax.Array, carry: Carry, *, masked: bool) -> Carry:
        pages, top, total, acc = carry
        plan = self.plan
        next_pages = self.page_ids(index + 1)
        pos = self._positions(index, 0)
        alive = self._alive(pos) if masked else None
        where = self._index(pages, pos, values=False)
        dtype = self.q[0].dtype
        keys = [k for p in plan.keys for k in self._gather(self.kv.k, where, alive, p, dtype)]
        k_scales = None
        if self.kv.k_scale is not None:
            k_scales = _slot_scales(self.kv.k_scale, where, alive)
        scores, factor = self._scores(keys, k_scales)
        if masked:
            columns = self._positions(index, 1)
            visible = columns <= self.q_pos
            if plan.window is not None:
                # One comparison for both ends: what is ahead is far behind as an unsigned number.
                behind = (self.q_pos - columns).astype(jnp.uint32)
                visible = behind < jnp.uint32(plan.window)
            scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True) * factor)
        probs = triton_math.weights(scores, factor, new_top, interpret=plan.interpret)
        keep = jnp.exp2(top - new_top)
        total = total * keep + jnp.sum(probs, axis=1, keepdims=True)
        dtype = triton_math.weights_dtype(dtype, quantized=k_scales is not None)
        values, v_scales = keys[: len(plan.values.spans)], k_scales
        if not plan.latent:
            apart = self.kv.v is not None
            where = self._index(pages, pos, values=True)
            pool = self.kv.v if apart else self.kv.k
            values = self._gather(pool, where, alive, plan.values, dtype)
            if k_scales is not None:
                v_scales = _slot_scales(self.kv.v_scale if apart else self.kv.k_scale, where, alive)
        if v_scales is not None:
            probs *= v_scales
        probs = probs.astype(dtype)
        dot = functools.partial(triton_math.dot, axis=0, interpret=plan.interpret)
        acc = tuple(
            old * keep + dot(probs, v.astype(dtype)) for old, v in zip(acc, values, strict=True)
        )
        return next_pages, new_top, total, acc

    def _scores(self, keys: list[jax.Array], k_scales: jax.Array | None) -> tuple[jax.Array, float]:
        """f32 [rows, block_kv], and what is left to multiply them with, for base 2."""
        plan = self.plan
        dot = functools.partial(triton_math.dot, axis=1, interpret=plan.interpret)
        products = [dot(q, k) for q, k in zip(self.q, keys, strict=True)]
        scores = functools.reduce(jnp.add, products)
        factor = plan.scale * LOG2_E if plan.soft_cap is None else plan.scale / plan.soft_cap
        if k_scales is not None:
            scores, factor = scores * (k_scales * factor), 1.0
        if plan.soft_cap is not None:
            scores = triton_math.squashed(scores, 2.0 * LOG2_E * factor, interpret=plan.interpret)
            factor = 2.0 * LOG2_E * plan.soft_cap
        return scores, factor

    def _index(self, pages: Pages, pos: jax.Array, *, values: bool) -> tuple[Any, ...]:
        """Of the tile's tokens in a pool, for all axes but the last."""
        plan = self.plan
        offset = pos & (plan.block_size - 1)
        return plan.layout.row_index(
            self._slot_pages(pages),
            offset,
            self.tile.head,
            block_size=plan.block_size,
            values=values,
        )

    def _gather(
        self,
        pool: Any,
        index: tuple[Any, ...],
        alive: jax.Array | None,
        pieces: _Pieces,
        dtype: jnp.dtype,
    ) -> list[jax.Array]:
        """[block_kv, width] of each piece, as `dtype`."""
        found = []
        for span in pieces.spans:
            columns, exist = pieces.columns(span)
            mask = alive
            if exist is not None:
                mask = exist if alive is None else alive & exist
            if mask is not None:
                mask = jnp.broadcast_to(mask, (self.plan.config.block_kv, span[1]))
            tile = triton_math.load(pool.at[(*index, columns)], mask)
            found.append(triton_math.converted(tile, dtype))
        return found


def _slot_scales(scales: Any, index: tuple[Any, ...], alive: jax.Array | None) -> jax.Array:
    """f32 [1, block_kv] of an 8-bit cache."""
    return triton_math.load(scales.at[index], alive).reshape(1, -1)


def _page(positions: jax.Array, block_size: int) -> jax.Array:
    """positions // block_size for positions >= 0."""
    return lax.shift_right_logical(positions, jnp.int32(block_size.bit_length() - 1))

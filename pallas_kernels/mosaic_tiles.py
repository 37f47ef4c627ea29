"""What the Mosaic GPU kernels for decode and prefill share: tiles of K and V brought into a ring in
shared memory by TMA, and one step of the online softmax over such a tile.

A CTA has one warpgroup that only issues copies and one or more that only compute. K and V of a tile
have their own barriers: the room of K is free again as soon as the scores are there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_compat import plgpu, transposed
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.softmax import LOG2_E, LOWEST

ROWS = 64
"""Query rows of one warpgroup: what one wgmma multiplies."""
SHARED_MEMORY = 232_448
"""Bytes that one CTA may have on Hopper."""
RESERVED = 4096
"""Bytes of it left to barriers, alignment and the compiler's scratch for reductions."""
_SWIZZLE_COLUMNS = 64
"""Elements of 16 bits in 128 bytes."""

Carry = tuple[Any, Any, Any]
"""Accumulator f32 [ROWS, H], and running maximum and sum f32 [ROWS] of the online softmax."""


@dataclass(frozen=True)
class TileShape:
    """How tiles of `block_kv` tokens are put together from pages."""

    block_kv: int
    block_size: int
    head_dim: int
    dtype: Any
    layout: PoolLayout

    @property
    def piece(self) -> int:
        """Tokens of one copy: a page, or the part of it that is in the tile."""
        return min(self.block_kv, self.block_size)

    @property
    def pieces(self) -> int:
        return self.block_kv // self.piece

    @property
    def bytes(self) -> int:
        """Of K or V of one tile."""
        return self.block_kv * self.head_dim * int(jnp.dtype(self.dtype).itemsize)

    def depth(self, wanted: int, other_bytes: int) -> int:
        """Tiles in the ring: as many as wanted, or as fit beside the other shared memory."""
        return min(wanted, (SHARED_MEMORY - RESERVED - other_bytes) // (2 * self.bytes))

    def pages(self, pool: jax.Array) -> jax.Array:
        """The pool with an axis for pages: [blocks, block_size, K, H], or as it is in HND."""
        if self.layout is PoolLayout.HND:
            return pool
        return pool.reshape(-1, self.block_size, *pool.shape[1:])

    def piece_at(self, pool: Any, page: Any, offset: Any, head: Any) -> Any:
        """The tokens of one head from `offset` in a page, of the reference of such a pool."""
        tokens = pl.ds(offset, self.piece)
        if self.layout is PoolLayout.HND:
            return pool.at[page, head, tokens]
        return pool.at[page, tokens, head]


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as wgmma and TMA want it: 128-byte rows in tiles of 8, swizzled."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@dataclass(frozen=True)
class Ring:
    """References to the ring of one CTA."""

    depth: int
    k: Any  # [depth, block_kv, H]
    v: Any
    k_full: Any  # barriers [depth]
    v_full: Any
    k_free: Any
    v_free: Any


def ring_buffers(shape: TileShape, depth: int) -> tuple[Any, Any]:
    buffer = swizzled((depth, shape.block_kv, shape.head_dim), shape.dtype)
    return buffer, buffer


def ring_barriers(shape: TileShape, depth: int, *, consumers: int) -> tuple[Any, Any, Any, Any]:
    full = plgpu.Barrier(num_arrivals=shape.pieces, num_barriers=depth)
    free = plgpu.Barrier(num_arrivals=consumers, num_barriers=depth)
    return full, full, free, free


def fill_ring(
    ring: Ring,
    shape: TileShape,
    k_pool: Any,
    v_pool: Any,
    head: Any,
    *,
    first: Any,
    count: Any,
    page_of: Callable[[Any], Any],
) -> None:
    """Copy K and V of `count` tiles from tile `first` on, as room becomes free, and return when the
    last has been used. `page_of(position)` is the block id of the page with that position.

    The ids of the next tile are read before this one waits for room: their latency is hidden.
    """

    def ids(tile: Any) -> tuple[Any, ...]:
        start = tile * shape.block_kv
        return tuple(page_of(start + i * shape.piece) for i in range(shape.pieces))

    def copy(pool: Any, buffer: Any, full: Any, tile: Any, pages: tuple[Any, ...]) -> None:
        offset = lax.rem(tile * shape.block_kv, shape.block_size)  # 0 where pages are the smaller
        for i, page in enumerate(pages):
            target = buffer.at[pl.ds(i * shape.piece, shape.piece)]
            plgpu.copy_gmem_to_smem(shape.piece_at(pool, page, offset, head), target, full)

    def step(i: Any, pages: tuple[Any, ...]) -> tuple[Any, ...]:
        tile = first + i
        ahead = ids(tile + 1)
        slot = lax.rem(i, ring.depth)
        sides = (
            (k_pool, ring.k, ring.k_full, ring.k_free),
            (v_pool, ring.v, ring.v_full, ring.v_free),
        )
        for pool, buffer, full, free in sides:

            @pl.when(i >= ring.depth)
            def _wait(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            copy(pool, buffer.at[slot], full.at[slot], tile, pages)
        return ahead

    lax.fori_loop(0, count, step, ids(first))

    # Every arrival is waited for, so that no barrier is left in the middle of a phase.
    def drain(i: Any, _: None) -> None:
        slot = lax.rem(i, ring.depth)
        plgpu.barrier_wait(ring.k_free.at[slot])
        plgpu.barrier_wait(ring.v_free.at[slot])

    lax.fori_loop(jnp.maximum(count - ring.depth, 0), count, drain, None)


def empty_carry(head_dim: int) -> Carry:
    """Nothing summed yet."""
    rows = plgpu.Layout.WGMMA.reduce(1)
    acc = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)
    top = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), rows)
    return acc, top, plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), rows)


def scores_of(q: Any, k: Any, *, scale: float, soft_cap: float | None) -> Any:
    """q [ROWS, H] times k [block_kv, H], both in shared memory: f32 scores for base 2."""

    def multiply(acc: Any) -> Any:
        plgpu.wgmma(acc, q, transposed(k))
        return acc[...]

    scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, k.shape[0]), jnp.float32))
    if soft_cap is None:
        return scores * (scale * LOG2_E)
    # tanh(x) = 1 - 2 / (1 + e^2x). The hardware's own tanh is good for 11 bits only.
    power = jnp.exp2(scores * (2.0 * LOG2_E * scale / soft_cap))
    return (1.0 - 2.0 / (1.0 + power)) * (soft_cap * LOG2_E)


def zero_rows_outside(v: Any, low: Any, high: Any) -> None:
    """Zero the rows of v [block_kv, H] in shared memory that are not in [low, high): 0 * NaN would
    reach the sum, and a TMA cannot leave rows out.
    """
    for first in range(0, v.shape[1], _SWIZZLE_COLUMNS):  # few registers are free at this point
        part = v.at[:, pl.ds(first, _SWIZZLE_COLUMNS)]
        rows = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
        part[...] = jnp.where((rows >= low) & (rows < high), values, jnp.zeros((), v.dtype))
    plgpu.commit_smem()


def softmax_step(scores: Any, carry: Carry) -> tuple[Any, Carry]:
    """exp2 of the scores under the new maximum, and the carry rescaled to it, the sum updated."""
    acc, top, total = carry
    new_top = jnp.maximum(top, scores.max(axis=1))
    keep = jnp.exp2(top - new_top)
    probs = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
    return probs, (acc, new_top, total * keep + probs.sum(axis=1))


def add_values(acc: Any, probs: Any, v: Any, staging: Any | None) -> Any:
    """acc + probs [ROWS, block_kv] @ v [block_kv, H], v in shared memory.

    The interpreter lets wgmma neither take an operand from registers nor add to an accumulator that
    has a value, so interpreted kernels, and only they, have `staging` in shared memory for the
    probabilities and add the product afterwards.
    """
    operand = probs.astype(v.dtype)
    if staging is None:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, operand, v))(plgpu.ACC.init(acc))
    staging[...] = operand
    plgpu.commit_smem()

    def multiply(product: Any) -> Any:
        plgpu.wgmma(product, staging, v)
        return product[...]

    return acc + pl.run_scoped(multiply, plgpu.ACC(acc.shape, jnp.float32))


def normalize(carry: Carry) -> tuple[Any, Any]:
    """The result f32 [ROWS, H], zeros where nothing was summed, and its log2-sum-exp2 [ROWS]."""
    acc, top, total = carry
    divisor = jnp.where(total == 0.0, 1.0, total)
    lse = top + jnp.log(divisor) * LOG2_E
    return acc / lax.broadcast_in_dim(divisor, acc.shape, [0]), lse

"""Paged attention in plain jnp: the oracle of every kernel, and the CPU backend.

For the letters in shapes see `paged_kv`.

Two properties matter more here than speed:

* The cost follows the true context lengths: every loop has a traced bound, so one program serves
  all lengths.
* One token's result does not depend on how it was scheduled. The context is summed in chunks of
  `CHUNK` tokens that start at absolute multiples of it, in ascending order, with the online softmax
  (Milakov and Gimelshein, 2018); a chunk that is masked whole changes no bit. Decode rows and
  prefill tiles go through one function whose matmuls have between 8 and 32 rows, the range in which
  XLA:CPU gives a row the same bits whatever stands beside it. Row sums are spelled out for the
  same reason: XLA:CPU orders a `reduce` differently for different shapes. The softmax is in base 2
  with its running maximum rounded up to a whole number: rescaling is then exact, and it no longer
  matters whether the compiler fuses a multiplication and an addition into one rounding.

An 8-bit cache is dequantised chunk by chunk, and everything after that is float32 whatever type the
queries have: no error comes on top of that of the quantisation, and a token's bits depend on its
neighbours as little as before, because dequantising knows no neighbours.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_kv import PagedKV, PrefillTiles
from pallas_kernels.quantize import dequantize, quantize
from pallas_kernels.softmax import LOG2_E

CHUNK = 64
"""Context tokens summed at a time. A multiple of every SIMD width, whatever the block size."""
TILES_PER_GROUP = 8
"""Query tiles (or decode rows) processed side by side."""
FEW_ROWS = 4
"""So many decode rows, or fewer, go in smaller groups."""
MIN_MATMUL_ROWS = 8
_LOWEST_TOP = -(2.0**30)
_FAR = 2**31 - 1
MAX_MATMUL_ROWS = 32


def query_tile(group: int) -> int:
    """Tokens of one prefill tile for G query heads a KV head, so that tile x G stays within the
    bit-stable range of matmul rows.
    """
    return max(1, MAX_MATMUL_ROWS // group)


def load_pool(raw: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Undo the storage type of `store_pool` on values gathered from a pool."""
    return raw if raw.dtype == dtype else lax.bitcast_convert_type(raw, dtype)


def store_pool(values: jax.Array, pool_dtype: jnp.dtype) -> jax.Array:
    """Values as the pool stores them: 16-bit floats live as uint16 on CPU, where XLA would
    otherwise convert the whole pool to float32 around a scatter, and float8 as uint8.
    """
    if values.dtype == pool_dtype:
        return values
    return lax.bitcast_convert_type(values, pool_dtype)


def write_kv(kv: PagedKV, k: jax.Array, v: jax.Array | None, slots: jax.Array) -> PagedKV:
    """The cache with `k` [T, K, H] and `v` [T, K, HV] (None in a latent cache) at `slots` i32 [T],
    which are all different; slots out of range are dropped. An 8-bit cache gets them quantised.
    """
    new_k, k_scale = _write_pool(kv.k, kv.k_scale, k, slots)
    if kv.v is None or v is None:
        return PagedKV(new_k, None, k_scale)
    new_v, v_scale = _write_pool(kv.v, kv.v_scale, v, slots)
    return PagedKV(new_k, new_v, k_scale, v_scale)


def _write_pool(
    pool: jax.Array, scales: jax.Array | None, values: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    if scales is not None:
        values, scale = quantize(values, _dtype_8_bit(pool))
        scales = _scatter(scales, scale[..., 0], slots)
    return _scatter(pool, store_pool(values, pool.dtype), slots), scales


def _scatter(pool: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    return pool.at[slots].set(
        rows,
        mode="drop",
        unique_indices=True,
        wrap_negative_indices=False,
    )


def _dtype_8_bit(pool: jax.Array) -> jnp.dtype:
    return jnp.dtype(jnp.float8_e4m3fn) if pool.dtype == jnp.uint8 else pool.dtype


def _gather(
    pool: jax.Array, scales: jax.Array | None, slots: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """What the cache says at `slots` [W, C]: [W, C, K, H]."""
    raw = jnp.take(pool, slots, axis=0, mode="clip")
    if scales is None:
        return load_pool(raw, dtype)
    return dequantize(
        load_pool(raw, _dtype_8_bit(pool)), jnp.take(scales, slots, axis=0, mode="clip")
    )


def _row_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis (a power of two wide), keepdims, by halves: an order that no compiler
    changes (see the module docstring).
    """
    width = x.shape[-1]
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2 ** exponent for whole numbers <= 0, exactly; 0 below the smallest normal number."""
    biased = jnp.clip(exponent, -127.0, 0.0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


@functools.partial(jax.named_call, name="attend_group")
def _attend_group(
    q: jax.Array,  # [W, K, m, H], m = tile tokens x G (padded to MIN_MATMUL_ROWS)
    q_pos: jax.Array,  # i32 [W, m] absolute position of each query; -1 = padding
    tables: jax.Array,  # i32 [W, M] block ids
    kv: PagedKV,
    *,
    block_size: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    value_dim: int,
) -> jax.Array:  # f32 [W, K, m, HV]
    if kv.quantized:
        q = q.astype(jnp.float32)
    dtype = q.dtype
    width, heads, rows, _ = q.shape
    first_chunk, num_chunks = _chunks(q_pos, window)
    context = q_pos.max(axis=1)  # last position any query of the tile may see
    earliest = jnp.where(q_pos >= 0, q_pos, _FAR).min(axis=1)

    def chunk(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry
        pos = index * CHUNK + lax.iota(jnp.int32, CHUNK)
        blocks = jnp.take(tables, pos // block_size, axis=1, mode="clip")
        slots = blocks * block_size + (pos % block_size)[None, :]
        k = _gather(kv.k, kv.k_scale, slots, dtype)  # [W, C, K, H]
        v = k[..., :value_dim] if kv.v is None else _gather(kv.v, kv.v_scale, slots, dtype)
        # Slots that nobody sees hold whatever was there: 0 x NaN must not reach the sum.
        alive = pos[None, :] <= context[:, None]
        if window is not None:
            alive &= pos[None, :] > (earliest - window)[:, None]
        v = jnp.where(alive[:, :, None, None], v, jnp.zeros((), dtype))
        scores = lax.dot_general(
            q, k, (((3,), (3,)), ((0, 1), (0, 2))), preferred_element_type=jnp.float32
        )  # [W, K, m, C]
        if soft_cap is None:
            scores = scores * (scale * LOG2_E)
        else:
            scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2_E)
        visible = pos[None, None, :] <= q_pos[:, :, None]
        if window is not None:
            visible &= pos[None, None, :] > q_pos[:, :, None] - window
        scores = jnp.where(visible[:, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.ceil(scores.max(axis=-1, keepdims=True)))
        probs = jnp.exp2(scores - new_top)
        keep = _power_of_two(top - new_top)
        summed = lax.dot_general(
            probs.astype(dtype),
            v,
            (((3,), (1,)), ((0, 1), (0, 2))),
            preferred_element_type=jnp.float32,
        )
        return new_top, total * keep + _row_sum(probs), acc * keep + summed

    start = (
        jnp.full((width, heads, rows, 1), _LOWEST_TOP, jnp.float32),
        jnp.zeros((width, heads, rows, 1), jnp.float32),
        jnp.zeros((width, heads, rows, value_dim), jnp.float32),
    )
    total: jax.Array
    acc: jax.Array
    _, total, acc = lax.fori_loop(first_chunk, num_chunks, chunk, start)
    return acc / jnp.where(total == 0.0, 1.0, total)


def _chunks(q_pos: jax.Array, window: int | None) -> tuple[jax.Array | int, jax.Array]:
    """The chunks [first, end) that some query sees; those between are the same for all tiles, and
    one that is masked whole for a tile changes none of its bits.
    """
    end = (q_pos.max() + CHUNK) // CHUNK  # -1 (nothing to see) gives 0
    if window is None:
        return 0, end
    earliest = jnp.where(q_pos >= 0, q_pos, _FAR).min() - (window - 1)
    return jnp.clip(earliest // CHUNK, 0, end), end


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
) -> jax.Array:
    """Attention of one query token a row over its paged context.

    Args: `q` [D, N, H]; `block_tables` i32 [D, M]; `positions` i32 [D], the
    position of each row's token (its context is positions 0..p, already written), -1 for padding
    rows, which stand last and give zeros. Rows of similar length should stand together: a group of
    rows costs what its longest one does. Returns [D, N, H] in q's type.
    """
    rows, num_heads, dim = q.shape
    kv_heads = kv.k.shape[1]
    group = num_heads // kv_heads
    dim_out = kv.value_dim(value_dim)
    padded = max(MIN_MATMUL_ROWS, group)
    tail = -rows % TILES_PER_GROUP
    if tail:
        q = jnp.pad(q, ((0, tail), (0, 0), (0, 0)))
        block_tables = jnp.pad(block_tables, ((0, tail), (0, 0)))
        positions = jnp.pad(positions, (0, tail), constant_values=-1)
    q = q.reshape(rows + tail, kv_heads, group, dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padded - group), (0, 0)))

    def one_group(index: jax.Array, out: jax.Array, width: int) -> jax.Array:
        first = index * width
        pos = lax.dynamic_slice_in_dim(positions, first, width)
        result = _attend_group(
            lax.dynamic_slice_in_dim(q, first, width),
            jnp.broadcast_to(pos[:, None], (width, padded)),
            lax.dynamic_slice_in_dim(block_tables, first, width),
            kv,
            block_size=block_size,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            value_dim=dim_out,
        )
        return lax.dynamic_update_slice_in_dim(out, result.astype(q.dtype), first, 0)

    # Live rows stand first. The traced bound also keeps XLA from inlining a loop of one group,
    # which would be fused, and so rounded, differently.
    live = jnp.sum(positions >= 0, dtype=jnp.int32)

    def in_groups_of(width: int) -> jax.Array:
        empty = jnp.zeros((*q.shape[:-1], dim_out), q.dtype)
        step = functools.partial(one_group, width=width)
        done: jax.Array = lax.fori_loop(0, (live + width - 1) // width, step, empty)
        return done

    # A group costs its width in rows, live or not. In groups of one XLA may round differently.
    out: jax.Array = lax.cond(
        live <= FEW_ROWS,
        lambda: in_groups_of(FEW_ROWS // 2),
        lambda: in_groups_of(TILES_PER_GROUP),
    )
    return out[:rows, :, :group].reshape(rows, num_heads, dim_out)


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
) -> jax.Array:
    """Causal attention of new tokens over their paged context, which includes themselves (already
    written).

    Args: `q` [P, N, H]; `block_tables` i32 [R, M]; `tiles` of at most `tile` tokens, their number a
    multiple of `TILES_PER_GROUP`. Returns [P, N, H] in q's type; rows of tokens that are in no tile
    are meaningless.
    """
    _, num_heads, dim = q.shape
    kv_heads = kv.k.shape[1]
    group = num_heads // kv_heads
    dim_out = kv.value_dim(value_dim)
    rows = max(MIN_MATMUL_ROWS, tile * group)
    width = TILES_PER_GROUP
    offsets = lax.iota(jnp.int32, tile)[None, :]

    def one_group(index: jax.Array, out: jax.Array) -> jax.Array:
        first = index * width
        take = functools.partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=width)
        length = take(tiles.length)[:, None]
        tokens = jnp.take(q, take(tiles.start)[:, None] + offsets, axis=0, mode="clip")
        tokens = tokens.reshape(width, tile, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
        tokens = tokens.reshape(width, kv_heads, tile * group, dim)
        pos = jnp.where(offsets < length, take(tiles.position)[:, None] + offsets, -1)
        pos = jnp.repeat(pos, group, axis=1, total_repeat_length=tile * group)
        result = _attend_group(
            jnp.pad(tokens, ((0, 0), (0, 0), (0, rows - tile * group), (0, 0))),
            jnp.pad(pos, ((0, 0), (0, rows - tile * group)), constant_values=-1),
            jnp.take(block_tables, take(tiles.row), axis=0, mode="clip"),
            kv,
            block_size=block_size,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            value_dim=dim_out,
        )[:, :, : tile * group]
        result = result.reshape(width, kv_heads, tile, group, dim_out).transpose(0, 2, 1, 3, 4)
        result = result.reshape(width, tile, num_heads, dim_out).astype(q.dtype)
        return lax.dynamic_update_slice_in_dim(out, result, first, 0)

    count = tiles.row.shape[0]
    out = jnp.zeros((count, tile, num_heads, dim_out), q.dtype)
    out = lax.fori_loop(0, (tiles.count + width - 1) // width, one_group, out)
    out = out.reshape(count * tile, num_heads, dim_out)
    return jnp.take(out, tiles.token_tile, axis=0, mode="clip")

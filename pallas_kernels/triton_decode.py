"""Paged decode attention in Pallas Triton: one query token a row.

One program takes the query heads of one KV head, one row and one share ("split") of the row's
context. The shares are cut at run time from the row's true length, so short rows of a ragged batch
are not cut at all and leave their other programs without work. The softmax is online (Milakov and
Gimelshein, 2018), in base 2 and float32; with more than one split the kernel returns float32
partial results and their log-sum-exp, which XLA combines (split-K, as in Flash-Decoding, 2023).

For the letters in shapes see `paged_kv`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_math
from pallas_kernels.kernel_configs import DecodeConfig, heads_per_program
from pallas_kernels.paged_kv import PagedKV, is_8_bit
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.softmax import LOG2_E, LOWEST
from pallas_kernels.split_k import combine_splits
from pallas_kernels.support import check_supported, is_latent
from pallas_kernels.triton_math import iota, quotient

MIN_DOT = 16
"""Smallest extent of a matrix in a tensor core instruction."""
_MIN_PART = 32
"""Four warps share 32 columns; fewer would be computed by several of them, at twice the
registers."""
_MAX_PART = 128
"""With wider parts a thread has more rows, and so more page ids, to load."""
_MAX_PART_LATENT_8_BIT = 512
"""There one wide part takes 128 registers where four take 180."""


@dataclass(frozen=True)
class _Part:
    """Consecutive elements of a head. Extents of arrays in Triton are powers of two, so a head is
    cut into parts, the last of which may be padded.
    """

    start: int
    width: int
    used: int


@dataclass(frozen=True)
class _Shape:
    """What is known of one call when it is traced."""

    group: int
    heads: int  # query heads of one program; divides the grid's first axis
    rows: int  # `heads`, padded
    key_parts: tuple[_Part, ...]
    value_parts: tuple[_Part, ...]
    latent: bool
    quantized: bool
    block_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    layout: PoolLayout
    config: DecodeConfig
    interpret: bool

    @property
    def head_blocks(self) -> int:
        return pl.cdiv(self.group, self.heads)


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _parts(start: int, dim: int, widest: int = _MAX_PART) -> tuple[_Part, ...]:
    """512 = 4 x 128, 192 = 128 + 64, 96 = 64 + 32, and 80 = 64 + 32 with 16 of the 32 used."""
    widths = [widest] * (dim // widest)
    rest = dim % widest
    if rest >= _MIN_PART:
        widths.append(1 << (rest.bit_length() - 1))
        rest -= widths[-1]
    if rest:
        widths.append(max(_MIN_PART, _next_power_of_two(rest)))
    offsets = [sum(widths[:i]) for i in range(len(widths))]
    return tuple(
        _Part(start + offset, width, min(width, dim - offset))
        for offset, width in zip(offsets, widths, strict=True)
    )


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
) -> jax.Array:
    """Attention of one query token a row over its paged context.

    Args: `q` [D, N, H]; `kv` with pools of q's type, or int8 or float8_e4m3fn with scales whose
    shape is that of the pools without the last axis; `block_tables` i32 [D, M], entries behind a
    row's context are never followed; `positions` i32 [D], the position of each row's token (its
    context is positions 0..p, already written, of which `window` leaves the last ones), -1 for
    padding rows, which give zeros. `value_dim` is needed for a latent cache, whose values are the
    first elements of the keys. Returns [D, N, HV] in q's type.

    Raises NotImplementedError for what `support.check_supported` refuses.
    """
    _, num_heads, head_dim = q.shape
    latent = is_latent(kv, layout)
    kv_heads = layout.kv_heads(kv.k)
    group = num_heads // kv_heads
    assert group * kv_heads == num_heads, f"{num_heads} query heads over {kv_heads} KV heads"
    check_supported(
        q.dtype,
        kv,
        block_size=block_size,
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        layout=layout,
    )
    dim_out = head_dim if layout is PoolLayout.COMBINED else kv.value_dim(value_dim)
    wide = latent and is_8_bit(kv.k.dtype)
    values = _parts(0, dim_out, _MAX_PART_LATENT_8_BIT if wide else _MAX_PART)
    heads = heads_per_program(group, dim_out, config.num_warps, cache_8_bit=kv.quantized)
    shape = _Shape(
        group=group,
        heads=heads,
        rows=max(MIN_DOT, _next_power_of_two(heads)),
        key_parts=values + _parts(dim_out, head_dim - dim_out) if latent else _parts(0, head_dim),
        value_parts=values,
        latent=latent,
        quantized=kv.quantized,
        block_size=block_size,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        layout=layout,
        config=config,
        interpret=interpret,
    )
    out, lse = _launch(q, kv, block_tables, positions, shape, dim_out)
    return out if lse is None else combine_splits(out, lse).astype(q.dtype)


def _launch(
    q: jax.Array,
    kv: PagedKV,
    block_tables: jax.Array,
    positions: jax.Array,
    shape: _Shape,
    dim_out: int,
) -> tuple[jax.Array, jax.Array | None]:
    rows, num_heads, _ = q.shape
    splits = shape.config.splits
    pools = {"q": q, "k": kv.k, "v": kv.v, "k_scale": kv.k_scale, "v_scale": kv.v_scale}
    inputs = {name: array for name, array in pools.items() if array is not None}
    inputs |= {"tables": block_tables, "positions": positions}
    if splits == 1:
        outputs = {"out": jax.ShapeDtypeStruct((rows, num_heads, dim_out), q.dtype)}
    else:
        outputs = {
            "out": jax.ShapeDtypeStruct((rows, splits, num_heads, dim_out), jnp.float32),
            "lse": jax.ShapeDtypeStruct((rows, splits, num_heads), jnp.float32),
        }
    result: dict[str, jax.Array] = pl.pallas_call(
        functools.partial(_kernel, shape),
        out_shape=outputs,
        grid=(num_heads // shape.group * shape.head_blocks, rows, splits),
        compiler_params=plt.CompilerParams(
            num_warps=shape.config.num_warps, num_stages=shape.config.num_stages
        ),
        interpret=shape.interpret,
        name="paged_decode",
    )(inputs)
    return result["out"], result.get("lse")


def _kernel(shape: _Shape, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    head_block, row, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    kv_head = quotient(head_block, shape.head_blocks)
    place = triton_math.remainder(head_block, shape.head_blocks) * shape.heads + iota(shape.rows)
    live = (iota(shape.rows) < shape.heads) & (place < shape.group)
    heads = kv_head * shape.group + place
    position = inputs["positions"][row]
    first, end, has_work = _share(position, split, shape)

    q_parts = []
    for part in shape.key_parts:
        cols = part.start + iota(part.width)
        mask = _mask(live, part)
        q_parts.append(triton_math.load(inputs["q"].at[row, heads[:, None], cols[None, :]], mask))

    top, total, acc = _attend(inputs, q_parts, row, kv_head, position, first, end, shape)
    empty = total == 0.0
    divisor = jnp.where(empty, 1.0, total)
    for part, summed in zip(shape.value_parts, acc, strict=True):
        cols = part.start + iota(part.width)
        value = summed / divisor[:, None]
        out = outputs["out"]
        if "lse" in outputs:
            # Programs without work leave `out` alone: `combine_splits` does not believe it there.
            mask = _mask(live & has_work, part)
            plt.store(out.at[row, split, heads[:, None], cols[None, :]], value, mask=mask)
        else:
            out = out.at[row, heads[:, None], cols[None, :]]
            plt.store(out, value.astype(outputs["out"].dtype), mask=_mask(live, part))
    if "lse" in outputs:
        lse = jnp.where(empty, LOWEST, top + jnp.log(divisor) * LOG2_E)
        plt.store(outputs["lse"].at[row, split, heads], lse, mask=live)


def _share(position: Any, split: Any, shape: _Shape) -> tuple[Any, Any, Any]:
    """Tiles [first, end) of the context that this program sums, and whether there are any."""
    config = shape.config
    begin: Any = 0
    if shape.window is not None:
        begin = quotient(jnp.maximum(position - (shape.window - 1), 0), config.block_kv)
    tiles = quotient(position + config.block_kv, config.block_kv) - begin
    if config.splits == 1:
        return begin, begin + tiles, tiles > 0
    fewest = pl.cdiv(config.min_split_tokens, config.block_kv)
    programs = jnp.clip(quotient(tiles, max(1, fewest)), 1, config.splits)
    first = lax.div(tiles * split, programs)
    end = jnp.where(split < programs, lax.div(tiles * (split + 1), programs), first)
    return begin + first, begin + end, first < end


def _attend(
    inputs: dict[str, Any],
    q_parts: list[jax.Array],
    row: Any,
    kv_head: Any,
    position: Any,
    first: Any,
    end: Any,
    shape: _Shape,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Running maximum [rows], sum [rows] and weighted values [rows, width of part] of the tiles."""
    block_kv, block_size = shape.config.block_kv, shape.block_size
    dtype = q_parts[0].dtype
    value_dtype = triton_math.weights_dtype(dtype, quantized=shape.quantized)
    offsets = iota(block_kv)
    dot = functools.partial(triton_math.dot, interpret=shape.interpret)

    def seen(tile: Any) -> tuple[Any, Any]:
        token = tile * block_kv + offsets
        visible = token <= position
        if shape.window is not None:
            visible &= token > position - shape.window
        return token, visible

    def page_ids(tile: Any) -> Any:
        token, visible = seen(tile)
        return triton_math.load(inputs["tables"].at[row, quotient(token, block_size)], visible)

    def one_tile(tile: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        top, total, acc, pages = carry
        token, visible = seen(tile)
        if shape.config.carry_pages:
            next_pages = page_ids(tile + 1)
        else:
            pages, next_pages = page_ids(tile), pages
        where = functools.partial(
            shape.layout.row_index,
            pages,
            triton_math.remainder(token, block_size),
            kv_head,
            block_size=block_size,
        )
        k_index = where(values=False)
        keys = [_tile(inputs["k"], k_index, part, visible, dtype) for part in shape.key_parts]
        scores = sum(
            (dot(q, k, axis=1) for q, k in zip(q_parts, keys, strict=True)),
            start=jnp.zeros((), jnp.float32),
        )
        if shape.quantized:
            scores *= triton_math.load(inputs["k_scale"].at[k_index], visible)[None, :]
        if shape.soft_cap is None:
            scores *= shape.scale * LOG2_E
        else:
            scores = jnp.tanh(scores * (shape.scale / shape.soft_cap)) * (shape.soft_cap * LOG2_E)
        scores = jnp.where(visible[None, :], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1))
        probs = jnp.exp2(scores - new_top[:, None])
        keep = jnp.exp2(top - new_top)
        total = total * keep + probs.sum(axis=1)

        pool, scales = ("v", "v_scale") if "v" in inputs else ("k", "k_scale")
        index = k_index if shape.latent else where(values=True)
        if shape.latent and inputs["k"].dtype.itemsize == 2:
            values = keys[: len(shape.value_parts)]
        else:
            # A latent tile that has to be converted, once for each of two operand layouts, is not
            # copied asynchronously. Read it twice, the second time from the L2 cache; the policy
            # is there to keep the compiler from seeing one load in both.
            policy = "evict_first" if shape.latent else None
            values = [
                _tile(inputs[pool], index, part, visible, value_dtype, policy)
                for part in shape.value_parts
            ]
        if shape.quantized:
            probs *= triton_math.load(inputs[scales].at[index], visible)[None, :]
        weights = probs.astype(value_dtype)
        acc = tuple(
            old * keep[:, None] + dot(weights, v, axis=0)
            for old, v in zip(acc, values, strict=True)
        )
        return new_top, total, acc, next_pages

    pages = page_ids(first) if shape.config.carry_pages else jnp.zeros((), jnp.int32)
    top, total, acc, _ = lax.fori_loop(
        first,
        end,
        one_tile,
        (
            jnp.full((shape.rows,), LOWEST, jnp.float32),
            jnp.zeros((shape.rows,), jnp.float32),
            tuple(jnp.zeros((shape.rows, p.width), jnp.float32) for p in shape.value_parts),
            pages,
        ),
    )
    return top, total, list(acc)


def _tile(
    pool: Any,
    index: tuple[Any, ...],
    part: _Part,
    visible: Any,
    dtype: jnp.dtype,
    policy: str | None = None,
) -> jax.Array:
    """[block_kv, width of part] of a pool, zeros where nothing is visible, as `dtype`."""
    columns = part.start + iota(part.width)
    rows = tuple(i[:, None] if jnp.ndim(i) else i for i in index)
    tile = triton_math.load(pool.at[(*rows, columns[None, :])], _mask(visible, part), policy)
    return triton_math.converted(tile, dtype)


def _mask(rows: Any, part: _Part) -> Any:
    mask = jnp.broadcast_to(rows[:, None], (rows.shape[0], part.width))
    return mask if part.used == part.width else mask & (iota(part.width) < part.used)[None, :]

"""Matrix products and row sums whose order of additions does not depend on the number of rows, in
Pallas Triton (NVIDIA GPUs).

A library picks another algorithm, and so another order, for 8 rows than for 800. Here tiles, and
the shares of the contracted axis (split-K), follow from the weight's shape and type alone; every
row is multiplied by the same instructions wherever it stands in a tile, and the shares are added
one by one. So a row has the same bits whatever stands beside it. This is the approach of the
batch-invariant operations of Thinking Machines Lab (He, 2025).

Legend: `T` rows, `B` matrices side by side, `O` columns of the result, `K` the contracted axis.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_math
from pallas_kernels.triton_math import iota

WANTED_PROGRAMS = 128
"""Of one tile of rows: about one for each multiprocessor of a large GPU."""
_MAX_SPLITS = 8
_MIN_SPLIT = 1024
"""Elements of the contracted axis that a share has at least."""
_ROW_ELEMENTS = 4096
"""Elements that one program of the row sums takes, or one whole row."""
_MAX_ELEMENTS = 2**31


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Tiles of one program, all powers of two, and how many programs share the contracted axis."""

    rows: int
    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int


def product_config(matrices: int, columns: int, depth: int, dtype: jnp.dtype) -> ProductConfig:
    """For weights [B, O, K] of a type. The number of rows is left out on purpose."""
    float32 = jnp.dtype(dtype) == jnp.float32  # three TF32 products each, of twice the bytes
    tile, step = (64, 32) if float32 else (128, 64)
    programs = matrices * pl.cdiv(columns, tile)
    splits = 1
    while (
        splits < _MAX_SPLITS
        and programs * splits < WANTED_PROGRAMS
        and depth >= 2 * splits * _MIN_SPLIT
    ):
        splits *= 2
    return ProductConfig(tile, tile, step, splits, num_warps=8, num_stages=3)


def product(x: jax.Array, weight: jax.Array, *, interpret: bool = False) -> jax.Array:
    """x [T, B, K] times weight [B, O, K] of the same type: f32 [T, B, O].

    Raises NotImplementedError for arrays of 2**31 elements or more.
    """
    tokens, matrices, depth = x.shape
    columns = weight.shape[1]
    assert weight.shape == (matrices, columns, depth), (x.shape, weight.shape)
    assert x.dtype == weight.dtype
    config = product_config(matrices, columns, depth, x.dtype)
    out = jax.ShapeDtypeStruct((config.splits, tokens, matrices, columns), jnp.float32)
    for name, size in (("x", x.size), ("weight", weight.size), ("result", out.size)):
        if size >= _MAX_ELEMENTS:
            raise NotImplementedError(
                f"a {name} of {size} elements in a product with a fixed order: it takes fewer "
                "than 2**31; lower max_num_batched_tokens, or leave out deterministic"
            )
    row_tiles, column_tiles = pl.cdiv(tokens, config.rows), pl.cdiv(columns, config.columns)
    shares: jax.Array = pl.pallas_call(
        functools.partial(_product_kernel, config=config, interpret=interpret),
        out_shape=out,
        # Rows first: programs that run at a time read the same part of the weight.
        grid=(row_tiles, column_tiles * matrices, config.splits),
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="fixed_order_product",
    )(x, weight)
    return functools.reduce(jnp.add, [shares[split] for split in range(config.splits)])


def _product_kernel(
    x_ref: Any, weight_ref: Any, out_ref: Any, *, config: ProductConfig, interpret: bool
) -> None:
    tokens, _, depth = x_ref.shape
    columns = weight_ref.shape[1]
    column_tiles = pl.cdiv(columns, config.columns)
    place, split = pl.program_id(1), pl.program_id(2)
    matrix = triton_math.quotient(place, column_tiles)
    row = pl.program_id(0) * config.rows + iota(config.rows)
    column = triton_math.remainder(place, column_tiles) * config.columns + iota(config.columns)
    steps = pl.cdiv(depth, config.depth)
    share = pl.cdiv(steps, config.splits)

    def tile(ref: Any, index: tuple[Any, ...], exists: Any, at: Any) -> jax.Array:
        mask = jnp.broadcast_to(exists[:, None], (exists.shape[0], config.depth))
        if depth % config.depth:
            mask &= (at < depth)[None, :]
        return triton_math.load(ref.at[(*index, at[None, :])], mask)

    def add(step: Any, total: jax.Array) -> jax.Array:
        at = step * config.depth + iota(config.depth)
        left = tile(x_ref, (row[:, None], matrix), row < tokens, at)
        right = tile(weight_ref, (matrix, column[:, None]), column < columns, at)
        return total + triton_math.dot(left, right, axis=1, interpret=interpret)

    first = split * share
    total = jax.lax.fori_loop(
        first,
        jnp.minimum(first + share, steps),
        add,
        jnp.zeros((config.rows, config.columns), jnp.float32),
    )
    mask = (row < tokens)[:, None] & (column < columns)[None, :]
    plt.store(out_ref.at[split, row[:, None], matrix, column[None, :]], total, mask=mask)


def row_sums(x: jax.Array, *, interpret: bool = False) -> jax.Array:
    """f32 [T, E] -> [T, 1]."""
    tokens, width = x.shape
    padded = pl.next_power_of_2(width)
    rows = max(1, _ROW_ELEMENTS // padded)
    sums: jax.Array = pl.pallas_call(
        functools.partial(_sum_kernel, rows=rows, padded=padded),
        out_shape=jax.ShapeDtypeStruct((tokens,), jnp.float32),
        grid=(pl.cdiv(tokens, rows),),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="fixed_order_sums",
    )(x)
    return sums[:, None]


def _sum_kernel(x_ref: Any, out_ref: Any, *, rows: int, padded: int) -> None:
    tokens, width = x_ref.shape
    row, column = pl.program_id(0) * rows + iota(rows), iota(padded)
    mask = (row < tokens)[:, None] & (column < width)[None, :]
    values = triton_math.load(x_ref.at[row[:, None], column[None, :]], mask)
    plt.store(out_ref.at[row], jnp.sum(values, axis=1), mask=row < tokens)

"""The Mosaic GPU prefill kernel: interpreted on a CPU with its races looked for, and compiled."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels.mosaic_prefill import paged_prefill, tile_size
from pallas_kernels.paged_kv import PagedKV, PrefillTiles
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.tuning import PrefillConfig
from tests.kernels.attention_oracle import paged_case, tiles_for
from tests.kernels.lowering import export_for_cuda
from tests.kernels.mosaic_runs import (
    interpreted,
    run,
)

BF16 = ml_dtypes.bfloat16
# Rings of two tiles are filled more than once by contexts of three.
ONE, TWO = (PrefillConfig(block_rows=rows, block_kv=64, num_stages=2) for rows in (64, 128))


@dataclass(frozen=True)
class Shape:
    head_dim: int = 64
    group: int = 4
    block_size: int = 16
    config: PrefillConfig = ONE
    dtype: npt.DTypeLike = BF16
    layout: PoolLayout = PoolLayout.NHD
    kv_heads: int = 1
    window: int | None = None
    soft_cap: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "tile": tile_size(self.group, self.config),
            "block_size": self.block_size,
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "layout": self.layout,
            "config": self.config,
        }


@pytest.mark.parametrize(
    ("group", "rows", "tokens"),
    [(1, 64, 64), (4, 64, 16), (3, 128, 42), (8, 128, 16), (64, 64, 1), (40, 128, 2)],
)
def test_tile_size(group: int, rows: int, tokens: int) -> None:
    assert tile_size(group, PrefillConfig(block_rows=rows)) == tokens


# A chunk is (tokens before it, its tokens).
SHAPES = [
    (Shape(kv_heads=2), [(0, 1), (60, 5), (126, 18)]),
    (Shape(128, 3, 32, TWO, np.float16, PoolLayout.HND, 1, 50, 5.0), [(0, 44), (150, 9)]),
    (Shape(64, 8, 8, TWO, window=1), [(60, 8), (0, 5)]),
    (
        Shape(64, 1, 128, PrefillConfig(block_rows=64, block_kv=128, num_stages=2), window=100),
        [(127, 66), (0, 3)],
    ),
    (Shape(256, 16, 64), [(62, 6)]),
]


@interpreted
@pytest.mark.parametrize(("shape", "chunks"), SHAPES)
def test_against_float64(shape: Shape, chunks: list[tuple[int, int]]) -> None:
    """NaN stands in all slots that belong to nobody and in the queries of padding tokens; behind
    the tiles in use there is one more.
    """
    case = paged_case(
        [before + count for before, count in chunks],
        block_size=shape.block_size,
        kv_heads=shape.kv_heads,
        group=shape.group,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
    )
    tile = shape.settings["tile"]
    tiles = tiles_for(
        [(row, before, count) for row, (before, count) in enumerate(chunks)],
        tile=tile,
        num_tokens=sum(count for _, count in chunks) + 3,
        num_tiles=sum(-(-count // tile) for _, count in chunks) + 1,
    )
    used = len(tiles.tokens)
    q = case.queries(used + 3, np.random.default_rng(1))
    q[used:] = np.nan
    prefill = functools.partial(paged_prefill, interpret=True, detect_races=True, **shape.settings)
    out = np.asarray(run(prefill, q, case.kv(shape.layout), case.tables, tiles.arrays))
    assert out.dtype == shape.dtype
    assert (out[used:] == 0).all()
    # Results of short contexts are as large as the values, and are rounded to the type of q.
    error = 1e-3 if shape.dtype is np.float16 else 8e-3
    kind = {"scale": shape.head_dim**-0.5, "window": shape.window, "soft_cap": shape.soft_cap}
    for place, (row, position) in enumerate(tiles.tokens):
        expected = case.expected(q[place], row, position, **kind)
        np.testing.assert_allclose(
            out[place].astype(np.float64),
            expected,
            atol=error,
            rtol=error,
            err_msg=f"row {row}, position {position}",
        )


def arguments(shape: Shape, tokens: int = 256, rows: int = 4, width: int = 64) -> list[Any]:
    """Shapes of a call; of the pools, fewer blocks than an engine has."""
    dtype = jnp.dtype(shape.dtype)
    pool_shape = shape.layout.shape(64, shape.block_size, shape.kv_heads, shape.head_dim)
    pool: Any = jax.ShapeDtypeStruct(pool_shape, dtype)
    tiles = -(-tokens // tile_size(shape.group, shape.config)) + rows
    list_, token_tile, count = (
        jax.ShapeDtypeStruct(size, jnp.int32) for size in ((tiles,), (tokens,), ())
    )
    fields: list[Any] = [list_, list_, list_, list_, token_tile, count]
    return [
        jax.ShapeDtypeStruct((tokens, shape.kv_heads * shape.group, shape.head_dim), dtype),
        PagedKV(pool, pool),
        jax.ShapeDtypeStruct((rows, width), jnp.int32),
        PrefillTiles(*fields),
    ]


COMPILED = {
    "d128": Shape(128, 4, 16, PrefillConfig(128, 64, num_stages=5), kv_heads=8),
    "d128-tile128-window-cap": Shape(
        128, 3, 32, PrefillConfig(128, 128, num_stages=2), np.float16, PoolLayout.HND, 8, 512, 30.0
    ),
    "d256": Shape(256, 2, 128, PrefillConfig(64, 64, num_stages=3), soft_cap=50.0),
}


@pytest.mark.parametrize("name", COMPILED)
def test_lowers_for_cuda(name: str) -> None:
    shape = COMPILED[name]
    prefill = functools.partial(paged_prefill, **shape.settings)
    assert "mosaic_gpu" in export_for_cuda(prefill, *arguments(shape))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(config=PrefillConfig(block_rows=32)), "block_rows 32"),
        (Shape(head_dim=256, config=TWO), "block_rows 128 with head_dim 256"),
        (Shape(dtype=np.float32), "queries of float32"),
        (Shape(group=65), "65 query heads"),
    ],
)
def test_refuses(shape: Shape, reason: str) -> None:
    prefill = functools.partial(paged_prefill, **shape.settings)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(prefill, *arguments(shape))

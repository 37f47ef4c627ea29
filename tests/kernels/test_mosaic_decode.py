"""The Mosaic GPU decode kernel: interpreted on a CPU with its races looked for, and compiled."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import mosaic_compat, mosaic_tiles
from pallas_kernels.mosaic_decode import paged_decode
from pallas_kernels.paged_kv import PagedKV
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.tuning import DecodeConfig
from tests.kernels.attention_oracle import paged_case
from tests.kernels.lowering import export_for_cuda
from tests.kernels.mosaic_runs import (
    interpreted,
    run,
)

BF16 = ml_dtypes.bfloat16
# Rings of two tiles are filled more than once by contexts of three.
CONFIG = DecodeConfig(block_kv=64, num_stages=2, splits=1)


@dataclass(frozen=True)
class Shape:
    head_dim: int = 64
    group: int = 4
    block_size: int = 16
    dtype: npt.DTypeLike = BF16
    layout: PoolLayout = PoolLayout.NHD
    kv_heads: int = 1
    config: DecodeConfig = CONFIG
    window: int | None = None
    soft_cap: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "layout": self.layout,
            "config": self.config,
        }


def with_splits(splits: int, **changes: Any) -> DecodeConfig:
    return dataclasses.replace(CONFIG, splits=splits, min_split_tokens=64, **changes)


SHAPES = [
    (Shape(group=1), [1, 63, 64, 65, 129], np.nan),
    (Shape(128, 4, kv_heads=2, config=with_splits(4)), [200], np.inf),
    (Shape(64, 8, 128, np.float16, PoolLayout.HND, window=70, soft_cap=5.0), [5, 256], np.nan),
    (Shape(256, 3, 8, config=with_splits(2)), [8, 73], -np.inf),
    (Shape(64, 16, 32, config=with_splits(4, block_kv=128), window=100), [128, 300], np.nan),
]


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize(("shape", "lengths", "poison"), SHAPES)
def test_against_float64(shape: Shape, lengths: list[int], poison: float) -> None:
    """The poison stands in all slots that belong to nobody. A padding row stands first; its query
    is NaN and its block ids are garbage.
    """
    case = paged_case(
        lengths,
        block_size=shape.block_size,
        kv_heads=shape.kv_heads,
        group=shape.group,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        poison=poison,
    )
    q = case.queries(len(lengths) + 1, np.random.default_rng(1))
    q[0] = np.nan
    positions = np.array([-1, *(length - 1 for length in lengths)], np.int32)
    tables = np.concatenate([np.full_like(case.tables[:1], 2**30), case.tables])
    decode = functools.partial(paged_decode, interpret=True, detect_races=True, **shape.settings)
    out = np.asarray(run(decode, q, case.kv(shape.layout), tables, positions))
    assert out.dtype == shape.dtype
    assert (out[0] == 0).all()
    error = 1e-3 if shape.dtype is np.float16 else 8e-3
    kind = {"scale": shape.head_dim**-0.5, "window": shape.window, "soft_cap": shape.soft_cap}
    for row, length in enumerate(lengths):
        expected = case.expected(q[row + 1], row, length - 1, **kind)
        np.testing.assert_allclose(
            out[row + 1].astype(np.float64), expected, atol=error, rtol=error, err_msg=f"{row}"
        )


@interpreted
def test_the_race_detector_would_see_a_ring_that_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hasty:
        """Mosaic GPU whose memory warpgroup never waits for room."""

        def __getattr__(self, name: str) -> Any:
            return getattr(mosaic_compat.plgpu, name)

        def barrier_wait(self, barrier: Any) -> None:
            pass

    monkeypatch.setattr(mosaic_tiles, "plgpu", Hasty())
    shape = Shape()
    case = paged_case([256], block_size=16, kv_heads=1, group=4, head_dim=64, dtype=BF16)
    q = case.queries(1, np.random.default_rng(1))
    decode = functools.partial(paged_decode, interpret=True, detect_races=True, **shape.settings)
    with pytest.raises(Exception, match="(?i)race|phase"):
        run(decode, q, case.kv(), case.tables, np.array([255], np.int32)).block_until_ready()


def arguments(shape: Shape, rows: int = 8, width: int = 64) -> list[Any]:
    """Shapes of a call; of the pools, fewer blocks than an engine has."""
    dtype = jnp.dtype(shape.dtype)
    pool_shape = shape.layout.shape(64, shape.block_size, shape.kv_heads, shape.head_dim)
    pool: Any = jax.ShapeDtypeStruct(pool_shape, dtype)
    heads = shape.kv_heads * shape.group
    return [
        jax.ShapeDtypeStruct((rows, heads, shape.head_dim), dtype),
        PagedKV(pool, pool),
        jax.ShapeDtypeStruct((rows, width), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    ]


FULL = DecodeConfig(block_kv=64, num_stages=6, splits=8)
COMPILED = {
    "d128": Shape(128, 4, kv_heads=8, config=FULL),
    "d128-tile128-hnd": Shape(
        128, 8, 32, np.float16, PoolLayout.HND, config=DecodeConfig(block_kv=128, num_stages=3)
    ),
    "d256-unsplit-window-cap": Shape(
        256, 2, 128, config=with_splits(1), window=4096, soft_cap=50.0
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_lowers_for_cuda(name: str) -> None:
    shape = COMPILED[name]
    decode = functools.partial(paged_decode, **shape.settings)
    assert "mosaic_gpu" in export_for_cuda(decode, *arguments(shape))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(dtype=np.float32), "queries of float32"),
        (Shape(head_dim=80), "head_dim 80"),
        (Shape(head_dim=320), "head_dim 320"),
        (Shape(group=65), "65 query heads"),
        (Shape(block_size=4), "block_size 4"),
        (Shape(block_size=24), "block_size 24"),
        (Shape(config=DecodeConfig(block_kv=32)), "block_kv 32"),
        (Shape(head_dim=256, config=DecodeConfig(block_kv=128)), "block_kv 128 with head_dim 256"),
        (Shape(layout=PoolLayout.COMBINED), "layout 'combined'"),
    ],
)
def test_refuses(shape: Shape, reason: str) -> None:
    decode = functools.partial(paged_decode, **shape.settings)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(decode, *arguments(shape))


def test_refuses_latent_and_quantised_caches() -> None:
    shape = Shape()
    q, kv, *rest = arguments(shape)
    decode = functools.partial(paged_decode, **shape.settings)
    with pytest.raises(NotImplementedError, match="latent cache"):
        jax.eval_shape(decode, q, PagedKV(kv.k, None), *rest)
    pool: Any = jax.ShapeDtypeStruct(kv.k.shape, jnp.int8)
    scale: Any = jax.ShapeDtypeStruct(kv.k.shape[:-1], jnp.float32)
    with pytest.raises(NotImplementedError, match="int8 with scales"):
        jax.eval_shape(decode, q, PagedKV(pool, pool, scale, scale), *rest)


def test_says_why_it_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax 0.10 needs absl-py for it, which it does not install."""
    error = ModuleNotFoundError("No module named 'absl'")
    monkeypatch.setattr(mosaic_compat, "_import_error", error)
    shape = Shape()
    decode = functools.partial(paged_decode, **shape.settings)
    with pytest.raises(NotImplementedError, match=r"No module named 'absl'.*absl-py"):
        jax.eval_shape(decode, *arguments(shape))

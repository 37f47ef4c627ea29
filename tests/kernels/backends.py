"""The backends of paged attention behind one face, and the shapes that all of them are tried on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

from pallas_kernels import (
    mosaic_compat,
    mosaic_decode,
    mosaic_prefill,
    reference,
    triton_decode,
    triton_prefill,
    triton_write,
)
from pallas_kernels.native import build, ops
from pallas_kernels.paged_kv import PagedKV
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.tuning import DecodeConfig, PrefillConfig, WriteConfig
from tests.kernels.attention_oracle import PagedCase, Tiles, latent_case, paged_case

BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
_STATIC = ("block_size", "scale", "window", "soft_cap", "value_dim", "tile", "layout")


@dataclass(frozen=True)
class Setup:
    """A shape and what else a kernel is specialised on."""

    head_dim: int
    kv_heads: int
    group: int
    block_size: int
    dtype: npt.DTypeLike = np.float32
    cache_dtype: npt.DTypeLike | None = None
    window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None
    """Not None: a latent cache."""
    layout: PoolLayout = PoolLayout.NHD

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.value_dim is None else f"{self.head_dim}+{self.value_dim}"
        cache = "" if self.cache_dtype is None else f"-{np.dtype(self.cache_dtype).name}"
        return (
            f"d{dims}-k{self.kv_heads}-g{self.group}-b{self.block_size}"
            f"-{np.dtype(self.dtype).name}{cache}-w{self.window}-c{self.soft_cap}"
            f"-{self.layout.value}"
        )

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def error(self) -> float:
        """Of an element, as a share of the largest value in the cache: float32's rounding of sums,
        or that of weights and results to 16 bits.
        """
        if np.dtype(self.dtype).itemsize == 4:
            return 3e-6
        # With the scales of an 8-bit cache weights may be below float16's range: they are bfloat16.
        return 8e-3 if self.dtype is BF16 or self.cache_dtype is not None else 1e-3

    @property
    def quantization_error(self) -> float:
        """Of the attention over a cache of normal values, where they were quantised for it."""
        if self.cache_dtype is None:
            return 0.0
        return 0.03 if self.cache_dtype is np.int8 else 0.12

    def case(self, lengths: list[int], **changes: Any) -> PagedCase:
        shape: dict[str, Any] = {"block_size": self.block_size, "group": self.group}
        shape |= {"dtype": self.dtype, "cache_dtype": self.cache_dtype, **changes}
        if self.value_dim is not None:
            return latent_case(lengths, key_dim=self.head_dim, value_dim=self.value_dim, **shape)
        return paged_case(lengths, kv_heads=self.kv_heads, head_dim=self.head_dim, **shape)


@dataclass(frozen=True)
class Backend:
    """One implementation. Calls take numpy or jax arrays and return numpy arrays."""

    name: str
    layouts: tuple[PoolLayout, ...]
    decode_kernel: Callable[..., jax.Array]
    prefill_kernel: Callable[..., jax.Array] | None
    write_kernel: Callable[..., PagedKV]
    tile_size: Callable[[int], int]
    """Of a group: tokens of a prefill tile."""
    refuses: Callable[[Setup], str | None]
    """What the refusal says of a setup that this backend cannot do."""

    def decode(self, setup: Setup, q: Any, kv: PagedKV, tables: Any, positions: Any) -> Any:
        return np.asarray(self.decode_kernel(q, kv, tables, positions, **self._settings(setup)))

    def prefill(self, setup: Setup, q: Any, kv: PagedKV, tables: Any, tiles: Tiles) -> Any:
        assert self.prefill_kernel is not None
        settings = self._settings(setup) | {"tile": self.tile_size(setup.group)}
        return np.asarray(self.prefill_kernel(q, kv, tables, tiles.arrays, **settings))

    def write(self, setup: Setup, kv: PagedKV, k: Any, v: Any, slots: Any) -> PagedKV:
        layout = {} if self.layouts == (PoolLayout.NHD,) else {"layout": setup.layout}
        return self.write_kernel(kv, k, v, slots, **layout)

    def _settings(self, setup: Setup) -> dict[str, Any]:
        settings: dict[str, Any] = {"block_size": setup.block_size, "scale": setup.scale}
        settings |= {"window": setup.window, "soft_cap": setup.soft_cap}
        settings |= {"value_dim": setup.value_dim}
        if self.layouts != (PoolLayout.NHD,):
            settings["layout"] = setup.layout
        return settings


def _jitted(kernel: Callable[..., Any], **fixed: Any) -> Any:
    """Compiled with little effort: compiling costs far more here than running."""

    def call(*arrays: Any, **settings: Any) -> Any:
        return kernel(*arrays, **fixed, **settings)

    return jax.jit(
        call, static_argnames=_STATIC, compiler_options={"xla_backend_optimization_level": 0}
    )


def _never(_: Setup) -> None:
    return None


# Small tiles, so that short contexts have many of them, and more than one split.
_DECODE = DecodeConfig(block_kv=16, splits=4, min_split_tokens=32)
_PREFILL = PrefillConfig(block_rows=32, block_kv=16)
_MOSAIC_DECODE = DecodeConfig(block_kv=64, splits=2, min_split_tokens=64)
_MOSAIC_PREFILL = PrefillConfig(block_rows=64, block_kv=64)


def _reference() -> Backend:
    return Backend(
        "reference",
        (PoolLayout.NHD,),
        _jitted(reference.paged_decode),
        _jitted(reference.paged_prefill),
        _jitted(reference.write_kv),
        reference.query_tile,
        _never,
    )


def _triton() -> Backend:
    return Backend(
        "triton",
        tuple(PoolLayout),
        _jitted(triton_decode.paged_decode, config=_DECODE, interpret=True),
        _jitted(triton_prefill.paged_prefill, config=_PREFILL, interpret=True),
        _jitted(triton_write.write_kv, config=WriteConfig(block_tokens=4), interpret=True),
        functools.partial(triton_prefill.tile_size, config=_PREFILL),
        _never,
    )


def _native() -> Backend | None:
    """None where there is no library and no compiler."""
    try:
        build.load()
    except build.NativeUnavailable:
        return None
    return Backend(
        "native",
        (PoolLayout.NHD,),
        _jitted(ops.paged_decode),
        _jitted(ops.paged_prefill),
        _jitted(ops.write_kv),
        lambda _: ops.TILE,
        _never,
    )


def _mosaic_refuses(setup: Setup) -> str | None:
    if setup.layout is PoolLayout.COMBINED:
        return "layout 'combined'"
    if setup.value_dim is not None:
        return "latent cache"
    if setup.cache_dtype is not None:
        return "with scales"
    if np.dtype(setup.dtype).itemsize != 2:
        return "queries of float32"
    if setup.head_dim % 64:
        return f"head_dim {setup.head_dim}"
    if setup.block_size < 8:
        return f"block_size {setup.block_size}"
    return None


def _mosaic() -> Backend | None:
    """None where there is no interpreter for such kernels."""
    if not mosaic_compat.can_interpret():
        return None
    return Backend(
        "mosaic",
        (PoolLayout.NHD, PoolLayout.HND),
        _jitted(mosaic_decode.paged_decode, config=_MOSAIC_DECODE, interpret=True),
        _jitted(mosaic_prefill.paged_prefill, config=_MOSAIC_PREFILL, interpret=True),
        _jitted(triton_write.write_kv, config=WriteConfig(block_tokens=4), interpret=True),
        functools.partial(mosaic_prefill.tile_size, config=_MOSAIC_PREFILL),
        _mosaic_refuses,
    )


@functools.cache
def backend(name: str) -> Backend | None:
    makers: dict[str, Callable[[], Backend | None]] = {
        "reference": _reference,
        "native": _native,
        "triton": _triton,
        "mosaic": _mosaic,
    }
    return makers[name]()


# Every head_dim, element type, block size and layout at least once; G from 1 to 16; windows and
# soft caps alone and together.
SETUPS = [
    Setup(64, 2, 1, 4),
    Setup(128, 2, 4, 16, BF16, window=33),
    Setup(80, 1, 3, 32, np.float16, soft_cap=2.0),
    Setup(256, 1, 16, 128),
    Setup(96, 2, 2, 16, BF16, np.int8, window=17, soft_cap=3.0),
    Setup(64, 2, 8, 64, np.float32, F8),
    Setup(80, 1, 4, 16, BF16, F8, soft_cap=2.0, value_dim=64),
    Setup(48, 1, 16, 16, np.float32, np.int8, value_dim=32),
    Setup(576, 1, 5, 64, BF16, value_dim=512),
    Setup(64, 2, 7, 16, BF16, window=1, layout=PoolLayout.HND),
    Setup(64, 2, 2, 16, np.float32, np.int8, window=40, layout=PoolLayout.HND),
    Setup(64, 2, 2, 16, layout=PoolLayout.COMBINED),
    Setup(96, 2, 1, 32, np.float32, F8, layout=PoolLayout.COMBINED),
]

"""The kernels by name, with the options that each takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax

from pallas_kernels import tuning
from pallas_kernels.pool_layout import PoolLayout

MODULES = {
    ("reference", "decode"): "reference",
    ("reference", "prefill"): "reference",
    ("reference", "write"): "reference",
    ("pallas_triton", "decode"): "triton_decode",
    ("pallas_triton", "prefill"): "triton_prefill",
    ("pallas_triton", "write"): "triton_write",
    ("pallas_mosaic", "decode"): "mosaic_decode",
    ("pallas_mosaic", "prefill"): "mosaic_prefill",
}
FUNCTIONS = {"decode": "paged_decode", "prefill": "paged_prefill", "write": "write_kv"}


def kernel(
    backend: str,
    what: str,
    *,
    dry: bool,
    config: Any = None,
    layout: PoolLayout = PoolLayout.NHD,
) -> Callable[..., Any]:
    """A function of arrays and what the kernels have in common; the rest is bound. Raises
    `NotImplementedError` where there is no such kernel.
    """
    if (backend, what) not in MODULES:
        raise NotImplementedError(f"{backend} has no kernel for {what}")
    module = import_module(f"pallas_kernels.{MODULES[backend, what]}")
    function: Callable[..., Any] = getattr(module, FUNCTIONS[what])
    if backend == "reference":
        return function
    return functools.partial(function, config=config, layout=layout, interpret=dry)


def prefill_tile(backend: str, group: int, config: Any) -> int:
    """Tokens of one tile of that backend."""
    module = import_module(f"pallas_kernels.{MODULES[backend, 'prefill']}")
    if backend == "reference":
        return int(module.query_tile(group))
    return int(module.tile_size(group, config))


def decode_config(
    *,
    batch: int,
    context: int,
    group: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: str,
    cache: str | None = None,
    value_dim: int | None = None,
    backend: str = "pallas_triton",
) -> tuning.DecodeConfig:
    """What the engine would take here."""
    return tuning.decode_config(
        jax.devices()[0].device_kind,
        head_dim=dim,
        value_dim=value_dim or dim,
        group=group,
        kv_heads=kv_heads,
        block_size=block_size,
        q_dtype=dtype,
        kv_dtype=cache_dtype(cache, dtype),
        batch=batch,
        context=context,
        backend=backend,
    )


def prefill_config(
    *,
    tokens: int,
    context: int,
    group: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: str,
    cache: str | None = None,
    value_dim: int | None = None,
    backend: str = "pallas_triton",
) -> tuning.PrefillConfig:
    """What the engine would take here."""
    return tuning.prefill_config(
        jax.devices()[0].device_kind,
        head_dim=dim,
        value_dim=value_dim or dim,
        group=group,
        kv_heads=kv_heads,
        block_size=block_size,
        q_dtype=dtype,
        kv_dtype=cache_dtype(cache, dtype),
        tokens=tokens,
        context=context,
        backend=backend,
    )


def write_config(
    *, tokens: int, kv_heads: int, dim: int, block_size: int, dtype: str, cache: str | None = None
) -> tuning.WriteConfig:
    """What the engine would take here."""
    return tuning.write_config(
        jax.devices()[0].device_kind,
        head_dim=dim,
        value_dim=dim,
        kv_heads=kv_heads,
        block_size=block_size,
        kv_dtype=cache_dtype(cache, dtype),
        tokens=tokens,
    )


def cache_dtype(cache: str | None, dtype: str) -> str:
    """The name of the pool's element type."""
    return {"fp8": "float8_e4m3fn", "int8": "int8", None: dtype}[cache]

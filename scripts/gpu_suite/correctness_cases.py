"""Which cases the correctness section runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pallas_kernels.pool_layout import PoolLayout

LONG = (1, 15, 16, 17, 64, 65, 511, 2048, 4097)


@dataclass(frozen=True, slots=True)
class Config:
    """One case. `lengths` are contexts (decode) or chunks' (past, length) pairs (prefill)."""

    name: str
    lengths: tuple[Any, ...] = LONG
    group: int = 4
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    cache: str | None = None
    latent: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    layout: PoolLayout = PoolLayout.NHD
    backend: str = "pallas_triton"
    changes: tuple[tuple[str, Any], ...] = ()
    """Fields of the kernel's configuration that differ from what the engine would take."""


CHUNKS = ((0, 300), (333, 77), (4096, 129), (17, 1))
DECODE = (
    Config("bf16"),
    Config("g8", group=8),
    Config("g1", group=1),
    Config("page32", block_size=32),
    Config("page64 cap", block_size=64, soft_cap=30.0),
    Config("page128", block_size=128),
    Config("splits1", changes=(("splits", 1),)),
    Config("splits16", changes=(("splits", 16), ("min_split_tokens", 64))),
    Config("window", window=100),
    Config("d64", dim=64),
    Config("d80", dim=80, kv_heads=4, group=1),
    Config("d96", dim=96, kv_heads=4),
    Config("d256 cap window", dim=256, kv_heads=4, group=2, window=512, soft_cap=50.0),
    Config("f32", dtype="float32", kv_heads=2),
    Config("f16", dtype="float16", kv_heads=2),
    Config("int8", cache="int8"),
    Config("fp8", cache="fp8"),
    Config("latent", kv_heads=1, group=16, dim=576, latent=512),
    Config("latent g128", (1, 65, 1000), kv_heads=1, group=128, dim=576, latent=512),
    Config("hnd", layout=PoolLayout.HND),
    Config("combined", layout=PoolLayout.COMBINED),
    Config("not carried", changes=(("carry_pages", False),)),
    Config("reference", backend="reference"),
    Config("mosaic", backend="pallas_mosaic"),
    Config("mosaic d64 g8", backend="pallas_mosaic", dim=64, group=8),
    Config("mosaic window cap", backend="pallas_mosaic", window=100, soft_cap=30.0),
    Config("mosaic hnd page64", backend="pallas_mosaic", layout=PoolLayout.HND, block_size=64),
)
PREFILL = (
    Config("bf16", CHUNKS),
    Config("g8 rows128", CHUNKS, group=8, changes=(("block_rows", 128), ("num_warps", 8))),
    Config("g1 window", CHUNKS, group=1, window=100),
    Config("d64 page32 cap", CHUNKS, dim=64, block_size=32, soft_cap=30.0),
    Config("d256", CHUNKS, dim=256, kv_heads=2, group=2),
    Config("f32", CHUNKS, dtype="float32", kv_heads=2),
    Config("int8", CHUNKS, cache="int8"),
    Config("fp8", CHUNKS, cache="fp8"),
    Config("latent", ((0, 40), (333, 33)), kv_heads=1, group=16, dim=576, latent=512),
    Config("reference", CHUNKS, kv_heads=2, backend="reference"),
    Config("mosaic", CHUNKS, backend="pallas_mosaic"),
    Config("mosaic g8", CHUNKS, backend="pallas_mosaic", group=8),
)
WRITE = (
    Config("bf16"),
    Config("d80", dim=80, kv_heads=3),
    Config("f32", dtype="float32"),
    Config("int8", cache="int8"),
    Config("fp8", cache="fp8"),
    Config("latent", kv_heads=1, group=16, dim=576, latent=512),
)
TINY: dict[str, Any] = {"kv_heads": 2, "group": 2, "dim": 16}
DRY: dict[str, tuple[Config, ...]] = {
    "decode": (Config("bf16", (1, 17, 40), **TINY), Config("int8", (5, 33), cache="int8", **TINY)),
    "prefill": (Config("bf16", ((0, 9), (20, 5)), **TINY),),
    "write": (Config("fp8", cache="fp8", **TINY),),
}

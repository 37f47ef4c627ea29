"""One timed decode: its shape, a pool of random data larger than any cache, and its program."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_suite.backends import decode_config, kernel
from pallas_kernels.paged_kv import PagedKV
from pallas_kernels.pool_layout import PoolLayout

POOL_TOKENS = 2**20
"""Of every pool. Whatever part of it a call reads, the next call reads another."""
DRY_POOL_TOKENS = 2**10
READ_RATE = 4.3e12
"""Bytes a second, to guess how often a program must call; nothing is judged by it."""
ELEMENT: dict[str | None, Any] = {None: jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """`lengths`, if given, are the rows' contexts; else all are `context`."""

    batch: int
    context: int
    group: int = 4
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16
    cache: str | None = None
    latent: int | None = None
    layout: PoolLayout = PoolLayout.NHD
    backend: str = "pallas_triton"
    order: str = "random"
    """Of the blocks in the pool: random, sorted (each row ascending), or identity."""
    lengths: tuple[int, ...] | None = None
    config: Any = None
    """None takes what the engine would."""
    label: str = ""
    """What sets this case apart from others of its shape."""

    @property
    def name(self) -> str:
        shape = f"B{self.batch} ctx{self.context} G{self.group}"
        if (self.kv_heads, self.dim) != (8, 128):
            shape += f" K{self.kv_heads} D{self.dim}"
        kind = self.cache or "bf16"
        return " ".join(part for part in (shape, kind, self.label) if part)

    @property
    def kv_bytes(self) -> int:
        """What the context of all rows holds: the least that must be read."""
        tokens = sum(self.lengths) if self.lengths else self.batch * self.context
        each = self.dim * (1 if self.latent else 2) * jnp.dtype(ELEMENT[self.cache]).itemsize
        scales = 0 if self.cache is None else (4 if self.latent else 8)
        return int(tokens * self.kv_heads * (each + scales))

    @property
    def floor_seconds(self) -> float:
        return self.kv_bytes / READ_RATE

    @property
    def pool_key(self) -> tuple[Any, ...]:
        return self.cache, self.kv_heads, self.dim, self.latent is not None

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.batch, -(-self.context // self.block_size)

    def chosen_config(self) -> Any:
        if self.config is not None:
            return self.config
        return decode_config(
            batch=self.batch,
            context=self.context,
            group=self.group,
            kv_heads=self.kv_heads,
            dim=self.dim,
            block_size=self.block_size,
            dtype="bfloat16",
            cache=self.cache,
            value_dim=self.latent,
            backend=self.backend,
        )

    def facts(self) -> dict[str, Any]:
        """For the row of results."""
        ours = self.backend.startswith("pallas_")
        config = dataclasses.asdict(self.chosen_config()) if ours else None
        return {
            "batch": self.batch,
            "context": self.context,
            "group": self.group,
            "kv_heads": self.kv_heads,
            "dim": self.dim,
            "block_size": self.block_size,
            "cache": self.cache or "bfloat16",
            "layout": self.layout.value,
            "order": self.order,
            "backend": self.backend,
            "kv_bytes": self.kv_bytes,
            "config": config,
        }


def pool_tokens(case: DecodeCase, *, dry: bool) -> int:
    """Slots of the pool as this layout sees it: a combined one takes the K array for both."""
    total = DRY_POOL_TOKENS if dry else POOL_TOKENS
    return total // 2 if case.layout is PoolLayout.COMBINED else total


def regions(case: DecodeCase, *, dry: bool) -> int:
    """How many different sets of blocks the pool has for such a call."""
    rows, width = case.table_shape
    return pool_tokens(case, dry=dry) // case.block_size // (rows * width)


def first_tables(case: DecodeCase, *, dry: bool) -> np.ndarray[Any, Any]:
    """i32 [D, M] of the first set: its blocks are spread over the whole pool, save for identity."""
    count, sets = int(np.prod(case.table_shape)), regions(case, dry=dry)
    assert sets >= 1, f"{case.name}: the pool is too small"
    ids = np.arange(count)
    if case.order != "identity":
        ids = np.random.default_rng(count).permutation(count) * sets
    tables = ids.reshape(case.table_shape).astype(np.int32)
    return np.sort(tables, axis=1) if case.order == "sorted" else tables


def next_tables(case: DecodeCase, tables: Any, *, dry: bool) -> Any:
    """The tables of the next call; after the last set comes the first."""
    count, sets = int(np.prod(case.table_shape)), regions(case, dry=dry)
    if case.order == "identity":
        return (tables + count) % (count * sets)
    place = tables % sets
    return tables - place + (place + 1) % sets


def as_layout(case: DecodeCase, kv: PagedKV) -> PagedKV:
    """The same bytes (random ones, so that they may stand anywhere) under another shape."""
    if case.layout is PoolLayout.NHD:
        return kv
    slots = kv.k.shape[0]
    if case.layout is PoolLayout.COMBINED:
        return PagedKV(kv.k.reshape(slots // 2, 2 * case.kv_heads, case.dim), None)
    shape = case.layout.shape(slots // case.block_size, case.block_size, case.kv_heads, case.dim)
    assert kv.v is not None
    return PagedKV(kv.k.reshape(shape), kv.v.reshape(shape))


def make_pool(case: DecodeCase, *, dry: bool) -> PagedKV:
    """Random K and V of `POOL_TOKENS` slots; to be traced, or asked for its shapes."""
    slots = DRY_POOL_TOKENS if dry else POOL_TOKENS
    shape = (slots, case.kv_heads, case.dim)
    keys = jax.random.split(jax.random.key(7), 4)

    def pool(key: Any) -> Any:
        if case.cache == "int8":
            return jax.random.randint(key, shape, -127, 128, jnp.int8)
        return jax.random.normal(key, shape, jnp.bfloat16).astype(ELEMENT[case.cache])

    def scale(key: Any) -> Any:
        if case.cache is None:
            return None
        return jax.random.uniform(key, shape[:2], jnp.float32, 0.01, 0.02)

    if case.latent:
        return PagedKV(pool(keys[0]), None, scale(keys[2]), None)
    return PagedKV(pool(keys[0]), pool(keys[1]), scale(keys[2]), scale(keys[3]))


def attention_of(case: DecodeCase, *, dry: bool) -> Any:
    """`(q, kv, tables, positions) -> out` of this case's kernel."""
    function = kernel(
        case.backend, "decode", dry=dry, config=case.chosen_config(), layout=case.layout
    )

    def attention(q: Any, kv: PagedKV, tables: Any, positions: Any) -> Any:
        return function(
            q,
            as_layout(case, kv),
            tables,
            positions,
            block_size=case.block_size,
            scale=case.dim**-0.5,
            value_dim=case.latent,
        )

    return attention

"""Attention over the paged cache, as the layers call it: what a step tells it, and what runs it.

Which backend an engine has is decided in `attention_choice`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged.device.determinism import CONFIG_CONTEXT, CONFIG_TOKENS
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.routines import XLA, Routines
from pallas_kernels import reference, tuning
from pallas_kernels.native import build, ops
from pallas_kernels.paged_kv import PagedKV, PrefillTiles


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMeta:
    """Where the tokens of a step stand in the cache of one group of layers. Decode rows come first
    on the token axis, then P prompt tokens in tiles.
    """

    kv_slots: jax.Array  # i32[T] pool slot of each token's K and V; out of range = not written
    block_tables: jax.Array  # i32[R, M]
    decode_positions: jax.Array  # i32[R] position of each decode row's token; -1 = not a decode row
    tiles: PrefillTiles


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What a backend is chosen and its kernels are configured for: the attention of one device."""

    group: int
    """Query heads of a KV head."""
    kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_dim: int
    latent: bool
    """The values are the first `value_dim` elements of the keys."""
    block_size: int
    dtype: jnp.dtype
    """Of queries and of new keys and values."""
    cache_dtype: jnp.dtype
    windows: frozenset[int | None]
    """Of the layers."""
    soft_cap: float | None
    table: tuning.TuningTable | None = None
    """Where a kernel's configuration is looked for before the package's own table."""
    fixed: bool = False
    """One kernel of one size for all tokens, so that none's bits depend on how it is scheduled."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        *,
        block_size: int,
        dtype: jnp.dtype,
        cache_dtype: jnp.dtype,
        table: tuning.TuningTable | None = None,
        fixed: bool = False,
    ) -> AttentionSizes:
        shape = model.kv_shape
        cuts = 1 if shape.latent else model.tensor_parallel
        return cls(
            model.group_size,
            shape.heads // cuts,
            shape.key_dim,
            shape.value_dim,
            shape.latent,
            block_size,
            np.dtype(dtype),
            np.dtype(cache_dtype),
            frozenset(model.layer_windows),
            model.attention_cap,
            table,
            fixed,
        )


class PagedAttention(ABC):
    """`attend` fits `models.layers.Attend`; how the cache is written and read is the backend's."""

    name: str
    routines: Routines = XLA
    """For the rest of the layers."""
    variant: str | None = None
    """Which of its code paths this processor runs, if there are several: they round differently."""

    def __init__(self, sizes: AttentionSizes) -> None:
        self.sizes = sizes

    @abstractmethod
    def tile(self, tokens: int, context: int) -> int:
        """Prompt tokens per tile of the host's tile list, in a step with room for so many of them
        and block tables that hold `context` tokens.
        """

    @abstractmethod
    def write(
        self, kv: PagedKV, k: jax.Array, v: jax.Array | None, slots: jax.Array
    ) -> PagedKV: ...

    @abstractmethod
    def decode(
        self, q: jax.Array, kv: PagedKV, tables: jax.Array, positions: jax.Array, **settings: Any
    ) -> jax.Array: ...

    @abstractmethod
    def prefill(
        self, q: jax.Array, kv: PagedKV, tables: jax.Array, tiles: PrefillTiles, **settings: Any
    ) -> jax.Array: ...

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        layer_kv: PagedKV,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        value_dim: int | None = None,
    ) -> tuple[jax.Array, PagedKV]:
        """The layer's output [T, N, HV] for `q` [T, N, H], and the cache with `k` and `v` in it."""
        # All of the step's K and V go in before any of its queries reads: a row may have hit a
        # block of another row.
        layer_kv = self.write(layer_kv, k, v, meta.kv_slots)
        rows = meta.decode_positions.shape[0]
        settings: dict[str, Any] = {
            "block_size": self.sizes.block_size,
            "scale": scale,
            "window": window,
            "soft_cap": soft_cap,
            "value_dim": value_dim,
        }
        tables = meta.block_tables
        if self.sizes.fixed:
            single = self._single_tokens(meta)
            out = self.prefill(q[:rows], layer_kv, tables, single, **settings)
        else:
            out = self.decode(q[:rows], layer_kv, tables, meta.decode_positions, **settings)
        if meta.tiles.token_tile.shape[0]:
            prompt = self.prefill(q[rows:], layer_kv, tables, meta.tiles, **settings)
            out = jnp.concatenate([out, prompt])
        return out, layer_kv

    def _single_tokens(self, meta: AttentionMeta) -> PrefillTiles:
        """The decode rows as tiles of one token: a prompt's tokens and those that follow it then go
        through the same sums. Padding rows stand last and are behind the count.
        """
        positions = meta.decode_positions
        rows = positions.shape[0]
        place = lax.iota(jnp.int32, rows)
        live = positions >= 0
        tile = self.tile(rows, meta.block_tables.shape[1] * self.sizes.block_size)
        return PrefillTiles(
            row=place,
            start=place,
            length=live.astype(jnp.int32),
            position=jnp.maximum(positions, 0),
            token_tile=place * tile,
            count=jnp.sum(live, dtype=jnp.int32),
        )


class ReferenceAttention(PagedAttention):
    """Plain jnp; runs everywhere and gives every token the same bits however it is scheduled (on
    CPU).
    """

    name = "reference"

    def tile(self, tokens: int, context: int) -> int:
        return reference.query_tile(self.sizes.group)

    def write(self, kv: PagedKV, k: jax.Array, v: jax.Array | None, slots: jax.Array) -> PagedKV:
        return reference.write_kv(kv, k, v, slots)

    def decode(
        self, q: jax.Array, kv: PagedKV, tables: jax.Array, positions: jax.Array, **settings: Any
    ) -> jax.Array:
        return reference.paged_decode(q, kv, tables, positions, **settings)

    def prefill(
        self, q: jax.Array, kv: PagedKV, tables: jax.Array, tiles: PrefillTiles, **settings: Any
    ) -> jax.Array:
        return reference.paged_prefill(
            q, kv, tables, tiles, tile=reference.query_tile(self.sizes.group), **settings
        )


class NativeAttention(PagedAttention):
    """Compiled kernels for CPUs, which `native.build.load` has made ready. As with the reference, a
    token gets the same bits however it is scheduled.
    """

    name = "native"

    def __init__(self, sizes: AttentionSizes) -> None:
        super().__init__(sizes)
        from pallas_kernels.native.layers import NativeRoutines

        self.variant = build.isa()
        self.routines = NativeRoutines()

    def tile(self, tokens: int, context: int) -> int:
        return ops.TILE

    def write(self, kv: PagedKV, k: jax.Array, v: jax.Array | None, slots: jax.Array) -> PagedKV:
        return ops.write_kv(kv, k, v, slots)

    def decode(
        self, q: jax.Array, kv: PagedKV, tables: jax.Array, positions: jax.Array, **settings: Any
    ) -> jax.Array:
        return ops.paged_decode(q, kv, tables, positions, **settings)

    def prefill(
        self, q: jax.Array, kv: PagedKV, tables: jax.Array, tiles: PrefillTiles, **settings: Any
    ) -> jax.Array:
        return ops.paged_prefill(q, kv, tables, tiles, tile=ops.TILE, **settings)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        layer_kv: PagedKV,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        value_dim: int | None = None,
    ) -> tuple[jax.Array, PagedKV]:
        """As in the base class, in one call."""
        return ops.attend(
            *(q, k, v, layer_kv, meta.kv_slots, meta.block_tables, meta.decode_positions),
            meta.tiles if meta.tiles.token_tile.shape[0] else None,
            block_size=self.sizes.block_size,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            value_dim=value_dim,
        )


@dataclass(frozen=True, slots=True)
class Kernel:
    """A module with the decode or the prefill kernel of a Pallas backend, and the backend's name in
    the tuning table.
    """

    backend: str
    module: ModuleType


class KernelAttention(PagedAttention):
    """Pallas kernels: one for decode rows and one for prompt tokens."""

    def __init__(
        self,
        name: str,
        sizes: AttentionSizes,
        device_kind: str,
        *,
        decode: Kernel,
        prefill: Kernel,
        interpret: bool,
    ) -> None:
        super().__init__(sizes)
        self.name = name
        self._device_kind = device_kind
        self.decode_kernel, self.prefill_kernel = decode, prefill
        self._interpret = interpret

    def tile(self, tokens: int, context: int) -> int:
        size: int = self.prefill_kernel.module.tile_size(
            self.sizes.group, self._prefill_config(tokens, context)
        )
        return size

    def write(self, kv: PagedKV, k: jax.Array, v: jax.Array | None, slots: jax.Array) -> PagedKV:
        if not kv.quantized:  # XLA's scatter works in place, and is one with what made K and V
            return reference.write_kv(kv, k, v, slots)
        from pallas_kernels import triton_write

        sizes = self.sizes
        config = tuning.write_config(
            self._device_kind,
            head_dim=sizes.head_dim,
            value_dim=sizes.value_dim,
            kv_heads=sizes.kv_heads,
            block_size=sizes.block_size,
            kv_dtype=sizes.cache_dtype.name,
            tokens=slots.shape[0],
            table=sizes.table,
        )
        written = triton_write.write_kv(
            self._typed(kv), k, v, slots, config=config, interpret=self._interpret
        )
        return _pools_as(written, kv.k.dtype)

    def decode(
        self, q: jax.Array, kv: PagedKV, tables: jax.Array, positions: jax.Array, **settings: Any
    ) -> jax.Array:
        self._check_heads(q, kv)
        config = tuning.decode_config(
            self._device_kind,
            batch=q.shape[0],
            context=tables.shape[1] * self.sizes.block_size,
            backend=self.decode_kernel.backend,
            **self._query(),
        )
        out: jax.Array = self.decode_kernel.module.paged_decode(
            q,
            self._typed(kv),
            tables,
            positions,
            config=config,
            interpret=self._interpret,
            **settings,
        )
        return out

    def prefill(
        self, q: jax.Array, kv: PagedKV, tables: jax.Array, tiles: PrefillTiles, **settings: Any
    ) -> jax.Array:
        self._check_heads(q, kv)
        tokens, context = q.shape[0], tables.shape[1] * self.sizes.block_size
        out: jax.Array = self.prefill_kernel.module.paged_prefill(
            q,
            self._typed(kv),
            tables,
            tiles,
            tile=self.tile(tokens, context),
            config=self._prefill_config(tokens, context),
            interpret=self._interpret,
            **({"uniform": True} if self.sizes.fixed else {}),  # Triton's; Mosaic GPU has none
            **settings,
        )
        return out

    def _prefill_config(self, tokens: int, context: int) -> tuning.PrefillConfig:
        if self.sizes.fixed:
            tokens, context = CONFIG_TOKENS, CONFIG_CONTEXT
        return tuning.prefill_config(
            self._device_kind,
            tokens=tokens,
            context=context,
            backend=self.prefill_kernel.backend,
            **self._query(),
        )

    def _query(self) -> dict[str, Any]:
        """What the tuning table is asked by."""
        sizes = self.sizes
        return {
            "head_dim": sizes.head_dim,
            "value_dim": sizes.value_dim,
            "group": sizes.group,
            "kv_heads": sizes.kv_heads,
            "block_size": sizes.block_size,
            "q_dtype": sizes.dtype.name,
            "kv_dtype": sizes.cache_dtype.name,
            "table": sizes.table,
        }

    def _check_heads(self, q: jax.Array, kv: PagedKV) -> None:
        """The host's tiles are cut for these sizes, so the layers must have them."""
        heads = kv.k.shape[1]
        assert (q.shape[1] // heads, heads) == (self.sizes.group, self.sizes.kv_heads)

    def _typed(self, kv: PagedKV) -> PagedKV:
        """Pools in the cache's type: on CPU they are stored as unsigned integers."""
        return _pools_as(kv, self.sizes.cache_dtype)


def _pools_as(kv: PagedKV, dtype: jnp.dtype) -> PagedKV:
    def pool_as(pool: jax.Array) -> jax.Array:
        return pool if pool.dtype == dtype else lax.bitcast_convert_type(pool, dtype)

    v = None if kv.v is None else pool_as(kv.v)
    return PagedKV(pool_as(kv.k), v, kv.k_scale, kv.v_scale)

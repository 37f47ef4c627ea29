"""Which code attends over the paged cache, and what a step tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import LayerKV
from pallas_kernels import reference


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMeta:
    """Where the tokens of a step stand in the cache of one group of layers. Decode rows come first
    on the token axis, then P prompt tokens in tiles.
    """

    kv_slots: jax.Array  # i32[T] pool slot of each token's K and V; out of range = not written
    block_tables: jax.Array  # i32[R, M]
    decode_positions: jax.Array  # i32[R] position of each decode row's token; -1 = not a decode row
    tile_row: jax.Array  # i32[NT], and so on: see `reference.paged_prefill`
    tile_start: jax.Array  # i32[NT]
    tile_len: jax.Array  # i32[NT]
    tile_position: jax.Array  # i32[NT]
    token_tile: jax.Array  # i32[P]
    num_tiles: jax.Array  # i32[]


class AttentionBackend(Protocol):
    """`attend` fits `models.layers.Attend`; `tile` is the prompt tokens per tile of the host's tile
    list.
    """

    name: str
    tile: int

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        layer_kv: LayerKV,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        value_dim: int | None = None,
    ) -> tuple[jax.Array, LayerKV]: ...


class ReferenceAttention:
    """Plain jnp; runs everywhere and gives every token the same bits however it is scheduled (on
    CPU).
    """

    name = "reference"

    def __init__(self, model: ModelConfig, block_size: int) -> None:
        self.tile = reference.query_tile(model.group_size)
        self.block_size = block_size

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        layer_kv: LayerKV,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        value_dim: int | None = None,
    ) -> tuple[jax.Array, LayerKV]:
        # All of the step's K and V go in before any of its queries reads: a row may have hit a
        # block of another row.
        k_pool = reference.write_kv(layer_kv[0], k, meta.kv_slots)
        v_pool = None if v is None else reference.write_kv(layer_kv[1], v, meta.kv_slots)
        rows = meta.decode_positions.shape[0]
        out = reference.paged_decode(
            q[:rows],
            k_pool,
            v_pool,
            meta.block_tables,
            meta.decode_positions,
            block_size=self.block_size,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            value_dim=value_dim,
        )
        if meta.token_tile.shape[0]:
            prompt = reference.paged_prefill(
                q[rows:],
                k_pool,
                v_pool,
                meta.block_tables,
                meta.tile_row,
                meta.tile_start,
                meta.tile_len,
                meta.tile_position,
                meta.token_tile,
                meta.num_tiles,
                tile=self.tile,
                block_size=self.block_size,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                value_dim=value_dim,
            )
            out = jnp.concatenate([out, prompt])
        return out, (k_pool,) if v_pool is None else (k_pool, v_pool)


def choose_backend(name: str, model: ModelConfig, block_size: int) -> tuple[AttentionBackend, str]:
    """The backend for `--attention-backend name` and the reason, to be logged once."""
    reason = "asked for" if name != "auto" else "the only backend so far; it runs on every device"
    return ReferenceAttention(model, block_size), reason

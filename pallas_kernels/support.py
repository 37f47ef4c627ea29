"""What the GPU kernels can do, checked before anything is traced; `reference` can do the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_kv import PagedKV, is_8_bit
from pallas_kernels.pool_layout import PoolLayout

MAX_HEAD_DIM = 256
MAX_VALUE_DIM_LATENT = 512
MAX_ROPE_DIM_LATENT = 128
MAX_GROUP = 128
MAX_POOL_ELEMENTS = 2**31
QUERY_TYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
CACHE_TYPES_8_BIT = (jnp.int8, jnp.float8_e4m3fn)
_USE_REFERENCE = "use the attention backend 'reference'"


def is_latent(kv: PagedKV, layout: PoolLayout) -> bool:
    """Whether the values are the first elements of the keys."""
    return kv.v is None and layout is not PoolLayout.COMBINED


def check_supported(
    q_dtype: jnp.dtype,
    kv: PagedKV,
    *,
    block_size: int,
    group: int,
    head_dim: int,
    value_dim: int | None,
    layout: PoolLayout,
) -> None:
    """Raise NotImplementedError, with the value, the limit and the way out, for what the GPU
    kernels refuse. `group` is query heads per KV head; `head_dim` that of the keys; `value_dim` is
    only read for a latent cache.
    """
    _check_types(jnp.dtype(q_dtype), kv)
    if block_size < 1 or block_size & (block_size - 1):
        raise NotImplementedError(
            f"block_size {block_size}: the GPU kernels take powers of two; "
            f"choose 16, 32, 64 or 128, or {_USE_REFERENCE}"
        )
    if not 1 <= group <= MAX_GROUP:
        raise NotImplementedError(
            f"{group} query heads per KV head: the GPU kernels take 1 to {MAX_GROUP}; "
            f"{_USE_REFERENCE}"
        )
    if is_latent(kv, layout):
        _check_latent_dims(head_dim, value_dim)
    else:
        values = head_dim if kv.v is None else kv.v.shape[-1]
        for name, dim in (("head_dim", head_dim), ("head_dim of the values", values)):
            if not 1 <= dim <= MAX_HEAD_DIM:
                raise NotImplementedError(
                    f"{name} {dim}: the GPU kernels take 1 to {MAX_HEAD_DIM}; {_USE_REFERENCE}"
                )
    for name, pool in (("K", kv.k), ("V", kv.v)):
        if pool is not None and pool.size >= MAX_POOL_ELEMENTS:
            raise NotImplementedError(
                f"a {name} pool of {pool.size} elements: the GPU kernels address fewer than "
                f"2**31 = {MAX_POOL_ELEMENTS} (32-bit offsets); use fewer blocks "
                "(a smaller share of the device's memory) or shard over more devices"
            )


def _check_latent_dims(head_dim: int, value_dim: int | None) -> None:
    assert value_dim is not None, "values that are part of the keys need value_dim"
    rope = head_dim - value_dim
    if not (1 <= value_dim <= MAX_VALUE_DIM_LATENT and 0 <= rope <= MAX_ROPE_DIM_LATENT):
        raise NotImplementedError(
            f"a latent cache of head_dim {head_dim} with value_dim {value_dim}: the GPU kernels "
            f"take value_dim 1 to {MAX_VALUE_DIM_LATENT} and 0 to {MAX_ROPE_DIM_LATENT} elements "
            f"beside it; {_USE_REFERENCE}"
        )


def _check_types(q_dtype: jnp.dtype, kv: PagedKV) -> None:
    if q_dtype not in QUERY_TYPES:
        raise NotImplementedError(
            f"queries of {q_dtype}: the GPU kernels take float32, bfloat16 and float16; "
            "choose one of them as the model's dtype"
        )
    for name, pool, scale in _pools(kv):
        dtype = jnp.dtype(pool.dtype)
        if is_8_bit(dtype):
            if dtype not in CACHE_TYPES_8_BIT:
                raise NotImplementedError(
                    f"a {name} pool of {dtype}: the GPU kernels take int8 and float8_e4m3fn "
                    "as 8-bit types; choose one of them as the cache's dtype"
                )
            if scale is None:
                raise NotImplementedError(
                    f"a {name} pool of {dtype} without scales: the GPU kernels take 8-bit caches "
                    "with a float32 scale per slot and head; give PagedKV its k_scale and v_scale"
                )
        elif dtype != q_dtype:
            raise NotImplementedError(
                f"a {name} pool of {dtype} with queries of {q_dtype}: the GPU kernels take pools "
                "of the queries' type, int8 or float8_e4m3fn; choose one of them as the cache's "
                "dtype"
            )
        elif scale is not None:
            raise NotImplementedError(
                f"a {name} pool of {dtype} with scales: the GPU kernels take scales only with "
                "8-bit caches; leave k_scale and v_scale out"
            )
    if kv.v is not None and is_8_bit(kv.k.dtype) != is_8_bit(kv.v.dtype):
        raise NotImplementedError(
            f"a K pool of {kv.k.dtype} and a V pool of {kv.v.dtype}: the GPU kernels take both or "
            "neither with 8 bits; choose one type as the cache's dtype"
        )


def _pools(kv: PagedKV) -> list[tuple[str, jax.Array, jax.Array | None]]:
    pools: list[tuple[str, jax.Array, jax.Array | None]] = [("K", kv.k, kv.k_scale)]
    if kv.v is not None:
        pools.append(("V", kv.v, kv.v_scale))
    return pools

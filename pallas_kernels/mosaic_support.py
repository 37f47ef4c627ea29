"""What the Mosaic GPU kernels can do, on top of the limits that all GPU kernels have."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import support
from pallas_kernels.mosaic_compat import require_mosaic
from pallas_kernels.paged_kv import PagedKV
from pallas_kernels.pool_layout import PoolLayout

MAX_GROUP = 64
MAX_HEAD_DIM = 256
MIN_BLOCK_SIZE = 8
_TAKE_TRITON = "use the attention backend 'pallas_triton'"


def check_supported(
    q: jax.Array,
    kv: PagedKV,
    *,
    block_size: int,
    block_kv: int,
    layout: PoolLayout,
    interpret: bool,
) -> int:
    """G, the query heads of a KV head. Raise NotImplementedError with the value, the limit and the
    way out where these kernels cannot serve `q` [.., N, H] and `kv`.
    """
    require_mosaic(interpret=interpret)
    _check_cache(kv, layout)
    dim = q.shape[-1]
    heads = kv.k.shape[1]
    group: int = q.shape[1] // heads
    support.check_supported(
        q.dtype,
        kv,
        block_size=block_size,
        group=group,
        head_dim=dim,
        value_dim=dim,
        layout=layout,
    )
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"queries of {q.dtype}: the Mosaic GPU kernels take bfloat16 and float16, the types "
            f"that wgmma multiplies; {_TAKE_TRITON}"
        )
    assert kv.v is not None
    for name, size in (("head_dim", dim), ("head_dim of the values", kv.v.shape[-1])):
        if size != dim or dim % 64 or not 64 <= dim <= MAX_HEAD_DIM:
            raise NotImplementedError(
                f"{name} {size}: the Mosaic GPU kernels take 64, 128, 192 and 256, the same for "
                f"keys and values (128-byte swizzles); {_TAKE_TRITON}"
            )
    if group > MAX_GROUP:
        raise NotImplementedError(
            f"{group} query heads per KV head: the Mosaic GPU kernels take 1 to {MAX_GROUP}, the "
            f"rows of one wgmma; {_TAKE_TRITON}"
        )
    if block_size < MIN_BLOCK_SIZE:
        raise NotImplementedError(
            f"block_size {block_size}: the Mosaic GPU kernels take {MIN_BLOCK_SIZE} and more, the "
            f"rows of a swizzle tile; choose 16, 32, 64 or 128, or {_TAKE_TRITON}"
        )
    tiles = (64, 128) if dim <= 128 else (64,)  # longer heads would not leave the registers
    if block_kv not in tiles:
        raise NotImplementedError(
            f"block_kv {block_kv} with head_dim {dim}: the Mosaic GPU kernels take {tiles}; choose "
            f"another configuration, or {_TAKE_TRITON}"
        )
    return group


def _check_cache(kv: PagedKV, layout: PoolLayout) -> None:
    if layout not in (PoolLayout.NHD, PoolLayout.HND):
        raise NotImplementedError(
            f"pools in the layout {layout.value!r}: the Mosaic GPU kernels take 'nhd' and 'hnd'; "
            f"{_TAKE_TRITON}"
        )
    if kv.v is None:
        raise NotImplementedError(
            "a latent cache (values that are part of the keys): the Mosaic GPU kernels take K and "
            f"V in pools of their own; {_TAKE_TRITON}"
        )
    if kv.quantized or kv.v_scale is not None:
        raise NotImplementedError(
            f"a cache of {kv.k.dtype} with scales: the Mosaic GPU kernels take bfloat16 and "
            f"float16; {_TAKE_TRITON}"
        )

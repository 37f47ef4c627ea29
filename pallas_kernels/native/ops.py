"""Paged attention and the KV write on CPUs, in C++ through XLA's foreign function interface.

For the letters in shapes see `paged_kv`. The results of a token do not depend on how it was
scheduled: its context is summed in chunks and parts that begin at absolute positions, in ascending
order, and nothing is shared with what stands beside it but the reading of keys and values. Decode
rows and prompt tokens go through the same code, and threads only take whole pieces of it.

All functions work in place where they write (XLA copies a pool only if its old contents are used
again), and raise `Unsupported` while tracing for what the kernels do not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import build
from pallas_kernels.paged_kv import PagedKV, PrefillTiles

TILE = 64
"""Prompt tokens of a tile of the host's tile list. The kernels cut them as they like."""
_WRITE, _ATTENTION, _ATTEND = "jaxpaged_write_kv", "jaxpaged_paged_attention", "jaxpaged_attend"
_FLOATS = tuple(jnp.dtype(name) for name in (jnp.float32, jnp.bfloat16, jnp.float16))
_CACHES_8_BIT = tuple(jnp.dtype(name) for name in (jnp.int8, jnp.float8_e4m3fn, jnp.uint8))


class Unsupported(NotImplementedError):
    """The native kernels do not do this. The message says what."""


def write_kv(kv: PagedKV, k: jax.Array, v: jax.Array | None, slots: jax.Array) -> PagedKV:
    """The cache with `k` [T, K, H] and `v` [T, K, HV] (None in a latent cache) at `slots` i32 [T],
    which are all different; slots out of range are dropped. An 8-bit cache gets them quantised,
    with the bits of `quantize`.
    """
    if kv.v is None or v is None:
        kv, v = PagedKV(kv.k, None, kv.k_scale), None
    _check_types(k.dtype, kv)
    pools = _pools(kv)
    written = _call(
        _WRITE,
        [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        [*pools, *_news(k, v), slots],
        aliases={i: i for i in range(len(pools))},
        values=kv.v is not None,
        scales=kv.quantized,
    )
    return _with_pools(kv, written)


def paged_decode(
    q: jax.Array,
    kv: PagedKV,
    block_tables: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    value_dim: int | None = None,
) -> jax.Array:
    """Attention of one query token a row over its paged context.

    Args: `q` [D, N, H]; `block_tables` i32 [D, M]; `positions` i32 [D], the position of each row's
    token (its context is positions 0..p, already written), -1 for padding rows, which give zeros.
    Returns [D, N, HV] in q's type.
    """
    settings = _settings(kv, block_size, scale, window, soft_cap, value_dim)
    return _attention(q, kv, block_tables, positions, None, settings)


def paged_prefill(
    q: jax.Array,
    kv: PagedKV,
    block_tables: jax.Array,
    tiles: PrefillTiles,
    *,
    tile: int,
    block_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    value_dim: int | None = None,
) -> jax.Array:
    """Causal attention of new tokens over their paged context, which includes themselves (already
    written).

    Args: `q` [P, N, H]; `block_tables` i32 [R, M]; `tiles`, whose size `tile` makes no difference
    here. Returns [P, N, HV] in q's type; tokens that are in no tile give zeros.
    """
    settings = _settings(kv, block_size, scale, window, soft_cap, value_dim)
    return _attention(q, kv, block_tables, None, tiles, settings)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    kv: PagedKV,
    slots: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    tiles: PrefillTiles | None,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    value_dim: int | None = None,
) -> tuple[jax.Array, PagedKV]:
    """`write_kv`, then `paged_decode` for the first tokens of `q` [T, N, H], as many as `positions`
    has, and `paged_prefill` for the others (none if `tiles` is None), in one call: the same bits,
    and fewer calls and copies.
    """
    if kv.v is None or v is None:
        kv, v = PagedKV(kv.k, None, kv.k_scale), None
    settings = _settings(kv, block_size, scale, window, soft_cap, value_dim)
    queries = _queries(q, kv, block_tables, positions, tiles)
    pools = _pools(kv)
    out, *written = _call(
        _ATTEND,
        [_result(q, kv, value_dim), *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools)],
        [*queries, *_news(k, v), slots],
        aliases={2 + i: 1 + i for i in range(len(pools))},
        rows=True,
        tiles=tiles is not None,
        **settings,
    )
    return out, _with_pools(kv, written)


# ------------------------------------------------------------------ calls


def _attention(
    q: jax.Array,
    kv: PagedKV,
    block_tables: jax.Array,
    positions: jax.Array | None,
    tiles: PrefillTiles | None,
    settings: dict[str, Any],
) -> jax.Array:
    (out,) = _call(
        _ATTENTION,
        [_result(q, kv, int(settings["value_dim"]))],
        _queries(q, kv, block_tables, positions, tiles),
        rows=positions is not None,
        tiles=tiles is not None,
        **settings,
    )
    return out


def _call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    arguments: Sequence[jax.Array],
    *,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Sequence[jax.Array]:
    build.load()
    call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    written: Sequence[jax.Array] = call(*arguments, **attributes)
    return written


def _queries(
    q: jax.Array,
    kv: PagedKV,
    block_tables: jax.Array,
    positions: jax.Array | None,
    tiles: PrefillTiles | None,
) -> list[jax.Array]:
    _check_types(q.dtype, kv)
    arguments = [q, block_tables, *_pools(kv)]
    if positions is not None:
        arguments.append(positions)
    if tiles is not None:
        arguments += [tiles.row, tiles.start, tiles.length, tiles.position, tiles.count]
    return arguments


def _settings(
    kv: PagedKV,
    block_size: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    value_dim: int | None,
) -> dict[str, Any]:
    """The attributes of a call; 0 stands for None."""
    return {
        "block_size": np.int64(block_size),
        "scale": np.float64(scale),
        "window": np.int64(window or 0),
        "soft_cap": np.float64(soft_cap or 0.0),
        "value_dim": np.int64(kv.value_dim(value_dim)),
        "values": kv.v is not None,
        "scales": kv.quantized,
    }


def _result(q: jax.Array, kv: PagedKV, value_dim: int | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*q.shape[:2], kv.value_dim(value_dim)), q.dtype)


def _news(k: jax.Array, v: jax.Array | None) -> list[jax.Array]:
    return [k] if v is None else [k, v]


def _pools(kv: PagedKV) -> list[jax.Array]:
    return [pool for pool in (kv.k, kv.v, kv.k_scale, kv.v_scale) if pool is not None]


def _with_pools(kv: PagedKV, pools: Sequence[jax.Array]) -> PagedKV:
    """`kv` with other arrays, in the order of `_pools`."""
    left = iter(pools)

    def following(pool: jax.Array | None) -> jax.Array | None:
        return None if pool is None else next(left)

    return PagedKV(next(left), following(kv.v), following(kv.k_scale), following(kv.v_scale))


def _check_types(dtype: jnp.dtype, kv: PagedKV) -> None:
    """`dtype` of queries or of new keys."""
    dtype, stored = jnp.dtype(dtype), jnp.dtype(kv.k.dtype)
    if dtype not in _FLOATS:
        raise Unsupported(f"queries, keys and values of {dtype}; float32, bfloat16 or float16 are")
    if kv.quantized:
        if stored not in _CACHES_8_BIT:
            raise Unsupported(f"a cache of {stored} with scales; int8 and float8_e4m3fn are")
    elif stored not in (dtype, jnp.dtype(jnp.uint16)) or stored.itemsize != dtype.itemsize:
        raise Unsupported(f"a cache of {stored} for queries, keys and values of {dtype}")

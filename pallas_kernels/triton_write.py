"""New K and V into a paged cache, in Pallas Triton: one kernel for both, in place.

A program takes some tokens of one KV head, so that a row of a pool is written by neighbouring
threads, 16 bytes each. An 8-bit cache gets its rows quantised on the way (see `quantize`): then
nothing but the new rows is read, and nothing of their size is written in between.

For the letters in shapes see `paged_kv`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.paged_kv import PagedKV
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.quantize import quantize
from pallas_kernels.support import MAX_VALUE_DIM_LATENT, check_supported
from pallas_kernels.triton_math import iota, quotient, remainder
from pallas_kernels.tuning import WriteConfig

_Arrays = dict[str, Any]


@dataclass(frozen=True)
class _Plan:
    """What is known of one call when it is traced."""

    tokens: int
    slots: int  # of the cache
    block_size: int  # 1 where a slot's number is its index
    layout: PoolLayout
    config: WriteConfig
    interpret: bool


def write_kv(
    kv: PagedKV,
    k: jax.Array,
    v: jax.Array | None,
    slots: jax.Array,
    *,
    config: WriteConfig,
    layout: PoolLayout = PoolLayout.NHD,
    interpret: bool = False,
) -> PagedKV:
    """The cache with `k` [T, K, H] and `v` [T, K, HV] (None in a latent cache) at `slots` i32 [T];
    slots out of range are dropped, the others have to be all different. Scales of an 8-bit cache
    have the shape of their pools without the last axis.

    The pools are written in place: `kv` has to be donated, or XLA copies it first. The bits are
    those that `reference.write_kv` writes on a CPU.

    Raises NotImplementedError for what `support.check_supported` refuses.
    """
    _check(kv, k, v, layout)
    block_size = kv.k.shape[2] if layout is PoolLayout.HND else 1
    plan = _Plan(
        tokens=k.shape[0],
        slots=kv.k.shape[0] * block_size,
        block_size=block_size,
        layout=layout,
        config=config,
        interpret=interpret,
    )
    new = {"slots": slots, "k": k} | ({} if v is None else {"v": v})
    fields = {"k": kv.k, "v": kv.v, "k_scale": kv.k_scale, "v_scale": kv.v_scale}
    pools = {name: pool for name, pool in fields.items() if pool is not None}
    if plan.tokens:
        pools = _launch(plan, pools, new, heads=k.shape[1])
    return PagedKV(pools["k"], pools.get("v"), pools.get("k_scale"), pools.get("v_scale"))


def _check(kv: PagedKV, k: jax.Array, v: jax.Array | None, layout: PoolLayout) -> None:
    combined = layout is PoolLayout.COMBINED
    assert (v is None) == (kv.v is None and not combined), "V where the cache has a place for it"
    assert v is None or v.dtype == k.dtype
    check_supported(
        k.dtype,
        kv,
        block_size=kv.k.shape[2] if layout is PoolLayout.HND else 1,
        group=1,
        head_dim=k.shape[-1],
        value_dim=min(k.shape[-1], MAX_VALUE_DIM_LATENT),
        layout=layout,
    )


def _launch(
    plan: _Plan, pools: dict[str, jax.Array], new: dict[str, jax.Array], *, heads: int
) -> dict[str, jax.Array]:
    # Arguments are flattened in the order of their names, first the pools and then the rest.
    aliases = {place: place for place in range(len(pools))}
    written: dict[str, jax.Array] = pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape={n: jax.ShapeDtypeStruct(p.shape, p.dtype) for n, p in pools.items()},
        grid=(heads, pl.cdiv(plan.tokens, plan.config.block_tokens)),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=plan.config.num_warps, num_stages=1),
        interpret=plan.interpret,
        name="write_kv",
    )(pools, new)
    return written


def _kernel(plan: _Plan, _: _Arrays, new: _Arrays, pools: _Arrays) -> None:
    head = pl.program_id(0)
    tokens = pl.program_id(1) * plan.config.block_tokens + iota(plan.config.block_tokens)
    exists = tokens < plan.tokens
    slots = plt.load(new["slots"].at[tokens], mask=exists, other=jnp.int32(-1))
    live = (slots >= 0) & (slots < plan.slots)
    # A store that is masked out must not name a row that a live one writes: the interpreter reads
    # rows, changes those that are live, and writes all of them back. Past the end it drops them.
    slots = jnp.where(live, slots, plan.slots)
    for values, name in enumerate(("k", "v")):
        if name not in new:
            continue
        pool = name if name in pools else "k"
        block, offset = quotient(slots, plan.block_size), remainder(slots, plan.block_size)
        index = plan.layout.row_index(
            block, offset, head, block_size=plan.block_size, values=bool(values)
        )
        rows = _load_rows(new[name], tokens, head, exists)
        if pool + "_scale" in pools:
            divide = lax.div if plan.interpret else _divide
            rows, scale = quantize(rows, pools[pool].dtype, divide=divide)
            plt.store(pools[pool + "_scale"].at[index], scale[:, 0], mask=live)
        _store_rows(pools[pool], index, rows, live)


def _load_rows(ref: Any, tokens: jax.Array, head: Any, exists: jax.Array) -> jax.Array:
    """[block_tokens, H padded to a power of two] of one head, zeros in the padding."""
    columns, mask = _columns(ref.shape[-1], exists)
    zero = jnp.zeros((), ref.dtype)
    return plt.load(ref.at[tokens[:, None], head, columns], mask=mask, other=zero)


def _store_rows(ref: Any, index: tuple[Any, ...], rows: jax.Array, live: jax.Array) -> None:
    columns, mask = _columns(ref.shape[-1], live)
    wide = tuple(i[:, None] if jnp.ndim(i) else i for i in index)
    plt.store(ref.at[(*wide, columns)], rows, mask=mask)


def _columns(dim: int, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The last axis [1, padded], and which elements [rows, padded] there are."""
    columns = iota(pl.next_power_of_2(dim))[None, :]
    return columns, jnp.broadcast_to(rows[:, None], (rows.size, columns.size)) & (columns < dim)


def _divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y rounded as IEEE 754 asks; Triton's own division of float32 may be two bits off."""
    (quotient,) = plt.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;",
        args=[x, y],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return quotient

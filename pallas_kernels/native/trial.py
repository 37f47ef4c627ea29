"""One small case with a known result, before a model depends on the kernels.

They were made by whatever compiler there is, and chosen by what the processor says of itself. A
mistake of either should show here, and not in what a model says.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.native import ops
from pallas_kernels.native.toolchain import NativeUnavailable
from pallas_kernels.paged_kv import PagedKV

_HEADS, _KV_HEADS, _DIM = 6, 2, 80
_BLOCK, _BLOCKS = 16, 30
_LENGTHS = (1, 70, 160)
"""Tokens of three sequences, the one that is decoded included."""
_SCALE = 0.1
_TOLERANCE = {4: 1e-4, 2: 3e-2}
"""By the bytes of an element, for values around 1."""

Array = npt.NDArray[Any]


def check(dtype: jnp.dtype) -> None:
    """Let three decode rows write their keys and values into a cache of random ones and attend over
    it, all of them of `dtype`. Raises `NativeUnavailable` if the result is wrong.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    rows, last = len(_LENGTHS), np.array(_LENGTHS, np.int32) - 1
    q = normal(rows, _HEADS, _DIM)
    k, v = normal(_BLOCK * _BLOCKS, _KV_HEADS, _DIM), normal(_BLOCK * _BLOCKS, _KV_HEADS, _DIM)
    tables = rng.permutation(_BLOCKS).reshape(rows, -1).astype(np.int32)
    slots = tables[np.arange(rows), last // _BLOCK] * _BLOCK + last % _BLOCK
    before = [x.copy() for x in (k, v)]
    for pool in before:
        pool[slots] = np.nan
    stored = np.uint16 if dtype.itemsize == 2 else np.float32  # as an engine has them on CPUs
    found = _attend(
        q, k[slots], v[slots], *(pool.view(stored) for pool in before), slots, tables, last
    )
    expected = np.stack([_expected(q[i], k, v, tables[i], _LENGTHS[i]) for i in range(rows)])
    worst = float(np.abs(np.asarray(found, np.float64) - expected).max())
    if not worst <= _TOLERANCE[dtype.itemsize]:  # NaN is wrong, too
        raise NativeUnavailable(
            f"the compiled kernels give wrong results on this machine (off by {worst:.2g} in "
            f"{dtype.name}); please report it, with the processor and the compiler"
        )


@jax.jit
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    slots: jax.Array,
    tables: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    kv = PagedKV(k_pool, v_pool)
    return ops.attend(
        *(q, k, v, kv, slots, tables, positions, None), block_size=_BLOCK, scale=_SCALE
    )[0]


def _expected(q: Array, k: Array, v: Array, table: Array, length: int) -> Array:
    """Attention of one token, in float64: [N, H]."""
    position = np.arange(length)
    slots = table[position // _BLOCK] * _BLOCK + position % _BLOCK
    group = _HEADS // _KV_HEADS
    keys, values = (np.repeat(x[slots].astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("nh,cnh->nc", q.astype(np.float64), keys) * _SCALE
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    result: Array = np.einsum("nc,cnh->nh", weights, values)
    return result

"""The parts of a layer between the attention calls, in C++ (`layers.cc`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import build

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_PRODUCT, _NORM, _ROTATE = "jaxpaged_matrix_product", "jaxpaged_rms_norm", "jaxpaged_rotate"


class Live(Protocol):
    """Rows [0, counts[0]) and [first, first + counts[1]) of an array; the others are padding."""

    @property
    def counts(self) -> jax.Array: ...
    @property
    def first(self) -> int: ...


class NativeRoutines:
    """Fits `jaxpaged.models.routines.Routines`; `build.load` comes first."""

    def __init__(self) -> None:
        self._multiplies = build.multiplies()

    def product(
        self,
        x: jax.Array,
        weight: jax.Array,
        live: Live | None = None,
        *,
        onto: jax.Array | None = None,
    ) -> jax.Array | None:
        """x [T, E] times a bfloat16 weight [O, E], added to `onto` if that is given: f32 [T, O].
        None for other types, and where the processor has no instructions that do better than XLA.
        """
        if not self._takes(x, weight):
            return None
        out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
        if onto is not None and onto.dtype != jnp.float32:
            return None
        added = () if onto is None else (onto,)
        result: jax.Array = _call(
            _PRODUCT,
            out,
            x,
            weight,
            *added,
            live=live,
            aliases={2: 0} if added else None,  # in its memory, if nobody needs it any more
            gated=False,
            onto=bool(added),
        )
        return result

    def gated_product(
        self, x: jax.Array, weight: jax.Array, activation: str, live: Live | None = None
    ) -> jax.Array | None:
        """x [T, E] times a bfloat16 weight [I, 2, E]; silu of the first times the second of each
        pair: bfloat16 [T, I]. None where `product` is, and for other activations.
        """
        if activation != "silu" or not self._takes(x, weight):
            return None
        out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.bfloat16)
        matrix = weight.reshape(-1, weight.shape[-1])
        result: jax.Array = _call(_PRODUCT, out, x, matrix, live=live, gated=True, onto=False)
        return result

    def _takes(self, x: jax.Array, weight: jax.Array) -> bool:
        if not self._multiplies or weight.dtype != jnp.bfloat16:
            return False
        return x.dtype in (jnp.float32, jnp.bfloat16)

    def rms_norm(
        self,
        x: jax.Array,
        weight: jax.Array,
        *,
        eps: float,
        offset: float,
        live: Live | None = None,
    ) -> jax.Array | None:
        """f32 [T, E] over its root mean square, times `offset` + `weight` [E]: f32 [T, E]."""
        if x.dtype != jnp.float32 or weight.dtype not in _FLOATS:
            return None
        out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        scalars: dict[str, Any] = {"eps": np.float32(eps), "offset": np.float32(offset)}
        result: jax.Array = _call(_NORM, out, x, weight, live=live, **scalars)
        return result

    def rotate(
        self, qkv: jax.Array, table: jax.Array, dtype: jax.typing.DTypeLike, live: Live | None
    ) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """Queries [T, K * G, H], keys and values [T, K, H] of `dtype` from f32 [T, K, G + 2, H].
        The first D elements of queries and keys are turned by pairs (i, i + D / 2) with the
        cosines and sines of `table` f32 [2, T, D / 2].
        """
        if qkv.dtype != jnp.float32 or table.dtype != jnp.float32 or dtype not in _FLOATS:
            return None
        tokens, heads, group, dim = qkv.shape
        keys = jax.ShapeDtypeStruct((tokens, heads, dim), dtype)
        queries = jax.ShapeDtypeStruct((tokens, heads * (group - 2), dim), dtype)
        q, k, v = _call(_ROTATE, (queries, keys, keys), qkv, table, live=live)
        return q, k, v


def _call(
    target: str,
    results: Any,
    *arguments: jax.Array,
    live: Live | None,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Any:
    """Without `live` all rows are."""
    rows = arguments[0].shape[0]
    counts = jnp.array([rows, 0], jnp.int32) if live is None else live.counts
    first = np.int64(rows if live is None else live.first)
    call: Callable[..., Any] = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    return call(*arguments, counts, first=first, **attributes)

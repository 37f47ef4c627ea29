"""The parts of a layer between the attention calls, in C++ (`layers.cc`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import build

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


class NativeRoutines:
    """Fits `jaxpaged.models.routines.Routines`; `build.load` comes first."""

    def __init__(self) -> None:
        self._multiplies = build.multiplies()

    def product(self, x: jax.Array, weight: jax.Array) -> jax.Array | None:
        """x [T, E] times a bfloat16 weight [O, E]: f32 [T, O]. None for other types, and where the
        processor has no instructions that do better than XLA.
        """
        if not self._multiplies or weight.dtype != jnp.bfloat16:
            return None
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return None
        out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
        result: jax.Array = jax.ffi.ffi_call("jaxpaged_matrix_product", out)(x, weight)
        return result

    def rms_norm(
        self, x: jax.Array, weight: jax.Array, *, eps: float, offset: float
    ) -> jax.Array | None:
        """f32 [T, E] over its root mean square, times `offset` + `weight` [E]: f32 [T, E]."""
        if x.dtype != jnp.float32 or weight.dtype not in _FLOATS:
            return None
        out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        call = jax.ffi.ffi_call("jaxpaged_rms_norm", out)
        result: jax.Array = call(x, weight, eps=np.float32(eps), offset=np.float32(offset))
        return result

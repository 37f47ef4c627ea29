"""What inner loops of the Triton kernels are made of: masked loads, conversions of 8-bit caches,
matrix products, and the softmax's exponentials, in as few instructions as the GPU allows.
"""

from __future__ import annotations

import struct
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt


def load(at: Any, mask: jax.Array | None, policy: str | None = None) -> jax.Array:
    """Zeros where masked. (An `other` of Python's 0 fails for 8-bit floats.)"""
    if mask is None:
        return plt.load(at, eviction_policy=policy)
    return plt.load(at, mask=mask, other=jnp.zeros((), at.dtype), eviction_policy=policy)


def converted(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """8-bit floats go to bfloat16 by way of float32: float16, which is what the compiler takes, has
    no fast conversion to bfloat16 (Hopper: 16 a cycle and multiprocessor).
    """
    if x.dtype == jnp.float8_e4m3fn and dtype == jnp.bfloat16:
        return x.astype(jnp.float32).astype(dtype)
    return x.astype(dtype)


def weights_dtype(queries: jnp.dtype, *, quantized: bool) -> jnp.dtype:
    """Of the softmax weights in their product with the values. Those of an 8-bit cache have the
    scales of the values in them, too small for float16; both 8-bit types are exact in bfloat16.
    """
    float16 = jnp.dtype(queries) == jnp.float16
    return jnp.dtype(jnp.bfloat16) if quantized and float16 else jnp.dtype(queries)


def iota(size: int) -> jax.Array:
    """i32 [size], whatever JAX's integers are by default."""
    return jnp.arange(size, dtype=jnp.int32)


def quotient(x: Any, by: int) -> Any:
    """x // by for an i32 x >= 0, whatever JAX's integers are by default."""
    return lax.div(x, jnp.int32(by))


def remainder(x: Any, by: int) -> Any:
    """x % by for an i32 x >= 0, whatever JAX's integers are by default."""
    return lax.rem(x, jnp.int32(by))


def weights(scores: jax.Array, factor: float, top: jax.Array, *, interpret: bool) -> jax.Array:
    """2 ** (scores x factor - top).

    In PTX: this is most of what the loop does beside the matrix products, and XLA would make six
    instructions of it: it does not fuse the product with the difference, and its exp2 is also right
    for results below 2**-126, which are 0 here.
    """
    if interpret:
        return jnp.exp2(scores * factor - top)
    return _ptx(
        f"fma.rn.ftz.f32 t, $1, {_literal(factor)}, $2; ex2.approx.ftz.f32 $0, t;",
        *(scores, jnp.broadcast_to(-top, scores.shape)),
    )


def squashed(scores: jax.Array, factor: float, *, interpret: bool) -> jax.Array:
    """-1 / (1 + 2 ** (scores x factor)).

    With a factor of 2 log2(e), twice that and 1 are tanh. A softmax does not see the 1, and
    this is a third of the instructions; the approximate tanh of the hardware errs by 2**-11, which
    a soft cap would multiply.
    """
    if interpret:
        return -1.0 / (1.0 + jnp.exp2(scores * factor))
    return _ptx(
        f"mul.rn.ftz.f32 t, $1, {_literal(factor)}; ex2.approx.ftz.f32 t, t; "
        f"add.rn.ftz.f32 t, t, {_literal(1.0)}; rcp.approx.ftz.f32 t, t; neg.ftz.f32 $0, t;",
        scores,
    )


def _ptx(lines: str, *args: jax.Array) -> jax.Array:
    """Element by element of f32 arrays of one shape; $0 is the result, `t` a register."""
    (result,) = plt.elementwise_inline_asm(
        f"{{ .reg .f32 t; {lines} }}",
        args=args,
        constraints=",".join(["=f", *("f" for _ in args)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return result


def _literal(value: float) -> str:
    """As PTX writes a float32."""
    return "0f" + struct.pack(">f", value).hex()


def dot(a: jax.Array, b: jax.Array, axis: int, *, interpret: bool) -> jax.Array:
    """f32 product over a's last axis and b's axis `axis`."""
    precision = None
    if a.dtype == jnp.float32 and not interpret:
        # On tensor cores, which have no float32: three products of TF32 come close to it.
        precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )

"""Layers that the model families share, in Flax NNX.

Legend: `T` tokens of a step (all sequences side by side), `E` hidden size, `K` KV heads, `G` query
heads per KV head, `H` head_dim, `I` MLP width, `V` vocabulary. Weights are stored [out, in] and
contracted on the last axis, the layout of Hugging Face checkpoints and the one XLA:CPU multiplies
fastest. Every matmul accumulates in float32 and rounds once; the residual stream and all
elementwise work stay in float32.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax import lax

from jaxpaged.models.config import RopeConfig

LayerKV = tuple[jax.Array, jax.Array]
"""K and V pool of one layer, each [slots, K, H]."""


class Attend(Protocol):
    """Writes new K/V into the pools and attends over the paged context. Given by the runner."""

    def __call__(
        self,
        q: jax.Array,  # [T, N, H]
        k: jax.Array,  # [T, K, H]
        v: jax.Array,  # [T, K, H]
        layer_kv: LayerKV,
        meta: Any,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[jax.Array, LayerKV]: ...


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[T, E] x [..., E] -> f32 [T, ...]. Inputs are rounded to the weight's type first.

    The product is taken with the weight as a matrix. Given more axes, XLA:CPU transposes the whole
    weight in every call, and gives a token other bits with more than 32 beside it than with fewer.
    """
    product = lax.dot_general(
        x.astype(weight.dtype),
        weight.reshape(-1, weight.shape[-1]),
        (((1,), (1,)), ((), ())),
        # float32 weights mean float32 products: TF32 would lose 13 bits on GPUs.
        precision="highest" if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return product.reshape(x.shape[0], *weight.shape[:-1])


def mean_of_squares(x: jax.Array) -> jax.Array:
    """f32 [T, E] -> [T, 1], as a matmul with ones: XLA:CPU sums `reduce` in an order that depends
    on T, and a token's bits must not depend on what it is batched with.
    """
    ones = jnp.ones((8, x.shape[-1]), jnp.float32)
    return matmul(x * x, ones)[:, :1] / x.shape[-1]


def param(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param[jax.Array]:
    """A parameter. Modules are built under `nnx.eval_shape`, so nothing is allocated."""
    return nnx.Param(jnp.zeros(shape, dtype))


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich, 2019), in float32."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = param((size,), dtype)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        normed = x * lax.rsqrt(mean_of_squares(x) + self.eps)
        return normed * self.weight[...].astype(jnp.float32)[None, :]


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one weight [I, 2, E].

    In this order a slice of I is a slice of the matrix [2 I, E] that `matmul` sees, so that
    sharding over I stays local.
    """

    def __init__(self, hidden: int, width: int, dtype: jnp.dtype) -> None:
        self.gate_up = param((width, 2, hidden), dtype)
        self.down = param((hidden, width), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = matmul(x, self.gate_up[...])  # [T, I, 2]
        return matmul(jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1], self.down[...])


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions over a paged KV cache.

    `qkv` is [K, G + 2, H, E]: the query heads of a group, then its K and its V, so that sharding
    over KV heads never cuts across a group.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: jnp.dtype,
        *,
        window: int | None = None,
    ) -> None:
        self.group = num_heads // num_kv_heads
        self.qkv = param((num_kv_heads, self.group + 2, head_dim, hidden), dtype)
        self.out = param((hidden, num_heads * head_dim), dtype)
        self.window = window

    def __call__(
        self, x: jax.Array, rope: jax.Array, layer_kv: LayerKV, meta: Any, attend: Attend
    ) -> tuple[jax.Array, LayerKV]:
        weight = self.qkv[...]
        tokens, (kv_heads, _, dim, _) = x.shape[0], weight.shape
        qkv = matmul(x, weight)  # [T, K, G + 2, H]
        turned = apply_rope(qkv[:, :, : self.group + 1], rope).astype(weight.dtype)
        out, layer_kv = attend(
            turned[:, :, : self.group].reshape(tokens, kv_heads * self.group, dim),
            turned[:, :, self.group],
            qkv[:, :, self.group + 1].astype(weight.dtype),
            layer_kv,
            meta,
            scale=1.0 / math.sqrt(dim),
            window=self.window,
            soft_cap=None,
        )
        return matmul(out.reshape(tokens, -1), self.out[...]), layer_kv


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float32]:
    """f32 [H / 2] radians per position. llama3 scaling: the Llama 3.1 release's rule, as
    transformers does it.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    freqs = (np.float32(1.0) / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "linear":
        return freqs / np.float32(rope.factor)
    if rope.kind == "llama3":
        wavelength = np.float32(2 * math.pi) / freqs
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        span = rope.high_freq_factor - rope.low_freq_factor
        smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / span
        blended = (1 - smooth) * freqs / rope.factor + smooth * freqs
        freqs = np.where(wavelength > low, freqs / rope.factor, freqs)
        between = (wavelength <= low) & (wavelength >= high)
        return np.where(between, blended, freqs).astype(np.float32)
    assert rope.kind == "default", rope.kind
    return freqs


def rope_table(positions: jax.Array, freqs: npt.NDArray[np.float32]) -> jax.Array:
    """f32 [2, T, H / 2]: cosines and sines. Computed once a step; every layer uses it."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(freqs)[None, :]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def apply_rope(x: jax.Array, rope: jax.Array) -> jax.Array:
    """Rotate f32 [T, A, B, H] by pairs (i, i + H/2) (Su et al., 2021, in the half-split layout)."""
    cos, sin = rope[0][:, None, None, :], rope[1][:, None, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

"""Layers that the model families share, in Flax NNX.

Legend: `T` tokens of a step (all sequences side by side), `E` hidden size, `K` KV heads, `G` query
heads per KV head, `H` head_dim, `I` MLP width, `V` vocabulary. Weights are stored [out, in] and
contracted on the last axis, the layout of Hugging Face checkpoints and the one XLA:CPU multiplies
fastest. Every matmul accumulates in float32 and rounds once; the residual stream and all
elementwise work stay in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.order import order_in_force
from jaxpaged.models.parallel import all_sum
from jaxpaged.models.rope import apply_rope
from jaxpaged.models.routines import live_among, routines_in_force
from jaxpaged.models.sources import GroupedQKV, Interleaved, ParamSource, Tensor, whole

LayerKV = Any
"""The cache of one layer, as the runner keeps it; models hand it on."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
"""By their names in Hugging Face configs."""


class Attend(Protocol):
    """Writes new K/V into the pools and attends over the paged context. Given by the runner."""

    def __call__(
        self,
        q: jax.Array,  # [T, N, H]
        k: jax.Array,  # [T, K, H]
        v: jax.Array | None,  # [T, K, H]; None: the first `value_dim` elements of k
        layer_kv: LayerKV,
        meta: Any,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        value_dim: int | None = None,
    ) -> tuple[jax.Array, LayerKV]: ...


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[T, E] x [..., E] -> f32 [T, ...]. Inputs are rounded to the weight's type first.

    The product is taken with the weight as a matrix. Given more axes, XLA:CPU transposes the whole
    weight in every call, and gives a token other bits with more than 32 beside it than with fewer.
    """
    matrix = weight.reshape(-1, weight.shape[-1])
    order = order_in_force()
    if order is not None:
        fixed = order.product(x.astype(weight.dtype)[:, None], matrix[None])
        return fixed.reshape(x.shape[0], *weight.shape[:-1])
    own = routines_in_force().product(x, matrix, live_among(x.shape[0]))
    if own is not None:
        return own.reshape(x.shape[0], *weight.shape[:-1])
    product = lax.dot_general(
        x.astype(weight.dtype),
        matrix,
        (((1,), (1,)), ((), ())),
        # float32 weights mean float32 products: TF32 would lose 13 bits on GPUs.
        precision="highest" if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return product.reshape(x.shape[0], *weight.shape[:-1])


def project(
    x: jax.Array,
    weight: jax.Array,
    devices: int,
    *,
    bias: jax.Array | None = None,
    onto: jax.Array | None = None,
) -> jax.Array:
    """`matmul` [T, I] x [E, I] summed over the devices, and once `bias` [E] and `onto` f32 [T, E],
    the residual stream, added to it.
    """
    if onto is not None and bias is None and devices == 1 and order_in_force() is None:
        own = routines_in_force().product(x, weight, live_among(x.shape[0]), onto=onto)
        if own is not None:
            return own
    out = all_sum(matmul(x, weight), devices)
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None]
    return out if onto is None else onto + out


def mean(x: jax.Array) -> jax.Array:
    """f32 [T, E] -> [T, 1], as a matmul with ones: XLA:CPU sums `reduce` in an order that depends
    on T, and a token's bits must not depend on what it is batched with.
    """
    order = order_in_force()
    if order is not None:
        return order.row_sums(x) / x.shape[-1]
    ones = jnp.ones((8, x.shape[-1]), jnp.float32)
    return matmul(x, ones)[:, :1] / x.shape[-1]


def mean_of_squares(x: jax.Array) -> jax.Array:
    """f32 [T, E] -> [T, 1]."""
    return mean(x * x)


def param(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param[jax.Array]:
    """A parameter. Modules are built under `nnx.eval_shape`, so nothing is allocated."""
    return nnx.Param(jnp.zeros(shape, dtype))


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis (Zhang and Sennrich, 2019), in float32.

    `unit_offset`: the stored weight is the deviation from 1 (Gemma).
    """

    def __init__(
        self, size: int, eps: float, dtype: jnp.dtype, *, unit_offset: bool = False
    ) -> None:
        self.weight = param((size,), dtype)
        self.eps = eps
        self.unit_offset = unit_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
        offset = 1.0 if self.unit_offset else 0.0
        if order_in_force() is None:
            own = routines_in_force().rms_norm(
                rows,
                self.weight[...],
                eps=self.eps,
                offset=offset,
                live=live_among(rows.shape[0]),
            )
            if own is not None:
                return own.reshape(x.shape)
        weight = self.weight[...].astype(jnp.float32)
        if self.unit_offset:
            weight = weight + 1.0
        normed = rows * lax.rsqrt(mean_of_squares(rows) + self.eps) * weight[None, :]
        return normed.reshape(x.shape)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis of f32 [T, E] (Ba et al., 2016), in float32.

    Without `affine` it has no parameters.
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, *, affine: bool = True) -> None:
        self.weight = param((size,), dtype) if affine else None
        self.bias = param((size,), dtype) if affine else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        centred = x - mean(x)
        normed = centred * lax.rsqrt(mean_of_squares(centred) + self.eps)
        if self.weight is None or self.bias is None:
            return normed
        weight, bias = (p[...].astype(jnp.float32)[None, :] for p in (self.weight, self.bias))
        return normed * weight + bias

    @staticmethod
    def sources(prefix: str, size: int, *, affine: bool = True) -> dict[str, ParamSource]:
        """From the tensors `prefix`.weight and .bias."""
        return {n: whole(f"{prefix}.{n}", (size,)) for n in ("weight", "bias") if affine}


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x)); gate and up are one weight [I, 2, E].

    In this order a slice of I is a slice of the matrix [2 I, E] that `matmul` sees, so that
    sharding over I stays local. With `reduce` off the result is this device's part of the sum.
    `bias`: all three projections have one; that of `down` is added once, after the sum.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        *,
        width: int | None = None,
        activation: str = "silu",
        bias: bool = False,
        reduce: bool = True,
    ) -> None:
        assert reduce or not bias, "a bias cannot be added to a part of a sum"
        width = config.padded(config.intermediate_size if width is None else width)
        self.gate_up = param((width, 2, config.hidden_size), dtype)
        self.gate_up_bias = param((width, 2), dtype) if bias else None
        self.down = param((config.hidden_size, width), dtype)
        self.down_bias = param((config.hidden_size,), dtype) if bias else None
        self.activation = activation
        self.devices = config.tensor_parallel if reduce else 1

    def __call__(self, x: jax.Array, onto: jax.Array | None = None) -> jax.Array:
        """f32 [T, E], added to `onto` if that is given."""
        bias = None if self.down_bias is None else self.down_bias[...]
        return project(self._passed(x), self.down[...], self.devices, bias=bias, onto=onto)

    def _passed(self, x: jax.Array) -> jax.Array:
        """What the gates let pass: [T, I]."""
        weight = self.gate_up[...]
        if self.gate_up_bias is None and order_in_force() is None:
            own = routines_in_force().gated_product(
                x, weight, self.activation, live_among(x.shape[0])
            )
            if own is not None:
                return own
        gate_up = matmul(x, weight)  # [T, I, 2]
        if self.gate_up_bias is not None:
            gate_up = gate_up + self.gate_up_bias[...].astype(jnp.float32)[None]
        return ACTIVATIONS[self.activation](gate_up[:, :, 0]) * gate_up[:, :, 1]

    @staticmethod
    def sources(
        config: ModelConfig, prefix: str, *, width: int | None = None, bias: bool = False
    ) -> dict[str, ParamSource]:
        """From `gate_proj`, `up_proj` and `down_proj` under `prefix`."""
        width = config.intermediate_size if width is None else width
        hidden = config.hidden_size

        def joined(kind: str, *tail: int) -> tuple[Tensor, ...]:
            return tuple(Tensor(f"{prefix}{n}_proj.{kind}", (width, *tail)) for n in ("gate", "up"))

        sources: dict[str, ParamSource] = {
            "gate_up": Interleaved(
                tensors=joined("weight", hidden), axes=("mlp", "gate_up", "embed")
            ),
            "down": whole(f"{prefix}down_proj.weight", (hidden, width), ("embed", "mlp")),
        }
        if bias:
            sources["gate_up_bias"] = Interleaved(tensors=joined("bias"), axes=("mlp", "gate_up"))
            sources["down_bias"] = whole(f"{prefix}down_proj.bias", (hidden,))
        return sources


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions over a paged KV cache.

    `qkv` is [K, G + 2, H, E]: the query heads of a group, then its K and its V, so that sharding
    over KV heads never cuts across a group. `scale` None is 1 / sqrt(H). `qk_norm` is an RMSNorm
    over each head of q and k before the rotation. `out_bias` is added once, after the sum over
    devices.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        *,
        window: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        norm_unit_offset: bool = False,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        hidden, dim, kv_heads = config.hidden_size, config.head_dim, config.kv_shape.heads
        self.group = config.group_size
        self.qkv = param((kv_heads, self.group + 2, dim, hidden), dtype)
        self.bias = param((kv_heads, self.group + 2, dim), dtype) if qkv_bias else None
        self.out = param((hidden, config.num_heads * dim), dtype)
        self.out_bias = param((hidden,), dtype) if out_bias else None
        if qk_norm:
            self.q_norm = RMSNorm(dim, config.norm_eps, dtype, unit_offset=norm_unit_offset)
            self.k_norm = RMSNorm(dim, config.norm_eps, dtype, unit_offset=norm_unit_offset)
        self.qk_norm = qk_norm
        self.window = window
        self.scale = 1.0 / math.sqrt(dim) if scale is None else scale
        self.soft_cap = soft_cap
        self.devices = config.tensor_parallel

    def __call__(
        self,
        x: jax.Array,
        rope: jax.Array | None,
        layer_kv: LayerKV,
        meta: Any,
        attend: Attend,
        onto: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerKV]:
        """f32 [T, E], added to `onto` if that is given, and the cache. `rope` is the layer's table,
        None where positions are not rotated.
        """
        weight = self.qkv[...]
        tokens = x.shape[0]
        qkv = matmul(x, weight)  # [T, K, G + 2, H]
        if self.bias is not None:
            qkv = qkv + self.bias[...].astype(jnp.float32)[None]
        out, layer_kv = attend(
            *self._turned(qkv, rope, weight.dtype),
            layer_kv,
            meta,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
        )
        bias = None if self.out_bias is None else self.out_bias[...]
        flat = out.reshape(tokens, -1)
        mixed = project(flat, self.out[...], self.devices, bias=bias, onto=onto)
        return mixed, layer_kv

    def _turned(
        self, qkv: jax.Array, rope: jax.Array | None, dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [T, N, H], keys and values [T, K, H] for the cache, from f32 [T, K, G + 2, H]."""
        tokens, kv_heads, _, dim = qkv.shape
        if rope is not None and not self.qk_norm:
            own = routines_in_force().rotate(qkv, rope, dtype, live_among(tokens))
            if own is not None:
                return own
        turned = qkv[:, :, : self.group + 1]
        if self.qk_norm:
            q, k = turned[:, :, : self.group], turned[:, :, self.group :]
            turned = jnp.concatenate([self.q_norm(q), self.k_norm(k)], axis=2)
        if rope is not None:
            turned = apply_rope(turned, rope)
        turned = turned.astype(dtype)
        queries = turned[:, :, : self.group].reshape(tokens, kv_heads * self.group, dim)
        return queries, turned[:, :, self.group], qkv[:, :, self.group + 1].astype(dtype)

    @staticmethod
    def sources(
        config: ModelConfig,
        prefix: str,
        *,
        out: str = "o_proj",
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
    ) -> dict[str, ParamSource]:
        """From `q_proj`, `k_proj`, `v_proj` and `out` under `prefix`, with the options of the
        module.
        """
        hidden, dim = config.hidden_size, config.head_dim
        rows = [n * dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        axes = ("kv_heads", "heads_of_group", "head_dim")

        def joined(kind: str, *tail: int) -> tuple[Tensor, ...]:
            return tuple(
                Tensor(f"{prefix}{n}_proj.{kind}", (count, *tail))
                for n, count in zip("qkv", rows, strict=True)
            )

        sources: dict[str, ParamSource] = {
            "qkv": GroupedQKV(
                tensors=joined("weight", hidden), axes=(*axes, "embed"), repeat=config.kv_repeat
            ),
            "out": whole(f"{prefix}{out}.weight", (hidden, rows[0]), ("embed", "heads")),
        }
        if qkv_bias:
            sources["bias"] = GroupedQKV(tensors=joined("bias"), axes=axes, repeat=config.kv_repeat)
        if out_bias:
            sources["out_bias"] = whole(f"{prefix}{out}.bias", (hidden,))
        if qk_norm:
            sources["q_norm.weight"] = whole(f"{prefix}q_norm.weight", (dim,))
            sources["k_norm.weight"] = whole(f"{prefix}k_norm.weight", (dim,))
        return sources

"""Multi-head latent attention (DeepSeek-V2, 2024): one latent a token in the cache, for all heads.

Legend: `T` tokens of a step, `E` hidden size, `N` query heads, `L` the latent's width
(kv_lora_rank), `R` rotated and `P` other dimensions of a query head, `V` dimensions of a value,
`Q` the width that queries are made from (q_lora_rank, or E).

A head's keys and values are its own projections of the latent, which the cache does not hold: the
projection of the keys is applied to the query instead, and that of the values to what attention
makes of the latents. So attention itself has one KV head, with keys [latent, rotated part] of
L + R and values that are their first L elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxpaged.models.config import KVShape, ModelConfig
from jaxpaged.models.layers import Attend, LayerKV, RMSNorm, matmul, param
from jaxpaged.models.order import order_in_force
from jaxpaged.models.parallel import all_sum
from jaxpaged.models.rope import apply_rope, yarn_mscale
from jaxpaged.models.sources import HostArray, Index, ParamSource, ReadSlice, Tensor, whole

_NORM_EPS = 1e-6  # of the norms on latents, whatever the model's other norms have


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(ModelConfig):
    """`head_dim` is the rotated part of a head, R."""

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    """P, the part of a query and key head that is not rotated."""
    value_dim: int
    attention_bias: bool = False
    """On q_a, kv_a and the output."""
    rope_interleave: bool = True
    """The checkpoint rotates pairs (2i, 2i + 1) and not (i, i + R/2)."""

    @property
    def kv_shape(self) -> KVShape:
        """Every device has the whole cache."""
        return KVShape(1, self.kv_lora_rank + self.head_dim, self.kv_lora_rank, latent=True)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.tensor_parallel

    def splits_into(self, devices: int) -> bool:
        return self.num_heads % devices == 0

    @property
    def attention_scale(self) -> float:
        """1 / sqrt(P + R), times yarn's temperature where the rotation does not have all of it."""
        growth = yarn_mscale(self.rope.factor, self.rope.mscale_all_dim)
        return float((self.nope_dim + self.head_dim) ** -0.5 * growth**2)


def head_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[T, N, I] x [N, O, I] -> f32 [T, N, O]: each head with its own matrix. Inputs are rounded to
    the weight's type first.

    With the weights contracted on their last axis XLA:CPU gives a token the same bits beside any
    number of others (8 to 1,056 tried); contracted on the middle one, other bits from 40 on.
    """
    if weight.shape[0] == 1:  # one matrix product, which XLA:CPU splits by the rows otherwise
        return matmul(x[:, 0], weight[0])[:, None]
    order = order_in_force()
    if order is not None:
        return order.product(x.astype(weight.dtype), weight)
    product = lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((2,), (2,)), ((1,), (0,))),
        precision="highest" if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return product.transpose(1, 0, 2)


class LatentAttention(nnx.Module):
    """Attention over a latent cache. Queries and their heads are cut over the devices; the latent
    is made, and kept, on each of them.
    """

    def __init__(self, config: LatentConfig, dtype: jnp.dtype) -> None:
        hidden, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
        rank, biased = config.q_lora_rank, config.attention_bias
        if rank is not None:
            self.q_a = param((rank, hidden), dtype)
            self.q_a_bias = param((rank,), dtype) if biased else None
            self.q_norm = RMSNorm(rank, _NORM_EPS, dtype)
        query, joined = config.nope_dim + config.head_dim, latent + config.head_dim
        self.q = param((heads, query, hidden if rank is None else rank), dtype)
        self.kv_a = param((1, joined, hidden), dtype)
        self.kv_a_bias = param((1, joined), dtype) if biased else None
        self.kv_norm = RMSNorm(latent, _NORM_EPS, dtype)
        self.key_up = param((heads, latent, config.nope_dim), dtype)
        self.value_up = param((heads, config.value_dim, latent), dtype)
        self.out = param((hidden, heads * config.value_dim), dtype)
        self.out_bias = param((hidden,), dtype) if biased else None
        self.low_rank_q = rank is not None
        self.scale = config.attention_scale
        self.devices = config.tensor_parallel

    def __call__(
        self, x: jax.Array, rope: jax.Array, layer_kv: LayerKV, meta: Any, attend: Attend
    ) -> tuple[jax.Array, LayerKV]:
        key_up, value_up = self.key_up[...], self.value_up[...]
        latent, nope = key_up.shape[1:]
        q = matmul(self._queries(x), self.q[...])  # [T, N, P + R]
        kv = matmul(x, self.kv_a[...])  # [T, 1, L + R]
        if self.kv_a_bias is not None:
            kv = kv + self.kv_a_bias[...].astype(jnp.float32)[None]
        q = jnp.concatenate([head_matmul(q[..., :nope], key_up), _turn(q[..., nope:], rope)], -1)
        k = jnp.concatenate([self.kv_norm(kv[..., :latent]), _turn(kv[..., latent:], rope)], -1)
        out, layer_kv = attend(
            q.astype(key_up.dtype),
            k.astype(key_up.dtype),
            None,
            layer_kv,
            meta,
            scale=self.scale,
            window=None,
            soft_cap=None,
            value_dim=latent,
        )  # [T, N, L]
        values = head_matmul(out, value_up).reshape(x.shape[0], -1)
        mixed = all_sum(matmul(values, self.out[...]), self.devices)
        if self.out_bias is not None:
            mixed = mixed + self.out_bias[...].astype(jnp.float32)[None]
        return mixed, layer_kv

    def _queries(self, x: jax.Array) -> jax.Array:
        """What the queries are made from: f32 [T, Q]."""
        if not self.low_rank_q:
            return x
        low = matmul(x, self.q_a[...])
        if self.q_a_bias is not None:
            low = low + self.q_a_bias[...].astype(jnp.float32)[None]
        return self.q_norm(low)

    @staticmethod
    def sources(config: LatentConfig, prefix: str) -> dict[str, ParamSource]:
        """From the tensors under `prefix`, with their names in DeepSeek's checkpoints."""
        hidden, heads, rank = config.hidden_size, config.num_heads, config.q_lora_rank
        latent, nope, value = config.kv_lora_rank, config.nope_dim, config.value_dim
        query, joined, pair = nope + config.head_dim, latent + config.head_dim, nope + value
        kv_a = f"{prefix}kv_a_proj_with_mqa"
        q_order, kv_order = (_rope_order(config, first) for first in (nope, latent))
        kv_b = (Tensor(f"{prefix}kv_b_proj.weight", (heads * pair, latent)),)
        q_name, width = ("q_proj", hidden) if rank is None else ("q_b_proj", rank)
        sources: dict[str, ParamSource] = {
            "q": HeadRows(
                tensors=(Tensor(f"{prefix}{q_name}.weight", (heads * query, width)),),
                axes=("heads", "head_dim", "embed"),
                rows=q_order,
            ),
            "kv_a": HeadRows(tensors=(Tensor(f"{kv_a}.weight", (joined, hidden)),), rows=kv_order),
            "kv_norm.weight": whole(f"{prefix}kv_a_layernorm.weight", (latent,)),
            "key_up": HeadRows(
                tensors=kv_b,
                axes=("heads", "latent", "head_dim"),
                rows=tuple(range(nope)),
                stored=pair,
                transposed=True,
            ),
            "value_up": HeadRows(
                tensors=kv_b,
                axes=("heads", "head_dim", "latent"),
                rows=tuple(range(nope, pair)),
                stored=pair,
            ),
            "out": whole(f"{prefix}o_proj.weight", (hidden, heads * value), ("embed", "heads")),
        }
        if rank is not None:
            sources["q_a"] = whole(f"{prefix}q_a_proj.weight", (rank, hidden))
            sources["q_norm.weight"] = whole(f"{prefix}q_a_layernorm.weight", (rank,))
        if config.attention_bias:
            if rank is not None:
                sources["q_a_bias"] = whole(f"{prefix}q_a_proj.bias", (rank,))
            sources["kv_a_bias"] = HeadRows(
                tensors=(Tensor(f"{kv_a}.bias", (joined,)),), rows=kv_order
            )
            sources["out_bias"] = whole(f"{prefix}o_proj.bias", (hidden,))
        return sources


def _turn(x: jax.Array, rope: jax.Array) -> jax.Array:
    """Rotate all of f32 [T, A, R]."""
    return apply_rope(x[:, :, None], rope)[:, :, 0]


def _rope_order(config: LatentConfig, first: int) -> tuple[int, ...]:
    """Rows of a projection whose last R are rotated, from `first` on, so that pairs stand half of R
    apart. Queries and keys are turned around alike, so their products stay.
    """
    dim = config.head_dim
    pairs = [*range(0, dim, 2), *range(1, dim, 2)] if config.rope_interleave else range(dim)
    return (*range(first), *(first + i for i in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows(ParamSource):
    """For each head, some rows of its part of one tensor: [N S, ...] as [N, len(rows), ...].

    `rows` are those of one head, in the order of the parameter; S is `stored`, or 0 if every row
    is among them. `transposed`: the last two axes of the parameter change places.
    """

    rows: tuple[int, ...]
    stored: int = 0
    transposed: bool = False

    def fill(self, out: HostArray, read: ReadSlice, shape: tuple[int, ...], index: Index) -> None:
        heads, *rest = (*index, *(slice(None),) * (len(shape) - len(index)))
        start, stop, _ = heads.indices(shape[0])
        (tensor,) = self.tensors
        size = self.stored or len(self.rows)
        found = tensor.read(read, (slice(start * size, stop * size),))
        picked = found.reshape(stop - start, size, *found.shape[1:])[:, np.asarray(self.rows)]
        if self.transposed:
            picked = picked.swapaxes(1, 2)
        out[...] = picked[(slice(None), *rest)]

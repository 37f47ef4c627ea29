"""What every model family gives the engine: modules to run, and where each parameter comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import (
    Attend,
    LayerKV,
    RMSNorm,
    inverse_frequencies,
    matmul,
    param,
    rope_table,
)
from jaxpaged.sharding import LogicalAxes

HostArray = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class ParamSource:
    """The checkpoint tensors that make one parameter.

    `join`: None takes one tensor as it is, "interleave" stacks several matrices on a new second
    axis, "qkv" interleaves the three projections into [K, G + 2, H, E]. `axes` are the parameter's
    logical axes; None is replicated.
    """

    names: tuple[str, ...]
    join: str | None = None
    axes: LogicalAxes | None = None

    def tensor_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes the tensors must have so that they make a parameter of this shape."""
        if self.join is None:
            return [shape]
        if self.join == "interleave":
            return [(shape[0], *shape[2:])] * len(self.names)
        assert self.join == "qkv", self.join
        kv_heads, slots, dim, hidden = shape
        return [(kv_heads * n * dim, hidden) for n in (slots - 2, 1, 1)]

    def assemble(self, tensors: Sequence[HostArray], shape: tuple[int, ...]) -> HostArray:
        if self.join is None:
            return tensors[0]
        if self.join == "interleave":
            return np.stack(tensors, axis=1)
        kv_heads, _, dim, hidden = shape
        parts = [t.reshape(kv_heads, -1, dim, hidden) for t in tensors]
        return np.concatenate(parts, axis=1)


class DecoderLayer(nnx.Module):
    """One layer: f32 [T, E] in and out, plus its KV pools."""

    def __call__(
        self, x: jax.Array, rope: jax.Array, layer_kv: LayerKV, meta: Any, attend: Attend
    ) -> tuple[jax.Array, LayerKV]:
        raise NotImplementedError("each family defines its layer")


class CausalLM(nnx.Module):
    """A decoder-only language model. Subclasses add `layers` and `layer_sources`."""

    layers: nnx.List[DecoderLayer]

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.embedding = param((config.vocab_size, config.hidden_size), dtype)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        if not config.tie_embeddings:
            self.head = param((config.vocab_size, config.hidden_size), dtype)
        self.tied = config.tie_embeddings
        self.rope = config.rope
        self.head_dim = config.head_dim

    def embed(self, tokens: jax.Array) -> jax.Array:
        """i32 [T] -> f32 [T, E]."""
        return jnp.take(self.embedding[...], tokens, axis=0, mode="clip").astype(jnp.float32)

    def rope_table(self, positions: jax.Array) -> jax.Array:
        return rope_table(positions, inverse_frequencies(self.rope, self.head_dim))

    def logits(self, x: jax.Array) -> jax.Array:
        """f32 [R, E] after the last layer -> f32 [R, V]."""
        weight = self.embedding if self.tied else self.head
        return matmul(self.norm(x), weight[...])

    @staticmethod
    def layer_sources(config: ModelConfig, index: int) -> dict[str, ParamSource]:
        """Parameter path within layer `index` -> source."""
        raise NotImplementedError("each family names its tensors")

    @classmethod
    def sources(cls, config: ModelConfig) -> dict[str, ParamSource]:
        """Parameter path -> source, for the whole model."""
        sources = {
            "embedding": ParamSource(("model.embed_tokens.weight",), axes=("vocab", "embed")),
            "norm.weight": ParamSource(("model.norm.weight",)),
        }
        if not config.tie_embeddings:
            sources["head"] = ParamSource(("lm_head.weight",), axes=("vocab", "embed"))
        for index in range(config.num_layers):
            for path, source in cls.layer_sources(config, index).items():
                sources[f"layers.{index}.{path}"] = source
        return sources

    @classmethod
    def ignorable(cls, config: ModelConfig, name: str) -> bool:
        """Checkpoint tensors that carry nothing the model lacks."""
        return name.endswith("rotary_emb.inv_freq") or (
            config.tie_embeddings and name == "lm_head.weight"
        )

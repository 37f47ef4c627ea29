"""What every model family gives the engine: modules to run, and where each parameter comes from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import Attend, LayerKV, RMSNorm, matmul, param
from jaxpaged.models.parallel import all_columns, look_up
from jaxpaged.models.rope import rope_table
from jaxpaged.models.sources import ParamSource, whole

RopeTables = Any
"""What `CausalLM.rope_tables` computes once a step and every layer is given."""


class DecoderLayer(nnx.Module):
    """One layer: f32 [T, E] in and out, plus its KV pools."""

    def __call__(
        self, x: jax.Array, rope: RopeTables, layer_kv: LayerKV, meta: Any, attend: Attend
    ) -> tuple[jax.Array, LayerKV]:
        raise NotImplementedError("each family defines its layer")


class CausalLM(nnx.Module):
    """A decoder-only language model. Subclasses add `layers` and `layer_sources`.

    Modules are built with the shapes of the whole model, and run on a device's slice of each
    weight: whatever depends on a size takes it from the weight.
    """

    layers: nnx.List[DecoderLayer]

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        rows = config.padded(config.vocab_size)
        self.embedding = param((rows, config.hidden_size), dtype)
        self.norm = self.final_norm(config, dtype)
        if not config.tie_embeddings:
            self.head = param((rows, config.hidden_size), dtype)
        self.tied = config.tie_embeddings
        self.devices = config.tensor_parallel
        self.rope = config.rope
        self.rotary_dim = config.rope.rotary_dim(config.head_dim)

    def final_norm(self, config: ModelConfig, dtype: jnp.dtype) -> nnx.Module:
        return RMSNorm(config.hidden_size, config.norm_eps, dtype)

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """i32 [T] twice -> f32 [T, E]."""
        return look_up(self.embedding[...], tokens, self.devices)

    def rope_tables(self, positions: jax.Array, lengths: jax.Array) -> RopeTables:
        """For i32 [T] positions and lengths (see `rope_table`)."""
        return rope_table(self.rope, self.rotary_dim, positions, lengths)

    def logits(self, x: jax.Array) -> jax.Array:
        """f32 [R, E] after the last layer -> f32 [R, V], V padded to a multiple of the devices."""
        weight = self.embedding if self.tied else self.head
        return all_columns(matmul(self.norm(x), weight[...]), self.devices)

    @staticmethod
    def layer_sources(config: ModelConfig, index: int) -> dict[str, ParamSource]:
        """Parameter path within layer `index` -> source."""
        raise NotImplementedError("each family names its tensors")

    @classmethod
    def outer_sources(cls, config: ModelConfig) -> dict[str, ParamSource]:
        """Parameter path -> source, for what is not in a layer."""
        table, axes = (config.vocab_size, config.hidden_size), ("vocab", "embed")
        sources = {
            "embedding": whole("model.embed_tokens.weight", table, axes),
            "norm.weight": whole("model.norm.weight", (config.hidden_size,)),
        }
        if not config.tie_embeddings:
            sources["head"] = whole("lm_head.weight", table, axes)
        return sources

    @classmethod
    def sources(cls, config: ModelConfig) -> dict[str, ParamSource]:
        """Parameter path -> source, for the whole model."""
        sources = cls.outer_sources(config)
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

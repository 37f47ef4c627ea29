"""OPT (Zhang et al., 2022) and Galactica: learned positions, layer norms, biases, plain MLPs.

opt-350m differs from its siblings: norms come after attention and MLP, and embeddings are narrower
than the layers, with a projection on either side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.errors import ModelLoadError
from jaxpaged.models.base import CausalLM, DecoderLayer, RopeTables
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.config_reader import ConfigReader
from jaxpaged.models.layers import (
    ACTIVATIONS,
    Attend,
    Attention,
    LayerKV,
    LayerNorm,
    matmul,
    param,
)
from jaxpaged.models.parallel import all_columns, all_sum
from jaxpaged.models.rope import NO_ROPE
from jaxpaged.models.sources import ParamSource, under, whole

ARCHITECTURES = ("OPTForCausalLM",)
_FIRST_POSITION = 2
"""The row of position 0: fairseq, which the models were trained with, kept two for padding."""
_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTConfig(ModelConfig):
    embedding_size: int
    """Where it is not hidden_size, the embedding is projected on its way in and out."""
    activation: str
    bias: bool
    norm_first: bool
    final_norm: bool
    affine: bool
    """Norms have weights and biases."""


def read_config(fields: Mapping[str, Any], architecture: str, where: str) -> OPTConfig:
    """Raises `ModelLoadError` for missing or impossible values, `UnsupportedModelError` for others'
    maths.
    """
    reader = ConfigReader(fields, where)
    reader.refuse_other_maths()
    reader.require("activation_function", tuple(ACTIVATIONS))
    hidden, heads = reader.integer("hidden_size"), reader.heads()
    if hidden % heads:
        raise ModelLoadError(
            f"{where}: config hidden_size={hidden} is not a multiple of "
            f"num_attention_heads={heads}."
        )
    norm_first = reader.flag("do_layer_norm_before", default=True)
    return OPTConfig(
        architecture=architecture,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.integer("ffn_dim"),
        num_layers=reader.layers(),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        norm_eps=_NORM_EPS,
        rope=NO_ROPE,
        max_position=reader.integer("max_position_embeddings", 2048),
        tie_embeddings=reader.flag("tie_word_embeddings", default=True),
        embedding_size=reader.integer("word_embed_proj_dim", hidden),
        activation=fields.get("activation_function", "relu"),
        bias=reader.flag("enable_bias", default=True),
        norm_first=norm_first,
        final_norm=norm_first and not reader.flag("_remove_final_layer_norm"),
        affine=reader.flag("layer_norm_elementwise_affine", default=True),
    )


class OPTLayer(DecoderLayer):
    """Attention, then a linear layer either side of an activation, each with a norm."""

    def __init__(self, config: OPTConfig, dtype: jnp.dtype) -> None:
        hidden, width = config.hidden_size, config.padded(config.intermediate_size)
        self.attention_norm = _norm(config, dtype)
        self.attention = Attention(config, dtype, qkv_bias=config.bias, out_bias=config.bias)
        self.mlp_norm = _norm(config, dtype)
        self.up = param((width, hidden), dtype)
        self.up_bias = param((width,), dtype) if config.bias else None
        self.down = param((hidden, width), dtype)
        self.down_bias = param((hidden,), dtype) if config.bias else None
        self.activation = config.activation
        self.norm_first = config.norm_first
        self.devices = config.tensor_parallel

    def __call__(
        self, x: jax.Array, rope: RopeTables, layer_kv: LayerKV, meta: Any, attend: Attend
    ) -> tuple[jax.Array, LayerKV]:
        inner = self.attention_norm(x) if self.norm_first else x
        mixed, layer_kv = self.attention(inner, None, layer_kv, meta, attend)
        x = x + mixed
        if self.norm_first:
            return x + self._mlp(self.mlp_norm(x)), layer_kv
        x = self.attention_norm(x)
        return self.mlp_norm(x + self._mlp(x)), layer_kv

    def _mlp(self, x: jax.Array) -> jax.Array:
        inner = _plus(matmul(x, self.up[...]), self.up_bias)
        out = matmul(ACTIVATIONS[self.activation](inner), self.down[...])
        return _plus(all_sum(out, self.devices), self.down_bias)


class _Unchanged(nnx.Module):
    """In the place of a norm that is not there."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class OPTForCausalLM(CausalLM):
    """Embeddings of tokens and of positions, layers, norm and tied head."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        assert isinstance(config, OPTConfig)
        super().__init__(config, dtype)
        hidden, width = config.hidden_size, config.embedding_size
        rows = config.padded(config.vocab_size)
        self.embedding = param((rows, width), dtype)
        if not config.tie_embeddings:
            self.head = param((rows, width), dtype)
        self.positions = param((config.max_position + _FIRST_POSITION, hidden), dtype)
        self.project_in = param((hidden, width), dtype) if width != hidden else None
        self.project_out = param((width, hidden), dtype) if width != hidden else None
        self.layers = nnx.List([OPTLayer(config, dtype) for _ in range(config.num_layers)])

    def final_norm(self, config: ModelConfig, dtype: jnp.dtype) -> nnx.Module:
        assert isinstance(config, OPTConfig)
        return _norm(config, dtype) if config.final_norm else _Unchanged()

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = super().embed(tokens, positions)
        if self.project_in is not None:
            x = matmul(x, self.project_in[...])
        rows = positions + _FIRST_POSITION
        return x + jnp.take(self.positions[...], rows, axis=0, mode="clip").astype(jnp.float32)

    def rope_tables(self, positions: jax.Array, lengths: jax.Array) -> RopeTables:
        """None: positions are in the embedding."""
        return ()

    def logits(self, x: jax.Array) -> jax.Array:
        x = self.norm(x)
        if self.project_out is not None:
            x = matmul(x, self.project_out[...])
        weight = self.embedding if self.tied else self.head
        return all_columns(matmul(x, weight[...]), self.devices)

    @staticmethod
    def layer_sources(config: ModelConfig, index: int) -> dict[str, ParamSource]:
        assert isinstance(config, OPTConfig)
        prefix, bias = f"model.decoder.layers.{index}.", config.bias
        hidden, width, affine = config.hidden_size, config.intermediate_size, config.affine
        sources = {
            "up": whole(prefix + "fc1.weight", (width, hidden), ("mlp", "embed")),
            "down": whole(prefix + "fc2.weight", (hidden, width), ("embed", "mlp")),
        }
        if bias:
            sources["up_bias"] = whole(prefix + "fc1.bias", (width,), ("mlp",))
            sources["down_bias"] = whole(prefix + "fc2.bias", (hidden,))
        attention = Attention.sources(
            config, prefix + "self_attn.", out="out_proj", qkv_bias=bias, out_bias=bias
        )
        norms = {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
        for path, name in norms.items():
            sources |= under(path, LayerNorm.sources(prefix + name, hidden, affine=affine))
        return sources | under("attention", attention)

    @classmethod
    def outer_sources(cls, config: ModelConfig) -> dict[str, ParamSource]:
        assert isinstance(config, OPTConfig)
        prefix, hidden, width = "model.decoder.", config.hidden_size, config.embedding_size
        table, axes = (config.vocab_size, width), ("vocab", "embed")
        rows = config.max_position + _FIRST_POSITION
        sources = {
            "embedding": whole(prefix + "embed_tokens.weight", table, axes),
            "positions": whole(prefix + "embed_positions.weight", (rows, hidden)),
        }
        if not config.tie_embeddings:
            sources["head"] = whole("lm_head.weight", table, axes)
        if width != hidden:
            sources["project_in"] = whole(prefix + "project_in.weight", (hidden, width))
            sources["project_out"] = whole(prefix + "project_out.weight", (width, hidden))
        if config.final_norm:
            norm = LayerNorm.sources(prefix + "final_layer_norm", hidden, affine=config.affine)
            sources |= under("norm", norm)
        return sources

    @classmethod
    def sources(cls, config: ModelConfig) -> dict[str, ParamSource]:
        """As transformers saves them, or instead without "model." in front, as half of the sizes
        (350M, 6.7B to 30B) were published.
        """
        sources = super().sources(config)
        return {
            path: dataclasses.replace(source, instead=_without_prefix(source))
            for path, source in sources.items()
        }

    @classmethod
    def ignorable(cls, config: ModelConfig, name: str) -> bool:
        return name.endswith("decoder.version") or super().ignorable(config, name)


def _without_prefix(source: ParamSource) -> ParamSource:
    names = [tensor.name.removeprefix("model.") for tensor in source.tensors]
    tensors = [
        dataclasses.replace(tensor, name=name)
        for tensor, name in zip(source.tensors, names, strict=True)
    ]
    return dataclasses.replace(source, tensors=tuple(tensors))


def _norm(config: OPTConfig, dtype: jnp.dtype) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, dtype, affine=config.affine)


def _plus(x: jax.Array, bias: nnx.Param[jax.Array] | None) -> jax.Array:
    return x if bias is None else x + bias[...].astype(jnp.float32)[None, :]

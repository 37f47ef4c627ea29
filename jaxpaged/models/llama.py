"""The Llama family: Llama 2, 3 and 3.x, SmolLM2, DeepSeek-R1-Distill-Llama, Mistral, Ministral."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.base import CausalLM, DecoderLayer, RopeTables
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.config_reader import ConfigReader
from jaxpaged.models.layers import Attend, Attention, GatedMLP, LayerKV, RMSNorm
from jaxpaged.models.rope import read_max_position, read_rope
from jaxpaged.models.sources import ParamSource, under, whole

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM")
_MISTRAL_WINDOW = 4096
_MISTRAL_KV_HEADS = 8
_MAX_POSITION, _MISTRAL_MAX_POSITION = 2048, 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """What families that are Llama in everything else have or lack."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def read_config(fields: Mapping[str, Any], architecture: str, where: str) -> LlamaConfig:
    """Raises `ModelLoadError` for missing or impossible values, `UnsupportedModelError` for others'
    maths.
    """
    reader = ConfigReader(fields, where)
    reader.refuse_other_maths()
    reader.require("hidden_act", ("silu",))
    llama = architecture.startswith("Llama")
    if not llama:
        reader.require("attention_bias", (False, None))
        reader.require("mlp_bias", (False, None))
    dimensions = reader.dimensions(kv_heads=None if llama else _MISTRAL_KV_HEADS)
    # null is no window, left out is the family's default
    window = None if llama else fields.get("sliding_window", _MISTRAL_WINDOW)
    longest = _MAX_POSITION if llama else _MISTRAL_MAX_POSITION
    biased = reader.flag("attention_bias")
    rope = read_rope(reader)
    max_position = read_max_position(reader, rope, longest)
    return LlamaConfig(
        architecture=architecture,
        **dimensions,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=max_position,
        tie_embeddings=reader.flag("tie_word_embeddings"),
        windows=reader.windows_alike(dimensions["num_layers"], window, max_position),
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=reader.flag("mlp_bias"),
    )


class LlamaLayer(DecoderLayer):
    """Pre-norm attention and gated MLP."""

    def __init__(self, config: LlamaConfig, index: int, dtype: jnp.dtype) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.attention = Attention(
            config,
            dtype,
            window=config.layer_windows[index],
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm=config.qk_norm,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = self.feed_forward(config, index, dtype)

    def feed_forward(self, config: LlamaConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
        """What layer `index` has after its attention: f32 [T, E] in and, added to `onto`, out."""
        return GatedMLP(config, dtype, bias=config.mlp_bias)

    def __call__(
        self, x: jax.Array, rope: RopeTables, layer_kv: LayerKV, meta: Any, attend: Attend
    ) -> tuple[jax.Array, LayerKV]:
        normed = self.attention_norm(x)
        x, layer_kv = self.attention(normed, rope, layer_kv, meta, attend, onto=x)
        return self.mlp(self.mlp_norm(x), onto=x), layer_kv


class LlamaForCausalLM(CausalLM):
    """Embedding, layers, norm and (possibly tied) head."""

    layer_type: ClassVar[type[LlamaLayer]] = LlamaLayer

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        assert isinstance(config, LlamaConfig)
        super().__init__(config, dtype)
        layers = range(config.num_layers)
        self.layers = nnx.List([self.layer_type(config, index, dtype) for index in layers])

    @staticmethod
    def layer_sources(config: ModelConfig, index: int) -> dict[str, ParamSource]:
        assert isinstance(config, LlamaConfig)
        prefix, size = f"model.layers.{index}.", (config.hidden_size,)
        attention = Attention.sources(
            config,
            prefix + "self_attn.",
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm=config.qk_norm,
        )
        mlp = GatedMLP.sources(config, prefix + "mlp.", bias=config.mlp_bias)
        return {
            "attention_norm.weight": whole(prefix + "input_layernorm.weight", size),
            "mlp_norm.weight": whole(prefix + "post_attention_layernorm.weight", size),
            **under("attention", attention),
            **under("mlp", mlp),
        }

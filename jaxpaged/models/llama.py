"""The Llama family: Llama 2, 3 and 3.x, SmolLM2, Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.models.base import CausalLM, DecoderLayer, ParamSource
from jaxpaged.models.config import ConfigReader, ModelConfig
from jaxpaged.models.layers import Attend, Attention, GatedMLP, LayerKV, RMSNorm

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_MISTRAL_WINDOW = 4096


def read_config(fields: Mapping[str, Any], architecture: str, where: str) -> ModelConfig:
    """Raises `ModelLoadError` for missing or impossible values, `UnsupportedModelError` for others'
    maths.
    """
    reader = ConfigReader(fields, where)
    reader.refuse_other_maths()
    reader.require("hidden_act", ("silu",))
    reader.require("attention_bias", (False, None))
    reader.require("mlp_bias", (False, None))
    reader.require("pretraining_tp", (1, None))
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelLoadError(
            f"{where}: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={kv_heads}."
        )
    head_dim = reader.head_dim(hidden, heads)
    if head_dim % 2:
        raise ModelLoadError(f"{where}: head_dim={head_dim} must be even for rotary positions.")
    window = None
    if architecture.startswith("Mistral"):  # null is no window, left out is the family's default
        window = fields.get("sliding_window", _MISTRAL_WINDOW)
    kinds = set(fields.get("layer_types") or ())
    if not kinds <= {"full_attention" if window is None else "sliding_attention"}:
        raise UnsupportedModelError(
            f"{where}: config layer_types={sorted(kinds)} with sliding_window={window} is not "
            "supported for this architecture; all layers must attend alike."
        )
    return ModelConfig(
        architecture=architecture,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=reader.rope(),
        max_position=reader.integer("max_position_embeddings", 2048),
        tie_embeddings=reader.flag("tie_word_embeddings"),
        sliding_window=None if window is None else reader.integer("sliding_window", window),
    )


class LlamaLayer(DecoderLayer):
    """Pre-norm attention and gated MLP."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.attention = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            window=config.sliding_window,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype)

    def __call__(
        self, x: jax.Array, rope: jax.Array, layer_kv: LayerKV, meta: Any, attend: Attend
    ) -> tuple[jax.Array, LayerKV]:
        mixed, layer_kv = self.attention(self.attention_norm(x), rope, layer_kv, meta, attend)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), layer_kv


class LlamaForCausalLM(CausalLM):
    """Embedding, layers, norm and (possibly tied) head."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        super().__init__(config, dtype)
        self.layers = nnx.List([LlamaLayer(config, dtype) for _ in range(config.num_layers)])

    @staticmethod
    def layer_sources(config: ModelConfig, index: int) -> dict[str, ParamSource]:
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        return {
            "attention_norm.weight": ParamSource((prefix + "input_layernorm.weight",)),
            "attention.qkv": ParamSource(
                tuple(attention + f"{n}_proj.weight" for n in "qkv"),
                join="qkv",
                axes=("kv_heads", "heads_of_group", "head_dim", "embed"),
            ),
            "attention.out": ParamSource(
                (attention + "o_proj.weight",), axes=("embed", "kv_heads")
            ),
            "mlp_norm.weight": ParamSource((prefix + "post_attention_layernorm.weight",)),
            "mlp.gate_up": ParamSource(
                (prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"),
                join="interleave",
                axes=("mlp", "gate_up", "embed"),
            ),
            "mlp.down": ParamSource((prefix + "mlp.down_proj.weight",), axes=("embed", "mlp")),
        }

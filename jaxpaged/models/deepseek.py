"""DeepSeek-V2, V2-Lite and V2.5 (DeepseekV2ForCausalLM), DeepSeek-V3, V3.1 and R1, and models of
that architecture such as Moonlight and Kimi K2 (DeepseekV3ForCausalLM): latent attention, and
experts of which some are shared by all tokens.

Legend: `T` tokens of a step, `E` hidden size, `X` routed experts in `G` groups, `k` experts a token
is sent to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpaged.errors import ModelLoadError
from jaxpaged.models.base import CausalLM, DecoderLayer, RopeTables
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.config_reader import MOST_EXPERTS, ConfigReader
from jaxpaged.models.layers import Attend, GatedMLP, LayerKV, RMSNorm, matmul, mean, param
from jaxpaged.models.mla import LatentAttention, LatentConfig
from jaxpaged.models.moe import Experts, in_order
from jaxpaged.models.parallel import all_sum
from jaxpaged.models.rope import read_max_position, read_rope
from jaxpaged.models.sources import ParamSource, under, whole

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
_UNDERSTOOD = ("kv_lora_rank", "n_routed_experts")
_Q_LORA_RANK = 1536
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(LatentConfig):
    experts: int
    experts_per_token: int
    groups: int
    """1 where a token may be sent to any of the experts."""
    top_groups: int
    """Groups whose experts a token may be sent to."""
    expert_width: int
    shared_experts: int
    dense_layers: int
    """The first ones, which have a plain MLP."""
    sigmoid_scores: bool
    """V3: sigmoids, with a bias for the choice and a group's best two counting. Else: a softmax,
    and a group's best one.
    """
    normalise: bool
    """Divide the weights of a token's experts by their sum."""
    weight_scale: float
    extra_layers: int = 0
    """Layers behind the last that predict further tokens; not used."""


def read_config(fields: Mapping[str, Any], architecture: str, where: str) -> DeepseekConfig:
    """Raises `ModelLoadError` for missing or impossible values, `UnsupportedModelError` for others'
    maths.
    """
    reader = ConfigReader(fields, where)
    reader.refuse_other_maths(understood=_UNDERSTOOD)
    reader.require("hidden_act", ("silu",))
    reader.require("mlp_bias", (False, None))
    reader.require("moe_layer_freq", (1, None))
    v3 = architecture == "DeepseekV3ForCausalLM"
    routing = _routing_v3(reader) if v3 else _routing_v2(reader)
    heads, rotated = reader.heads(), reader.integer("qk_rope_head_dim", 64)
    if rotated % 2:
        raise ModelLoadError(f"{where}: config qk_rope_head_dim={rotated} must be even.")
    reader.require("num_key_value_heads", (heads, None))
    rope = read_rope(reader, head_dim=rotated)
    no_rank = "q_lora_rank" in fields and fields["q_lora_rank"] is None
    config = DeepseekConfig(
        architecture=architecture,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.layers(),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=rotated,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=read_max_position(reader, rope, 4096 if v3 else 2048),
        tie_embeddings=reader.flag("tie_word_embeddings"),
        q_lora_rank=None if no_rank else reader.integer("q_lora_rank", _Q_LORA_RANK),
        kv_lora_rank=reader.integer("kv_lora_rank", 512),
        nope_dim=reader.integer("qk_nope_head_dim", 128),
        value_dim=reader.integer("v_head_dim", 128),
        attention_bias=reader.flag("attention_bias"),
        rope_interleave=reader.flag("rope_interleave", default=True) if v3 else True,
        **routing,
    )
    _check_groups(config, where)
    return config


def _routing_v2(reader: ConfigReader) -> dict[str, Any]:
    reader.require("scoring_func", ("softmax", None))
    reader.require("topk_method", ("greedy", "group_limited_greedy"))
    reader.require("norm_topk_prob", (False, None))
    reader.require("rope_interleave", (True, None))
    grouped = reader.fields.get("topk_method") == "group_limited_greedy"
    return {
        "experts": reader.integer("n_routed_experts", 64, most=MOST_EXPERTS),
        "experts_per_token": reader.integer("num_experts_per_tok"),
        "groups": reader.integer("n_group") if grouped else 1,
        "top_groups": reader.integer("topk_group") if grouped else 1,
        "expert_width": reader.integer("moe_intermediate_size", 1407),
        "shared_experts": reader.integer("n_shared_experts", 2),
        "dense_layers": reader.integer("first_k_dense_replace", 0, least=0),
        "sigmoid_scores": False,
        "normalise": False,
        "weight_scale": reader.number("routed_scaling_factor", 1.0),
    }


def _routing_v3(reader: ConfigReader) -> dict[str, Any]:
    reader.require("scoring_func", ("sigmoid", None))
    reader.require("topk_method", ("noaux_tc", None))
    return {
        "experts": reader.integer("n_routed_experts", 256, most=MOST_EXPERTS),
        "experts_per_token": reader.integer("num_experts_per_tok", 8),
        "groups": reader.integer("n_group", 8),
        "top_groups": reader.integer("topk_group", 4),
        "expert_width": reader.integer("moe_intermediate_size", 2048),
        "shared_experts": reader.integer("n_shared_experts", 1),
        "dense_layers": reader.integer("first_k_dense_replace", 3, least=0),
        "sigmoid_scores": True,
        "normalise": reader.flag("norm_topk_prob", default=True),
        "weight_scale": reader.number("routed_scaling_factor", 2.5),
        "extra_layers": reader.integer("num_nextn_predict_layers", 1, least=0),
    }


def _check_groups(config: DeepseekConfig, where: str) -> None:
    groups, top, experts = config.groups, config.top_groups, config.experts
    least = 2 if config.sigmoid_scores and groups > 1 else 1  # a group's best two are added
    if experts % groups or experts // groups < least:
        raise ModelLoadError(
            f"{where}: config n_routed_experts={experts} cannot be cut into n_group={groups} "
            f"equal groups of at least {least}."
        )
    if top > groups:
        raise ModelLoadError(f"{where}: config topk_group={top} must be at most n_group={groups}.")
    if config.experts_per_token > experts // groups * top:
        raise ModelLoadError(
            f"{where}: config num_experts_per_tok={config.experts_per_token} is more than the "
            f"{experts // groups * top} experts of topk_group={top} groups "
            f"(n_routed_experts={experts}, n_group={groups})."
        )


class Mixture(nnx.Module):
    """Routed experts and shared ones; the router computes in float32."""

    def __init__(self, config: DeepseekConfig, dtype: jnp.dtype) -> None:
        exact = jnp.dtype(jnp.float32)
        self.router = param((config.experts, config.hidden_size), exact)
        self.bias = param((config.experts,), exact) if config.sigmoid_scores else None
        self.experts = Experts(config, dtype, count=config.experts, width=config.expert_width)
        self.shared = GatedMLP(config, dtype, width=_shared_width(config), reduce=False)
        self.count = config.experts_per_token
        self.groups, self.top_groups = config.groups, config.top_groups
        self.normalise, self.weight_scale = config.normalise, config.weight_scale
        self.devices = config.tensor_parallel

    def __call__(self, x: jax.Array) -> jax.Array:
        ids, weights = self.route(x)
        return all_sum(self.experts(x, ids, weights) + self.shared(x), self.devices)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """f32 [T, E] -> the experts of each token and their weights, i32 and f32 [T, k]. Of equal
        scores the expert with the lower number comes first.
        """
        logits = matmul(x, self.router[...])
        if self.bias is None:
            scores = _softmax(logits)
            choice = scores
        else:
            scores = jax.nn.sigmoid(logits)
            choice = scores + self.bias[...][None]
        ids = lax.top_k(self._in_best_groups(choice), self.count)[1]
        weights = jnp.take_along_axis(scores, ids, axis=1)
        if self.normalise:
            weights = weights / (in_order(weights[:, :, None]) + 1e-20)
        return ids, weights * self.weight_scale

    def _in_best_groups(self, choice: jax.Array) -> jax.Array:
        """f32 [T, X] with minus infinity for experts outside a token's best groups."""
        if self.groups == self.top_groups:
            return choice
        grouped = choice.reshape(choice.shape[0], self.groups, -1)
        best = lax.top_k(grouped, 1 if self.bias is None else 2)[0]
        marks = best[..., 0] if self.bias is None else best[..., 0] + best[..., 1]
        chosen = lax.top_k(marks, self.top_groups)[1]
        inside = (chosen[:, :, None] == lax.iota(jnp.int32, self.groups)[None, None, :]).any(axis=1)
        return jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(choice.shape)

    @staticmethod
    def sources(config: DeepseekConfig, prefix: str) -> dict[str, ParamSource]:
        shape, width = (config.experts, config.hidden_size), _shared_width(config)
        routed = Experts.sources(
            config, f"{prefix}experts.", count=config.experts, width=config.expert_width
        )
        sources = {
            "router": whole(f"{prefix}gate.weight", shape),
            **under("experts", routed),
            **under("shared", GatedMLP.sources(config, f"{prefix}shared_experts.", width=width)),
        }
        if config.sigmoid_scores:
            sources["bias"] = whole(f"{prefix}gate.e_score_correction_bias", shape[:1])
        return sources


def _shared_width(config: DeepseekConfig) -> int:
    return config.expert_width * config.shared_experts


def _softmax(logits: jax.Array) -> jax.Array:
    """Over the last axis of f32 [T, X], summed in an order that does not depend on T."""
    powers = jnp.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / (mean(powers) * logits.shape[1])


class DeepseekLayer(DecoderLayer):
    """Pre-norm latent attention, and a mixture or, in the first layers, a gated MLP."""

    def __init__(self, config: DeepseekConfig, index: int, dtype: jnp.dtype) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.attention = LatentAttention(config, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        dense = index < config.dense_layers
        self.mlp = GatedMLP(config, dtype) if dense else Mixture(config, dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTables, layer_kv: LayerKV, meta: Any, attend: Attend
    ) -> tuple[jax.Array, LayerKV]:
        mixed, layer_kv = self.attention(self.attention_norm(x), rope, layer_kv, meta, attend)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), layer_kv


class DeepseekForCausalLM(CausalLM):
    """Embedding, layers, norm and (possibly tied) head."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        assert isinstance(config, DeepseekConfig)
        super().__init__(config, dtype)
        layers = range(config.num_layers)
        self.layers = nnx.List([DeepseekLayer(config, index, dtype) for index in layers])

    @staticmethod
    def layer_sources(config: ModelConfig, index: int) -> dict[str, ParamSource]:
        assert isinstance(config, DeepseekConfig)
        prefix, size = f"model.layers.{index}.", (config.hidden_size,)
        mlp = GatedMLP if index < config.dense_layers else Mixture
        return {
            "attention_norm.weight": whole(prefix + "input_layernorm.weight", size),
            "mlp_norm.weight": whole(prefix + "post_attention_layernorm.weight", size),
            **under("attention", LatentAttention.sources(config, prefix + "self_attn.")),
            **under("mlp", mlp.sources(config, prefix + "mlp.")),
        }

    @classmethod
    def ignorable(cls, config: ModelConfig, name: str) -> bool:
        """Also the layers that predict further tokens (V3)."""
        assert isinstance(config, DeepseekConfig)
        layer = _LAYER.match(name)
        extra = range(config.num_layers, config.num_layers + config.extra_layers)
        return super().ignorable(config, name) or (layer is not None and int(layer[1]) in extra)

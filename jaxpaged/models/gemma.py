"""The Gemma family: Gemma 1 and CodeGemma, Gemma 2, and Gemma 3 where it is published without the
vision part (270M and 1B).

Norm weights are deviations from 1, and embeddings are scaled by the square root of the hidden size.
Gemma 2 adds norms behind attention and MLP, a window in every second layer, and soft caps. Gemma 3
adds a norm over each head of q and k, and other rotary frequencies in the layers with a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.models.base import CausalLM, DecoderLayer, RopeTables
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.config_reader import FULL, SLIDING, ConfigReader
from jaxpaged.models.layers import ACTIVATIONS, Attend, Attention, GatedMLP, LayerKV, RMSNorm
from jaxpaged.models.rope import (
    RopeConfig,
    read_max_position,
    read_rope,
    read_rope_settings,
    rope_table,
)
from jaxpaged.models.sources import ParamSource, under, whole

ARCHITECTURES = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
_GELU = "gelu_pytorch_tanh"
_WINDOW = 4096
_HEAD_DIM = 256
_QUERY_SCALAR = 256.0
_GEMMA3_EVERY = 6
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(ModelConfig):
    activation: str = _GELU
    scale: float | None = None
    """Of attention scores; None is 1 / sqrt(head_dim)."""
    logits_cap: float | None = None
    bias: bool = False
    """All four projections of attention have one."""
    post_norms: bool = False
    """Behind attention and MLP, before they are added."""
    qk_norm: bool = False
    local_rope: RopeConfig | None = None
    """Of the layers in `local_layers`, where they have their own."""
    local_layers: frozenset[int] = frozenset()
    """Those with a window, even one that the context does not exceed."""


def read_config(fields: Mapping[str, Any], architecture: str, where: str) -> GemmaConfig:
    """Raises `ModelLoadError` for missing or impossible values, `UnsupportedModelError` for others'
    maths.
    """
    reader = ConfigReader(fields, where)
    reader.require("use_bidirectional_attention", (False, None))
    read = {"Gemma": _gemma1, "Gemma2": _gemma2, "Gemma3": _gemma3}
    return read[architecture.removesuffix("ForCausalLM")](reader, architecture)


def _gemma1(reader: ConfigReader, architecture: str) -> GemmaConfig:
    reader.refuse_other_maths()
    # The first releases said "gelu" and meant the approximation.
    reader.require("hidden_act", (_GELU, "gelu"))
    reader.require("hidden_activation", (None, _GELU))
    common = _common(reader, architecture, _one_rope(reader), kv_heads=16)
    windows = reader.windows_alike(reader.layers(), None, common["max_position"])
    return GemmaConfig(**common, windows=windows)


def _gemma2(reader: ConfigReader, architecture: str) -> GemmaConfig:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    reader.refuse_other_maths(understood=("query_pre_attn_scalar", *caps))
    window = reader.fields.get("sliding_window", _WINDOW)
    if window:  # else `windows` says what is wrong with it
        reader.require("sliding_window_size", (None, window))
    reader.require("sliding_window_pattern", (None, 2))
    attention_cap, logits_cap = (
        reader.number_or_none(key, default) for key, default in zip(caps, (50.0, 30.0), strict=True)
    )
    common = _common(reader, architecture, _one_rope(reader), kv_heads=4)
    return GemmaConfig(
        **common,
        **_since_gemma2(reader, _kinds(reader, every=2), common["max_position"]),
        attention_cap=attention_cap,
        logits_cap=logits_cap,
    )


def _gemma3(reader: ConfigReader, architecture: str) -> GemmaConfig:
    # No released model caps scores, and transformers ignores the setting here.
    reader.refuse_other_maths(understood=("query_pre_attn_scalar", "final_logit_softcapping"))
    every = reader.integer("sliding_window_pattern", _GEMMA3_EVERY)
    global_rope, local_rope = _gemma3_ropes(reader)
    common = _common(reader, architecture, global_rope, kv_heads=4, max_position=131_072)
    kinds = _kinds(reader, every=every)
    return GemmaConfig(
        **common,
        **_since_gemma2(reader, kinds, common["max_position"]),
        local_rope=local_rope,
        local_layers=frozenset(i for i, kind in enumerate(kinds) if kind == SLIDING),
        logits_cap=reader.number_or_none("final_logit_softcapping"),
        qk_norm=True,
    )


def _common(
    reader: ConfigReader,
    architecture: str,
    rope: RopeConfig,
    *,
    kv_heads: int,
    max_position: int = 8192,
) -> dict[str, Any]:
    return {
        "architecture": architecture,
        **reader.dimensions(kv_heads=kv_heads, head_dim=_HEAD_DIM),
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "max_position": read_max_position(reader, rope, max_position),
        "tie_embeddings": reader.flag("tie_word_embeddings", default=True),
        "bias": reader.flag("attention_bias"),
    }


def _kinds(reader: ConfigReader, *, every: int) -> Sequence[str]:
    """Where `layer_types` is left out, every so many-th layer attends to all."""
    layers = range(reader.layers())
    return reader.layer_kinds([SLIDING if (i + 1) % every else FULL for i in layers])


def _since_gemma2(reader: ConfigReader, kinds: Sequence[str], max_position: int) -> dict[str, Any]:
    window = reader.fields.get("sliding_window", _WINDOW)
    reader.require("hidden_activation", (None, *ACTIVATIONS))
    return {
        "activation": reader.fields.get("hidden_activation") or _GELU,
        "scale": reader.number("query_pre_attn_scalar", _QUERY_SCALAR) ** -0.5,
        "post_norms": True,
        "windows": reader.windows(kinds, window, max_position),
    }


def _one_rope(reader: ConfigReader) -> RopeConfig:
    return read_rope(reader, head_dim=reader.integer("head_dim", _HEAD_DIM))


def _gemma3_ropes(reader: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """Global and local, from `rope_parameters` by layer type (transformers 5), or from `rope_theta`
    with `rope_scaling`, and `rope_local_base_freq` (older).
    """
    nested = reader.fields.get("rope_parameters") or {}
    scaling = reader.fields.get("rope_scaling") or {}
    if not isinstance(nested, Mapping) or not isinstance(scaling, Mapping):
        raise UnsupportedModelError(
            f"{reader.where}: config rope_parameters={nested!r} and rope_scaling={scaling!r} must "
            "be mappings."
        )
    each = all(isinstance(value or {}, Mapping) for value in nested.values())
    if not each or not nested.keys() <= {FULL, SLIDING}:
        raise UnsupportedModelError(
            f"{reader.where}: config rope_parameters={nested!r} is not supported for this "
            f"architecture; it must have settings for each of {FULL}, {SLIDING}."
        )
    theta = reader.number("rope_theta", _GLOBAL_THETA)
    local_theta = reader.number("rope_local_base_freq", _LOCAL_THETA)
    ropes = (
        read_rope_settings(reader, {"rope_theta": theta, **(nested.get(FULL) or {}), **scaling}),
        read_rope_settings(reader, {"rope_theta": local_theta, **(nested.get(SLIDING) or {})}),
    )
    for rope in ropes:
        if rope.rule != "fixed":
            raise UnsupportedModelError(
                f"{reader.where}: rope_type {rope.kind!r} is not supported for this architecture."
            )
    return ropes


class GemmaLayer(DecoderLayer):
    """Attention and gated MLP, each with a norm before and, since Gemma 2, behind."""

    def __init__(self, config: GemmaConfig, index: int, dtype: jnp.dtype) -> None:
        window = config.layer_windows[index]
        self.table = int(config.local_rope is not None and index in config.local_layers)
        self.attention_norm = _norm(config, dtype)
        self.attention = Attention(
            config,
            dtype,
            window=window,
            qkv_bias=config.bias,
            out_bias=config.bias,
            qk_norm=config.qk_norm,
            norm_unit_offset=True,
            scale=config.scale,
            soft_cap=config.attention_cap,
        )
        self.mlp_norm = _norm(config, dtype)
        self.mlp = GatedMLP(config, dtype, activation=config.activation)
        self.attention_post_norm = _norm(config, dtype) if config.post_norms else None
        self.mlp_post_norm = _norm(config, dtype) if config.post_norms else None

    def __call__(
        self, x: jax.Array, rope: RopeTables, layer_kv: LayerKV, meta: Any, attend: Attend
    ) -> tuple[jax.Array, LayerKV]:
        table = rope[self.table]
        mixed, layer_kv = self.attention(self.attention_norm(x), table, layer_kv, meta, attend)
        if self.attention_post_norm is not None:
            mixed = self.attention_post_norm(mixed)
        x = x + mixed
        mixed = self.mlp(self.mlp_norm(x))
        if self.mlp_post_norm is not None:
            mixed = self.mlp_post_norm(mixed)
        return x + mixed, layer_kv


class GemmaForCausalLM(CausalLM):
    """Scaled embedding, layers, norm and (tied) head, its logits soft-capped in some models."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        assert isinstance(config, GemmaConfig)
        super().__init__(config, dtype)
        layers = range(config.num_layers)
        self.layers = nnx.List([GemmaLayer(config, index, dtype) for index in layers])
        self.local_rope = config.local_rope
        self.logits_cap = config.logits_cap
        # Rounded to the type of the weights, as the models were trained: sqrt(3072) is 55.5 then.
        self.embedding_scale = float(np.float32(math.sqrt(config.hidden_size)).astype(dtype))

    def final_norm(self, config: ModelConfig, dtype: jnp.dtype) -> nnx.Module:
        return _norm(config, dtype)

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return super().embed(tokens, positions) * self.embedding_scale

    def rope_tables(self, positions: jax.Array, lengths: jax.Array) -> RopeTables:
        """The table of all layers, or of those without and with a window."""
        ropes = [self.rope] if self.local_rope is None else [self.rope, self.local_rope]
        return tuple(rope_table(rope, self.rotary_dim, positions, lengths) for rope in ropes)

    def logits(self, x: jax.Array) -> jax.Array:
        logits = super().logits(x)
        if self.logits_cap is None:
            return logits
        return jnp.tanh(logits / self.logits_cap) * self.logits_cap

    @staticmethod
    def layer_sources(config: ModelConfig, index: int) -> dict[str, ParamSource]:
        assert isinstance(config, GemmaConfig)
        prefix, size = f"model.layers.{index}.", (config.hidden_size,)
        norms = {"attention_norm": "input", "mlp_norm": "post_attention"}
        if config.post_norms:
            norms = {
                "attention_norm": "input",
                "attention_post_norm": "post_attention",
                "mlp_norm": "pre_feedforward",
                "mlp_post_norm": "post_feedforward",
            }
        attention = Attention.sources(
            config,
            prefix + "self_attn.",
            qkv_bias=config.bias,
            out_bias=config.bias,
            qk_norm=config.qk_norm,
        )
        return {
            **{
                f"{n}.weight": whole(f"{prefix}{t}_layernorm.weight", size)
                for n, t in norms.items()
            },
            **under("attention", attention),
            **under("mlp", GatedMLP.sources(config, prefix + "mlp.")),
        }


def _norm(config: ModelConfig, dtype: jnp.dtype) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.norm_eps, dtype, unit_offset=True)

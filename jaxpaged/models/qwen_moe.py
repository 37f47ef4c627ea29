"""The sparse Qwen models: Qwen1.5-MoE and Qwen2-57B-A14B (Qwen2MoeForCausalLM, with an expert that
all tokens go through), Qwen3-30B-A3B, Qwen3-235B-A22B and Qwen3-Coder (Qwen3MoeForCausalLM).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import ModelLoadError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.config_reader import FULL, SLIDING, ConfigReader
from jaxpaged.models.layers import GatedMLP
from jaxpaged.models.llama import LlamaForCausalLM
from jaxpaged.models.mixtral import (
    EXPERT_COUNTS,
    MixtralForCausalLM,
    MixtureConfig,
    expert_counts,
    without_mlp,
)
from jaxpaged.models.moe import Experts
from jaxpaged.models.qwen import refuse_other_qwens
from jaxpaged.models.rope import read_max_position, read_rope
from jaxpaged.models.sources import ParamSource, under, whole

ARCHITECTURES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
_WINDOW = 4096
_WINDOW_LAYERS = 28
_MAX_POSITION = 32768


def read_config(fields: Mapping[str, Any], architecture: str, where: str) -> MixtureConfig:
    """Raises `ModelLoadError` for missing or impossible values, `UnsupportedModelError` for others'
    maths.
    """
    reader = ConfigReader(fields, where)
    qwen3 = architecture.startswith("Qwen3")
    refuse_other_qwens(reader, qwen3=qwen3, understood=EXPERT_COUNTS)
    if not qwen3:
        reader.require("attention_bias", (False, None))
    dimensions = reader.dimensions(kv_heads=4 if qwen3 else 16)
    layers = dimensions["num_layers"]
    rope = read_rope(reader)
    max_position = read_max_position(reader, rope, _MAX_POSITION)
    shared = None if qwen3 else reader.integer("shared_expert_intermediate_size", 5632)
    biased = reader.flag("attention_bias")
    return MixtureConfig(
        architecture=architecture,
        **dimensions,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=max_position,
        tie_embeddings=reader.flag("tie_word_embeddings"),
        windows=_windows(reader, layers, max_position, every_layer=qwen3),
        qkv_bias=biased if qwen3 else reader.flag("qkv_bias", default=True),
        out_bias=biased and qwen3,
        qk_norm=qwen3,
        expert_width=reader.integer("moe_intermediate_size", 768 if qwen3 else 1408),
        normalise=reader.flag("norm_topk_prob"),
        dense_layers=_dense_layers(reader, layers),
        shared_width=shared,
        **expert_counts(reader, experts=128 if qwen3 else 60, per_token=8 if qwen3 else 4),
    )


def _windows(
    reader: ConfigReader, layers: int, max_position: int, *, every_layer: bool
) -> tuple[int | None, ...]:
    """With `use_sliding_window` every layer has a window, or every other one of the first
    `max_window_layers`.
    """
    if not reader.flag("use_sliding_window"):
        return reader.windows_alike(layers, None, max_position)
    window = reader.fields.get("sliding_window", _WINDOW)
    if every_layer:
        return reader.windows_alike(layers, window, max_position)
    end = reader.integer("max_window_layers", _WINDOW_LAYERS, least=0)
    kinds = [SLIDING if i % 2 == 0 and i < end else FULL for i in range(layers)]
    return reader.windows(kinds, window, max_position)


def _dense_layers(reader: ConfigReader, layers: int) -> frozenset[int]:
    """Those that `mlp_only_layers` names, and all but every `decoder_sparse_step`-th."""
    named = reader.fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        raise ModelLoadError(
            f"{reader.where}: config mlp_only_layers={named!r:.80} must be a list of layer numbers."
        )
    beyond = [layer for layer in named if not 0 <= layer < layers]
    if beyond:
        raise ModelLoadError(
            f"{reader.where}: config mlp_only_layers has {beyond[0]!r:.80}, but the layers are "
            f"0 to {layers - 1}."
        )
    step = reader.integer("decoder_sparse_step", 1)
    return frozenset(named) | {i for i in range(layers) if (i + 1) % step}


class QwenMoeForCausalLM(MixtralForCausalLM):
    """Embedding, layers, norm and (possibly tied) head."""

    @staticmethod
    def layer_sources(config: ModelConfig, index: int) -> dict[str, ParamSource]:
        assert isinstance(config, MixtureConfig)
        if index in config.dense_layers:
            return LlamaForCausalLM.layer_sources(config, index)
        prefix, hidden = f"model.layers.{index}.mlp.", config.hidden_size
        experts = Experts.sources(
            config, prefix + "experts.", count=config.experts, width=config.expert_width
        )
        mixture = {
            "router": whole(prefix + "gate.weight", (config.experts, hidden)),
            **under("experts", experts),
        }
        if config.shared_width is not None:
            shared = GatedMLP.sources(config, prefix + "shared_expert.", width=config.shared_width)
            mixture |= under("shared", shared)
            mixture["shared_gate"] = whole(prefix + "shared_expert_gate.weight", (1, hidden))
        return without_mlp(config, index) | under("mlp", mixture)

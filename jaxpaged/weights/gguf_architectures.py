"""What each `general.architecture` of GGUF is in Hugging Face's terms: tensor names and config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.weights.gguf_families import (
    deepseek2_config,
    gemma1_config,
    gemma2_config,
    gemma3_config,
    llama_config,
    phi3_config,
    qwen2_config,
    qwen3_config,
    qwen3moe_config,
)
from jaxpaged.weights.gguf_metadata import Metadata
from jaxpaged.weights.gguf_rope import LONG_FACTORS, ROPE_FREQS, SHORT_FACTORS

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_QKV = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_OUT = {"attn_output": "self_attn.o_proj"}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LATENT = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_SHARED_EXPERTS = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one kind of file maps to a Hugging Face checkpoint."""

    config: Callable[[Metadata], dict[str, Any]]
    """The config of a file; asks the metadata for every key it understands."""
    layer: Mapping[str, str]
    """Tensors of a layer: `blk.N.<key>` -> `model.layers.N.<value>`."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Those stored as [experts, out, in] -> the name of one expert's matrix, with {} for its
    number."""
    joined: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Projections of keys, stored as [heads, in, keys] -> the tensor with those of values,
    [heads, values, in], and the name of the one matrix in which each head has its keys above its
    values."""
    config_tensors: tuple[str, ...] = ()
    """Tensors that became part of the config."""
    interleaved: bool = False
    """The rows of q and k alternate between the two halves of each head's rotation. llama.cpp
    stores them so for the architectures whose rope it computes on neighbouring pairs."""
    norm_offset: float = 0.0
    """What the stored norm weights are larger by."""


def _of(names: Mapping[str, str], suffix: str = ".weight") -> dict[str, str]:
    return {part + suffix: name + suffix for part, name in names.items()}


def _experts(prefix: str, gate: str, up: str, down: str) -> dict[str, str]:
    parts = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return _of({part: f"{prefix}.experts.{{}}.{name}" for part, name in parts.items()})


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        llama_config,
        layer=_of(_NORMS | _QKV | _OUT | _MLP | {"ffn_gate_inp": "block_sparse_moe.gate"})
        | _of(_QKV | _OUT | _MLP, ".bias"),
        experts=_experts("block_sparse_moe", "w1", "w3", "w2"),
        config_tensors=(ROPE_FREQS,),
        interleaved=True,
    ),
    "qwen2": Architecture(
        qwen2_config, layer=_of(_NORMS | _QKV | _OUT | _MLP) | _of(_QKV, ".bias")
    ),
    "qwen3": Architecture(qwen3_config, layer=_of(_NORMS | _QKV | _OUT | _QK_NORM | _MLP)),
    "qwen3moe": Architecture(
        qwen3moe_config,
        layer=_of(_NORMS | _QKV | _OUT | _QK_NORM | {"ffn_gate_inp": "mlp.gate"}),
        experts=_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    "gemma": Architecture(gemma1_config, layer=_of(_NORMS | _QKV | _OUT | _MLP), norm_offset=1.0),
    "gemma2": Architecture(
        gemma2_config, layer=_of(_FOUR_NORMS | _QKV | _OUT | _MLP), norm_offset=1.0
    ),
    "gemma3": Architecture(
        gemma3_config, layer=_of(_FOUR_NORMS | _QKV | _OUT | _QK_NORM | _MLP), norm_offset=1.0
    ),
    "phi3": Architecture(
        phi3_config,
        layer=_of(
            {
                **_NORMS,
                **_OUT,
                "attn_qkv": "self_attn.qkv_proj",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
            }
        ),
        config_tensors=(LONG_FACTORS, SHORT_FACTORS),
    ),
    "deepseek2": Architecture(
        deepseek2_config,
        layer=_of(_NORMS | _LATENT | _OUT | _MLP | _SHARED_EXPERTS | {"ffn_gate_inp": "mlp.gate"})
        | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        experts=_experts("mlp", "gate_proj", "up_proj", "down_proj"),
        joined={"attn_k_b.weight": ("attn_v_b.weight", "self_attn.kv_b_proj.weight")},
    ),
}
"""`general.architecture` -> what it is."""

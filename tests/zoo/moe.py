"""Mixtral, Qwen2-MoE and Qwen3-MoE: numbers of experts, dense layers among sparse ones, windows."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
AROUND_WINDOW = (1, 7, 8, 9, 10, 40, 130)


def published_mixtral(fields: dict[str, Any]) -> dict[str, Any]:
    """As in the checkpoints on the hub: a theta at the top."""
    return fields | {"rope_theta": fields.pop("rope_parameters")["rope_theta"]}


def published_qwen3(fields: dict[str, Any]) -> dict[str, Any]:
    """As in the checkpoints on the hub: another name for the number of experts, a window off."""
    fields["num_experts"] = fields.pop("num_local_experts")
    rope = fields.pop("rope_parameters")
    return fields | {"rope_theta": rope["rope_theta"], "max_window_layers": 48}


def without_layer_types(fields: dict[str, Any]) -> dict[str, Any]:
    del fields["layer_types"]
    return fields


CASES = [
    Case(
        name="mixtral",
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        config={**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2},
        edit=published_mixtral,
    ),
    Case(
        name="mixtral-window-tied-three-of-six",
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        config={
            **SIZES,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
        prompts=AROUND_WINDOW,
    ),
    Case(
        name="qwen3-moe",
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        config={
            **SIZES,
            "head_dim": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        edit=published_qwen3,
    ),
    Case(
        name="qwen3-moe-dense-layers-not-normalised",
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        config={
            **SIZES,
            "num_hidden_layers": 6,  # layers 1 and 5 are sparse
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "tie_word_embeddings": True,
        },
        prompts=AROUND_WINDOW,
    ),
    Case(
        name="qwen2-moe",
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        config={
            **SIZES,
            "num_experts": 6,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 80,
        },
    ),
    Case(
        name="qwen2-moe-window-dense-layer-normalised",
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        config={
            **SIZES,
            "num_hidden_layers": 4,  # with a window: 0 and 2
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
        },
        prompts=AROUND_WINDOW,
        edit=without_layer_types,
    ),
]

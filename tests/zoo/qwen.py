"""Qwen2, Qwen2.5 and Qwen3: biases, q/k norm, and windows in some layers."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case

AROUND_WINDOW = (1, 7, 8, 9, 10, 40, 130)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}


def published(fields: dict[str, Any]) -> dict[str, Any]:
    """As in the checkpoints on the hub: a theta at the top, a window that is switched off."""
    rope = fields.pop("rope_parameters")
    del fields["layer_types"]
    return fields | {"rope_theta": rope["rope_theta"], "sliding_window": 8, "use_mrope": False}


def without_layer_types(fields: dict[str, Any]) -> dict[str, Any]:
    del fields["layer_types"]
    return fields


CASES = [
    Case(
        name="qwen2",
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        config={**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        edit=published,
    ),
    Case(
        name="qwen2-window-from-layer-1-tied",
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        config={**SIZES, **WINDOW, "max_window_layers": 1, "tie_word_embeddings": True},
        prompts=AROUND_WINDOW,
        edit=without_layer_types,
    ),
    Case(
        name="qwen2-window-everywhere",
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        config={**SIZES, **WINDOW, "max_window_layers": 0},
        prompts=AROUND_WINDOW,
        edit=without_layer_types,
    ),
    Case(
        name="qwen2-window-nowhere-five-heads",
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        config={
            **SIZES,
            **WINDOW,
            "max_window_layers": 3,
            "hidden_size": 80,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
        },
        edit=without_layer_types,
    ),
    Case(
        name="qwen2-layer-types",
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        config={
            **SIZES,
            **WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        prompts=AROUND_WINDOW,
    ),
    Case(
        name="qwen3",
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        config={**SIZES, "head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    Case(
        name="qwen3-bias-window",
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        config={
            **SIZES,
            **WINDOW,
            "head_dim": 16,
            "attention_bias": True,
            "max_window_layers": 2,
        },
        prompts=AROUND_WINDOW,
        edit=without_layer_types,
    ),
]

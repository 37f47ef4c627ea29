"""Llama and Mistral with the options that few of their models use."""

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


def called_mistral(fields: dict[str, Any]) -> dict[str, Any]:
    """Ministral 8B is published as a Mistral with layer types."""
    return fields | {"architectures": ["MistralForCausalLM"]}


CASES = [
    Case(
        name="llama-biases",
        model_type="llama",
        architecture="LlamaForCausalLM",
        config={**SIZES, "attention_bias": True, "mlp_bias": True},
    ),
    Case(
        name="llama-attention-bias-tied",
        model_type="llama",
        architecture="LlamaForCausalLM",
        config={**SIZES, "attention_bias": True, "tie_word_embeddings": True},
    ),
    Case(
        name="ministral-window-everywhere",
        model_type="ministral",
        architecture="MinistralForCausalLM",
        config={**SIZES, "sliding_window": 8, "head_dim": 32},
        prompts=AROUND_WINDOW,
    ),
    Case(
        name="mistral-layer-types",
        model_type="ministral",
        architecture="MinistralForCausalLM",
        config={
            **SIZES,
            "sliding_window": 8,
            "head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        prompts=AROUND_WINDOW,
        edit=called_mistral,
    ),
]

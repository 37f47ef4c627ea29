"""Mistral 7B and its kin: Llama with a sliding window."""

from __future__ import annotations

from tests.zoo.case import Case

CASES = [
    Case(
        name="mistral-window",
        model_type="mistral",
        architecture="MistralForCausalLM",
        config={
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "sliding_window": 8,
        },
        prompts=(1, 7, 8, 9, 40, 130),
    ),
]

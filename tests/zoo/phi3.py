"""Phi-3 and Phi-4: fused projections, longrope on either side of its threshold, part of a head."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.7 * i for i in range(pairs)],
        **more,
    }


def old_spelling(fields: dict[str, Any]) -> dict[str, Any]:
    """As Phi-3 is published, from before transformers 5."""
    rope = fields.pop("rope_parameters")
    factors = {key: rope[key] for key in ("short_factor", "long_factor")}
    scaling = {"type": "longrope", **factors}
    return {**fields, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


CASES = [
    Case(
        name="phi3-window",
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        config={**BASE, "sliding_window": 24},
        prompts=(1, 17, 23, 24, 25, 130),
    ),
    Case(
        name="phi3-longrope",
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        config={
            **BASE,
            "original_max_position_embeddings": 64,
            "rope_parameters": longrope(8, rope_theta=500.0),
        },
        # 60 crosses while it generates, 44 ends on the threshold.
        prompts=(1, 17, 44, 60, 63, 64, 65, 130),
        one_pass=False,
        edit=old_spelling,
    ),
    Case(
        name="phi4-mini",
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        config={
            **BASE,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 64,
            "sliding_window": 512,
            "rope_parameters": longrope(
                12, rope_theta=500.0, partial_rotary_factor=0.75, attention_factor=1.3
            ),
        },
        prompts=(1, 17, 130),
    ),
    Case(
        name="phi4-partial",
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        config={
            **BASE,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 250_000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
]

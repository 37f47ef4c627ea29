"""Gemma 1, 2 and 3: norms around 1, scaled embeddings, soft caps, windows, two sets of rotary
frequencies.
"""

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
    "head_dim": 32,
    "max_position_embeddings": 256,
}
# Low enough that the caps change scores and logits of random weights.
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}


def first_release(fields: dict[str, Any]) -> dict[str, Any]:
    """Gemma 1 as it was first published."""
    return fields | {"hidden_act": "gelu", "hidden_activation": None}


def older_gemma2(fields: dict[str, Any]) -> dict[str, Any]:
    """Before transformers 5: no layer types, the window twice, a theta at the top."""
    del fields["layer_types"]
    rope = fields.pop("rope_parameters")
    return fields | {"rope_theta": rope["rope_theta"], "sliding_window_size": 8}


def older_gemma3(fields: dict[str, Any]) -> dict[str, Any]:
    """Before transformers 5: a pattern, and rope settings at the top, scaled in global layers."""
    del fields["layer_types"], fields["rope_parameters"]
    fields.pop("_sliding_window_pattern", None)
    return fields | {
        "sliding_window_pattern": 2,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }


CASES = [
    Case(
        name="gemma",
        model_type="gemma",
        architecture="GemmaForCausalLM",
        config={**SIZES, "num_key_value_heads": 1},
        edit=first_release,
    ),
    Case(
        name="gemma-bias-untied",
        model_type="gemma",
        architecture="GemmaForCausalLM",
        config={
            **SIZES,
            "head_dim": 16,
            "hidden_size": 60,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        },
    ),
    Case(
        name="gemma2",
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        config={**SIZES, **CAPS, "sliding_window": 8, "query_pre_attn_scalar": 20},
        prompts=AROUND_WINDOW,
        edit=older_gemma2,
    ),
    Case(
        name="gemma2-no-caps-bias-untied",
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        config={
            **SIZES,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 8,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "hidden_activation": "gelu",
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        prompts=AROUND_WINDOW,
    ),
    Case(
        name="gemma3-older-spelling",
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        config={**SIZES, "sliding_window": 8, "query_pre_attn_scalar": 20},
        prompts=AROUND_WINDOW,
        edit=older_gemma3,
    ),
    Case(
        name="gemma3-seven-layers-cap-bias-untied",
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        config={
            **SIZES,
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "final_logit_softcapping": 10.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        prompts=AROUND_WINDOW,
    ),
]

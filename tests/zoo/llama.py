"""Llama with every kind of rotary positions, beyond the 64 tokens that some were stretched from."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case

ORIGINAL = 64
EDGES = (1, 17, 63, 64, 65, 205)
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "rope_theta": 500.0,
}


def case(
    name: str,
    rope: dict[str, Any],
    prompts: tuple[int, ...] = EDGES,
    max_position: int = 256,
    **more: Any,
) -> Case:
    return Case(
        name=f"llama-{name}",
        model_type="llama",
        architecture="LlamaForCausalLM",
        config={
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": max_position,
            "rope_parameters": rope,
        },
        prompts=prompts,
        engine={"max_model_len": 256},
        **more,
    )


def old_spelling(fields: dict[str, Any]) -> dict[str, Any]:
    """As before transformers 5."""
    rope = fields.pop("rope_parameters")
    kind, theta = rope.pop("rope_type"), rope.pop("rope_theta")
    return {**fields, "rope_theta": theta, "rope_scaling": {"type": kind, **rope}}


CASES = [
    case("theta", {"rope_type": "default", "rope_theta": 300.0}),
    case("linear", {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}, edit=old_spelling),
    # A prompt beyond the original context comes after one within it each time: transformers keeps
    # the frequencies of the longest sequence until it sees one that is shorter than that.
    case(
        "dynamic",
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
        prompts=(1, 65, 17, 205, 44, 63),
        max_position=ORIGINAL,
        one_pass=False,
    ),
    case(
        "llama3",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            "rope_theta": 500.0,
        },
    ),
    # The context that the model takes follows from the factor.
    case("yarn", YARN, max_position=ORIGINAL, edit=old_spelling),
    case("yarn-mscale", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8}),
    case("yarn-factor", {**YARN, "attention_factor": 1.3, "truncate": False}),
    # No prompt crosses while it generates: transformers does that well for Phi-3 only.
    case(
        "longrope",
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [1.0 + 0.7 * i for i in range(8)],
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            "rope_theta": 500.0,
        },
        prompts=(1, 17, 44, 65, 205),
    ),
]

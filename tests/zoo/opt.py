"""OPT: as most of them are, as opt-350m is, and as Galactica is."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
}


def case(name: str, prompts: tuple[int, ...] = (1, 17, 130), **config: Any) -> Case:
    return Case(
        name=name,
        model_type="opt",
        architecture="OPTForCausalLM",
        config={**BASE, **config},
        prompts=prompts,
        engine={"max_model_len": 160},
    )


CASES = [
    case("opt", prompts=(1, 17, 140)),  # to the last position there is
    case("opt-350m", word_embed_proj_dim=32, do_layer_norm_before=False),
    case(
        "opt-galactica",
        activation_function="gelu",
        enable_bias=False,
        layer_norm_elementwise_affine=False,
        tie_word_embeddings=False,
    ),
    case(
        "opt-no-final-norm",
        word_embed_proj_dim=96,
        _remove_final_layer_norm=True,
        vocab_size=509,
    ),
]

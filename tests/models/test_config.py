from __future__ import annotations

from typing import Any

import pytest

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.models.config import ModelConfig, RopeConfig
from jaxpaged.models.llama import LlamaForCausalLM
from jaxpaged.models.registry import find_model, supported_architectures
from tests.tiny_models import tiny_config

ABSENT = object()


def read(model_type: str = "llama", **changes: Any) -> ModelConfig:
    """Read a tiny config with some fields replaced, or taken out (ABSENT)."""
    fields = tiny_config(model_type, **changes)
    fields = {key: value for key, value in fields.items() if value is not ABSENT}
    return find_model(fields, "here/config.json")[1]


def test_a_plain_config() -> None:
    assert read() == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        max_position=256,
        tie_embeddings=False,
        sliding_window=None,
    )


@pytest.mark.parametrize(
    ("key", "name", "default"),
    [
        ("num_key_value_heads", "num_kv_heads", 4),
        ("head_dim", "head_dim", 16),
        ("rms_norm_eps", "norm_eps", 1e-6),
        ("rope_theta", "rope", RopeConfig(10000.0)),
        ("max_position_embeddings", "max_position", 2048),
        ("tie_word_embeddings", "tie_embeddings", False),
    ],
)
@pytest.mark.parametrize("given", [ABSENT, None], ids=["absent", "null"])
def test_defaults(key: str, name: str, default: Any, given: Any) -> None:
    assert getattr(read(**{key: given}), name) == default


def test_head_dim_need_not_be_hidden_by_heads() -> None:
    assert read(head_dim=24).head_dim == 24
    assert read(head_dim=None, hidden_size=96).head_dim == 24


# ---------------------------------------------------------------- what is refused, and how


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ],
)
@pytest.mark.parametrize("value", [ABSENT, None, 0, -4, 4.0, "4", True, [4]], ids=repr)
def test_required_integers(key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(**{key: value})
    shown = "None" if value is ABSENT else repr(value)
    for part in ("here/config.json", repr(key), f"got {shown}"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 0),
        ("num_key_value_heads", "2"),
        ("head_dim", -16),
        ("head_dim", 16.0),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", True),
        ("rope_theta", -1.0),
        ("rope_theta", "10000"),
        ("rope_theta", float("inf")),
        ("max_position_embeddings", 2048.5),
        ("tie_word_embeddings", "false"),
        ("tie_word_embeddings", 0.5),
    ],
)
def test_optional_fields_of_the_wrong_kind(key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(**{key: value})
    assert repr(key) in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"num_key_value_heads": 8}, ["num_attention_heads=4", "num_key_value_heads=8"]),
        ({"head_dim": None, "hidden_size": 66}, ["hidden_size=66", "num_attention_heads=4"]),
        ({"head_dim": 15}, ["head_dim=15", "even"]),
    ],
)
def test_dimensions_that_do_not_go_together(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(**changes)
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("hidden_act", None),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("pretraining_tp", 2),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_other_mathematics_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(**{key: value})
    assert f"{key}={value!r}" in str(error.value)


@pytest.mark.parametrize(
    "harmless",
    [{"pretraining_tp": 1}, {"partial_rotary_factor": 1.0}, {"hidden_act": ABSENT}],
    ids=str,
)
def test_settings_that_change_nothing_are_taken(harmless: dict[str, Any]) -> None:
    assert read(**harmless) == read()


@pytest.mark.parametrize(
    "names", [["GPT2LMHeadModel"], [], None, ABSENT, "LlamaForCausalLM", ["llamaforcausallm"]]
)
def test_unknown_architectures(names: Any) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(architectures=names)
    for part in ("here/config.json", "'llama'", *supported_architectures()):
        assert part in str(error.value)


def test_the_first_known_architecture_counts() -> None:
    assert read(architectures=["Other", "MistralForCausalLM"]).architecture == "MistralForCausalLM"
    assert find_model(tiny_config(), "x")[0] is LlamaForCausalLM


# ---------------------------------------------------------------- sliding window


@pytest.mark.parametrize(
    # Without the key, Mistral's own default holds.
    ("value", "expected"),
    [(32, 32), (None, None), (ABSENT, 4096)],
)
def test_window_of_mistral(value: Any, expected: int | None) -> None:
    assert read("mistral", sliding_window=value).sliding_window == expected


@pytest.mark.parametrize("value", [0, -1, "32", 1.5])
def test_impossible_windows(value: Any) -> None:
    with pytest.raises(ModelLoadError, match="sliding_window"):
        read("mistral", sliding_window=value)


def test_llama_has_no_window() -> None:
    assert read(sliding_window=32).sliding_window is None


# ---------------------------------------------------------------- rope

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 500000}, RopeConfig(5e5)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig(1e4)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(1e4, "linear", 2.0)),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "x", "factor": 2.0}},
            RopeConfig(1e4, "linear", 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64),
        ),
        (
            {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            RopeConfig(5e5),
        ),
        (
            {"rope_theta": ABSENT, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            RopeConfig(1e4, "linear", 4.0),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64),
        ),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}}, RopeConfig(5e5)),
    ],
)
def test_both_spellings_of_rope(fields: dict[str, Any], expected: RopeConfig) -> None:
    assert read(**fields).rope == expected


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"rope_scaling": {"rope_type": "foo"}}, ["rope_type", "'foo'", "llama3"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_type", "'yarn'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["rope_type", "'dynamic'"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_type", "'longrope'"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, ["partial_rotary_factor=0.25"]),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["per layer type", "full_attention"],
        ),
    ],
)
def test_rope_that_is_not_supported(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(**fields)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, ["'factor'", "None"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["'factor'", "0"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ["'factor'", "'2'"]),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": None}},
            ["'low_freq_factor'", "None"],
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            ["'low_freq_factor'", "None"],
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            ["high_freq_factor=1.0", "low_freq_factor=1.0"],
        ),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
        ({"rope_parameters": [1, 2]}, ["rope_parameters", "[1, 2]"]),
        ({"rope_parameters": {"rope_theta": "big"}}, ["'rope_theta'", "'big'"]),
        ({"rope_parameters": {"rope_theta": -1.0}}, ["'rope_theta'", "-1.0"]),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": 3}}, ["rope_type", "3"]),
    ],
)
def test_rope_settings_of_the_wrong_kind(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(**fields)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("logit_scale", 3),
        ("embedding_multiplier", 12.0),
        ("use_sliding_window", False),
        ("num_local_experts", 8),
        ("kv_lora_rank", 512),
    ],
)
def test_maths_of_other_families_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config {key}={value} is not supported"):
        read(**{key: value})
    assert read(**{key: None}) == read()


def test_layers_that_attend_differently_are_refused() -> None:
    mixed = ["sliding_attention", "full_attention"]
    for model_type in ("llama", "mistral"):
        with pytest.raises(UnsupportedModelError, match="layer_types"):
            read(model_type, layer_types=mixed)
    assert read(layer_types=["full_attention"] * 2) == read()
    assert read("mistral", layer_types=["sliding_attention"] * 2).sliding_window == 32
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        read("mistral", layer_types=["full_attention"] * 2)


def test_empty_rope_parameters_do_not_hide_rope_scaling() -> None:
    old = {"rope_type": "linear", "factor": 4.0}
    assert read(rope_parameters={}, rope_scaling=old).rope == RopeConfig(10000.0, "linear", 4.0)

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.models.gemma import GemmaConfig, GemmaForCausalLM
from jaxpaged.models.registry import find_model
from jaxpaged.models.rope import RopeConfig

ABSENT = object()
LAYERS = 7
ALL = ("Gemma", "Gemma2", "Gemma3")
SLIDING, FULL = "sliding_attention", "full_attention"


def read(name: str, **changes: Any) -> GemmaConfig:
    given = {
        "architectures": [f"{name}ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        **changes,
    }
    given = {key: value for key, value in given.items() if value is not ABSENT}
    model, config = find_model(given, "here/config.json")
    assert model is GemmaForCausalLM and isinstance(config, GemmaConfig)
    return config


# ---------------------------------------------------------------- defaults, of transformers


@pytest.mark.parametrize("name", ALL)
def test_defaults_that_all_share(name: str) -> None:
    config = read(name, head_dim=ABSENT)
    assert (config.head_dim, config.norm_eps, config.tie_embeddings) == (256, 1e-6, True)
    assert (config.activation, config.bias) == ("gelu_pytorch_tanh", False)
    assert not read(name, tie_word_embeddings=False).tie_embeddings
    assert read(name, attention_bias=True).bias


def test_defaults_of_each_generation() -> None:
    first, second, third = (
        read(name, num_attention_heads=16, num_key_value_heads=ABSENT) for name in ALL
    )
    assert [c.num_kv_heads for c in (first, second, third)] == [16, 4, 4]
    assert [c.max_position for c in (first, second, third)] == [8192, 8192, 131072]
    assert [c.scale for c in (first, second, third)] == [None, 1 / 16, 1 / 16]
    assert [c.attention_cap for c in (first, second, third)] == [None, 50.0, None]
    assert [c.logits_cap for c in (first, second, third)] == [None, 30.0, None]
    assert [c.post_norms for c in (first, second, third)] == [False, True, True]
    assert [c.qk_norm for c in (first, second, third)] == [False, False, True]
    assert first.windows == ()
    assert second.windows == (4096, None, 4096, None, 4096, None, 4096)
    assert third.windows == (4096, 4096, 4096, 4096, 4096, None, 4096)
    assert [c.rope for c in (first, second, third)] == [
        *(RopeConfig(1e4), RopeConfig(1e4), RopeConfig(1e6))
    ]
    assert [c.local_rope for c in (first, second, third)] == [None, None, RopeConfig(1e4)]


# ---------------------------------------------------------------- caps, scale, activation


def test_caps_and_scale_as_the_config_says() -> None:
    config = read(
        "Gemma2",
        attn_logit_softcapping=20,
        final_logit_softcapping=None,
        query_pre_attn_scalar=144,
    )
    assert (config.attention_cap, config.logits_cap, config.scale) == (20.0, None, 1 / 12)
    assert read("Gemma3", final_logit_softcapping=30.0).logits_cap == 30.0


@pytest.mark.parametrize(
    "key", ["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"]
)
@pytest.mark.parametrize("value", [0, -1.0, "30", True, float("inf")], ids=repr)
def test_impossible_numbers(key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"{key!r} must be a positive number.*got {value!r}"):
        read("Gemma2", **{key: value})


def test_activations() -> None:
    assert read("Gemma", hidden_act="gelu").activation == "gelu_pytorch_tanh"
    # The older configs of Gemma 1 have both names.
    both = {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
    assert read("Gemma", **both).activation == "gelu_pytorch_tanh"
    for name in ("Gemma2", "Gemma3"):
        assert read(name, hidden_activation="gelu").activation == "gelu"
        assert read(name, hidden_activation=None).activation == "gelu_pytorch_tanh"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *[(name, "use_bidirectional_attention", True) for name in ALL],
        *[(name, "num_experts", 8) for name in ALL],
        ("Gemma", "hidden_act", "silu"),
        ("Gemma", "hidden_activation", "gelu"),
        ("Gemma", "query_pre_attn_scalar", 64),
        ("Gemma", "final_logit_softcapping", 30.0),
        ("Gemma2", "hidden_activation", "swish"),
        ("Gemma2", "sliding_window_size", 8),
        ("Gemma2", "sliding_window_pattern", 6),
        ("Gemma3", "hidden_activation", "swish"),
        ("Gemma3", "attn_logit_softcapping", 50.0),
    ],
)
def test_other_mathematics_is_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config {key}={value!r} is not supported"):
        read(name, **{key: value})


# ---------------------------------------------------------------- windows


def test_windows_of_gemma2() -> None:
    every_second = (8, None, 8, None, 8, None, 8)
    assert read("Gemma2", sliding_window=8).windows == every_second
    assert read("Gemma2", sliding_window=8, sliding_window_size=8).windows == every_second
    assert read("Gemma2", sliding_window=8, sliding_window_pattern=2).windows == every_second
    kinds = [FULL] * 6 + [SLIDING]
    assert read("Gemma2", sliding_window=8, layer_types=kinds).windows == (*[None] * 6, 8)
    assert read("Gemma2", sliding_window=8, layer_types=[FULL] * 7).windows == ()


def test_windows_of_gemma3() -> None:
    assert read("Gemma3", sliding_window=8, sliding_window_pattern=3).windows == (
        *(8, 8, None, 8, 8, None, 8),
    )
    assert read("Gemma3", sliding_window=8, sliding_window_pattern=1).windows == ()
    # The layers' own kinds count, not the pattern that newer releases write beside them.
    kinds = [FULL] * 6 + [SLIDING]
    beside = read("Gemma3", sliding_window=8, layer_types=kinds, _sliding_window_pattern=6)
    assert beside.windows == (*[None] * 6, 8)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"sliding_window": None}, "no window: sliding_window=None"),
        ({"sliding_window": 0}, "'sliding_window' must be a positive integer, got 0"),
        ({"layer_types": [FULL] * 6}, "each of the 7 layers"),
        ({"layer_types": ["chunked_attention"] * 7}, "'chunked_attention'"),
    ],
)
@pytest.mark.parametrize("name", ["Gemma2", "Gemma3"])
def test_impossible_windows(name: str, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelLoadError, match=part):
        read(name, **changes)


def test_impossible_patterns() -> None:
    for value in (0, "6", 2.0):
        with pytest.raises(ModelLoadError, match="'sliding_window_pattern'"):
            read("Gemma3", sliding_window_pattern=value)
    with pytest.raises(UnsupportedModelError, match="no window"):
        read("Gemma", sliding_window=8, layer_types=[SLIDING] * 7)


# ---------------------------------------------------------------- rope of Gemma 3

LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, (RopeConfig(5e5), RopeConfig(1e4))),
        ({"rope_local_base_freq": 500}, (RopeConfig(1e6), RopeConfig(500.0))),
        (
            {"rope_theta": 5e5, "rope_local_base_freq": 500, "rope_scaling": LINEAR},
            (RopeConfig(5e5, "linear", 8.0), RopeConfig(500.0)),
        ),
        ({"rope_scaling": None, "rope_parameters": None}, (RopeConfig(1e6), RopeConfig(1e4))),
        (
            {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_theta": 500.0}}},
            (RopeConfig(1e6, "linear", 8.0), RopeConfig(500.0)),
        ),
        (
            {"rope_parameters": {FULL: {**LINEAR, "rope_theta": 5e5}}, "rope_theta": 7.0},
            (RopeConfig(5e5, "linear", 8.0), RopeConfig(1e4)),
        ),
        (
            {"rope_parameters": {SLIDING: LINEAR, FULL: None}},
            (RopeConfig(1e6), RopeConfig(1e4, "linear", 8.0)),
        ),
    ],
)
def test_both_spellings_of_rope(
    changes: dict[str, Any], expected: tuple[RopeConfig, RopeConfig]
) -> None:
    config = read("Gemma3", **changes)
    assert (config.rope, config.local_rope) == expected


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"rope_parameters": LINEAR}, "rope_parameters=.*for each of full_attention"),
        ({"rope_parameters": {FULL: LINEAR, "other": {}}}, "other"),
        ({"rope_parameters": {FULL: 3}}, "full_attention.*3"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"rope_scaling": {FULL: LINEAR}}, "full_attention"),
        ({"rope_scaling": {"rope_type": "foo"}}, "rope_type 'foo'"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}, "max_position_embeddings": 64},
            "rope_type 'dynamic'",
        ),
        ({"rope_local_base_freq": 0}, "'rope_local_base_freq'"),
        ({"rope_theta": "big"}, "'rope_theta'"),
    ],
)
def test_impossible_rope(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelLoadError, match=part):
        read("Gemma3", **changes)


# ---------------------------------------------------------------- published models


def test_gemma_3_1b() -> None:
    """The fields that it was published with."""
    published = {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "initializer_range": 0.02,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "use_cache": True,
        "vocab_size": 262144,
    }
    assert find_model(published, "x")[1] == GemmaConfig(
        architecture="Gemma3ForCausalLM",
        vocab_size=262144,
        hidden_size=1152,
        intermediate_size=6912,
        num_layers=26,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        norm_eps=1e-6,
        rope=RopeConfig(1e6),
        max_position=32768,
        tie_embeddings=True,
        windows=(*(512, 512, 512, 512, 512, None) * 4, 512, 512),
        scale=1 / 16,
        post_norms=True,
        qk_norm=True,
        local_rope=RopeConfig(1e4),
        local_layers=frozenset(range(26)) - {5, 11, 17, 23},
    )


def test_layers_keep_their_frequencies_where_the_window_hides_nothing() -> None:
    config = read("Gemma3", num_hidden_layers=7, sliding_window=128, max_position_embeddings=128)
    assert (config.windows, config.local_layers) == ((), frozenset({0, 1, 2, 3, 4, 6}))
    small = dataclasses.replace(config, hidden_size=8, vocab_size=8, intermediate_size=8)
    layers = GemmaForCausalLM(small, jnp.dtype(jnp.float32)).layers
    assert [layer.table for layer in layers] == [1, 1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("given", [0, None])
def test_a_missing_window_is_named(given: Any) -> None:
    for changes in ({}, {"sliding_window_size": 4096}):
        with pytest.raises(ModelLoadError, match=rf"'?sliding_window\b.*{given}"):
            read("Gemma2", sliding_window=given, **changes)


def test_gemma_3_with_vision_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Gemma3ForConditionalGeneration.*gemma3"):
        find_model(
            {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, "x"
        )

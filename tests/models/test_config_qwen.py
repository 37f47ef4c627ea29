from __future__ import annotations

import math
from typing import Any

import pytest

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.models.llama import LlamaConfig, LlamaForCausalLM
from jaxpaged.models.registry import find_model
from jaxpaged.models.rope import RopeConfig

ABSENT = object()
LAYERS = 4


def fields(name: str = "Qwen2", **changes: Any) -> dict[str, Any]:
    given = {
        "architectures": [f"{name}ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        **changes,
    }
    return {key: value for key, value in given.items() if value is not ABSENT}


def read(name: str = "Qwen2", **changes: Any) -> LlamaConfig:
    model, config = find_model(fields(name, **changes), "here/config.json")
    assert model is LlamaForCausalLM and isinstance(config, LlamaConfig)
    return config


def test_what_each_generation_adds_to_llama() -> None:
    qwen2, qwen3 = read(), read("Qwen3")
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.mlp_bias, qwen2.qk_norm) == (
        *(True, False, False, False),
    )
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.mlp_bias, qwen3.qk_norm) == (
        *(False, False, False, True),
    )
    biased = read("Qwen3", attention_bias=True)
    assert (biased.qkv_bias, biased.out_bias) == (True, True)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_defaults(name: str) -> None:
    config = read(name)
    assert config.norm_eps == 1e-6
    assert config.rope == RopeConfig(10000.0)
    assert config.max_position == 32768
    assert not config.tie_embeddings
    assert config.windows == ()
    assert config.head_dim == {"Qwen2": 16, "Qwen3": 128}[name]
    assert read(name, head_dim=32).head_dim == 32
    wide = read(name, num_attention_heads=64, head_dim=16, num_key_value_heads=ABSENT)
    assert wide.num_kv_heads == 32


# ---------------------------------------------------------------- windows

WINDOW = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, ()),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True}, ()),  # 28 layers without one come first
        ({"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096, 4096)),
        ({**WINDOW, "max_window_layers": 0}, (8, 8, 8, 8)),
        ({**WINDOW, "max_window_layers": 3}, (None, None, None, 8)),
        ({**WINDOW, "max_window_layers": 4}, ()),
        ({**WINDOW, "max_window_layers": 0, "sliding_window": None}, ()),
        ({**WINDOW, "layer_types": None, "max_window_layers": 3}, (None, None, None, 8)),
        (
            {**WINDOW, "layer_types": ["sliding_attention", *["full_attention"] * 3]},
            (8, None, None, None),
        ),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 4}, ()),
    ],
)
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_windows(name: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(name, **changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"use_sliding_window": "yes"}, "'use_sliding_window' must be true or false, got 'yes'"),
        ({**WINDOW, "max_window_layers": -1}, "'max_window_layers' must be .*, got -1"),
        ({**WINDOW, "max_window_layers": 1.0}, "'max_window_layers' must be .*, got 1.0"),
        ({**WINDOW, "max_window_layers": 0, "sliding_window": 0}, "'sliding_window'.* got 0"),
        ({**WINDOW, "layer_types": ["full_attention"] * 3}, "each of the 4 layers"),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention"] * 4},
            "no window: sliding_window=8, use_sliding_window=None",
        ),
        ({**WINDOW, "layer_types": ["linear_attention"] * 4}, "'linear_attention'"),
    ],
)
def test_impossible_windows(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelLoadError, match=part):
        read(**changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("use_mrope", True), ("num_experts", 8), ("kv_lora_rank", 512)],
)
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_other_mathematics_is_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config {key}={value!r} is not supported"):
        read(name, **{key: value})


def test_rope_in_both_spellings() -> None:
    old = read(rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2.0})
    new = read(rope_parameters={"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0})
    assert old.rope == new.rope == RopeConfig(1e6, "linear", 2.0)
    with pytest.raises(UnsupportedModelError, match="mrope"):
        read(rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]})


def test_yarn_as_the_model_cards_say() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    config = read(rope_theta=1e6, rope_scaling=yarn, max_position_embeddings=32768)
    assert (config.rope.kind, config.max_position) == ("yarn", 131072)


def test_norms_over_heads_are_of_the_third_generation() -> None:
    assert read("Qwen3", use_qk_norm=True) == read("Qwen3", use_qk_norm=None) == read("Qwen3")
    for name, value in (("Qwen3", False), ("Qwen2", True)):
        with pytest.raises(UnsupportedModelError, match=f"use_qk_norm={value}"):
            read(name, use_qk_norm=value)


def test_deepseek_r1_0528_qwen3_8b(caplog: pytest.LogCaptureFixture) -> None:
    """The fields that it was published with; transformers ignores attn_factor, too."""
    published = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 131072,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "pad_token_id": 151645,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "attn_factor": 0.8782488562869419,
        },
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    for _ in range(2):  # a config is read several times
        config = find_model(published, "r1/config.json")[1]
    assert config.rope == RopeConfig(
        1e6,
        "yarn",
        4.0,
        original_max_position=32768,
        attention_factor=0.1 * math.log(4) + 1,
    )
    assert (config.max_position, config.windows, config.num_layers) == (131072, (), 36)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("r1/config.json: rope setting attn_factor=0.8782488562869419 is not")


def test_factors_of_longrope_fit_the_default_head_dim() -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    scaling = {"type": "longrope", "original_max_position_embeddings": 64, **factors}
    config = read("Qwen3", rope_scaling=scaling, max_position_embeddings=256)
    assert config.rope.long_factor == (2.0,) * 64


def test_deepseek_r1_distill_qwen_1_5b() -> None:
    """The fields that it was published with."""
    published = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "initializer_range": 0.02,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.44.0",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    assert find_model(published, "x")[1] == LlamaConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        norm_eps=1e-6,
        rope=RopeConfig(10000.0),
        max_position=131072,
        tie_embeddings=False,
        qkv_bias=True,
    )

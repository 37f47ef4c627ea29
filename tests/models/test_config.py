from __future__ import annotations

from typing import Any

import pytest

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import LlamaConfig, LlamaForCausalLM
from jaxpaged.models.registry import find_model, supported_architectures
from jaxpaged.models.rope import RopeConfig
from tests.tiny_models import tiny_config

ABSENT = object()


def read(model_type: str = "llama", **changes: Any) -> ModelConfig:
    """Read a tiny config with some fields replaced, or taken out (ABSENT)."""
    fields = tiny_config(model_type, **changes)
    fields = {key: value for key, value in fields.items() if value is not ABSENT}
    return find_model(fields, "here/config.json")[1]


def test_a_plain_config() -> None:
    assert read() == LlamaConfig(
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


@pytest.mark.parametrize(
    ("key", "limit"),
    [
        ("num_hidden_layers", 10_000),
        ("num_attention_heads", 100_000),
        ("vocab_size", 2**31 - 1),
        ("max_position_embeddings", 2**31 - 1),
    ],
)
def test_integers_have_a_limit(key: str, limit: int) -> None:
    for value in (limit + 1, 10**10, 10**400):
        with pytest.raises(ModelLoadError, match=f"{key!r} must be an integer of at most {limit}"):
            read(**{key: value})
    if key != "num_attention_heads":
        read(**{key: limit})


@pytest.mark.parametrize("value", [10**400, 1e300, 1e-320], ids=["10**400", "1e300", "1e-320"])
def test_numbers_beyond_float32_are_refused(value: Any) -> None:
    linear = {"rope_type": "linear", "factor": value}
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_slow": value}
    for changes in ({"rms_norm_eps": value}, {"rope_scaling": linear}, {"rope_scaling": yarn}):
        with pytest.raises(ModelLoadError, match="must be a positive number, from"):
            read(**changes)


def test_dual_chunk_attention_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    fields = tiny_config(dual_chunk_attention_config={"chunk_size": 262144})
    for _ in range(2):
        assert find_model(fields, "dual/config.json")[1] == read()
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith("dual/config.json: config dual_chunk_attention_config is not used")


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
        ("partial_rotary_factor", 0.5),
    ],
)
def test_other_mathematics_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(**{key: value})
    assert f"{key}={value!r}" in str(error.value)


@pytest.mark.parametrize(
    "harmless",
    [
        {"pretraining_tp": 1},
        {"pretraining_tp": 2},
        {"partial_rotary_factor": 1.0},
        {"hidden_act": ABSENT},
    ],
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
    [(32, (32, 32)), (None, ()), (ABSENT, (4096, 4096))],
)
def test_window_of_mistral(value: Any, expected: tuple[int, ...]) -> None:
    for name in ("MistralForCausalLM", "MinistralForCausalLM"):
        changes = {"architectures": [name], "max_position_embeddings": 8192}
        assert read("mistral", **changes, sliding_window=value).windows == expected


@pytest.mark.parametrize(
    ("window", "expected"),
    [(255, (255, 255)), (256, ()), (2**31, ()), (10**400, ()), (ABSENT, ())],
)
def test_a_window_as_long_as_the_context_is_none(window: Any, expected: tuple[int, ...]) -> None:
    for kinds in (ABSENT, ["sliding_attention"] * 2):
        config = read("mistral", sliding_window=window, layer_types=kinds)
        assert config.windows == expected


def test_a_window_that_is_said_to_be_unused() -> None:
    for harmless in (None, 256):  # no window, and one that hides nothing
        config = read("mistral", sliding_window=harmless, use_sliding_window=False)
        assert config.windows == ()
    assert read(use_sliding_window=False, sliding_window=32) == read()
    with pytest.raises(
        UnsupportedModelError, match="use_sliding_window=False contradicts sliding_window=32"
    ):
        read("mistral", use_sliding_window=False)
    with pytest.raises(UnsupportedModelError, match="use_sliding_window='no'"):
        read(use_sliding_window="no")


@pytest.mark.parametrize("value", [0, -1, "32", 1.5])
def test_impossible_windows(value: Any) -> None:
    with pytest.raises(ModelLoadError, match="sliding_window"):
        read("mistral", sliding_window=value)


def test_llama_has_no_window() -> None:
    assert read(sliding_window=32).windows == ()


# ---------------------------------------------------------------- maths of others


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("logit_scale", 3),
        ("embedding_multiplier", 12.0),
        ("num_local_experts", 8),
        ("kv_lora_rank", 512),
    ],
)
def test_maths_of_other_families_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config {key}={value} is not supported"):
        read(**{key: value})
    assert read(**{key: None}) == read()


def test_layers_of_mistral_that_attend_differently() -> None:
    for kinds, windows in (
        (["sliding_attention", "full_attention"], (32, None)),
        (["sliding_attention"] * 2, (32, 32)),
        (["full_attention"] * 2, ()),
    ):
        config = read("mistral", layer_types=kinds)
        assert (config.windows, config.layer_windows) == (windows, windows or (None, None))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"layer_types": ["full_attention"]}, "each of the 2 layers"),
        ({"layer_types": "full_attention"}, "each of the 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        ({"layer_types": ["full_attention", None]}, "has None"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "no window"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, "'sliding_window'"),
    ],
)
def test_impossible_layer_types(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelLoadError, match=part):
        read("mistral", **changes)


def test_llama_has_no_layers_with_a_window() -> None:
    assert read(layer_types=["full_attention"] * 2) == read()
    with pytest.raises(UnsupportedModelError, match="layer_types has 'sliding_attention'"):
        read(layer_types=["full_attention", "sliding_attention"], sliding_window=32)


def test_biases_of_llama() -> None:
    attention, mlp = read(attention_bias=True), read(mlp_bias=True)
    assert isinstance(attention, LlamaConfig) and isinstance(mlp, LlamaConfig)
    assert (attention.qkv_bias, attention.out_bias, attention.mlp_bias) == (True, True, False)
    assert (mlp.qkv_bias, mlp.out_bias, mlp.mlp_bias) == (False, False, True)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_that_mistral_has_not(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{key}=True"):
        read("mistral", **{key: True})
    with pytest.raises(ModelLoadError, match=f"{key!r} must be true or false, got 1"):
        read(**{key: 1})


def test_kv_heads_that_a_config_leaves_out() -> None:
    heads = {"num_attention_heads": 16, "head_dim": 16, "num_key_value_heads": ABSENT}
    assert read(**heads).num_kv_heads == 16
    assert read("mistral", **heads).num_kv_heads == 8
    assert read("mistral", **(heads | {"num_key_value_heads": None})).num_kv_heads == 16


def test_deepseek_r1_distill_llama_8b() -> None:
    """The fields that it was published with."""
    llama3 = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    config = find_model(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": llama3,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0.dev0",
            "use_cache": True,
            "vocab_size": 128256,
        },
        "x",
    )[1]
    assert config == LlamaConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope=RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),
        max_position=131072,
        tie_embeddings=False,
    )

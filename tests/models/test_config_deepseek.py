from __future__ import annotations

from typing import Any

import pytest

from jaxpaged.errors import ConfigError, ModelLoadError, UnsupportedModelError
from jaxpaged.models.config import KVShape
from jaxpaged.models.deepseek import DeepseekConfig, DeepseekForCausalLM
from jaxpaged.models.registry import find_model
from jaxpaged.models.rope import RopeConfig

ABSENT = object()
YARN_LENGTH = 163840
YARN = {
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def read(name: str = "V3", **changes: Any) -> DeepseekConfig:
    given = {
        "architectures": [f"Deepseek{name}ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        **({"num_experts_per_tok": 4} if name == "V2" else {}),
        **changes,
    }
    fields = {key: value for key, value in given.items() if value is not ABSENT}
    model, config = find_model(fields, "here/config.json")
    assert model is DeepseekForCausalLM and isinstance(config, DeepseekConfig)
    return config


def test_defaults() -> None:
    """Those of transformers for each of the two."""
    common = {
        "architecture": "DeepseekV3ForCausalLM",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 4,
        "num_heads": 12,
        "num_kv_heads": 12,
        "head_dim": 64,
        "norm_eps": 1e-6,
        "rope": RopeConfig(10000.0),
        "tie_embeddings": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "nope_dim": 128,
        "value_dim": 128,
        "attention_bias": False,
        "rope_interleave": True,
    }
    assert read("V3") == DeepseekConfig(
        **common,
        max_position=4096,
        experts=256,
        experts_per_token=8,
        groups=8,
        top_groups=4,
        expert_width=2048,
        shared_experts=1,
        dense_layers=3,
        sigmoid_scores=True,
        normalise=True,
        weight_scale=2.5,
        extra_layers=1,
    )
    assert read("V2") == DeepseekConfig(
        **{**common, "architecture": "DeepseekV2ForCausalLM"},
        max_position=2048,
        experts=64,
        experts_per_token=4,
        groups=1,
        top_groups=1,
        expert_width=1407,
        shared_experts=2,
        dense_layers=0,
        sigmoid_scores=False,
        normalise=False,
        weight_scale=1.0,
        extra_layers=0,
    )


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"q_lora_rank": None}, "q_lora_rank", None),
        ({"num_key_value_heads": 12}, "num_kv_heads", 12),
        ({"num_key_value_heads": None}, "num_kv_heads", 12),
        ({"head_dim": 128}, "head_dim", 64),  # a name that other families use; not read
        ({"rope_interleave": False}, "rope_interleave", False),
        ({"first_k_dense_replace": 0}, "dense_layers", 0),
        ({"num_nextn_predict_layers": 0}, "extra_layers", 0),
        ({"n_group": 1, "topk_group": 1}, "groups", 1),
        ({"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}, "groups", 8),
    ],
    ids=str,
)
def test_settings(changes: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(read(**changes), field) == value


def test_groups_of_v2_count_only_where_the_method_says_so() -> None:
    groups = {"n_group": 8, "topk_group": 3}
    assert read("V2", **groups).groups == 1
    grouped = read("V2", topk_method="group_limited_greedy", **groups)
    assert (grouped.groups, grouped.top_groups) == (8, 3)
    with pytest.raises(ModelLoadError, match="'n_group'"):
        read("V2", topk_method="group_limited_greedy", topk_group=3)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("V2", "norm_topk_prob", True),
        ("V2", "scoring_func", "sigmoid"),
        ("V2", "topk_method", "noaux_tc"),
        ("V2", "topk_method", None),
        ("V2", "mlp_bias", True),
        ("V2", "rope_interleave", False),
        ("V3", "scoring_func", "softmax"),
        ("V3", "topk_method", "greedy"),
        ("V3", "moe_layer_freq", 2),
        ("V3", "hidden_act", "gelu"),
        ("V3", "num_key_value_heads", 4),
        ("V3", "partial_rotary_factor", 0.5),
        ("V3", "qk_layernorm", True),
    ],
)
def test_other_mathematics_is_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(name, **{key: value})
    assert f"{key}={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"kv_lora_rank": 0}, ["'kv_lora_rank'", "0"]),
        ({"q_lora_rank": "8"}, ["'q_lora_rank'", "'8'"]),
        ({"qk_rope_head_dim": 15}, ["qk_rope_head_dim=15", "even"]),
        ({"first_k_dense_replace": -1}, ["'first_k_dense_replace'", "-1"]),
        ({"norm_topk_prob": "yes"}, ["'norm_topk_prob'", "'yes'"]),
        ({"routed_scaling_factor": 0}, ["'routed_scaling_factor'", "0"]),
        ({"n_routed_experts": 10**6}, ["'n_routed_experts'", "at most 100000"]),
        ({"n_routed_experts": 20}, ["n_routed_experts=20", "n_group=8"]),
        ({"n_routed_experts": 8}, ["n_routed_experts=8", "n_group=8", "at least 2"]),
        ({"topk_group": 9}, ["topk_group=9", "n_group=8"]),
        (
            {"n_routed_experts": 16, "topk_group": 2, "num_experts_per_tok": 5},
            ["num_experts_per_tok=5", "4 experts", "topk_group=2"],
        ),
    ],
    ids=str,
)
def test_impossible_values(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(**changes)
    assert all(part in str(error.value) for part in ["here/config.json", *parts])


def test_experts_per_token_of_v2_have_no_default() -> None:
    with pytest.raises(ModelLoadError, match="'num_experts_per_tok'"):
        read("V2", num_experts_per_tok=ABSENT)


@pytest.mark.parametrize("old", [True, False])
def test_both_spellings_of_yarn(old: bool) -> None:
    long = {"max_position_embeddings": YARN_LENGTH}
    if old:
        config = read(**long, rope_theta=5e4, rope_scaling={"type": "yarn", **YARN})
    else:
        config = read(**long, rope_parameters={"rope_type": "yarn", "rope_theta": 5e4, **YARN})
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("yarn", 5e4, 40.0)
    assert config.max_position == YARN_LENGTH
    # 0.1 ln 40 + 1, squared, over sqrt(128 + 64)
    assert config.attention_scale == pytest.approx(0.13523377)


def test_the_scale_of_attention_is_of_the_whole_head() -> None:
    plain = 192**-0.5
    assert read().attention_scale == pytest.approx(plain)
    no_mscale = {key: value for key, value in YARN.items() if "mscale" not in key}
    config = read(max_position_embeddings=YARN_LENGTH, rope_scaling={"type": "yarn", **no_mscale})
    assert config.attention_scale == pytest.approx(plain)  # all of it is in the rotation
    assert config.rope.attention_factor == pytest.approx(1.3688879)


def test_every_device_has_the_whole_cache_and_some_heads() -> None:
    config = read().over(4)
    assert config.kv_shape == KVShape(1, 576, 512, latent=True)
    assert config.kv_shape.elements == 576
    assert config.group_size == 3
    with pytest.raises(ConfigError) as error:
        read().over(8)
    assert "tensor_parallel_size=8" in str(error.value)
    assert "sizes that work: 1, 2, 3, 4, 6, 12." in str(error.value)


@pytest.mark.parametrize(
    ("name", "version", "ignored"),
    [
        ("model.layers.4.eh_proj.weight", "V3", True),
        ("model.layers.4.mlp.experts.0.down_proj.weight", "V3", True),
        ("model.layers.5.eh_proj.weight", "V3", False),
        ("model.layers.4.eh_proj.weight", "V2", False),
        ("model.layers.3.self_attn.extra.weight", "V3", False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "V2", True),
        ("lm_head.weight", "V3", False),
    ],
)
def test_tensors_that_are_not_needed(name: str, version: str, ignored: bool) -> None:
    assert DeepseekForCausalLM.ignorable(read(version), name) is ignored

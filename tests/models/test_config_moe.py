from __future__ import annotations

from typing import Any

import pytest

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.models.mixtral import MixtureConfig
from jaxpaged.models.registry import find_model
from jaxpaged.models.rope import RopeConfig

ABSENT = object()
LAYERS = 4
FAMILIES = ["Mixtral", "Qwen2Moe", "Qwen3Moe"]


def fields(name: str, **changes: Any) -> dict[str, Any]:
    given = {
        "architectures": [f"{name}ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        **changes,
    }
    return {key: value for key, value in given.items() if value is not ABSENT}


def read(name: str, **changes: Any) -> MixtureConfig:
    _, config = find_model(fields(name, **changes), "here/config.json")
    assert isinstance(config, MixtureConfig)
    return config


def test_defaults() -> None:
    mixtral, qwen2, qwen3 = (read(name, num_key_value_heads=ABSENT) for name in FAMILIES)
    assert [c.num_kv_heads for c in (mixtral, qwen2, qwen3)] == [8, 16, 4]
    assert [c.experts for c in (mixtral, qwen2, qwen3)] == [8, 60, 128]
    assert [c.experts_per_token for c in (mixtral, qwen2, qwen3)] == [2, 4, 8]
    assert [c.expert_width for c in (mixtral, qwen2, qwen3)] == [128, 1408, 768]
    assert [c.shared_width for c in (mixtral, qwen2, qwen3)] == [None, 5632, None]
    assert [c.normalise for c in (mixtral, qwen2, qwen3)] == [True, False, False]
    assert [c.norm_eps for c in (mixtral, qwen2, qwen3)] == [1e-5, 1e-6, 1e-6]
    assert [c.max_position for c in (mixtral, qwen2, qwen3)] == [131_072, 32_768, 32_768]
    assert [c.rope.theta for c in (mixtral, qwen2, qwen3)] == [1e6, 1e4, 1e4]
    assert [c.qkv_bias for c in (mixtral, qwen2, qwen3)] == [False, True, False]
    assert [c.qk_norm for c in (mixtral, qwen2, qwen3)] == [False, False, True]
    for config in (mixtral, qwen2, qwen3):
        assert (config.head_dim, config.out_bias, config.tie_embeddings) == (4, False, False)
        assert config.windows == () and config.dense_layers == frozenset()


def test_a_published_mixtral() -> None:
    config = read(
        "Mixtral",
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=32768,
        num_attention_heads=32,
        num_experts_per_tok=2,
        num_hidden_layers=32,
        num_key_value_heads=8,
        num_local_experts=8,
        output_router_logits=False,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.02,
        sliding_window=None,
        tie_word_embeddings=False,
    )
    assert (config.experts, config.experts_per_token, config.expert_width) == (8, 2, 14336)
    assert (config.head_dim, config.windows, config.max_position) == (128, (), 32768)


def test_a_published_qwen3_moe() -> None:
    config = read(
        "Qwen3Moe",
        attention_bias=False,
        decoder_sparse_step=1,
        head_dim=128,
        hidden_size=2048,
        intermediate_size=6144,
        max_position_embeddings=40960,
        max_window_layers=48,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
        rope_scaling=None,
        rope_theta=1000000.0,
        sliding_window=None,
        use_sliding_window=False,
    )
    assert (config.experts, config.experts_per_token, config.expert_width) == (128, 8, 768)
    assert (config.head_dim, config.normalise, config.windows) == (128, True, ())
    assert config.rope == RopeConfig(1e6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts(name: str, key: str) -> None:
    assert read(name, **{key: 12}).experts == 12
    assert read(name, num_experts=12, num_local_experts=12).experts == 12
    with pytest.raises(ModelLoadError, match=r"'num_experts': 12, 'num_local_experts': 16"):
        read(name, num_experts=12, num_local_experts=16)


@pytest.mark.parametrize(
    ("settings", "dense"),
    [
        ({"decoder_sparse_step": 2}, {0, 2}),
        ({"decoder_sparse_step": 3}, {0, 1, 3}),
        ({"mlp_only_layers": [1, 3]}, {1, 3}),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, {0, 1, 2}),
        ({"mlp_only_layers": None}, set()),
    ],
)
def test_dense_layers(settings: dict[str, Any], dense: set[int]) -> None:
    for name in ("Qwen2Moe", "Qwen3Moe"):
        assert read(name, **settings).dense_layers == dense


@pytest.mark.parametrize("beyond", [-1, LAYERS, 10**400])
def test_dense_layers_that_are_not_there(beyond: int) -> None:
    with pytest.raises(ModelLoadError, match=f"mlp_only_layers has {str(beyond)[:80]}.*0 to 3"):
        read("Qwen3Moe", mlp_only_layers=[0, beyond])


@pytest.mark.parametrize("name", FAMILIES)
def test_there_are_not_too_many_experts(name: str) -> None:
    assert read(name, num_experts=100_000).experts == 100_000
    with pytest.raises(ModelLoadError, match="'num_experts' must be an integer of at most 100000"):
        read(name, num_experts=100_001)


def test_what_qwen3_coder_says_of_itself() -> None:
    said = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}
    assert read("Qwen3Moe", **said) == read("Qwen3Moe")
    with pytest.raises(UnsupportedModelError, match="use_qk_norm=False"):
        read("Qwen3Moe", use_qk_norm=False)
    with pytest.raises(UnsupportedModelError, match="use_qk_norm=True"):
        read("Qwen2Moe", use_qk_norm=True)


@pytest.mark.parametrize(
    ("name", "settings", "windows"),
    [
        ("Mixtral", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("Qwen3Moe", {"sliding_window": 8}, ()),
        ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 8}, (8, 8, 8, 8)),
        ("Qwen3Moe", {"use_sliding_window": True}, (4096,) * 4),
        ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": None}, ()),
        ("Qwen2Moe", {"use_sliding_window": False, "sliding_window": 0}, ()),
        ("Qwen2Moe", {"use_sliding_window": True, "sliding_window": 8}, (8, None, 8, None)),
        (
            "Qwen2Moe",
            {"use_sliding_window": True, "max_window_layers": 2},
            (4096, None) + (None,) * 2,
        ),
        ("Qwen2Moe", {"use_sliding_window": True, "max_window_layers": 0}, ()),
        (
            "Qwen2Moe",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            (None, None, None, 8),
        ),
    ],
)
def test_windows(name: str, settings: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(name, **settings).windows == windows


@pytest.mark.parametrize(
    ("names", "settings", "parts"),
    [
        (FAMILIES, {"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        (FAMILIES, {"num_experts_per_tok": 200}, ["num_experts_per_tok=200"]),
        (FAMILIES, {"num_local_experts": "many"}, ["'num_local_experts'", "'many'"]),
        (FAMILIES, {"n_routed_experts": 8}, ["n_routed_experts=8"]),
        (FAMILIES, {"final_logit_softcapping": 30.0}, ["final_logit_softcapping=30.0"]),
        (["Mixtral", "Qwen2Moe"], {"attention_bias": True}, ["attention_bias=True"]),
        (["Mixtral", "Qwen3Moe"], {"layer_types": ["full_attention"]}, ["layer_types"]),
        (["Qwen2Moe", "Qwen3Moe"], {"mlp_only_layers": 3}, ["mlp_only_layers=3"]),
        (["Qwen2Moe", "Qwen3Moe"], {"mlp_only_layers": ["1"]}, ["mlp_only_layers=['1']"]),
        (["Qwen2Moe", "Qwen3Moe"], {"decoder_sparse_step": 0}, ["'decoder_sparse_step'", "0"]),
        (["Qwen2Moe", "Qwen3Moe"], {"moe_intermediate_size": -1}, ["'moe_intermediate_size'"]),
        (["Qwen2Moe", "Qwen3Moe"], {"norm_topk_prob": 1}, ["'norm_topk_prob'", "1"]),
        (["Qwen2Moe"], {"shared_expert_intermediate_size": 0}, ["'shared_expert_intermediate"]),
    ],
)
def test_errors_name_the_setting(
    names: list[str], settings: dict[str, Any], parts: list[str]
) -> None:
    for name in names:
        with pytest.raises((ModelLoadError, UnsupportedModelError)) as error:
            read(name, **settings)
        assert all(part in str(error.value) for part in ["here/config.json", *parts])

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.models.llama import LlamaConfig
from jaxpaged.models.phi3 import Phi3ForCausalLM
from jaxpaged.models.registry import find_model
from jaxpaged.models.rope import RopeConfig

ABSENT = object()
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}


def read(**changes: Any) -> LlamaConfig:
    given = {
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        **changes,
    }
    given = {key: value for key, value in given.items() if value is not ABSENT}
    model, config = find_model(given, "here/config.json")
    assert model is Phi3ForCausalLM and isinstance(config, LlamaConfig)
    return config


@pytest.mark.parametrize("given", [ABSENT, None], ids=["absent", "null"])
def test_defaults(given: Any) -> None:
    names = ("num_key_value_heads", "head_dim", "rms_norm_eps", "sliding_window", "rope_scaling")
    config = read(**dict.fromkeys(names, given))
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 8, 1e-5)
    assert (config.rope, config.max_position) == (RopeConfig(1e4), 4096)
    assert (config.windows, config.tie_embeddings) == ((), False)


@pytest.mark.parametrize(
    # What covers the whole context is no window.
    ("window", "expected"),
    [(2047, (2047, 2047)), (4095, (4095, 4095)), (4096, ()), (262144, ())],
)
def test_windows(window: int, expected: tuple[int, ...]) -> None:
    assert read(sliding_window=window).windows == expected


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("outside", [True, False])
def test_longrope_by_all_its_names(kind: str, key: str, outside: bool) -> None:
    scaling: dict[str, Any] = {key: kind, **FACTORS}
    original = {"original_max_position_embeddings": 1024}
    if not outside:
        scaling |= original
    config = read(rope_scaling=scaling, **(original if outside else {}))
    assert config.rope == RopeConfig(
        1e4,
        "longrope",
        4.0,
        original_max_position=1024,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(1024)),
        short_factor=(1.0, 1.5, 2.0, 2.5),
        long_factor=(2.0, 3.0, 4.0, 5.0),
    )
    assert config.max_position == 4096


def test_the_original_length_is_4096_where_none_is_given() -> None:
    config = read(rope_scaling={"type": "longrope", **FACTORS}, max_position_embeddings=131072)
    assert (config.rope.original_max_position, config.rope.factor) == (4096, 32.0)
    assert config.max_position == 131072


def test_phi4_mini_rotates_part_of_a_head() -> None:
    half = {key: value[:3] for key, value in FACTORS.items()}
    config = read(partial_rotary_factor=0.75, rope_scaling={"type": "longrope", **half})
    assert config.rope.partial == 0.75
    with pytest.raises(ModelLoadError, match="'short_factor' must have 4 numbers"):
        read(rope_scaling={"type": "longrope", **half})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("lm_head_bias", True),
        ("full_attn_mod", 2),
        ("interpolate_factor", 2),
        ("num_local_experts", 16),
    ],
)
def test_other_maths_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{key}={value!r}"):
        read(**{key: value})


def test_kinds_of_rope_that_the_family_lacks() -> None:
    with pytest.raises(UnsupportedModelError, match="'linear'.*longrope"):
        read(rope_scaling={"type": "linear", "factor": 2.0})

"""Rope settings in configs: both spellings, defaults, what follows from them, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.config_reader import ConfigReader
from jaxpaged.models.registry import find_model
from jaxpaged.models.rope import NO_ROPE, RopeConfig, context_length, read_rope
from tests.tiny_models import tiny_config

ABSENT = object()
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_4 = 0.1 * math.log(4) + 1
SHORT, LONG = [1.0 + i for i in range(8)], [2.0 + i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
LONGROPE_4 = math.sqrt(1 + math.log(4) / math.log(64))


def read(**changes: Any) -> ModelConfig:
    """A tiny Llama of 256 positions and heads of 16, with some fields replaced or taken out."""
    fields = tiny_config("llama", **changes)
    fields = {key: value for key, value in fields.items() if value is not ABSENT}
    return find_model(fields, "here/config.json")[1]


def yarn(**changes: Any) -> RopeConfig:
    settings = {"factor": 4.0, "original_max_position": 64, "attention_factor": YARN_4, **changes}
    return RopeConfig(1e4, "yarn", **settings)


def longrope(**changes: Any) -> RopeConfig:
    settings = {
        "factor": 4.0,
        "original_max_position": 64,
        "attention_factor": LONGROPE_4,
        "short_factor": tuple(SHORT),
        "long_factor": tuple(LONG),
        **changes,
    }
    return RopeConfig(1e4, "longrope", **settings)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 500000}, RopeConfig(5e5)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig(1e4)),
        ({"rope_scaling": {"rope_type": None, "type": None}}, RopeConfig(1e4)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(1e4, "linear", 2.0)),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "x", "factor": 2.0}},
            RopeConfig(1e4, "linear", 2.0),
        ),
        (
            {"rope_parameters": {}, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            RopeConfig(1e4, "linear", 4.0),
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
        (  # twice the same
            {
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
                "rope_scaling": {"type": "linear", "factor": 4},
            },
            RopeConfig(1e4, "linear", 4.0),
        ),
        (
            {
                "rope_scaling": {
                    "type": "linear",
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                }
            },
            RopeConfig(1e4, "linear", 2.0, original_max_position=64),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            RopeConfig(1e4, "dynamic", 2.0, original_max_position=256),
        ),
        ({"rope_scaling": YARN}, yarn()),
        ({"rope_scaling": {**YARN, "factor": None}}, yarn()),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            yarn(original_max_position=256),
        ),
        (
            {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
            yarn(beta_fast=16.0, beta_slow=2.0, truncate=False),
        ),
        ({"rope_scaling": {**YARN, "attention_factor": 1.5}}, yarn(attention_factor=1.5)),
        ({"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 0}}, yarn()),
        (
            {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            yarn(attention_factor=1.0, mscale_all_dim=1.0),
        ),
        ({"rope_scaling": LONGROPE, "original_max_position_embeddings": 64}, longrope()),
        ({"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 64}}, longrope()),
        (
            {
                "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 128},
                "original_max_position_embeddings": 64,
            },
            longrope(),
        ),
        (
            {"rope_scaling": LONGROPE},
            longrope(factor=1.0, original_max_position=256, attention_factor=1.0),
        ),
        (
            {
                "rope_scaling": {**LONGROPE, "rope_type": ABSENT, "type": "su", "factor": 1.0},
                "original_max_position_embeddings": 64,
            },
            longrope(factor=1.0, attention_factor=1.0),
        ),
    ],
)
def test_both_spellings_of_rope(fields: dict[str, Any], expected: RopeConfig) -> None:
    scaling = fields.get("rope_scaling")
    if scaling:
        given = {key: value for key, value in scaling.items() if value is not ABSENT}
        fields = {**fields, "rope_scaling": given}
    assert read(**fields).rope == expected


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"rope_scaling": {"rope_type": "foo"}}, ["rope_type", "'foo'", "longrope"]),
        ({"rope_scaling": {"rope_type": "proportional"}}, ["rope_type", "'proportional'"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, ["partial_rotary_factor=0.25"]),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["per layer type", "full_attention"],
        ),
        ({"rope_scaling": {"factor": 4.0}}, ["factor=4.0", "'default'"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0, "attention_factor": 1.2}},
            ["attention_factor=1.2", "'linear'"],
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
            ["alpha=1000.0", "'dynamic'"],
        ),
        ({"rope_scaling": {**LONGROPE, "short_mscale": 1.1}}, ["short_mscale=1.1"]),
        (
            {"rope_scaling": {**LONGROPE, "attn_factor": 0.8}},
            ["attn_factor=0.8", "'longrope'"],
        ),
        ({"rope_scaling": {**YARN, "extrapolation_factor": 0.5}}, ["extrapolation_factor=0.5"]),
        ({"rope_scaling": {**YARN, "long_factor": LONG}}, ["long_factor=", "'yarn'"]),
        (
            {
                "rope_scaling": {
                    "type": "dynamic",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            ["original_max_position_embeddings=64", "max_position_embeddings=256"],
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
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    **LLAMA3,
                    "original_max_position_embeddings": "64",
                }
            },
            ["'original_max_position_embeddings'", "'64'"],
        ),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
        ({"rope_parameters": [1, 2]}, ["rope_parameters", "[1, 2]"]),
        ({"rope_parameters": {"rope_theta": "big"}}, ["'rope_theta'", "'big'"]),
        ({"rope_parameters": {"rope_theta": -1.0}}, ["'rope_theta'", "-1.0"]),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": 3}}, ["rope_type", "3"]),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            ["rope_parameters", "rope_scaling", "differ"],
        ),
        ({"rope_scaling": {"type": "yarn"}}, ["'factor'", "None"]),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, ["rope_theta=1.0", "above 1", "'yarn'"]),
        ({"rope_scaling": {**YARN, "factor": 1e30}}, ["factor=1e+30", "64 tokens", "2147483647"]),
        (
            {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
            ["partial_rotary_factor=1.0", "0.5", "leave one out"],
        ),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, ["beta_fast=1.0", "2.0"]),
        ({"rope_scaling": {**YARN, "truncate": 1}}, ["'truncate'", "got 1"]),
        ({"rope_scaling": {**YARN, "mscale": "1"}}, ["'mscale'", "'1'"]),
        ({"rope_scaling": {**YARN, "attention_factor": 0}}, ["'attention_factor'", "0"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["'short_factor'", "None"]),
        ({"rope_scaling": {**LONGROPE, "long_factor": LONG[1:]}}, ["'long_factor'", "8", "7"]),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 7 + [0]}}, ["'long_factor'"]),
    ],
)
def test_rope_settings_of_the_wrong_kind(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(**fields)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_part_of_a_head() -> None:
    fields = {"hidden_size": 64, "num_attention_heads": 4, "partial_rotary_factor": 0.75}
    rope = read_rope(ConfigReader(fields, "x"), partial=True)
    assert rope == RopeConfig(1e4, partial=0.75)
    assert (rope.rotary_dim(16), RopeConfig(1e4).rotary_dim(16)) == (12, 16)
    inner = {"rope_parameters": {"partial_rotary_factor": 0.75}}
    assert read_rope(ConfigReader(inner, "x"), partial=True).partial == 0.75
    assert read_rope(ConfigReader(fields | inner, "x"), partial=True).partial == 0.75
    for share in (0, 1.5, "half"):
        reader = ConfigReader({**fields, "partial_rotary_factor": share}, "x")
        with pytest.raises(ModelLoadError, match="partial_rotary_factor"):
            read_rope(reader, partial=True)


def test_what_a_family_may_set() -> None:
    assert read_rope(ConfigReader({}, "x"), default_theta=1e6) == RopeConfig(1e6)
    fields = {"max_position_embeddings": 64, "rope_scaling": LONGROPE}
    assert read_rope(ConfigReader(fields, "x"), head_dim=16).short_factor == tuple(SHORT)
    with pytest.raises(ModelLoadError, match="must have 4 numbers"):
        read_rope(ConfigReader(fields, "x"), head_dim=8)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, 256),
        ({"type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "llama3", **LLAMA3}, 256),
        ({**LONGROPE, "original_max_position_embeddings": 64}, 256),
        ({"type": "linear", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "dynamic", "factor": 4.0}, 1024),
        (YARN, 256),
        ({**YARN, "factor": 2.0}, 256),
        ({**YARN, "factor": 8.5}, 544),
        ({"type": "yarn", "factor": 4.0}, 1024),
    ],
    ids=str,
)
def test_context_length(scaling: dict[str, Any], expected: int) -> None:
    config = read(rope_scaling=scaling)
    assert config.max_position == context_length(config.rope, 256) == expected


@pytest.mark.parametrize("key", ["max_sequence_length", "seq_length"])
def test_context_of_models_that_were_trained_further(key: str) -> None:
    """As vicuna-7b-v1.5-16k says it: 4096, a factor of 4, and 16384."""
    linear, dynamic = ({"type": kind, "factor": 4.0} for kind in ("linear", "dynamic"))
    vicuna = {"max_position_embeddings": 4096, key: 16384}
    assert read(**vicuna, rope_scaling=linear).max_position == 16384
    assert read(**(vicuna | {key: 32768}), rope_scaling=dynamic).max_position == 32768
    assert read(**(vicuna | {key: 2048}), rope_scaling=linear).max_position == 4096
    assert read(**(vicuna | {key: None}), rope_scaling=linear).max_position == 4096
    assert read(**vicuna).max_position == 4096  # not without a stretch


def test_models_without_rotary_positions() -> None:
    assert (NO_ROPE.rule, NO_ROPE.threshold, context_length(NO_ROPE, 100)) == ("fixed", 0, 100)

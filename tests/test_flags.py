"""Flags from dataclasses: one a field, help from the field's text, typed values."""

from __future__ import annotations

import argparse
import dataclasses
import typing

import pytest

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.flags import add_flags, field_docs, flag_name, given, value_of
from jaxpaged.sampling_params import SamplingParams
from server.settings import ServerConfig


def parser_of(cls: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, cls, "fields")
    return parser


def parse(cls: type, *words: str) -> dict[str, object]:
    return given(parser_of(cls).parse_args(words), cls)


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams, BeamSearchParams, ServerConfig])
def test_every_field_has_a_text_and_a_flag(cls: type) -> None:
    docs = field_docs(cls)
    help_text = " ".join(parser_of(cls).format_help().split())
    for field in dataclasses.fields(cls):
        assert docs.get(field.name), f"{cls.__name__}.{field.name} has no text"
        assert flag_name(field.name) in help_text
        assert docs[field.name][:20] in help_text


def test_nothing_given_leaves_nothing() -> None:
    assert parse(EngineConfig) == {}
    assert parse(SamplingParams) == {}


def test_engine_values() -> None:
    words = "--model m --max-model-len 8k --max-num-seqs 4 --watermark 0.5 --decode-buckets 8,16"
    assert parse(EngineConfig, *words.split()) == {
        "model": "m",
        "max_model_len": "8k",
        "max_num_seqs": 4,
        "watermark": 0.5,
        "decode_buckets": [8, 16],
    }
    config = EngineConfig.from_dict(parse(EngineConfig, *words.split()))
    assert config.max_model_len == 8000
    assert config.decode_buckets == (8, 16)


def test_booleans_turn_on_and_off() -> None:
    assert parse(EngineConfig, "--no-enable-prefix-caching", "--enforce-eager") == {
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }


def test_the_second_name_of_a_flag() -> None:
    words = ("--device-memory-utilization", "0.5")
    assert parse(EngineConfig, *words) == {"gpu_memory_utilization": 0.5}


def test_sampling_values() -> None:
    words = ["--stop", "a", "--stop", "b c", "--top-k", "-1", "--logit-bias", '{"5": -100}']
    words += ["--stop-token-ids", "1,2", "--temperature", "0.5", "--seed", "-3"]
    fields = parse(SamplingParams, *words)
    params = SamplingParams.from_dict(fields)
    assert params.stop == ["a", "b c"]
    assert params.top_k == -1
    assert params.logit_bias == {5: -100.0}
    assert params.stop_token_ids == [1, 2]
    assert params.temperature == 0.5
    assert params.seed == 2**64 - 3


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams, ServerConfig])
def test_none_is_a_value_of_exactly_the_fields_that_may_be_none(cls: type) -> None:
    hints = typing.get_type_hints(cls)
    optional = []
    for field in dataclasses.fields(cls):
        if type(None) in typing.get_args(hints[field.name]):
            optional.append(field.name)
            if bool in typing.get_args(hints[field.name]):  # a switch takes no word
                assert value_of(cls, field.name, "none") is None
                assert parse(cls, flag_name(field.name)) == {field.name: True}
                assert parse(cls, f"--no-{flag_name(field.name)[2:]}") == {field.name: False}
                continue
            assert parse(cls, flag_name(field.name), "none") == {field.name: None}
        elif hints[field.name] in (int, float):
            with pytest.raises(SystemExit):
                parse(cls, flag_name(field.name), "none")
    assert len(optional) > 5
    cls(**dict.fromkeys(optional))


def test_none_as_a_text() -> None:
    # "none" is a choice of generation_config, and one of several stop strings is only a text.
    assert parse(EngineConfig, "--generation-config", "none") == {"generation_config": "none"}
    assert parse(SamplingParams, "--stop", "none", "--stop", "x") == {"stop": ["none", "x"]}
    assert parse(SamplingParams, "--stop", "none of") == {"stop": ["none of"]}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--n", "two"], "expected an integer, got 'two'"),
        (["--temperature", "hot"], "expected a number, got 'hot'"),
        (["--stop-token-ids", "1;2"], "separated by commas"),
        (["--logit-bias", "[1]"], "expected a JSON object"),
        (["--logit-bias", "{"], "not JSON"),
        (["--max-tok", "3"], "unrecognized arguments"),
    ],
)
def test_wrong_values_are_usage_errors(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(SamplingParams, *words)
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("max_num_seqs", "8", 8),
        ("max_num_seqs", "none", None),
        ("max_model_len", "8k", "8k"),
        ("watermark", "0.5", 0.5),
        ("enforce_eager", "TRUE", True),
        ("enforce_eager", "off", False),
        ("decode_buckets", "8,16", [8, 16]),
    ],
)
def test_values_written_as_one_text(field: str, text: str, value: object) -> None:
    assert value_of(EngineConfig, field, text) == value


def test_lists_of_texts_as_one_text() -> None:
    assert value_of(ServerConfig, "allowed_origins", "a, b,") == ["a", "b"]
    assert value_of(ServerConfig, "allowed_origins", '["a,b"]') == ["a,b"]
    assert value_of(ServerConfig, "api_key", "none") is None
    assert value_of(SamplingParams, "stop", "a,b") == ["a,b"]
    with pytest.raises(ConfigError, match="expected true or false, got '2'"):
        value_of(EngineConfig, "enforce_eager", "2")
    with pytest.raises(ConfigError, match="expected an integer"):
        value_of(EngineConfig, "max_num_seqs", "x")


def test_words_and_booleans_in_one() -> None:
    for text, value in (("true", True), ("false", False), ("never", "never")):
        assert parse(BeamSearchParams, "--early-stopping", text) == {"early_stopping": value}
    with pytest.raises(ConfigError, match="expected true, false or never, got 'True'"):
        value_of(BeamSearchParams, "early_stopping", "True")


def test_a_clashing_field_takes_a_prefix() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, SamplingParams, "sampling", clashes={"seed": "sampling"})
    add_flags(parser, EngineConfig, "engine")
    args = parser.parse_args(["--seed", "1", "--sampling-seed", "2"])
    assert given(args, EngineConfig) == {"seed": 1}
    assert given(args, SamplingParams) == {"seed": 2}


def test_a_type_without_a_flag_is_our_own_mistake() -> None:
    @dataclasses.dataclass
    class Odd:
        value: complex = 1j

    with pytest.raises(TypeError, match="no flag can be made"):
        add_flags(argparse.ArgumentParser(), Odd, "odd")

"""Engine settings: what is taken, how it is normalised, and the errors that name what is wrong."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

from jaxpaged import config
from jaxpaged.config import EngineConfig, claim_device_memory
from jaxpaged.errors import ConfigError

FIELDS = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
TYPES = {field.name: str(field.type) for field in dataclasses.fields(EngineConfig)}
BOOLEANS = [name for name, kind in TYPES.items() if kind.startswith("bool")]
NUMBERS = [name for name, kind in TYPES.items() if "int" in kind or "float" in kind]
TEXTS = [name for name, kind in TYPES.items() if kind.startswith("str")]


class Odd:
    """Something that no setting can be."""

    def __repr__(self) -> str:
        raise RuntimeError("cannot be shown")


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    return str(caught.value)


def test_every_field_has_its_check() -> None:
    assert list(config._CHECKS) == list(FIELDS)
    assert len(BOOLEANS) == 8
    assert len(TEXTS) == 15
    assert {*BOOLEANS, *NUMBERS, *TEXTS} == set(FIELDS)


def test_the_defaults_are_their_own_normal_form() -> None:
    assert dataclasses.asdict(EngineConfig()) == FIELDS
    changed = EngineConfig(max_model_len="8K", decode_buckets=[8, 16])  # type: ignore[arg-type]
    assert dataclasses.replace(changed) == changed


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [Odd(), b"x", {"a": 1}, {-8}, [], [0], 1j, Odd, np.zeros((2, 2))])
def test_values_of_no_use_name_their_field(name: str, value: Any) -> None:
    message = refused(**{name: value})
    assert message.startswith(f"{name} must be ")
    if isinstance(value, Odd):
        assert "a value of type Odd that cannot be shown" in message
    elif name.endswith("_buckets") and isinstance(value, (list, set, np.ndarray)) and len(value):
        assert repr(next(iter(value))) in message  # the item that is wrong
    else:
        assert repr(value) in message


@pytest.mark.parametrize("name", [n for n, default in FIELDS.items() if default is not None])
def test_none_is_refused_where_it_means_nothing(name: str) -> None:
    assert refused(**{name: None}).startswith(f"{name} must be ")


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans(name: str) -> None:
    for value in ("false", "no", "", 0, 1, 1.0, np.int64(0)):
        also = ", or None" if FIELDS[name] is None else ""
        assert refused(**{name: value}) == f"{name} must be true or false{also}, got {value!r}."
    for value in (True, False, np.True_, np.False_):
        assert getattr(EngineConfig(**{name: value}), name) is bool(value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["x", "0.5x", True, np.True_, float("nan"), -(10**99), "9" * 50])
def test_numbers_of_no_use(name: str, value: Any) -> None:
    assert refused(**{name: value}).startswith(f"{name} must be ")


@pytest.mark.parametrize("name", ["gpu_memory_utilization", "watermark"])
def test_shares(name: str) -> None:
    high = name == "watermark"
    for value in ("0.5", "", None, float("inf"), -0.1, 1.1, 10**400, [0.5], float(high)):
        assert f"{name} must be a number in " in refused(**{name: value})
    for value in (0.5, np.float32(0.5), np.float64(0.5), np.float16(0.5)):
        taken = getattr(EngineConfig(**{name: value}), name)
        assert (type(taken), taken) == (float, 0.5)
    assert getattr(EngineConfig(**{name: 1 - high}), name) == 1 - high


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("value", [5, 0.5, True, ["x"], b"x"])
def test_texts(name: str, value: Any) -> None:
    message = refused(**{name: value})
    assert message.startswith(f"{name} must be ")
    assert repr(value) in message


def test_empty_texts() -> None:
    for name in ("model", "tokenizer", "revision", "chat_template", "record"):
        assert refused(**{name: ""}).endswith("got ''." if name == "model" else "or None, got ''.")
    assert EngineConfig(compile_cache_dir="").compile_cache_dir == ""


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("8", 8),
        ("8.0", 8),
        (" 8k ", 8000),
        ("8K", 8192),
        ("1.5k", 1500),
        ("0.1k", 100),
        ("1.001k", 1001),
        ("2G", 2 * 2**30),
        ("2g", 2 * 10**9),
        ("2GiB", 2 * 2**30),
        ("2gB", 2 * 10**9),
        ("0.5m", 500_000),
        ("9007199254740993", 2**53 + 1),
        (np.int64(8), 8),
        (np.uint8(8), 8),
    ],
)
def test_sizes(given: Any, taken: int) -> None:
    made = EngineConfig(max_model_len=given, kv_cache_memory_bytes=given)
    assert (made.max_model_len, made.kv_cache_memory_bytes) == (taken, taken)
    assert type(made.max_model_len) is int


@pytest.mark.parametrize("name", ["max_model_len", "kv_cache_memory_bytes", "device_memory_margin"])
@pytest.mark.parametrize(
    "value", ["8.5", "1.0001k", "8T", "k", "", "8 8", "٨", "0x8", "8e3", "9" * 30 + "G", 8.0, 8.5]
)
def test_sizes_of_no_use(name: str, value: Any) -> None:
    rule = "a whole number such as 4096, 8k or 2GiB, or None"
    assert refused(**{name: value}) == f"{name} must be {rule}, got {value!r}."


@pytest.mark.parametrize("value", ["auto", "-1", -1, np.int32(-1)])
def test_the_longest_length_that_fits(value: Any) -> None:
    assert EngineConfig(max_model_len=value).max_model_len == "auto"


@pytest.mark.parametrize("value", [1, 0, -2, "1", "-2k"])
def test_lengths_too_small(value: Any) -> None:
    message = f"max_model_len must be an integer >= 2, auto, or None, got {value!r}."
    assert refused(max_model_len=value) == message


@pytest.mark.parametrize("name", ["decode_buckets", "prefill_buckets"])
def test_buckets(name: str) -> None:
    for value in ([8, 16], (8, 16), iter([8, 16]), range(8, 17, 8), np.array([8, 16])):
        taken = getattr(EngineConfig(**{name: value}), name)
        assert taken == (8, 16)
        assert {type(bucket) for bucket in taken} == {int}
    for bad in ("8", b"8", 5, (1.5,), (), (16, 8), (8, 8), (0, 8), ("8",), (True,), {8: 1}):
        assert f"{name} must be ascending integers >= 1" in refused(**{name: bad})
    assert "at most 1024 buckets" in refused(**{name: range(1, 10**12)})


def test_limits_of_integers() -> None:
    assert refused(block_size=-(10**5000)).endswith("a value of type int that cannot be shown.")
    assert refused(block_size=0) == "block_size must be an integer >= 1, got 0."
    assert refused(seed=2**64) == f"seed must be an integer in [0, 2**64), got {2**64}."
    assert refused(max_num_seqs=8.0) == "max_num_seqs must be an integer >= 1, or None, got 8.0."
    assert EngineConfig(seed=2**64 - 1).seed == 2**64 - 1
    assert EngineConfig(max_logprobs=-1).max_logprobs == -1
    taken = EngineConfig(max_num_seqs=np.int32(4)).max_num_seqs  # type: ignore[arg-type]
    assert (type(taken), taken) == (int, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "settings must be a mapping from names to values, got None."),
        ([("seed", 1)], "settings must be a mapping from names to values, got [('seed', 1)]."),
        ({"blocksize": 4}, "Unknown engine setting 'blocksize'. Did you mean 'block_size'?"),
        ({5: 4}, "Unknown engine setting 5."),
    ],
)
def test_mappings_of_no_use(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_dict(settings)
    assert str(caught.value) == message


NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture
def no_fraction(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (NEW, OLD):
        monkeypatch.setenv(name, "")  # so that what the code sets is undone, too
    return monkeypatch


def test_the_share_of_the_engine(no_fraction: pytest.MonkeyPatch) -> None:
    assert claim_device_memory(0.5) == 0.5
    assert (os.environ[OLD], os.environ[NEW]) == ("0.5", "")
    no_fraction.delenv(OLD)
    no_fraction.delenv(NEW)
    assert claim_device_memory(0.7) == 0.7
    assert (os.environ.pop(OLD), NEW in os.environ) == ("0.7", False)


@pytest.mark.parametrize("name", [NEW, OLD])
def test_the_share_of_the_user_wins(name: str, no_fraction: pytest.MonkeyPatch) -> None:
    no_fraction.setenv(name, " .25")
    assert claim_device_memory(0.5) == 0.25
    other = OLD if name == NEW else NEW
    assert (os.environ[name], os.environ[other]) == (" .25", "")


@pytest.mark.parametrize("name", [NEW, OLD])
@pytest.mark.parametrize("value", ["half", "50%", " ", "nan", "inf", "0", "-0.5"])
def test_a_share_of_no_use(name: str, value: str, no_fraction: pytest.MonkeyPatch) -> None:
    no_fraction.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"^\${name} must be a number > 0.*got '{value}'\.$"):
        claim_device_memory(0.5)

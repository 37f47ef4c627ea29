"""Parameters of a request: what is taken, how it is normalised, and what errors say."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxpaged import sampling_params
from jaxpaged.errors import InvalidRequestError
from jaxpaged.sampling_params import SamplingParams

DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
TYPES = {field.name: str(field.type) for field in dataclasses.fields(SamplingParams)}
BOOLEANS = [name for name, kind in TYPES.items() if kind == "bool"]
INTEGERS = [name for name, kind in TYPES.items() if kind in ("int", "int | None")]
FLOATS = [name for name, kind in TYPES.items() if kind == "float"]
ID_LISTS = ["allowed_token_ids", "stop_token_ids"]
TEXT_LISTS = ["bad_words", "stop"]


def refused(**fields: Any) -> str:
    """The message, for fields of which the first is the one to blame."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == next(iter(fields))
    return str(caught.value)


def test_every_field_has_its_check() -> None:
    assert list(sampling_params._CHECKS) == list(DEFAULTS)
    assert len(BOOLEANS) == 5
    assert len(FLOATS) == 6
    rest = {*ID_LISTS, *TEXT_LISTS, "logit_bias", "logprobs_mode"}
    assert {*BOOLEANS, *INTEGERS, *FLOATS} == set(DEFAULTS) - rest


def test_the_defaults() -> None:
    lists: dict[str, list[Any]] = {"stop": [], "stop_token_ids": [], "bad_words": []}
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS | lists


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("value", [object(), b"x", {"a": 1}, [-1], 1j, list, np.zeros((2, 2)), ""])
def test_values_of_no_use_name_their_field(name: str, value: Any) -> None:
    assert refused(**{name: value}).startswith(f"{name} must be ")


@pytest.mark.parametrize("name", [*BOOLEANS, *FLOATS, "n", "top_k", "min_tokens"])
def test_none_is_refused_where_it_means_nothing(name: str) -> None:
    assert refused(**{name: None}).endswith("got None.")


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans(name: str) -> None:
    for value in ("false", "", 0, 1, None, np.int64(1)):
        assert refused(**{name: value}) == f"{name} must be true or false, got {value!r}."
    for value in (True, False, np.True_, np.False_):
        assert getattr(SamplingParams(**{name: value}), name) is bool(value)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", ["0.5", True, np.True_, float("nan"), float("inf"), 10**400, -9])
def test_numbers_of_no_use(name: str, value: Any) -> None:
    assert refused(**{name: value}).startswith(f"{name} must be a number in ")


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("make", [float, np.float16, np.float32, np.float64])
def test_numpy_floats(name: str, make: Callable[[float], Any]) -> None:
    taken = getattr(SamplingParams(**{name: make(0.5)}), name)
    assert (type(taken), taken) == (float, 0.5)


@pytest.mark.parametrize("name", FLOATS)
def test_integers_are_numbers(name: str) -> None:
    taken = getattr(SamplingParams(**{name: np.int8(1)}), name)
    assert (type(taken), taken) == (float, 1.0)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    for bad in ("4", 4.0, np.float32(4), True, np.True_, -(10**5000), float("nan")):
        assert refused(**{name: bad}).startswith(f"{name} must be an integer ")
    for value in (4, np.int64(4), np.uint8(4)):
        taken = getattr(SamplingParams(**{name: value}), name)
        assert (type(taken), taken) == (int, 4)


def test_values_too_long_to_show() -> None:
    assert refused(n=10**5000).endswith("got a value of type int that cannot be shown.")
    assert len(refused(temperature="x" * 10_000)) < 200


@pytest.mark.parametrize("name", ID_LISTS)
def test_lists_of_ids(name: str) -> None:
    for value in ([5, 7], (5, 7), iter([5, 7]), np.array([5, 7]), [np.int64(5), np.uint16(7)]):
        taken = getattr(SamplingParams(**{name: value}), name)
        assert taken == [5, 7]
        assert {type(token) for token in taken} == {int}
    for bad in (5, "57", b"57", {5: 1}, [5.0], ["5"], [True], [[5]], [None], [-1], np.int64(5)):
        assert refused(**{name: bad}).startswith(f"{name} must be a list of token ids")
    assert refused(**{name: [5, -7]}).endswith("or None, got -7.")


@pytest.mark.parametrize("name", TEXT_LISTS)
def test_lists_of_texts(name: str) -> None:
    for value in (["a", "b"], ("a", "b"), iter(["a", "b"])):
        assert getattr(SamplingParams(**{name: value}), name) == ["a", "b"]
    for bad in (5, 0, False, b"ab", {"a": 1}, ["a", ""], ["a", 5], [b"a"], [None]):
        message = refused(**{name: bad})
        assert f"{name} must be a " in message
        assert "list of non-empty strings" in message


def test_a_single_stop_string() -> None:
    assert SamplingParams(stop="ab").stop == ["ab"]
    assert refused(bad_words="ab").endswith("got 'ab'.")
    assert refused(stop="x", detokenize=False) == "stop strings need detokenize=True."


@pytest.mark.parametrize(
    ("name", "one", "most", "noun"),
    [
        ("stop", "x", 64, "strings"),
        ("bad_words", "x", 64, "words"),
        ("stop_token_ids", 5, 128, "ids"),
        ("allowed_token_ids", 5, 1024, "ids"),
    ],
)
def test_longest_lists(name: str, one: Any, most: int, noun: str) -> None:
    assert len(getattr(SamplingParams(**{name: [one] * most}), name)) == most
    message = refused(**{name: [one] * (most + 1)})
    assert message == f"{name} must be at most {most} {noun}, or None, got {most + 1} {noun}."
    assert f"more than {most}" in refused(**{name: (one for _ in range(10**9))})


def test_no_allowed_token() -> None:
    assert "non-empty" in refused(allowed_token_ids=[])
    assert SamplingParams(allowed_token_ids=None).allowed_token_ids is None


def test_logit_bias() -> None:
    given = {"5": 1, " 6": np.float32(0.5), np.int64(7): 1e9, 8: -101}
    taken = SamplingParams(logit_bias=given).logit_bias  # type: ignore[arg-type]
    assert taken == {5: 1.0, 6: 0.5, 7: 100.0, 8: -100.0}
    assert {type(token) for token in taken} == {int}
    assert {type(bias) for bias in taken.values()} == {float}
    assert SamplingParams(logit_bias={}).logit_bias is None


@pytest.mark.parametrize(
    ("bias", "shown"),
    [
        ([5], "[5]"),
        ([], "[]"),
        ("5", "'5'"),
        (0, "0"),
        ({-1: 1}, "-1"),
        ({"x": 1}, "'x'"),
        ({"²": 1}, "'²'"),
        ({True: 1}, "True"),
        ({5.0: 1}, "5.0"),
        ({"9" * 5000: 1}, "'999"),
        ({5: "1"}, "'1'"),
        ({5: float("nan")}, "nan"),
        ({5: None}, "None"),
    ],
)
def test_logit_bias_of_no_use(bias: Any, shown: str) -> None:
    rule = "a mapping from token ids (integers >= 0) to finite numbers, or None"
    assert refused(logit_bias=bias).startswith(f"logit_bias must be {rule}, got {shown}")


def test_too_many_biases() -> None:
    assert "at most 1024 entries" in refused(logit_bias=dict.fromkeys(range(1025), 1.0))


def test_what_the_user_keeps_is_copied() -> None:
    given: dict[str, Any] = {
        "stop": ["a"],
        "bad_words": ["b"],
        "stop_token_ids": [5],
        "allowed_token_ids": [6],
        "logit_bias": {7: 1.0},
    }
    params = SamplingParams(**given)
    before = copy.deepcopy(params)
    for value in given.values():
        value.clear()
    assert params == before
    assert params.stop == ["a"]
    assert dataclasses.replace(params, n=2).stop is not params.stop


def test_copies_are_equal() -> None:
    params = SamplingParams(stop="x", seed=-5, temperature=0.001, logit_bias={"5": 500})  # type: ignore[dict-item]
    assert dataclasses.replace(params) == params
    assert pickle.loads(pickle.dumps(params)) == params


def test_temperatures() -> None:
    assert SamplingParams(temperature=1e-6).temperature == 0.0
    assert SamplingParams(temperature=1e-3).temperature == 0.01
    assert SamplingParams(temperature=np.float32(0)).greedy  # type: ignore[arg-type]


def test_seeds() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=np.int64(-2)).seed == 2**64 - 2  # type: ignore[arg-type]
    assert SamplingParams(seed=np.uint64(2**64 - 1)).seed == 2**64 - 1  # type: ignore[arg-type]
    for seed in (2**64, -(2**63) - 1):
        assert refused(seed=seed).startswith("seed must be an integer in [-2**63, 2**64), or None")


def test_token_limits_together() -> None:
    rule = "an integer >= 1 (0 only with prompt_logprobs), or None"
    assert refused(max_tokens=0) == f"max_tokens must be {rule}, got 0."
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    message = refused(min_tokens=5, max_tokens=4)
    assert message == "min_tokens must be at most max_tokens=4, got 5."
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5
    assert refused(min_tokens=10**5000).startswith("min_tokens must be at most max_tokens=16")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (None, "sampling_params", "sampling_params must be a mapping from names to values, got N"),
        ([], "sampling_params", "sampling_params must be a mapping from names to values, got []."),
        (
            {"temprature": 1},
            "temprature",
            "Unknown sampling parameter 'temprature'. Did you mean 'temperature'?",
        ),
        ({5: 1}, "5", "Unknown sampling parameter 5."),
        ({"stop": 5}, "stop", "stop must be a non-empty string, or a list of non-empty strings"),
    ],
)
def test_mappings_of_no_use(fields: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams.from_dict(fields)
    assert str(caught.value).startswith(message)
    assert caught.value.param == param

"""Parameters of a beam search: what is taken, how it is normalised, and what errors say."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from jaxpaged import beam_params
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.errors import InvalidRequestError

FIELDS = {field.name: str(field.type) for field in dataclasses.fields(BeamSearchParams)}
BOOLEANS = [name for name, kind in FIELDS.items() if kind == "bool"]


def made(**fields: Any) -> BeamSearchParams:
    return BeamSearchParams(**{"beam_width": 4, **fields})


def refused(**fields: Any) -> str:
    """The message, for fields of which the first is the one to blame."""
    with pytest.raises(InvalidRequestError) as caught:
        made(**fields)
    assert caught.value.param == next(iter(fields))
    return str(caught.value)


def test_every_field_has_its_check() -> None:
    assert list(beam_params._CHECKS) == list(FIELDS)
    assert len(BOOLEANS) == 4


def test_the_defaults() -> None:
    assert dataclasses.asdict(made()) == {
        "beam_width": 4,
        "max_tokens": 16,
        "length_penalty": 1.0,
        "early_stopping": False,
        "temperature": 0.0,
        "ignore_eos": False,
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "detokenize": True,
        "skip_special_tokens": True,
    }


def test_the_width_has_no_default() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        BeamSearchParams()  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="needs beam_width") as caught:
        BeamSearchParams.from_dict({"max_tokens": 3})
    assert caught.value.param == "beam_width"


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [object(), b"x", {"a": 1}, [-1], 1j, list, np.zeros((2, 2)), ""])
def test_values_of_no_use_name_their_field(name: str, value: Any) -> None:
    assert refused(**{name: value}).startswith(f"{name} must be ")


@pytest.mark.parametrize("value", [0, -1, 65, 10**30, 2.0, "2", True, None, float("nan")])
def test_widths_of_no_use(value: Any) -> None:
    assert refused(beam_width=value).startswith("beam_width must be an integer in [1, 64], got ")


@pytest.mark.parametrize("value", [1, 64, np.int64(12), np.uint8(2)])
def test_widths(value: Any) -> None:
    taken = made(beam_width=value).beam_width
    assert (type(taken), taken) == (int, int(value))


def test_lengths() -> None:
    for bad in (0, -1, 1.5, "3", True):
        assert refused(max_tokens=bad).startswith("max_tokens must be an integer >= 1, or None")
    assert made(max_tokens=None).max_tokens is None
    assert made(max_tokens=1).max_tokens == 1


@pytest.mark.parametrize("value", [True, False, np.True_, "never"])
def test_early_stopping(value: Any) -> None:
    taken = made(early_stopping=value).early_stopping
    assert taken == value
    assert type(taken) in (bool, str)


@pytest.mark.parametrize("value", ["Never", "true", "", 0, 1, None, 2.0])
def test_early_stopping_of_no_use(value: Any) -> None:
    message = refused(early_stopping=value)
    assert message == f'early_stopping must be true, false or "never", got {value!r}.'


@pytest.mark.parametrize(
    ("name", "bad", "rule"),
    [
        ("length_penalty", (-5.01, 6, float("inf"), float("nan"), "1", True), "[-5, 5]"),
        ("temperature", (-0.1, 2.01, float("inf"), float("nan"), "1", True), "[0, 2]"),
    ],
)
def test_numbers(name: str, bad: tuple[Any, ...], rule: str) -> None:
    for value in bad:
        assert refused(**{name: value}).startswith(f"{name} must be a number in {rule}, got ")
    for make in (float, np.float32, np.float16):
        taken = getattr(made(**{name: make(0.5)}), name)
        assert (type(taken), taken) == (float, 0.5)
    assert type(getattr(made(**{name: 2}), name)) is float


def test_a_long_context_to_the_largest_penalty_fits_a_float32() -> None:
    most = beam_params.MAX_LENGTH_PENALTY
    for penalty in (most, -most):
        assert 0 < np.float32((2**20) ** made(length_penalty=penalty).length_penalty) < np.inf


@pytest.mark.parametrize(
    ("given", "kept", "divisor"),
    [(0, 0.0, 1.0), (1, 1.0, 1.0), (1e-6, 0.0, 1.0), (1e-3, 0.01, 0.01), (0.7, 0.7, 0.7)],
)
def test_temperatures(given: float, kept: float, divisor: float) -> None:
    params = made(temperature=given)
    assert (params.temperature, params.divisor) == (kept, divisor)


def test_stop_ids() -> None:
    for value in ([5, 7], (5, 7), iter([5, 7]), np.array([5, 7])):
        taken = made(stop_token_ids=value).stop_token_ids
        assert taken == [5, 7]
        assert {type(token) for token in taken} == {int}
    assert "at most 128 ids" in refused(stop_token_ids=[1] * 129)
    assert refused(stop_token_ids=[5, -7]).endswith("or None, got -7.")


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans(name: str) -> None:
    for value in ("false", 0, None):
        assert refused(**{name: value}) == f"{name} must be true or false, got {value!r}."
    assert getattr(made(**{name: np.True_}), name) is True


def test_from_a_mapping() -> None:
    fields = {"beam_width": 3, "early_stopping": "never", "length_penalty": 0}
    assert BeamSearchParams.from_dict(fields) == BeamSearchParams(
        beam_width=3, early_stopping="never", length_penalty=0.0
    )
    with pytest.raises(InvalidRequestError, match="Did you mean 'beam_width'") as caught:
        BeamSearchParams.from_dict({"beam_with": 3})
    assert caught.value.param == "beam_with"
    with pytest.raises(InvalidRequestError, match="must be a mapping"):
        BeamSearchParams.from_dict([3])  # type: ignore[arg-type]


def test_copies_are_equal_and_nothing_can_be_changed() -> None:
    params = made(stop_token_ids=[3])
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, beam_width=2).beam_width == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.beam_width = 3  # type: ignore[misc]

"""Stop rules and derived counts of one request."""

from __future__ import annotations

import pytest

from tests.core.harness import make_request

EOS, STOP = 2, 7


def verdict(
    outputs: list[int], *, max_tokens: int = 5, min_tokens: int = 0, max_model_len: int = 100
) -> tuple[str, int | None] | None:
    request = make_request(
        "r", [2, 7], max_tokens, min_tokens=min_tokens, eos_token_ids=[EOS], stop_token_ids=[STOP]
    )
    request.token_ids += outputs
    return request.stop_verdict(max_model_len)


@pytest.mark.parametrize(
    ("outputs", "limits", "expected"),
    [
        ([5], {}, None),
        ([EOS], {}, ("stop", None)),
        ([STOP], {}, ("stop", STOP)),
        ([5, 5, 5, 5, 5], {}, ("length", None)),
        ([5, 5, 5, 5, EOS], {}, ("stop", None)),
        ([5, 5, 5, 5, STOP], {}, ("stop", STOP)),
        ([5, EOS], {"min_tokens": 3}, None),
        ([5, STOP], {"min_tokens": 3}, None),
        ([5, EOS], {"min_tokens": 2}, ("stop", None)),
        ([5, 5, STOP], {"min_tokens": 2}, ("stop", STOP)),
        ([5, 5, 5], {"max_model_len": 5}, ("length", None)),
        ([5, 5, EOS], {"max_model_len": 5}, ("stop", None)),
        ([5, 5, EOS], {"max_model_len": 5, "min_tokens": 50, "max_tokens": 500}, ("length", None)),
        ([5, 5, 5, 5, 5], {"min_tokens": 50}, ("length", None)),
    ],
)
def test_stop_rules(
    outputs: list[int], limits: dict[str, int], expected: tuple[str, int | None] | None
) -> None:
    assert verdict(outputs, **limits) == expected


def test_eos_is_told_from_a_stop_id_even_if_it_is_both() -> None:
    request = make_request("r", [1], eos_token_ids=[EOS], stop_token_ids=[EOS])
    request.token_ids.append(EOS)
    assert request.stop_verdict(100) == ("stop", None)


def test_without_eos_ids_nothing_stops_it_early() -> None:
    request = make_request("r", [1], 3)
    request.token_ids.append(EOS)
    assert request.stop_verdict(100) is None


def test_placeholders_count_towards_the_certain_end() -> None:
    request = make_request("r", [1, 2, 3], 2)
    assert not request.end_is_in_flight(100)
    request.num_inflight = 1
    assert not request.end_is_in_flight(100)
    assert request.end_is_in_flight(4)
    request.num_inflight = 2
    assert request.end_is_in_flight(100)
    assert request.num_tokens_with_inflight == 5


def test_the_caller_keeps_its_own_list() -> None:
    prompt = [1, 2]
    request = make_request("r", prompt)
    request.token_ids.append(3)
    assert prompt == [1, 2]
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 2], [3])
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (2, 1, 3)

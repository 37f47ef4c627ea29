"""Prompts of an offline run: what is accepted, and how bad lines are named."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import Any

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.jobs import InputError, Job, jobs_from_jsonl, jobs_from_lines, jobs_from_texts
from jaxpaged.sampling_params import SamplingParams


def read(*lines: str | bytes | dict[str, Any], chat: bool = False, **params: Any) -> list[Job]:
    encoded = [
        line
        if isinstance(line, bytes)
        else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    return jobs_from_jsonl(b"\n".join(encoded), chat=chat, params=params)


def test_the_three_kinds_of_line() -> None:
    messages = [{"role": "user", "content": "hi"}]
    jobs = read(
        {"prompt": "a", "params": {"max_tokens": 3}, "cache_salt": "s"},
        "",
        {"messages": messages, "cache_salt": "t", "priority": -2},
        {"prompt_token_ids": [1, 2]},
    )
    assert jobs == [
        Job(where="line 1", prompt="a", params={"max_tokens": 3}, cache_salt="s"),
        Job(where="line 3", messages=messages, cache_salt="t", priority=-2),
        Job(where="line 4", prompt_token_ids=[1, 2]),
    ]


def test_chat_makes_conversations_of_texts() -> None:
    conversation = [{"role": "user", "content": "a"}]
    assert read({"prompt": "a"}, chat=True)[0].messages == conversation
    assert jobs_from_texts(["a"], chat=True)[0].messages == conversation
    assert jobs_from_lines(b"a\n", chat=True)[0].messages == conversation


def test_plain_lines() -> None:
    jobs = jobs_from_lines("\ufeffone\r\n\n zwei \u2028ü\n".encode(), chat=False)
    # U+2028 is part of the text, and so are blanks at the ends.
    assert [job.prompt for job in jobs] == ["one", " zwei \u2028ü"]
    assert [job.where for job in jobs] == ["line 1", "line 3"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "expected a JSON object"),
        ({}, "exactly one of prompt, messages, prompt_token_ids, found none"),
        ({"prompt": "a", "messages": []}, "found prompt and messages"),
        ({"promt": "a"}, "did you mean 'prompt'?"),
        ({"prompt": 3}, "prompt must be a string"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        (b'{"prompt": "\xff"}', "codec can't decode"),
        ({"messages": []}, "messages must be a non-empty list"),
        ({"messages": ["hi"]}, "objects with a role"),
        ({"messages": [{"content": "hi"}]}, "objects with a role"),
        ({"prompt_token_ids": []}, "prompt_token_ids must be a non-empty list"),
        ({"prompt_token_ids": [True]}, "integers >= 0, got True"),
        ({"prompt_token_ids": [-1]}, "integers >= 0, got -1"),
        ({"prompt": "a", "params": 3}, "params must be an object"),
        ({"prompt": "a", "params": {"top_p": 2}}, "top_p must be a number in (0, 1], got 2"),
        ({"prompt": "a", "params": {"topp": 1}}, "Did you mean 'top_p'?"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be a non-empty string"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt must be a non-empty string"),
        ({"prompt": "a", "priority": "high"}, "priority must be an integer"),
        ({"prompt": "a", "priority": 1.0}, "priority must be an integer"),
        ({"prompt": "a", "priority": True}, "priority must be an integer"),
        ({"prompt": "a", "priority": None}, "priority must be an integer"),
    ],
)
def test_a_bad_line_is_named(line: str | bytes | dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError) as error:
        read({"prompt": "good"}, line, {"prompt": "good"})
    assert "nothing was run" in str(error.value)
    assert "line 2: " in str(error.value)
    assert reason in str(error.value)
    assert "line 3" not in str(error.value)


@pytest.mark.parametrize("value", [5, 5.5, True, "five", [5], ["\n", 5], {"a": [1]}, {"5": "x"}])
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_a_sampling_field_of_any_type_is_taken_or_its_line_named(name: str, value: Any) -> None:
    try:
        SamplingParams.from_dict({name: value})
    except InvalidRequestError:
        with pytest.raises(InputError, match=f"line 1: .*{name}"):
            read({"prompt": "a", "params": {name: value}})
    else:
        assert read({"prompt": "a", "params": {name: value}})[0].params == {name: value}


def test_a_deep_line_is_taken_or_named() -> None:
    # json.loads and json.dumps do not give up at the same depth.
    limit = sys.getrecursionlimit()
    for depth in (*range(limit - 120, limit), 10 * limit, 100 * limit):
        line = '{"messages": [{"role": "user", "content": ' + "[" * depth + "]" * depth + "}]}"
        with contextlib.suppress(InputError):
            read(line)
    with pytest.raises(InputError, match="line 1: not JSON"):
        read(line)


def test_token_ids_do_not_go_through_a_chat_template() -> None:
    with pytest.raises(InputError, match="line 1: prompt_token_ids cannot be used with --chat"):
        read({"prompt_token_ids": [1]}, chat=True)


def test_a_line_that_contradicts_the_flags_is_found() -> None:
    line = {"prompt": "a", "params": {"min_tokens": 9}}
    assert len(read(line, max_tokens=9)) == 1
    with pytest.raises(InputError, match="line 1: min_tokens"):
        read(line, max_tokens=8)


def test_lines_of_a_run_that_searches() -> None:
    line = {"prompt": "a", "params": {"beam_width": 8, "early_stopping": "never"}}
    assert read(line, beam_width=4)[0].params == line["params"]
    for own, reason in (
        ({"top_p": 0.5}, "Unknown beam search parameter 'top_p'"),
        ({"beam_width": 0}, "beam_width must be an integer in"),
        ({"length_penalty": "x"}, "length_penalty must be a number in"),
    ):
        with pytest.raises(InputError, match=f"line 1: {reason}"):
            read({"prompt": "a", "params": own}, beam_width=4)
    with pytest.raises(InputError, match="line 1: beam_width is of beam searches: .*--beam-width"):
        read(line)


def test_all_bad_lines_are_counted_and_the_first_are_shown() -> None:
    with pytest.raises(InputError) as error:
        read(*["{"] * 25)
    shown = str(error.value).splitlines()
    assert shown[1].startswith("  line 1: ")
    assert shown[10].startswith("  line 10: ")
    assert shown[11] == "  ... and 15 more"


def test_an_argument_that_is_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="--prompt number 2"):
        jobs_from_texts(["a", "b\udcff"], chat=False)

"""What requests may ask for: ranges, limits, defaults, and what is refused because it is not there
yet.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.sampling_params import SamplingParams
from server.body import decode_body
from server.protocol_completions import CompletionRequest
from server.sampling import UNSUPPORTED, sampling_params
from tests.server.apps import Json, Server, drive
from tests.server.scripted import Script

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
MILLION = 10**6
NOTHING: Json = {"prompt": "p", "messages": HI}


def params_of(server: Server, fields: Json) -> SamplingParams:
    request = decode_body(json.dumps({"prompt": "p", **fields}).encode(), CompletionRequest)
    return sampling_params(
        server.context, request, max_tokens=16, logprobs=None, prompt_logprobs=None
    )


def test_the_order_of_defaults() -> None:
    async def test(server: Server) -> None:
        plain = params_of(server, {})
        assert (plain.temperature, plain.top_p, plain.top_k) == (0.6, 0.9, 0)
        assert params_of(server, {"temperature": None}).temperature == 0.6
        assert params_of(server, {"temperature": 0, "top_p": 1}).temperature == 0.0
        assert params_of(server, {"top_p": 1}).top_p == 1.0

    drive(test, Script(), default_params=SamplingParams(temperature=0.6, top_p=0.9))


def test_every_parameter_arrives() -> None:
    async def test(server: Server) -> None:
        fields = {
            "n": 3,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 7,
            "min_p": 0.125,
            "presence_penalty": -1.5,
            "frequency_penalty": 1.5,
            "repetition_penalty": 1.25,
            "seed": -5,
            "stop": ["a", "b"],
            "stop_token_ids": [5, 6],
            "bad_words": ["x"],
            "allowed_token_ids": [7, 8],
            "logit_bias": {"5": 200, "6": -1},
            "min_tokens": 2,
            "logprobs_mode": "processed",
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        params = params_of(server, fields)
        for name, value in fields.items():
            if name not in ("seed", "logit_bias"):
                assert getattr(params, name) == value, name
        assert params.seed == 2**64 - 5 and params.logit_bias == {5: 100.0, 6: -1.0}
        assert params_of(server, {"seed": -1}).seed is None
        assert params_of(server, {"stop": "one"}).stop == ["one"]
        assert params_of(server, {"temperature": 0.001}).temperature == 0.01
        assert params_of(server, {"temperature": 1e-7}).greedy
        assert params_of(server, {"logit_bias": {}, "stop": [], "bad_words": []}) == params_of(
            server, {}
        )

    drive(test, Script())


OUT_OF_RANGE: list[tuple[Json, str]] = [
    *[({"temperature": value}, "temperature") for value in (-1.0, 2.5, "1", True, [])],
    *[({"top_p": value}, "top_p") for value in (0, 1.5, -1)],
    *[({"top_k": value}, "top_k") for value in (-2, 1.5, "3")],
    *[({"min_p": value}, "min_p") for value in (-0.5, 1.5)],
    *[({"n": value}, "n") for value in (0, -1, 1.0, "2", 129)],
    *[({"presence_penalty": value}, "presence_penalty") for value in (-2.5, 2.5)],
    *[({"frequency_penalty": value}, "frequency_penalty") for value in (-2.5, 2.5)],
    *[({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1)],
    *[({"seed": value}, "seed") for value in (2**64, -(2**63) - 1, 0.5)],
    *[({"max_tokens": value}, "max_tokens") for value in (0, -1, 257, 10**30, 1.5)],
    *[({"min_tokens": value}, "min_tokens") for value in (-1, 17)],
    *[({"logprobs_mode": value}, "logprobs_mode") for value in ("", "Raw", 1)],
    *[({"stop": value}, "stop") for value in ("", [""], ["a", ""])],
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [1024]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [5000]}, "allowed_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1024": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    *[({"cache_salt": f"a{bad}b"}, "cache_salt") for bad in "@/\\\0"],
    ({"priority": 1}, "priority"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("fields", "param"), OUT_OF_RANGE, ids=str)
def test_out_of_range(fields: Json, param: str) -> None:
    async def test(server: Server) -> None:
        steps = await server.engine.call(lambda engine: engine.scheduler.stats.steps)
        error = await server.refused(PATH, {**NOTHING, **fields})
        assert error["param"] == param and len(error["message"]) < 500
        if fields != {"min_tokens": 17}:  # more than the 16 of completions; chats have no such cap
            assert (await server.refused(CHAT, {**NOTHING, **fields}))["param"] == param
        assert steps == await server.engine.call(lambda engine: engine.scheduler.stats.steps)

    drive(test, Script())


def test_words_that_clients_look_for() -> None:
    async def test(server: Server) -> None:
        too_long = await server.refused(PATH, {"prompt": [5] * 300})
        assert too_long["message"] == (
            "This model's maximum context length is 256 tokens. However, your prompt contains 300 "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce "
            "the length of the input prompt."
        )
        assert too_long["param"] == "input_tokens" and too_long["type"] == "BadRequestError"
        for body in ({"prompt": "x" * 900}, {"prompt": ["p", [5] * 300][1:]}):
            error = await server.refused(PATH, body)
            assert "maximum context length is 256 tokens" in error["message"]
            assert error["param"] == "input_tokens"
        chat = [{"role": "user", "content": "x" * 900}]
        error = await server.refused(CHAT, {"messages": chat})
        assert "maximum context length is 256 tokens" in error["message"]
        many = await server.refused(PATH, {"prompt": "p", "max_tokens": 99999})
        assert many["message"] == (
            "max_tokens=99999 cannot be greater than max_model_len=256. "
            "Please request fewer output tokens."
        )
        alone = await server.refused(PATH, {"prompt": "p", "stream_options": {}})
        assert alone["message"] == "Stream options can only be defined when `stream=True`."
        empty = await server.refused(PATH, {"prompt": "p", "stop": [""]})
        assert empty["message"] == "stop cannot contain an empty string."

    drive(test, Script())


def test_schema_errors_are_short() -> None:
    async def test(server: Server) -> None:
        error = await server.refused(CHAT, {"messages": HI, "reasoning_effort": "x" * 5000})
        assert error["type"] == "Bad Request" and error["param"] == "reasoning_effort"
        assert len(error["message"]) < 300 and error["message"].startswith("1 validation error: ")
        error = await server.refused(PATH, {"prompt": "p", "max_tokens": "5"})
        assert error["message"] == (
            "1 validation error: Expected `int | null`, got `str` - at `max_tokens`"
        )

    drive(test, Script())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "p"} x',
        b'{"prompt": "p", "temperature": NaN}',
        b'{"prompt": "p", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'\xff\xfe{"prompt": "p"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "p", "vllm_xargs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "p", "\\ud800": 1}',
    ],
    ids=lambda body: repr(body[:40]),
)
def test_bodies_that_are_no_json(body: bytes) -> None:
    async def test(server: Server) -> None:
        error = await server.refused(PATH, body)
        assert error["type"] == "Bad Request" and len(error["message"]) < 300
        assert "Traceback" not in error["message"]

    drive(test, Script())


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
        ("", 400),
    ],
)
def test_content_types(kind: str, status: int) -> None:
    async def test(server: Server) -> None:
        response = await server.post(PATH, {"prompt": "p"}, {"content-type": kind})
        assert response.status_code == status
        if status == 400:
            assert response.json()["error"]["message"] == (
                "Unsupported Media Type: Only 'application/json' is allowed"
            )

    drive(test, Script())


@pytest.mark.parametrize(
    "prompt",
    [
        [[1, 1024]],
        [[-1]],
        [[2**31]],
        [[2**63]],
        [[2**70]],
        [[1.0]],
        [[True]],
        [["1"]],
        ["a", [1]],
        [[1], "a"],
        [1, "a"],
        [1, [1]],
        [1024],
        [-1],
        [1.5],
        [True],
        [5] * 100_000,
        [[5] * 100_000],
        "",
        [],
        [[]],
        [""],
        ["a", ""],
        [[1], []],
        None,
        5,
        {},
        True,
        [None],
        [{}],
    ],
    ids=lambda prompt: repr(prompt)[:30],
)
def test_prompts_that_are_refused(prompt: Any) -> None:  # AP-04
    async def test(server: Server) -> None:
        steps = await server.engine.call(lambda engine: engine.scheduler.stats.steps)
        error = await server.refused(PATH, {"prompt": prompt, "logprobs": 1})
        assert str(error["param"]).startswith(("prompt", "input_tokens"))
        assert len(error["message"]) < 300
        if prompt == [[1, 1024]]:
            assert "prompt[0][1] is token id 1024" in error["message"]
            assert "[0, 1024)" in error["message"]
        assert steps == await server.engine.call(lambda engine: engine.scheduler.stats.steps)

    drive(test, Script())


def test_a_missing_prompt() -> None:
    async def test(server: Server) -> None:
        error = await server.refused(PATH, {})
        assert "`prompt`" in error["message"]

    drive(test, Script())


NOT_YET: list[tuple[str, Any]] = [
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", "text"),
    ("structured_outputs", {"regex": "a"}),
    ("guided_json", {}),
    ("guided_regex", "a"),
    ("guided_choice", ["a"]),
    ("guided_grammar", "root ::= a"),
    ("best_of", 2),
    ("logprob_token_ids", [5]),
    ("prompt_embeds", "AAAA"),
    ("repetition_detection", {"max_pattern_size": 3}),
    ("thinking_token_budget", 0),
    ("kv_transfer_params", {"a": 1}),
    ("vllm_xargs", {"a": 1}),
]
ONLY_COMPLETIONS: list[tuple[str, Any]] = [("suffix", "end")]
ONLY_CHAT: list[tuple[str, Any]] = [
    ("documents", [{"text": "x"}]),
    ("media_io_kwargs", {"image": {}}),
    ("mm_processor_kwargs", {"a": 1}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
]
NEUTRAL: Json = {
    "response_format": {"type": "text"},
    "structured_outputs": {"json": None},
    "guided_choice": [],
    "use_beam_search": False,
    "length_penalty": 1,
    "early_stopping": False,
    "best_of": 1,
    "suffix": "",
    "logprob_token_ids": [],
    "thinking_token_budget": -1,
    "kv_transfer_params": {},
    "vllm_xargs": {},
    "documents": [],
    "modalities": ["text"],
    "functions": [],
    "function_call": "auto",
}


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_what_is_not_there_yet(path: str) -> None:
    async def test(server: Server) -> None:
        only = ONLY_COMPLETIONS if path == PATH else ONLY_CHAT
        for name, value in NOT_YET + only:
            error = await server.refused(path, {**NOTHING, name: value})
            assert error["param"] == name, name
            assert name in error["message"] and "not supported yet" in error["message"]
        plain = await server.ok(path, NOTHING)
        neutral = await server.ok(path, {**NOTHING, **NEUTRAL})
        assert neutral["choices"] == plain["choices"]
        await server.ok(path, {**NOTHING, "n": 2, "best_of": 2})

    drive(test, Script())


def test_no_field_is_refused_without_a_test() -> None:
    tried = {name for name, _ in NOT_YET + ONLY_COMPLETIONS + ONLY_CHAT}
    assert tried == {*UNSUPPORTED, "best_of"}


def test_priorities() -> None:
    async def test(server: Server) -> None:
        await server.ok(PATH, {"prompt": "p", "priority": -3})
        await server.refused(PATH, {"prompt": "p", "priority": 2**63})

    drive(test, Script(), config=EngineConfig(scheduling_policy="priority"))


def test_completions_of_one_request() -> None:
    async def test(server: Server) -> None:
        error = await server.refused(PATH, {"prompt": ["p"] * 9, "n": 8})
        assert error["param"] == "n" and "72 completions" in error["message"]
        await server.ok(PATH, {"prompt": ["p"] * 8, "n": 8, "max_tokens": 1})
        assert (await server.refused(PATH, {"prompt": ["p"] * 65}))["param"] == "prompt"
        assert (await server.refused(CHAT, {"messages": HI, "n": 65}))["param"] == "n"
        assert (await server.refused(PATH, {"prompt": "p", "stop": ["a"] * 5}))["param"] == "stop"

    limits = {"max_prompts": 64, "max_n": 64, "max_stop_strings": 4, "max_tools": 2}
    drive(test, Script(), settings=limits)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATH, {"n": MILLION}),
        (PATH, {"n": 10**9}),
        (PATH, {"prompt": [""] * MILLION}),
        (PATH, {"prompt": ["ab"] * MILLION}),
        (PATH, {"prompt": [[1]] * MILLION}),
        (PATH, {"prompt": ["a"] * 1000, "n": 128}),
        (PATH, {"stop": ["ab"] * MILLION}),
        (PATH, {"bad_words": ["ab"] * MILLION}),
        (PATH, {"stop_token_ids": [1000] * MILLION}),
        (PATH, {"allowed_token_ids": [1000] * MILLION}),
        (PATH, {"logit_bias": {str(i): 1 for i in range(MILLION)}}),
        (PATH, {"logprobs": 10**9}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * 10**5}),
        (CHAT, {"messages": HI * 300_000}),
        (CHAT, {"n": 10**9}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_many_items_are_refused_at_once(path: str, fields: Json) -> None:  # OP-07
    body = json.dumps({**NOTHING, **fields}).encode()

    async def test(server: Server) -> None:
        await server.refused(path, {**NOTHING, "n": 0})
        gc.collect()
        before, began = _rss(), time.perf_counter()
        error = await server.refused(path, body)
        took, grown = time.perf_counter() - began, _rss() - before
        if all(isinstance(value, (list, dict)) for value in fields.values()):
            assert "may have at most" in error["message"]  # counted before it was decoded
        assert took < 1.0 and grown < 50 * 2**20, (took, grown)

    drive(test, Script(), max_model_len=2048)


def test_a_huge_prompt_does_not_stop_the_others() -> None:
    async def test(server: Server) -> None:
        # One that is to be cut from the left is tokenised whole.
        body = {"prompt": "some words " * 500_000, "truncate_prompt_tokens": 4}
        huge = asyncio.ensure_future(server.ok(PATH, body))
        answers = 0
        while not huge.done():
            await server.ok(PATH, {"prompt": "p"})
            answers += 1
        assert (await huge)["usage"]["prompt_tokens"] == 4 and answers > 1

    drive(test, Script())


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096

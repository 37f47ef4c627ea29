"""use_beam_search: the answers of a search, and what may be asked for beside it."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.engine import Engine
from jaxpaged.outputs import RequestOutput
from tests.server.apps import MODEL, Json, Server, drive, ends_of, texts_of
from tests.server.scripted import Script, scripted_engine
from tests.tiny_models import EOS

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
INPUT: dict[str, Json] = {PATH: {"prompt": "Hi"}, CHAT: {"messages": HI}}
at_both = pytest.mark.parametrize("path", [PATH, CHAT])


def searched(engine: Engine, prompt: Any, params: BeamSearchParams) -> RequestOutput:
    """What the engine itself gives."""
    engine.add_request("a", prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1]


def text_of(choice: Json) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def body_of(path: str, **fields: Any) -> Json:
    return {**INPUT[path], "use_beam_search": True, "return_token_ids": True, **fields}


FIELDS: list[tuple[Json, Json]] = [
    ({"n": 3}, {"beam_width": 3}),
    ({"n": 3, "length_penalty": 0}, {"beam_width": 3, "length_penalty": 0.0}),
    ({"n": 2, "length_penalty": -1.5}, {"beam_width": 2, "length_penalty": -1.5}),
    ({"n": 3, "early_stopping": True}, {"beam_width": 3, "early_stopping": True}),
    ({"n": 3, "early_stopping": "never"}, {"beam_width": 3, "early_stopping": "never"}),
    ({"n": 4, "ignore_eos": True}, {"beam_width": 4, "ignore_eos": True}),
    ({"n": 3, "temperature": 0.5}, {"beam_width": 3, "temperature": 0.5}),
    ({"n": 3, "stop_token_ids": [5]}, {"beam_width": 3, "stop_token_ids": [5]}),
    ({"n": 2, "best_of": 5}, {"beam_width": 5}),
    ({"best_of": 3}, {"beam_width": 3}),
    ({}, {"beam_width": 1}),
    ({"n": None, "best_of": None}, {"beam_width": 1}),
]


@pytest.mark.parametrize(("fields", "meaning"), FIELDS, ids=str)
@at_both
def test_the_answers_are_the_engines(path: str, fields: Json, meaning: Json) -> None:
    script = Script(default=[4, 5, 6, 7], end=True)

    async def test(server: Server) -> None:
        body = body_of(path, max_tokens=6, **fields)
        whole = await server.ok(path, body)
        choices, n = whole["choices"], fields.get("n") or 1
        ids = whole["prompt_token_ids"] if path == CHAT else choices[0]["prompt_token_ids"]
        expected = searched(
            scripted_engine(script), ids, BeamSearchParams(max_tokens=6, **meaning)
        ).outputs
        assert len(expected) == meaning["beam_width"]
        scores = [output.score for output in expected]
        assert None not in scores and scores == sorted(scores, key=lambda s: -(s or 0.0))
        assert [choice["index"] for choice in choices] == list(range(n))
        for choice, output in zip(choices, expected, strict=False):
            assert text_of(choice) == output.text
            assert choice["token_ids"] == output.token_ids
            assert choice["finish_reason"] == output.finish_reason
            assert choice["stop_reason"] == output.stop_reason
            assert choice["logprobs"] is None
        usage = whole["usage"]
        assert usage["prompt_tokens"] == len(ids)
        assert usage["completion_tokens"] == sum(len(c["token_ids"]) for c in choices)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    drive(test, script)


@at_both
def test_a_stream_tells_the_same_at_its_end(path: str) -> None:
    async def test(server: Server) -> None:
        body = body_of(path, n=3, best_of=4, max_tokens=5)
        whole = await server.ok(path, body)
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await server.chunks(path, {**body, "stream_options": options})
        last = chunks.pop()
        assert last["choices"] == []
        unlike = {"prompt_tokens_details": None}
        assert last["usage"] | unlike == whole["usage"] | unlike
        assert all(chunk["usage"] | unlike == last["usage"] | unlike for chunk in chunks)
        assert texts_of(chunks) == {c["index"]: text_of(c) for c in whole["choices"]}
        ends = {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in whole["choices"]}
        assert ends_of(chunks) == ends
        ids: dict[int, list[int]] = {}
        for chunk in chunks:
            [choice] = chunk["choices"]
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        assert ids == {c["index"]: c["token_ids"] for c in whole["choices"]}
        # The best first, each whole before the next one.
        order = [chunk["choices"][0]["index"] for chunk in chunks if "role" not in str(chunk)]
        assert order == sorted(order) and set(order) == {0, 1, 2}

    drive(test, Script(default="one two three"))


def test_lists_of_prompts_echo_and_what_is_kept_of_the_end() -> None:
    script = Script(default=[4, 5])

    async def test(server: Server) -> None:
        body: Json = {"use_beam_search": True, "max_tokens": 4}
        lists = {**body, "prompt": ["Hi", "You"], "n": 2}
        choices = (await server.ok(PATH, lists))["choices"]
        for place, prompt in enumerate(lists["prompt"]):
            alone = (await server.ok(PATH, {**lists, "prompt": prompt}))["choices"]
            for index, choice in enumerate(alone):
                assert choices[2 * place + index] == {**choice, "index": 2 * place + index}
        echo = (await server.ok(PATH, {**lists, "echo": True}))["choices"]
        assert [e["text"] for e in echo] == [
            prompt + choices[2 * place + i]["text"]
            for place, prompt in enumerate(lists["prompt"])
            for i in range(2)
        ]
        ended = {**body, "prompt": "Hi", "skip_special_tokens": False}
        [hidden] = (await server.ok(PATH, ended))["choices"]
        [kept] = (await server.ok(PATH, {**ended, "include_stop_str_in_output": True}))["choices"]
        assert hidden["finish_reason"] == kept["finish_reason"] == "stop"
        assert kept["text"] == hidden["text"] + EOS

    drive(test, script)


NOT_BESIDE: list[tuple[str, Any]] = [
    *(("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("min_tokens", 1)),
    *(("presence_penalty", 0.5), ("frequency_penalty", -0.5), ("repetition_penalty", 1.1)),
    *(("stop", "x"), ("stop", ["x"]), ("bad_words", ["x"])),
    *(("logit_bias", {"5": 1}), ("allowed_token_ids", [5]), ("prompt_logprobs", 0)),
]
NEUTRAL: Json = {
    **{"top_p": 1, "top_k": -1, "min_p": 0, "min_tokens": 0, "seed": 7},
    **{"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    **{"stop": [], "bad_words": [], "logit_bias": {}, "temperature": 1.0, "echo": False},
    **{"logprobs": None, "top_logprobs": 0, "prompt_logprobs": None, "length_penalty": 1.0},
    **{"early_stopping": False, "user": "me", "stream_options": None, "logprobs_mode": "raw"},
}


@at_both
def test_what_a_search_cannot_heed(path: str) -> None:
    own: list[tuple[str, Any]] = [("logprobs", 0), ("logprobs", 2)]
    if path == CHAT:
        own = [("logprobs", True)]

    async def test(server: Server) -> None:
        for name, given in NOT_BESIDE + own:
            error = await server.refused(path, body_of(path, n=2, **{name: given}))
            assert error["param"] == name, (name, error)
            assert "cannot be combined with use_beam_search. " in error["message"]
        plain = await server.ok(path, body_of(path, n=2, max_tokens=4))
        neutral = await server.ok(path, body_of(path, n=2, max_tokens=4, **NEUTRAL))
        assert neutral["choices"] == plain["choices"]
        off = {**INPUT[path], "max_tokens": 4, "use_beam_search": False}
        assert len((await server.ok(path, off))["choices"]) == 1

    drive(test, Script())


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 9}, "n", r"at most 8 \(--max-num-seqs\)"),
        ({"n": 2, "best_of": 9}, "best_of", r"at most 8 \(--max-num-seqs\)"),
        ({"n": 3, "best_of": 2}, "best_of", "best_of=2 is less than n=3"),
        ({"best_of": 0}, "best_of", "best_of=0 is less than n=1"),
        ({"n": 0}, "n", "n must be"),
        ({"n": 129}, "n", "n must be at most 128"),
        (
            {"length_penalty": 5.5},
            "length_penalty",
            r"length_penalty must be a number in \[-5, 5\]",
        ),
        ({"early_stopping": "maybe"}, "early_stopping", 'true, false or "never"'),
        ({"early_stopping": 3}, "early_stopping", 'true, false or "never"'),
        ({"temperature": 3}, "temperature", "temperature must be"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
        ({"use_beam_search": "yes"}, "use_beam_search", "Expected `bool | null`"),
        ({"use_beam_search": 1}, "use_beam_search", "Expected `bool | null`"),
        ({"best_of": 1.5}, "best_of", "Expected `int | null`"),
        ({"length_penalty": "1"}, "length_penalty", "Expected `float | null`"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "vocabulary"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "truncate_prompt_tokens"),
        ({"stop_token_ids": list(range(40)), "n": 2}, "stop_token_ids", "too many"),
    ],
    ids=str,
)
@at_both
def test_out_of_range(path: str, fields: Json, param: str, words: str) -> None:
    async def test(server: Server) -> None:
        error = await server.refused(path, body_of(path, **fields))
        assert error["param"] == param and len(error["message"]) < 400
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(error["message"])
        assert server.engine.stats().steps == 0

    drive(test, Script())


def test_an_echo_without_output_is_no_search() -> None:
    async def test(server: Server) -> None:
        error = await server.refused(PATH, body_of(PATH, echo=True, max_tokens=0))
        assert error["param"] == "max_tokens"

    drive(test, Script())


def test_many_prompts_count_with_all_their_beams() -> None:
    async def test(server: Server) -> None:
        error = await server.refused(PATH, body_of(PATH, prompt=["p"] * 300, best_of=4))
        assert error["param"] == "n" and "1200 completions" in error["message"]

    drive(test, Script())


def test_the_widest_search_there_is() -> None:
    async def test(server: Server) -> None:
        error = await server.refused(PATH, body_of(PATH, n=65))
        assert error["param"] == "n" and error["message"].endswith("at most 64.")
        assert len((await server.ok(PATH, body_of(PATH, n=64, max_tokens=3)))["choices"]) == 64

    drive(test, Script(), max_num_seqs=80, max_num_batched_tokens=128, num_blocks=512)


@at_both
def test_fields_of_a_search_without_one(path: str) -> None:
    async def test(server: Server) -> None:
        for fields in ({"length_penalty": 0.5}, {"early_stopping": True}, {"early_stopping": 0}):
            for more in ({}, {"use_beam_search": False}):
                [name] = fields
                error = await server.refused(path, {**INPUT[path], **fields, **more})
                assert error["param"] == name
                assert "has no effect without use_beam_search" in error["message"]

    drive(test, Script())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 4, "model": MODEL}),
    ],
)
def test_endpoints_with_one_answer(path: str, body: Json) -> None:
    async def test(server: Server) -> None:
        response = await server.post(path, {**body, "use_beam_search": True})
        assert response.status_code == 400
        error = response.json()["error"]
        assert "use_beam_search=True is not supported at this endpoint" in error["message"]
        assert "/v1/chat/completions" in error["message"]
        await server.ok(path, {**body, "use_beam_search": False})

    drive(test, Script())


def test_a_failed_step_is_the_end_of_a_search_alone() -> None:
    script = Script()
    script.fail_read = lambda step: RuntimeError("device lost") if step == 2 else None

    async def test(server: Server) -> None:
        error = await server.refused(PATH, body_of(PATH, n=3, max_tokens=6), 500)
        assert "device lost" in error["message"]
        assert len((await server.ok(PATH, body_of(PATH, n=3, max_tokens=6)))["choices"]) == 3

    drive(test, script)

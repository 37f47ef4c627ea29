"""/v1/completions over the scripted engine, with stream and without."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from openai.types import Completion

from jaxpaged.config import EngineConfig
from jaxpaged.sampling_params import SamplingParams
from server.protocol_completions import CompletionChunk, CompletionRequest, CompletionResponse
from tests.server.apps import (
    MODEL,
    Json,
    Server,
    drive,
    ends_of,
    parse_events,
    texts_of,
)
from tests.server.scripted import Script, settled
from tests.tiny_models import BOS

PATH = "/v1/completions"
PIECES = ["Once", " upon", " a", " time", "."]


async def both(server: Server, body: Json) -> Json:
    """The answer without stream, after proof that the stream says the same."""
    whole: Json = await server.ok(PATH, body)
    msgspec.convert(whole, CompletionResponse)
    Completion.model_validate(whole)
    chunks = await server.chunks(PATH, body)
    for chunk in chunks:
        msgspec.convert(chunk, CompletionChunk)
        assert {"id", "object", "created", "model", "system_fingerprint"} <= chunk.keys()
        assert (chunk["id"], chunk["created"]) == (chunks[0]["id"], chunks[0]["created"])
    assert texts_of(chunks) == {c["index"]: c["text"] for c in whole["choices"]}
    ends = {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in whole["choices"]}
    assert ends_of(chunks) == ends
    return whole


def test_the_answer() -> None:
    async def test(server: Server) -> None:
        whole = await both(server, {"prompt": "p", "max_tokens": 20})
        assert whole["object"] == "text_completion" and whole["model"] == MODEL
        assert whole["id"].startswith("cmpl-") and whole["created"] > 1.7e9
        assert whole["system_fingerprint"] == server.context.fingerprint
        assert whole["choices"] == [
            {
                "index": 0,
                "text": "Once upon a time.",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ]
        assert whole["usage"] == {
            "prompt_tokens": 1,
            "completion_tokens": 6,  # the EOS counts
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    drive(test, Script(default=PIECES))


@pytest.mark.parametrize("interval", [1, 3])
def test_text_first_then_the_end_apart(interval: int) -> None:  # SR-04
    async def test(server: Server) -> None:
        chunks = await server.chunks(PATH, {"prompt": "p", "max_tokens": 20})
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [c["text"] for c in choices if c["text"]] == (
            PIECES if interval == 1 else ["Once", " upon a time", "."]
        )
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert choices[-1]["text"] == ""

    drive(test, Script(default=PIECES), settings={"stream_interval": interval})


def test_a_slow_reader_gets_everything_once() -> None:  # SR-04
    async def test(server: Server) -> None:
        call = server.call(PATH, {"prompt": "p", "max_tokens": 50, "stream": True})
        await call.until(b"data: ")
        call.send_gate.clear()
        while server.engine.num_unfinished:
            await asyncio.sleep(0.002)
        call.send_gate.set()
        await call.ended()
        assert texts_of(parse_events(call.body)) == {0: "".join(PIECES * 4)}

    drive(test, Script(default=PIECES * 4))


def test_prompts_times_n_and_usage() -> None:  # AP-07
    script = Script(default=["x"])
    script.reply("first", ["a", "b", "c"])

    async def test(server: Server) -> None:
        prompts = ["the first", "another"]
        body = {"prompt": prompts, "n": 3, "max_tokens": 20}
        whole = await both(server, body)
        assert [c["index"] for c in whole["choices"]] == list(range(6))
        assert [c["text"] for c in whole["choices"]] == ["abc"] * 3 + ["x"] * 3
        counts = [len(await server.engine.tokenize(prompt)) for prompt in prompts]
        usage = whole["usage"]
        assert usage["prompt_tokens"] == sum(counts)
        assert usage["completion_tokens"] == 3 * 4 + 3 * 2
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        chunks = await server.chunks(PATH, {**body, "stream_options": {"include_usage": True}})
        told = [chunk for chunk in chunks if "usage" in chunk]
        assert told == chunks[-1:] and told[0]["choices"] == []
        assert told[0]["usage"] | {"prompt_tokens_details": None} == usage | {
            "prompt_tokens_details": None
        }

    drive(test, script)


def test_cached_tokens_are_told() -> None:  # AP-07
    async def test(server: Server) -> None:
        body = {"prompt": "one long prompt that fills several blocks", "max_tokens": 2}
        first = (await server.ok(PATH, body))["usage"]
        second = (await server.ok(PATH, body))["usage"]
        assert first["prompt_tokens_details"] == {"cached_tokens": 0}
        cached = second.pop("prompt_tokens_details")["cached_tokens"]
        assert cached == second["prompt_tokens"] - 1  # a prompt that is all there costs a token
        assert second.items() <= first.items()
        salted = await server.ok(PATH, {**body, "cache_salt": "me"})
        assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    drive(test, Script())


def test_cached_tokens_can_be_left_out() -> None:
    async def test(server: Server) -> None:
        whole = await server.ok(PATH, {"prompt": "p"})
        assert whole["usage"]["prompt_tokens_details"] is None

    drive(test, Script(), settings={"enable_prompt_tokens_details": False})


def test_usage_in_every_chunk() -> None:
    async def test(server: Server) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": "p", "max_tokens": 20, "stream_options": options}
        chunks = await server.chunks(PATH, body)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == [1, 2, 3, 4, 5, 6, 6]  # text five times, the end with its EOS, the total
        without = {**body, "stream_options": {"continuous_usage_stats": True}}
        assert not any("usage" in chunk for chunk in await server.chunks(PATH, without))

    drive(test, Script(default=PIECES))


def test_usage_can_be_forced() -> None:
    async def test(server: Server) -> None:
        chunks = await server.chunks(PATH, {"prompt": "p"})
        assert [i for i, chunk in enumerate(chunks) if "usage" in chunk] == [len(chunks) - 1]

    drive(test, Script(), settings={"enable_force_include_usage": True})


@pytest.mark.parametrize(
    ("reply", "fields", "text", "end"),
    [
        # ST-01: the stop text begins or ends inside a token
        (["ab", "c DE", "F gh"], {"stop": ["DEF"]}, "abc ", ("stop", "DEF")),
        (["x<", "/", "s", ">y"], {"stop": ["</s>"]}, "x", ("stop", "</s>")),
        (["END"], {"stop": "N"}, "E", ("stop", "N")),
        (["ab", "c DE", "F gh"], {"stop": ["DEF"], "include_stop_str_in_output": True},
         "abc DEF", ("stop", "DEF")),
        # ST-02: what was held back comes at the end
        (["a", "a", "b"], {"stop": ["ab"]}, "a", ("stop", "ab")),
        (["foo", "<", "/"], {"stop": ["</s>"], "max_tokens": 3}, "foo</", ("length", None)),
        (["foo", "<", "/"], {"stop": ["</s>"]}, "foo</", ("stop", None)),
        (["a", "a", "b"], {"stop": ["aab", "ab"]}, "", ("stop", "aab")),
        (["a"], {"stop": ["a much longer text"]}, "a", ("stop", None)),
        # ST-05: texts, not token ids
        ([" the", " cat", " th", "e e", "nd", " x"], {"stop": ["the end"]}, " the cat ",
         ("stop", "the end")),
        # a stop id ends it, its text is not shown
        (["a", "b", "c"], {"stop_token_ids": "b"}, "a", ("stop", "b")),
    ],
)  # fmt: skip
def test_stop_strings(reply: list[str], fields: Json, text: str, end: Any) -> None:
    async def test(server: Server) -> None:
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None
        asked, expected = {"max_tokens": 20, **fields}, end
        if "stop_token_ids" in fields:
            stop_id = tokenizer.backend.token_to_id(fields["stop_token_ids"])
            asked["stop_token_ids"], expected = [stop_id], (end[0], stop_id)
        choice = (await both(server, {"prompt": "p", **asked}))["choices"][0]
        assert choice["text"] == text
        assert (choice["finish_reason"], choice["stop_reason"]) == expected

    drive(test, Script(default=reply))


def test_a_stop_string_of_byte_tokens() -> None:  # ST-05
    async def test(server: Server) -> None:
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None
        choice = (await both(server, {"prompt": "p", "stop": ["终"], "max_tokens": 20}))["choices"][
            0
        ]
        assert (choice["text"], choice["stop_reason"]) == ("好", "终")

    drive(test, Script(default="好终了"))


@pytest.mark.parametrize(
    ("max_tokens", "end"), [(2, "length"), (3, "length"), (4, "stop"), (5, "stop")]
)
def test_eos_at_the_limit(max_tokens: int, end: str) -> None:  # ST-06
    async def test(server: Server) -> None:
        choice = (await both(server, {"prompt": "p", "max_tokens": max_tokens}))["choices"][0]
        assert choice["finish_reason"] == end
        assert choice["text"] == "abc"[:max_tokens]

    drive(test, Script(default=["a", "b", "c"]))


def test_ends_of_all_kinds() -> None:  # ST-06, SR-02
    script = Script(default=["a", "b", "c"])
    script.reply("nothing", [])

    async def test(server: Server) -> None:
        stopped = await both(server, {"prompt": "p", "max_tokens": 3, "stop": "c"})
        assert stopped["choices"][0]["finish_reason"] == "stop"
        at_once = await both(server, {"prompt": "nothing", "max_tokens": 3})
        assert at_once["choices"][0]["text"] == ""
        assert at_once["choices"][0]["finish_reason"] == "stop"
        assert at_once["usage"]["completion_tokens"] == 1
        only_one = await both(server, {"prompt": "p", "max_tokens": 1})
        assert only_one["choices"][0]["text"] == "a"
        full = await both(server, {"prompt": "p", "max_tokens": 32, "ignore_eos": True})
        # prompt + max_tokens may be more than the context: what fits is computed
        assert full["choices"][0]["finish_reason"] == "length"
        assert full["usage"]["total_tokens"] == 32

    drive(test, script, max_model_len=32)


@pytest.mark.parametrize(
    "text",
    [
        "👩‍👩‍👧 𠮷野家",
        "ฉัน e\u0301",
        "🇫🇷",
        'a\nb\rc\u2028d\u2029e\u0085"\\\u0000\u007f',
        "  ",
        "\n\n",
    ],
)
def test_characters_survive(text: str) -> None:  # DT-01, SR-05
    async def test(server: Server) -> None:
        whole = await both(server, {"prompt": "p", "max_tokens": 200})
        assert whole["choices"][0]["text"] == text
        for chunk in await server.chunks(PATH, {"prompt": "p", "max_tokens": 200}):
            assert "\ufffd" not in chunk["choices"][0]["text"]

    drive(test, Script(default=text))


def test_an_unfinished_character_at_the_end() -> None:  # DT-01
    async def test(server: Server) -> None:
        tokens = await server.engine.tokenize("é🙂", add_special_tokens=False)
        body = {"prompt": "p", "max_tokens": len(tokens) - 1}
        assert (await both(server, body))["choices"][0]["text"] == "é\ufffd"

    drive(test, Script(default="é🙂"))


def test_a_token_that_the_tokenizer_does_not_know() -> None:  # DT-05
    script = Script(default=["a", 1000, "b"])

    async def test(server: Server) -> None:
        body = {"prompt": "p", "logprobs": 5, "max_tokens": 9, "return_token_ids": True}
        odd, plain = await asyncio.gather(both(server, body), both(server, {"prompt": "q"}))
        assert odd["choices"][0]["text"] == plain["choices"][0]["text"] == "ab"
        assert odd["choices"][0]["logprobs"]["tokens"][1] == ""
        assert (await both(server, {"prompt": [1000]}))["choices"][0]["text"] == "ab"

    drive(test, script)


def test_spaces_and_echo() -> None:  # DT-04
    async def test(server: Server) -> None:
        plain = await both(server, {"prompt": "Say:", "max_tokens": 20})
        assert plain["choices"][0]["text"] == " Hello world , do n't!"
        echo = await both(server, {"prompt": "Say:", "max_tokens": 20, "echo": True})
        assert echo["choices"][0]["text"] == "Say: Hello world , do n't!"
        ids = await server.engine.tokenize("Say:")
        of_ids = await both(server, {"prompt": ids, "max_tokens": 20, "echo": True, "n": 2})
        assert [c["text"] for c in of_ids["choices"]] == ["Say: Hello world , do n't!"] * 2

    drive(test, Script(default=[" Hello", " world", " ,", " do", " n't", "!"]))


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_in_the_middle(stream: bool) -> None:  # SR-02
    def fail(step: int) -> BaseException | None:
        return RuntimeError("device lost") if step == 2 else None

    async def test(server: Server) -> None:
        body = {"prompt": "p", "max_tokens": 20, "stream": stream}
        response = await server.post(PATH, body)
        if stream:
            assert response.status_code == 200
            *chunks, last = parse_events(response.content)
            assert texts_of(chunks)[0] and not ends_of(chunks)
            assert last["error"]["code"] == 500 and last["error"]["type"] == "InternalServerError"
        else:
            assert response.status_code == 500
        # the next request is served
        assert (await server.ok(PATH, {"prompt": "p", "max_tokens": 20}))["choices"]

    drive(test, Script(default=PIECES, fail_read=fail), config=EngineConfig(async_scheduling=False))


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_before_the_first_token(stream: bool) -> None:  # SR-02
    def fail(step: int) -> BaseException | None:
        return RuntimeError("device lost") if step == 0 else None

    async def test(server: Server) -> None:
        await server.refused(PATH, {"prompt": "p", "stream": stream}, status=500)

    drive(test, Script(default=PIECES, fail_read=fail))


@pytest.mark.parametrize(
    "fields", [{"temperature": -1.0}, {"prompt": "x" * 999}, {"model": "unknown"}, {"n": 0}]
)
def test_a_bad_request_is_refused_with_stream_too(fields: Json) -> None:  # SR-02
    async def test(server: Server) -> None:
        status = 404 if "model" in fields else 400
        refusal = await server.refused(PATH, {"prompt": "p", "stream": True, **fields}, status)
        assert refusal == await server.refused(PATH, {"prompt": "p", **fields}, status)

    drive(test, Script())


@pytest.mark.parametrize("stream", [False, True])
def test_the_server_shuts_down_meanwhile(stream: bool) -> None:  # SR-02
    gate = threading.Event()
    gate.set()

    async def test(server: Server) -> None:
        call = server.call(PATH, {"prompt": "p", "stream": stream, "max_tokens": 200})
        if stream:
            await call.until(b"data: ")
        else:
            while not server.engine.num_unfinished:
                await asyncio.sleep(0.002)
        await server.engine.drain(0.0)
        await call.ended()
        if stream:
            last = parse_events(call.body)[-1]["error"]
            assert call.status == 200 and last["code"] == 503
        else:
            assert call.status == 503 and b"shutting down" in call.body
        error = await server.refused(PATH, {"prompt": "p"}, status=503)
        assert "shutting down" in error["message"]

    drive(test, Script(default=["a"], end=False, step_seconds=0.005, gate=gate))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode", "waiting"])
def test_a_client_that_leaves_frees_everything(stream: bool, phase: str) -> None:  # OP-02
    gate = threading.Event()

    async def test(server: Server) -> None:
        def known() -> int:
            """Requests that the engine has; others may be on their way to it."""
            stats = server.engine.stats()
            return stats.num_running + stats.num_waiting

        others = []
        if phase == "waiting":  # all eight places are taken
            body = {"prompt": "p", "max_tokens": 200, "n": 8}
            others = [server.call(PATH, body)]
        if phase != "prefill":
            gate.set()
            while others and known() < 8:
                await asyncio.sleep(0.002)
        before = known()
        call = server.call(PATH, {"prompt": "q" * 150, "max_tokens": 80, "stream": stream})
        while known() == before:
            await asyncio.sleep(0.002)
        if phase == "decode":
            if stream:
                await call.until(b"data: ")
            else:
                while server.engine.stats().generation_tokens < 3:
                    await asyncio.sleep(0.002)
        told = phase == "decode" and stream
        call.leave()
        await call.ended()
        for other in others:
            other.leave()
            await other.ended()
        gate.set()
        await settled(server.engine)
        ended = server.engine.stats().requests_finished
        assert ended == {"abort": 9 if others else 1}, "it was computed to its end"
        assert (call.status, call.closed) == ((200, False) if told else (499, True))

    # What it asked for takes seconds, however late it comes.
    drive(test, Script(default=["a"], end=False, step_seconds=0.02, gate=gate))


def test_ids_in_ids_out() -> None:
    async def test(server: Server) -> None:
        body = {"prompt": [3, 4], "max_tokens": 2, "return_token_ids": True, "logprobs": 1}
        whole = await server.ok(PATH, body)
        choice = whole["choices"][0]
        assert choice["token_ids"] == [7, 8] and choice["prompt_token_ids"] == [3, 4]
        assert choice["text"] == "" and choice["logprobs"]["tokens"] == ["token_id:7", "token_id:8"]
        chunks = await server.chunks(PATH, body)
        news = [chunk["choices"][0] for chunk in chunks]
        assert news[0]["prompt_token_ids"] == [3, 4]
        assert [c.get("token_ids") for c in news] == [None, [7], [8]]
        for fields, param in (
            ({"prompt": "text"}, "prompt"),
            ({"prompt": [3], "stop": "x"}, "stop"),
            ({"prompt": [3], "bad_words": ["x"]}, "bad_words"),
        ):
            error = await server.refused(PATH, fields)
            assert error["param"] == param and "tokenizer" in error["message"]
        scored = await server.ok(
            PATH, {"prompt": [3, 4], "max_tokens": 0, "echo": True, "logprobs": 0}
        )
        assert scored["choices"][0]["logprobs"]["tokens"] == ["token_id:3", "token_id:4"]

    drive(test, Script(default=[7, 8, 9]), config=EngineConfig(skip_tokenizer_init=True))


def test_token_ids_beside_text() -> None:
    async def test(server: Server) -> None:
        body = {"prompt": "p", "return_token_ids": True, "max_tokens": 20, "stop": ["</s>"]}
        choice = (await both(server, body))["choices"][0]
        chunks = await server.chunks(PATH, body)
        told = [t for chunk in chunks for t in chunk["choices"][0].get("token_ids") or ()]
        assert choice["token_ids"] == told and len(told) == 4
        assert choice["prompt_token_ids"] == await server.engine.tokenize("p")

    drive(test, Script(default=["x<", "/", "s", ">y"]))


def test_ids_of_answers() -> None:
    async def test(server: Server) -> None:
        async def id_for(body: Json, **headers: str) -> str:
            response = await server.post(PATH, {"prompt": "p", **body}, headers)
            answer: str = response.json()["id"]
            return answer

        assert await id_for({}, **{"X-Request-Id": "abc-1"}) == "cmpl-abc-1"
        assert await id_for({"request_id": "mine"}) == "cmpl-mine"
        for bad in ("x" * 129, "a b", ""):
            assert bad not in (await id_for({}, **{"X-Request-Id": bad}))[5:] or not bad
            assert len(await id_for({"request_id": bad})) == len("cmpl-") + 32
        same = [id_for({"max_tokens": 30}, **{"X-Request-Id": "same"}) for _ in range(3)]
        assert await asyncio.gather(*same) == ["cmpl-same"] * 3  # at the same time

    drive(test, Script(end=False))


def test_special_tokens_can_be_left_out() -> None:
    script = Script(default=["a", BOS, "b"])

    async def test(server: Server) -> None:
        assert (await both(server, {"prompt": "p"}))["choices"][0]["text"] == "ab"
        shown = await both(server, {"prompt": "p", "skip_special_tokens": False})
        assert shown["choices"][0]["text"] == f"a{BOS}b"

    drive(test, script)


def test_prompts_are_cut_as_asked() -> None:
    async def test(server: Server) -> None:
        ids = list(range(40, 60))
        for fields, kept in (
            ({"truncate_prompt_tokens": 5}, ids[-5:]),
            ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, ids[-5:]),
            ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
            ({"truncate_prompt_tokens": 50}, ids),
            ({"truncate_prompt_tokens": -1, "max_tokens": 20}, ids[-12:]),
        ):
            body = {"prompt": ids, "return_token_ids": True, "max_tokens": 2, **fields}
            assert (await server.ok(PATH, body))["choices"][0]["prompt_token_ids"] == kept
        text = "some text of more than five tokens"
        whole = await server.engine.tokenize(text)
        body = {"prompt": [text, text], "truncate_prompt_tokens": 5, "return_token_ids": True,
                "echo": True, "max_tokens": 2}  # fmt: skip
        for choice in (await server.ok(PATH, body))["choices"]:
            assert choice["prompt_token_ids"] == whole[-5:]
            tail = server.engine.tokenizer.decode(whole[-5:])  # type: ignore[union-attr]
            assert choice["text"] == tail + "on"

    drive(test, Script(default="on"), max_model_len=32)


def test_the_default_length() -> None:
    async def sixteen(server: Server) -> None:
        assert (await server.ok(PATH, {"prompt": "p", "max_tokens": None}))["usage"][
            "completion_tokens"
        ] == 16

    async def of_the_model(server: Server) -> None:
        assert (await server.ok(PATH, {"prompt": "p"}))["usage"]["completion_tokens"] == 24

    drive(sixteen, Script(end=False))
    drive(of_the_model, Script(end=False), default_params=SamplingParams(max_tokens=24))


def test_null_is_absent() -> None:
    async def test(server: Server) -> None:
        names = [field.encode_name for field in msgspec.structs.fields(CompletionRequest)]
        nothing = {name: None for name in names if name != "prompt"}
        plain = await server.ok(PATH, {"prompt": "p"})
        nulls = await server.ok(PATH, {**nothing, "prompt": "p"})
        assert plain["choices"] == nulls["choices"] and plain["usage"] == nulls["usage"]

    drive(test, Script())

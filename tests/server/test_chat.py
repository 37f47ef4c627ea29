"""/v1/chat/completions over the scripted engine, with stream and without."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.body import decode_body
from server.chat import open_chat
from server.protocol_chat import ChatChunk, ChatRequest, ChatResponse
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
from tests.tiny_models import BOS, EOS

PATH = "/v1/chat/completions"
PIECES = ["Once", " upon", " a", " time", "."]
HI = [{"role": "user", "content": "Hi"}]
RENDERED = f"{BOS}<|user|>\nHi{EOS}\n<|assistant|>\n"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{{ enable_thinking }} {{ reasoning_effort }} {{ mood }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
)


async def both(server: Server, body: Json) -> Json:
    """The answer without stream, after proof that the stream says the same."""
    whole: Json = await server.ok(PATH, body)
    msgspec.convert(whole, ChatResponse)
    if all(choice["message"]["role"] == "assistant" for choice in whole["choices"]):
        ChatCompletion.model_validate(whole)  # OpenAI knows no other role
    chunks = await server.chunks(PATH, body)
    for chunk in chunks:
        msgspec.convert(chunk, ChatChunk)
        if (
            chunk["choices"]
            and chunk["choices"][0]["delta"].get("role", "assistant") == "assistant"
        ):
            ChatCompletionChunk.model_validate(chunk)
        assert {"id", "object", "created", "model", "system_fingerprint"} <= chunk.keys()
        assert (chunk["id"], chunk["created"]) == (chunks[0]["id"], chunks[0]["created"])
    choices = whole["choices"]
    assert texts_of(chunks) == {c["index"]: c["message"]["content"] for c in choices}
    assert ends_of(chunks) == {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in choices}
    return whole


async def prompt_of(server: Server, body: Json) -> str:
    text: str = (await server.ok(PATH, {**body, "return_prompt_text": True}))["prompt_text"]
    return text


def test_the_answer() -> None:
    async def test(server: Server) -> None:
        whole = await both(server, {"messages": HI})
        assert whole["object"] == "chat.completion" and whole["model"] == MODEL
        assert whole["id"].startswith("chatcmpl-")
        assert whole["choices"] == [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Once upon a time.",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ]
        prompt_tokens = len(await server.engine.tokenize(RENDERED, add_special_tokens=False))
        assert whole["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 6,
            "total_tokens": prompt_tokens + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    drive(test, Script(default=PIECES))


def test_the_order_of_a_stream() -> None:  # SR-02, SR-04
    async def test(server: Server) -> None:
        options = {"include_usage": True}
        chunks = await server.chunks(PATH, {"messages": HI, "n": 2, "stream_options": options})
        roles = {"role": "assistant", "content": ""}
        for index, chunk in enumerate(chunks[:2]):
            assert chunk["choices"] == [
                {"index": index, "delta": roles, "logprobs": None, "finish_reason": None}
            ]
        for index in (0, 1):
            own = [c["choices"][0] for c in chunks[2:-1] if c["choices"][0]["index"] == index]
            assert [c["delta"] for c in own] == [{"content": piece} for piece in PIECES] + [{}]
            assert [c["finish_reason"] for c in own] == [None] * 5 + ["stop"]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12
        assert not any("usage" in chunk for chunk in chunks[:-1])

    drive(test, Script(default=PIECES))


def test_usage_in_every_chunk() -> None:
    async def test(server: Server) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await server.chunks(PATH, {"messages": HI, "stream_options": options})
        assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 1, 2, 3, 4, 5, 6, 6]

    drive(test, Script(default=PIECES))


def test_stop_strings() -> None:  # ST-01, ST-02
    async def test(server: Server) -> None:
        for stop, text, end in (
            (["DEF"], "abc ", ("stop", "DEF")),
            (["gh!"], "abc DEF gh", ("stop", None)),
        ):
            choice = (await both(server, {"messages": HI, "stop": stop}))["choices"][0]
            assert choice["message"]["content"] == text
            assert (choice["finish_reason"], choice["stop_reason"]) == end

    drive(test, Script(default=["ab", "c DE", "F gh"]))


@pytest.mark.parametrize(
    ("max_tokens", "end"), [(2, "length"), (3, "length"), (4, "stop"), (5, "stop")]
)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_eos_at_the_limit(name: str, max_tokens: int, end: str) -> None:  # ST-06
    async def test(server: Server) -> None:
        choice = (await both(server, {"messages": HI, name: max_tokens}))["choices"][0]
        assert choice["finish_reason"] == end
        assert choice["message"]["content"] == "abc"[:max_tokens]

    drive(test, Script(default=["a", "b", "c"]))


def test_lengths() -> None:  # ST-06
    async def test(server: Server) -> None:
        fits = (await both(server, {"messages": HI}))["usage"]
        assert fits["total_tokens"] == 64  # all that fits
        both_given = {"messages": HI, "max_tokens": 9, "max_completion_tokens": 4}
        assert (await both(server, both_given))["usage"]["completion_tokens"] == 4
        nothing = await both(server, {"messages": HI, "max_tokens": 3, "ignore_eos": False})
        assert nothing["choices"][0]["finish_reason"] == "length"

    drive(test, Script(default=["a"], end=False), max_model_len=64)


@pytest.mark.parametrize("text", ["👩‍👩‍👧 𠮷野家 ฉัน", 'a\nb\rc\u2028d\u2029e\u0085"\\'])
def test_characters_survive(text: str) -> None:  # DT-01, SR-05
    async def test(server: Server) -> None:
        whole = await both(server, {"messages": HI, "return_prompt_text": True})
        assert whole["choices"][0]["message"]["content"] == text

    drive(test, Script(default=text))


def test_a_stream_begins_before_it_ends() -> None:  # SR-05
    gate = threading.Event()

    async def test(server: Server) -> None:
        call = server.call(PATH, {"messages": HI, "stream": True})
        gate.set()
        await call.until(b'"content":"Once"')
        assert not call.closed and call.headers["content-type"].startswith("text/event-stream")
        await call.ended()

    drive(test, Script(default=[*PIECES * 9], step_seconds=0.005, gate=gate))


def test_errors_in_a_stream() -> None:  # SR-02
    def fail(step: int) -> BaseException | None:
        return RuntimeError("device lost") if step == 3 else None

    async def test(server: Server) -> None:
        response = await server.post(PATH, {"messages": HI, "stream": True})
        *chunks, last = parse_events(response.content)
        assert response.status_code == 200 and texts_of(chunks)[0] and not ends_of(chunks)
        assert set(last) == {"error"} and last["error"]["code"] == 500
        await both(server, {"messages": HI})

    drive(test, Script(default=PIECES, fail_read=fail))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_everything(stream: bool) -> None:
    async def test(server: Server) -> None:
        call = server.call(PATH, {"messages": HI, "stream": stream, "n": 3})
        if stream:
            await call.until(b"content")
        while not await server.engine.call(lambda e: e.scheduler.stats.generation_tokens):
            await asyncio.sleep(0.002)
        call.leave()
        await call.ended()
        await settled(server.engine)
        assert server.engine.stats().requests_finished == {"abort": 3}

    drive(test, Script(default=["a"], end=False, step_seconds=0.002))


def test_a_client_that_leaves_while_its_template_is_rendered() -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def test(server: Server) -> None:
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None
        render = tokenizer.render_chat

        def slow(*arguments: Any, **options: Any) -> Any:
            begun.set()
            assert go_on.wait(30)
            return render(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer, "render_chat", slow)
            call = server.call(PATH, {"messages": HI})
            assert await asyncio.to_thread(begun.wait, 30)
            call.leave()
            await call.ended()
            go_on.set()
        assert call.status == 499

    drive(test, Script())


def test_content_of_parts() -> None:  # CH-01
    async def test(server: Server) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        text = await prompt_of(server, {"messages": [{"role": "user", "content": parts}]})
        as_text = await prompt_of(server, {"messages": [{"role": "user", "content": "a\nb"}]})
        assert text == as_text and "type" not in text
        image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
        error = await server.refused(PATH, {"messages": [{"role": "user", "content": image}]})
        assert "image_url" in error["message"] and error["param"] == "messages"
        odd = [{"role": "user", "content": [5, None]}]
        assert (await server.refused(PATH, {"messages": odd, "echo": True}))["param"] == "messages"

    drive(test, Script())


def test_one_bos() -> None:  # CH-06
    async def test(server: Server) -> None:
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None
        for special in (None, False, True):
            body = {"messages": HI, "return_token_ids": True, "add_special_tokens": special}
            ids = (await server.ok(PATH, body))["prompt_token_ids"]
            assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
            assert tokenizer.decode(ids, skip_special_tokens=False) == RENDERED

    drive(test, Script())


def test_continuing_a_message() -> None:  # CH-07
    async def test(server: Server) -> None:
        last = {"role": "assistant", "content": "The answer is "}
        chat = [*HI, {"role": "assistant", "content": "The answer is 5"}, *HI, last]
        for begins in (None, False):
            body = {
                "messages": chat,
                "continue_final_message": True,
                "add_generation_prompt": begins,
            }
            assert (await prompt_of(server, body)).endswith("<|assistant|>\nThe answer is ")
            whole = await both(server, {**body, "echo": True})
            assert whole["choices"][0]["message"]["content"] == "The answer is 42"
            assert whole["choices"][0]["message"]["role"] == "assistant"
        error = await server.refused(PATH, {**body, "add_generation_prompt": True})
        assert error["param"] == "continue_final_message"

    drive(test, Script(default=["42"]))


def test_echo_is_for_messages_of_the_same_role() -> None:
    async def test(server: Server) -> None:
        plain = await both(server, {"messages": HI, "echo": True})
        assert plain["choices"][0]["message"]["content"] == "42"
        bare = await both(server, {"messages": HI, "add_generation_prompt": False, "echo": True})
        assert bare["choices"][0]["message"] == plain["choices"][0]["message"] | {
            "role": "user",
            "content": "Hi42",
        }

    drive(test, Script(default=["42"]))


def test_the_role_of_answers() -> None:
    async def test(server: Server) -> None:
        assert (await both(server, {"messages": HI}))["choices"][0]["message"]["role"] == "model"

    drive(test, Script(), settings={"response_role": "model"})


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"tools": [TOOL]}, True),
        ({"tools": [TOOL], "tool_choice": "auto"}, True),
        ({"tools": [TOOL], "tool_choice": None}, True),
        ({"tools": [TOOL], "tool_choice": "none"}, False),
        ({"tools": []}, False),
        ({"tools": [], "tool_choice": "auto"}, False),
        ({"tools": None, "tool_choice": "none"}, False),
        ({"tool_choice": "none"}, False),
    ],
)
def test_tools(fields: Json, shown: bool) -> None:  # CH-05
    async def test(server: Server) -> None:
        whole = await both(server, {"messages": HI, "parallel_tool_calls": True, **fields})
        message, end = whole["choices"][0]["message"], whole["choices"][0]["finish_reason"]
        assert "tool_calls" not in message and end == "stop"
        assert ("[f]" in await prompt_of(server, {"messages": HI, **fields})) == shown

    drive(test, Script(chat_template=TOOLS_TEMPLATE))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "not supported yet"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "not supported yet",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "'g', which is not in tools",
        ),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "must be"),
        ({"tool_choice": "auto"}, "tool_choice", "`tools` must be set"),
        ({"tool_choice": "required"}, "tool_choice", "`tools` must be set"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "`tools` must be set"),
        ({"tools": [{"type": "function"}]}, "tools", "needs a name"),
        ({"tools": [{"type": "custom"}]}, "tools", "only function"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools",
            "tools[0].function.parameters must be an object, got []",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]},
            "tools",
            "tools[0].function.description must be text, got 5",
        ),
        ({"tools": {}}, "tools", "array"),
    ],
)
def test_tools_that_are_refused(fields: Json, param: str, words: str) -> None:  # CH-05
    async def test(server: Server) -> None:
        for stream in (False, True):
            error = await server.refused(PATH, {"messages": HI, "stream": stream, **fields})
            assert error["param"] == param and words in error["message"], error

    drive(test, Script())


def test_template_variables() -> None:
    async def test(server: Server) -> None:
        async def head(**fields: Any) -> list[str]:
            text = await prompt_of(server, {"messages": HI, **fields})
            return text.removeprefix(BOS).partition("<|")[0].split(" ")

        assert await head() == ["", "", "calm"]
        assert await head(reasoning_effort="none") == ["False", "none", "calm"]
        assert await head(reasoning_effort="high") == ["True", "high", "calm"]
        own = {"enable_thinking": False, "mood": "wild"}
        assert await head(reasoning_effort="high", chat_template_kwargs=own) == [
            "False",
            "high",
            "wild",
        ]
        error = await server.refused(PATH, {"messages": HI, "reasoning_effort": "huge"})
        assert error["param"] == "reasoning_effort"

    drive(
        test,
        Script(chat_template=TOOLS_TEMPLATE),
        settings={"default_chat_template_kwargs": {"mood": "calm"}},
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": "{{ 5 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 5 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ],
)
def test_templates_of_clients_are_refused(fields: Json, param: str) -> None:  # CH-09
    async def test(server: Server) -> None:
        assert (await server.refused(PATH, {"messages": HI, **fields}))["param"] == param

    drive(test, Script())


def test_templates_of_trusted_clients() -> None:  # CH-09
    async def test(server: Server) -> None:
        template = "{{ messages[0]['content'] }}!"
        for fields in (
            {"chat_template": template},
            {"chat_template_kwargs": {"chat_template": template}},
        ):
            assert await prompt_of(server, {"messages": HI, **fields}) == "Hi!"
        endless = (
            "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
        )
        for bad in ("{{ [].__class__.__base__ }}", endless, "{{ 'x' * 999999999 }}", "{% if %}"):
            await server.refused(PATH, {"messages": HI, "chat_template": bad})

    drive(test, Script(), settings={"trust_request_chat_template": True})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [*HI, {"role": 5}], "add_generation_prompt": False}, "messages"),
        ({}, "messages"),
    ],
)
def test_bad_messages(fields: Json, param: str) -> None:
    async def test(server: Server) -> None:
        error = await server.refused(PATH, fields)
        assert error["param"] == param or (not fields and "messages" in error["message"])

    drive(test, Script())


def test_extra_keys_and_fields_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        message = {**HI[0], "name": "me", "refusal": None, "audio": None, "id": "1", "opts": {}}
        plain = await both(server, {"messages": HI})
        body = {"messages": [message], "user": "u", "store": True, "metadata": {"a": "b"}}
        odd = {"service_tier": "auto", "verbosity": "low", "prediction": None, "stopp": "x"}
        assert (await both(server, {**body, **odd}))["choices"] == plain["choices"]
        await both(server, {**body, **odd})

    with caplog.at_level(logging.INFO, logger="server.body"):
        drive(test, Script())
    # Both told once, those of OpenAI's API never.
    assert [r.getMessage() for r in caplog.records if r.name == "server.body"] == [
        "The request field 'stopp' is unknown and ignored. Did you mean 'stop'?"
    ]


def test_prompts_and_ids_beside_the_text() -> None:
    async def test(server: Server) -> None:
        body = {"messages": HI, "return_token_ids": True, "return_prompt_text": True, "n": 2}
        whole = await both(server, body)
        chunks = await server.chunks(PATH, body)
        ids = await server.engine.tokenize(RENDERED, add_special_tokens=False)
        assert whole["prompt_token_ids"] == ids and whole["prompt_text"] == RENDERED
        assert chunks[0]["prompt_token_ids"] == ids and chunks[0]["prompt_text"] == RENDERED
        assert not any("prompt_text" in chunk for chunk in chunks[1:])
        for choice in whole["choices"]:
            told = [
                token
                for chunk in chunks
                for other in chunk["choices"]
                if other["index"] == choice["index"]
                for token in other.get("token_ids") or ()
            ]
            assert told == choice["token_ids"] and len(told) == 6
        cut = await server.ok(PATH, {**body, "truncate_prompt_tokens": 3})
        assert cut["prompt_token_ids"] == ids[-3:]

    drive(test, Script(default=PIECES))


def test_the_core_without_http() -> None:
    async def test(server: Server) -> None:
        fields = msgspec.json.encode({"messages": HI, "max_tokens": 3})
        chat = await open_chat(
            server.context, decode_body(fields, ChatRequest), request_id="resp_1"
        )
        try:
            news = [one async for several in chat.news() for one in several]
        finally:
            chat.close()
        assert (chat.prompt_text, chat.role, chat.envelope.id) == (RENDERED, "assistant", "resp_1")
        assert news[0].role == "assistant"
        assert "".join(one.text for one in news) == "Once upon a"
        assert news[-1].finish_reason == "length" and chat.usage().completion_tokens == 3
        left = await open_chat(server.context, decode_body(fields, ChatRequest), request_id="r")
        left.close()
        left.close()

    drive(test, Script(default=PIECES))


def test_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        await server.ok(PATH, {"messages": HI, "seed": 7, "request_id": "x"})

    settings = {"enable_log_requests": True, "enable_log_outputs": True, "max_log_len": 9}
    with caplog.at_level(logging.DEBUG, logger="server.request_log"):
        drive(test, Script(default=PIECES), settings=settings)
    asked, prompt, answered = [
        r.getMessage() for r in caplog.records if r.name == "server.request_log"
    ]
    assert asked.startswith("Request chatcmpl-x: 1 prompts") and "seed=7" in asked
    assert prompt == f"Request chatcmpl-x: prompt 0: {RENDERED[:9]!r}"
    assert answered == "Request chatcmpl-x: choice 0 (stop): 'Once upon'"

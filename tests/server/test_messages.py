"""/v1/messages with Anthropic's own client, over a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, TextBlock

from server.settings import ServerConfig
from tests.server.live import MODEL, Live, live_server
from tests.server.scripted import Script, waits

REPLY = ["Hello", " there", ", how", " are you?"]
HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {}},
}
# Prints what the model is told about tools, which the plain template of the tests does not.
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    script = Script(default=REPLY, chat_template=TEMPLATE)
    script.reply("It is sunny.", ["Take", " sunglasses."])
    script.reply("The capital of Italy is", [" Rome", "."])
    script.reply("Count", ["one", " two", " three", " four"])
    with live_server(script) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.base_url, api_key="none", max_retries=0) as client:
        yield client


def post(live: Live, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    return httpx.post(f"{live.base_url}{path}", json=body, timeout=30)


def text_of(message: Message) -> str:
    (block,) = message.content
    assert isinstance(block, TextBlock)
    return block.text


def test_a_whole_answer(client: anthropic.Anthropic, live: Live) -> None:
    message = client.messages.create(model=MODEL, max_tokens=50, messages=HI, system="Be kind.")
    assert text_of(message) == "".join(REPLY)
    assert message.id.startswith("msg_") and message.type == "message"
    assert message.role == "assistant" and message.model == MODEL
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    assert message.usage.output_tokens == len(REPLY) + 1  # with the end-of-sequence token
    assert message.usage.input_tokens > 0
    assert message._request_id
    live.settle()


def test_a_stream_has_the_whole_sequence_and_the_same_text(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(model=MODEL, max_tokens=50, messages=HI, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"} and len(kinds[2:-3]) > 1
    with client.messages.stream(model=MODEL, max_tokens=50, messages=HI) as stream:
        deltas = list(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(model=MODEL, max_tokens=50, messages=HI)
    assert "".join(deltas) == "".join(REPLY) == text_of(whole)
    assert final.stop_reason == whole.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_stream_on_the_wire(live: Live) -> None:
    response = post(live, model=MODEL, max_tokens=50, messages=HI, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["request-id"]
    names = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        names.append(name.removeprefix("event: "))
        assert json.loads(data.removeprefix("data: "))["type"] == names[-1]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert "[DONE]" not in response.text


def test_the_async_client(live: Live) -> None:
    async def ask() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(
            base_url=live.base_url, api_key="none", max_retries=0
        ) as client:
            whole = await client.messages.create(model=MODEL, max_tokens=50, messages=HI)
            async with client.messages.stream(model=MODEL, max_tokens=50, messages=HI) as stream:
                final = await stream.get_final_message()
        return text_of(whole), text_of(final)

    assert asyncio.run(ask()) == ("".join(REPLY), "".join(REPLY))


def test_the_beta_door_is_the_same(client: anthropic.Anthropic) -> None:
    message = client.beta.messages.create(
        model=MODEL, max_tokens=50, messages=HI, betas=["context-1m-2025-08-07"]
    )
    (block,) = message.content
    assert block.type == "text" and block.text == "".join(REPLY)


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "one two", "max_tokens", None),
        ({"stop_sequences": ["thr"]}, "one two ", "stop_sequence", "thr"),
        ({"stop_sequences": ["never"]}, "one two three four", "end_turn", None),
        ({"max_tokens": 4000}, "one two three four", "end_turn", None),
    ],
)
def test_why_it_stopped(
    client: anthropic.Anthropic, fields: Any, text: str, reason: str, sequence: str | None
) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 50, "messages": [{**HI[0], "content": "Count"}]}
    message = client.messages.create(**asked | fields)
    assert (text_of(message), message.stop_reason) == (text, reason)
    assert message.stop_sequence == sequence
    with client.messages.stream(**asked | fields) as stream:
        final = stream.get_final_message()
    assert (text_of(final), final.stop_reason) == (text, reason)
    assert final.stop_sequence == sequence


def test_the_end_of_the_context_is_told_apart() -> None:
    with live_server(Script(default=REPLY, end=False), max_model_len=32) as live:
        asked = {"model": MODEL, "max_tokens": 31, "messages": HI}
        assert post(live, **asked).json()["stop_reason"] == "model_context_window_exceeded"
        asked["max_tokens"] = 3
        assert post(live, **asked).json()["stop_reason"] == "max_tokens"


def test_sampling_settings_arrive(live: Live) -> None:
    asked = {"model": MODEL, "max_tokens": 5, "messages": HI}
    assert post(live, **asked, temperature=0.5, top_p=0.9, top_k=5).status_code == 200
    for name, value in (("temperature", 9), ("top_p", 2), ("top_k", -7)):
        response = post(live, **asked | {name: value})
        assert response.status_code == 400
        assert name in response.json()["error"]["message"]


def test_a_conversation_with_tools_is_read(client: anthropic.Anthropic) -> None:
    use: Any = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": "It is sunny."}
    message = client.messages.create(
        model=MODEL,
        max_tokens=50,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
        tools=[TOOL],
        tool_choice={"type": "auto"},
    )
    assert text_of(message) == "Take sunglasses."


def test_a_begun_answer_goes_on(client: anthropic.Anthropic) -> None:
    begun: Any = [*HI, {"role": "assistant", "content": "The capital of Italy is"}]
    message = client.messages.create(model=MODEL, max_tokens=50, messages=begun)
    assert text_of(message) == " Rome."


def test_the_answer_can_be_sent_back(client: anthropic.Anthropic) -> None:
    first = client.messages.create(model=MODEL, max_tokens=50, messages=HI)
    again: Any = [*HI, first.to_param(), {"role": "user", "content": "Again"}]
    second = client.messages.create(model=MODEL, max_tokens=50, messages=again)
    assert text_of(second) == "".join(REPLY)


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Word by word " * 5}]}
    for more in ({}, {"system": "Be kind."}, {"tools": [TOOL]}):
        counted = client.messages.count_tokens(**asked, **more)
        usage = client.messages.create(**asked, **more, max_tokens=1).usage
        cached = usage.cache_read_input_tokens
        assert cached is not None
        assert counted.input_tokens == usage.input_tokens + cached
    plain = client.messages.count_tokens(**asked).input_tokens
    assert client.messages.count_tokens(**asked, tools=[TOOL]).input_tokens > plain


def test_a_repeated_prompt_counts_as_cached(client: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "Say it again and again"}]
    for _ in range(2):
        with client.messages.stream(model=MODEL, max_tokens=5, messages=asked) as stream:
            usage = stream.get_final_message().usage
    assert usage.cache_read_input_tokens is not None and usage.cache_read_input_tokens > 0
    assert usage.cache_creation_input_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0."),
        ({"messages": []}, "messages must not be empty."),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": "w " * 999}]}, "maximum context length is 256"),
        ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "not supported yet"),
        ({"temperature": "hot"}, "Expected `float | null`"),
    ],
)
def test_errors_are_plain_errors(
    client: anthropic.Anthropic, fields: dict[str, Any], words: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(
            model=MODEL, max_tokens=5, messages=HI, stream=stream, extra_body=fields
        )
    assert caught.value.type == "invalid_request_error"
    assert caught.value.api_message is not None and words in caught.value.api_message
    assert caught.value.request_id is not None


def test_an_unknown_model_is_not_found(client: anthropic.Anthropic) -> None:
    asks: list[Callable[[], Any]] = [
        lambda: client.messages.create(model="claude-x", max_tokens=5, messages=HI),
        lambda: client.messages.count_tokens(model="claude-x", messages=HI),
    ]
    for ask in asks:
        with pytest.raises(anthropic.NotFoundError, match="`claude-x` does not exist") as caught:
            ask()
        assert caught.value.type == "not_found_error"


def fails_at(step: int) -> Callable[[int], BaseException | None]:
    return lambda number: RuntimeError("boom") if number == step else None


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_a_plain_error(stream: bool) -> None:
    with live_server(Script(default=REPLY, fail_read=fails_at(0))) as live:
        response = post(live, model=MODEL, max_tokens=50, messages=HI, stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "api_error"
        live.settle()


def test_a_later_failure_is_an_error_event() -> None:
    with live_server(Script(default=REPLY, fail_read=fails_at(2))) as live:
        texts = []
        with anthropic.Anthropic(base_url=live.base_url, api_key="x", max_retries=0) as client:
            stream = client.messages.create(model=MODEL, max_tokens=50, messages=HI, stream=True)
            with pytest.raises(anthropic.APIStatusError) as caught:  # noqa: PT012 - a stream
                for event in stream:
                    if event.type == "content_block_delta":
                        texts.append(event)
        assert len(texts) == 2
        assert caught.value.type == "api_error"
        live.settle()


def test_a_long_wait_is_bridged_by_comments_and_a_failure_still_told() -> None:
    gate = threading.Event()
    settings = ServerConfig(served_model_name=(MODEL,), sse_keep_alive_interval=0.02)
    with live_server(Script(default=REPLY, gate=gate, fail_read=fails_at(0)), settings) as live:
        with httpx.stream(
            "POST",
            f"{live.base_url}/v1/messages",
            json={"model": MODEL, "max_tokens": 50, "messages": HI, "stream": True},
            timeout=30,
        ) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            gate.set()
            told = [line for line in lines if line and not line.startswith(":")]
        assert told[0] == "event: error" and len(told) == 2
        assert json.loads(told[1].removeprefix("data: "))["error"]["type"] == "api_error"
        gate.clear()
        opener = threading.Timer(0.2, gate.set)
        opener.start()
        with (
            anthropic.Anthropic(base_url=live.base_url, api_key="none") as client,
            client.messages.stream(model=MODEL, max_tokens=50, messages=HI) as stream,
        ):
            assert text_of(stream.get_final_message()) == "".join(REPLY)
        opener.join()
        live.settle()


def test_a_client_that_leaves_aborts_its_request() -> None:
    gate = threading.Event()
    script = Script(default=REPLY, end=False, fail_read=waits(gate, 4))
    with live_server(script) as live:
        body = {"model": MODEL, "max_tokens": 200, "messages": HI, "stream": True}
        with httpx.stream(
            "POST", f"{live.base_url}/v1/messages", json=body, timeout=30
        ) as response:
            assert any("text_delta" in line for line in response.iter_lines())
        live.wait_until(lambda: live.context.in_flight == 0)  # the server has seen it, too
        gate.set()
        live.settle()
        assert live.engine.stats().requests_finished == {"abort": 1}


def test_keys_in_either_header_and_errors_of_the_middleware() -> None:
    settings = ServerConfig(served_model_name=(MODEL,), api_key=("secret",), max_request_bytes=2000)
    with live_server(settings=settings) as live:
        options: Any = {"base_url": live.base_url, "max_retries": 0}
        asked: Any = {"model": MODEL, "max_tokens": 5, "messages": HI}
        for keys in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with anthropic.Anthropic(**options, **keys) as client:
                assert client.messages.create(**asked).type == "message"
        with anthropic.Anthropic(**options, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                client.messages.create(**asked)
            assert refused.value.type == "authentication_error"
        headers = {"x-api-key": "secret"}
        for path, size, status, kind in (
            ("/v1/messages", 3000, 413, "request_too_large"),
            ("/v1/messages/nowhere", 10, 404, "not_found_error"),
        ):
            response = httpx.post(
                f"{live.base_url}{path}", json={"x": "y" * size}, headers=headers, timeout=30
            )
            assert response.status_code == status
            assert response.json()["error"]["type"] == kind
        response = httpx.get(f"{live.base_url}/v1/messages", headers=headers, timeout=30)
        assert response.status_code == 405
        assert response.json()["type"] == "error"

"""/v1/responses with OpenAI's own client, over a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from server.settings import ServerConfig
from tests.server.live import MODEL, Live, live_server
from tests.server.scripted import Script, waits

REPLY = ["Hello", " there", ", how", " are you?"]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    script = Script(default=REPLY)
    script.reply("It is sunny.", ["Take", " sunglasses."])
    script.reply("Unicode", ["€ ", "\u2028", "中文", "<|x|>"])
    with live_server(script) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(live: Live, **body: Any) -> httpx.Response:
    return httpx.post(f"{live.base_url}/v1/responses", json=body, timeout=30)


def test_a_whole_answer(client: openai.OpenAI, live: Live) -> None:
    response = client.responses.create(model=MODEL, input="Hi", instructions="Be kind.")
    assert response.output_text == "".join(REPLY)
    assert response.status == "completed" and response.error is None
    assert response.id.startswith("resp_") and response.object == "response"
    assert response.model == MODEL
    (item,) = response.output
    assert item.type == "message" and item.role == "assistant" and item.status == "completed"
    assert item.id.startswith("msg_")
    assert response.usage is not None
    assert response.usage.output_tokens == len(REPLY) + 1  # with the end-of-sequence token
    assert response.usage.total_tokens == response.usage.input_tokens + len(REPLY) + 1
    live.settle()


def test_a_stream_has_the_whole_sequence_and_the_same_text(
    client: openai.OpenAI, live: Live
) -> None:
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds[4:-4]) > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "".join(REPLY)
    whole = client.responses.create(model=MODEL, input="Hi")
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None and whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_the_clients_stream_helper_follows(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hi") as stream:
        snapshots = [
            event.snapshot for event in stream if event.type == "response.output_text.delta"
        ]
        final = stream.get_final_response()
    assert snapshots[-1] == "".join(REPLY) == final.output_text


def test_events_are_named_and_end_without_a_done(live: Live) -> None:
    response = post(live, model=MODEL, input="Hi", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "[DONE]" not in response.text


def test_unusual_characters_arrive(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="Unicode", stream=True))
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "€ \u2028中文<|x|>"


def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "".join(REPLY[:2])
    assert response.max_output_tokens == 2
    *_, last = client.responses.create(model=MODEL, input="Hi", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output_text == "".join(REPLY[:2])


def test_a_conversation_with_tools_is_read(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }
    hosted: Any = {"type": "web_search"}
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "It is sunny."},
    ]
    response = client.responses.create(
        model=MODEL, input=items, tools=[tool, hosted], tool_choice="auto"
    )
    assert response.output_text == "Take sunglasses."
    assert [tool.type for tool in response.tools] == ["function"]


def test_the_output_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Hi")
    items: Any = [{"role": "user", "content": "Hi"}]
    items += [item.to_dict() for item in first.output]
    items.append({"role": "user", "content": "Again"})
    second = client.responses.create(model=MODEL, input=items)
    assert second.output_text == "".join(REPLY)
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_repeated_prompt_counts_as_cached(client: openai.OpenAI) -> None:
    usages = [client.responses.create(model=MODEL, input="Say it " * 10).usage for _ in "12"]
    assert usages[0] is not None and usages[1] is not None
    assert usages[0].input_tokens_details.cached_tokens < usages[0].input_tokens
    assert usages[1].input_tokens_details.cached_tokens > 0


def test_logprobs_of_the_answer(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    (item,) = response.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text" and part.logprobs is not None
    assert [entry.token for entry in part.logprobs[: len(REPLY)]] == REPLY
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert response.top_logprobs == 2
    deltas: list[Any] = []
    for event in client.responses.create(model=MODEL, input="Hi", top_logprobs=2, stream=True):
        if event.type == "response.output_text.delta":
            deltas += event.logprobs
    assert [entry.token for entry in deltas] == [entry.token for entry in part.logprobs]


def test_what_was_asked_for_comes_back(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL,
        input="Hi",
        temperature=0.25,
        top_p=0.5,
        metadata={"a": "b"},
        user="me",
        truncation="auto",
        store=True,
        text={"format": {"type": "text"}, "verbosity": "low"},
    )
    assert (response.temperature, response.top_p) == (0.25, 0.5)
    assert response.metadata == {"a": "b"} and response.user == "me"
    assert response.text is not None and response.text.verbosity == "low"


def test_the_fields_of_chat_work_here_too(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="Hi", extra_body={"stop": "how", "top_k": 3, "seed": 1}
    )
    assert response.output_text == "Hello there, "


def test_a_long_wait_is_bridged_by_comments_and_a_failure_still_told() -> None:
    gate = threading.Event()
    settings = ServerConfig(served_model_name=(MODEL,), sse_keep_alive_interval=0.02)
    with live_server(Script(default=REPLY, gate=gate, fail_read=fails_at(0)), settings) as live:
        with httpx.stream(
            "POST",
            f"{live.base_url}/v1/responses",
            json={"model": MODEL, "input": "Hi", "stream": True},
            timeout=30,
        ) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            gate.set()
            names = [line for line in lines if line.startswith("event: ")]
        assert names == ["event: response.created", "event: response.failed"]
        gate.clear()
        opener = threading.Timer(0.2, gate.set)
        opener.start()
        with (
            openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="none") as client,
            client.responses.stream(model=MODEL, input="Hi") as stream,
        ):
            assert stream.get_final_response().output_text == "".join(REPLY)
        opener.join()
        live.settle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores nothing"),
        ({"background": True}, "background", "stream=true"),
        ({"temperature": 9}, "temperature", "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "max_output_tokens", "max_output_tokens"),
        ({"input": "word " * 400}, None, "maximum context length is 256 tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "not supported yet"),
        ({"input": [{"role": "user", "content": 5}]}, "input", "input[0].content"),
        ({"temperature": "hot"}, "temperature", "Expected `float | null`"),
    ],
)
def test_errors_are_plain_errors(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, words: str, stream: bool
) -> None:
    body = {"input": "Hi", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, stream=stream, extra_body=body)
    assert words in caught.value.message
    if param is not None:
        assert caught.value.param == param


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="`gpt-9` does not exist") as caught:
        client.responses.create(model="gpt-9", input="Hi")
    assert caught.value.param == "model"


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    done = client.responses.create(model=MODEL, input="Hi")
    for ask in (
        client.responses.retrieve,
        client.responses.cancel,
        client.responses.delete,
        client.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError, match="stores no responses"):
            ask(done.id)


def test_pydantic_output_is_refused_by_name(client: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        city: str

    with pytest.raises(openai.BadRequestError, match="json_schema"):
        client.responses.parse(model=MODEL, input="Hi", text_format=Answer)


def fails_at(step: int) -> Callable[[int], BaseException | None]:
    return lambda number: RuntimeError("boom") if number == step else None


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_a_plain_error(stream: bool) -> None:
    with live_server(Script(default=REPLY, fail_read=fails_at(0))) as live:
        response = post(live, model=MODEL, input="Hi", stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "InternalServerError"
        assert post(live, model=MODEL, input="Hi").json()["status"] == "completed"
        live.settle()


def test_a_later_failure_is_a_failed_response() -> None:
    with live_server(Script(default=REPLY, fail_read=fails_at(2))) as live:
        base_url = f"{live.base_url}/v1"
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
            assert client.responses.create(model=MODEL, input="Hi").status == "completed"
        live.settle()
    last = events[-1]
    assert last.type == "response.failed"
    assert last.sequence_number == len(events) - 1
    assert last.response.status == "failed" and last.response.error is not None
    assert last.response.error.code == "server_error"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert last.response.output_text == "".join(deltas) == "".join(REPLY[:2])


def test_a_client_that_leaves_aborts_its_request() -> None:
    gate = threading.Event()
    script = Script(default=REPLY, end=False, fail_read=waits(gate, 4))
    with live_server(script) as live:
        body = {"model": MODEL, "input": "Hi", "stream": True}
        with httpx.stream(
            "POST", f"{live.base_url}/v1/responses", json=body, timeout=30
        ) as response:
            assert any("output_text.delta" in line for line in response.iter_lines())
        live.wait_until(lambda: live.context.in_flight == 0)  # the server has seen it, too
        gate.set()
        live.settle()
        assert live.engine.stats().requests_finished == {"abort": 1}


def test_a_client_that_leaves_before_the_answer_aborts_too() -> None:
    gate = threading.Event()
    with live_server(Script(default=REPLY, gate=gate)) as live:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{live.base_url}/v1/responses",
                json={"model": MODEL, "input": "Hi"},
                timeout=httpx.Timeout(30, read=0.3),
            )
        live.wait_until(lambda: live.context.in_flight == 0)  # the server has seen it, too
        gate.set()
        live.settle()
        assert live.engine.stats().requests_finished == {"abort": 1}


def test_keys_guard_it() -> None:
    settings = ServerConfig(served_model_name=(MODEL,), api_key=("secret",))
    with live_server(settings=settings) as live:
        assert post(live, model=MODEL, input="Hi").status_code == 401
        with openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="secret") as client:
            assert client.responses.create(model=MODEL, input="Hi").status == "completed"

"""What OpenAI's client makes of refusals and failures, and what becomes of requests it gives up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from server.settings import ServerConfig
from tests.server.live import MODEL, Live, live_server
from tests.server.scripted import Script
from tests.server.wire import Wire

PIECES = ["Once", " upon", " a", " time", "."]
TEXT = "".join(PIECES)
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


def settings(**fields: Any) -> ServerConfig:
    return ServerConfig.from_dict({"served_model_name": (MODEL,), **fields})


@contextmanager
def client_of(
    live: Live,
    *,
    retries: int = 0,
    key: str = "any",
    on_response: Callable[[int], None] | None = None,
) -> Iterator[openai.OpenAI]:
    """`on_response` is called with each status, before the client does anything about it."""

    def told(response: httpx2.Response) -> None:
        if on_response is not None:
            on_response(response.status_code)

    with openai.OpenAI(
        base_url=f"{live.base_url}/v1",
        api_key=key,
        max_retries=retries,
        http_client=openai.DefaultHttpxClient(event_hooks={"response": [told]}),
    ) as client:
        yield client


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(Script(default=PIECES), settings(max_request_bytes=20_000)) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with client_of(live) as client:
        yield client
    live.settle()


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 3}, "temperature", "2"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user", "content": "x" * 999}]}, "input_tokens",
         "maximum context length is 256 tokens"),
        ({"max_tokens": 300}, "max_tokens", "cannot be greater than max_model_len=256"),
        ({"n": 1000}, "n", "128"),
        ({"top_logprobs": 3}, "top_logprobs", "`logprobs` must be set to true"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "`tools` must be set"),
        ({"extra_body": {"temperature": "hot"}}, "temperature", "float"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_requests(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str, *, stream: bool
) -> None:
    call: dict[str, Any] = {"model": MODEL, "messages": HI, "stream": stream, **fields}
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.chat.completions.create(**call)
    error = caught.value
    assert (error.param, error.code, error.status_code) == (param, "400", 400)
    assert error.type in ("BadRequestError", "Bad Request")


class Answer(pydantic.BaseModel):
    city: str


def test_formats_are_refused_not_ignored(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.parse(model=MODEL, messages=HI, response_format=Answer)
    assert caught.value.param == "response_format"
    with (
        pytest.raises(openai.BadRequestError),
        client.chat.completions.stream(model=MODEL, messages=HI, response_format=Answer) as stream,
    ):
        stream.until_done()
    for fields in ({"best_of": 3}, {"suffix": "end"}):
        given: dict[str, Any] = fields
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="p", **given)
        assert caught.value.param == next(iter(fields))


def test_what_is_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as model:
        client.chat.completions.create(model="gpt-4", messages=HI, stream=True)
    assert (model.value.param, model.value.type) == ("model", "NotFoundError")
    with pytest.raises(openai.NotFoundError, match="There are: .*/v1/chat/completions"):
        client.embeddings.create(model=MODEL, input="text")
    with pytest.raises(openai.APIStatusError, match="max-request-bytes") as large:
        client.completions.create(model=MODEL, prompt="x" * 30_000)
    assert large.value.status_code == 413 and large.value.body is not None


def test_keys() -> None:
    with live_server(Script(default=PIECES), settings(api_key=("ann:sesame",))) as live:
        with client_of(live, key="sesame") as client:
            assert client.completions.create(model=MODEL, prompt="p").choices[0].text == TEXT
        with client_of(live, key="guess", retries=2) as client:
            for call in (
                client.models.list,
                lambda: client.completions.create(model="", prompt=""),
            ):
                with pytest.raises(openai.AuthenticationError) as caught:
                    call()
                assert caught.value.code == "invalid_api_key"
                assert caught.value.type == "invalid_request_error"
                assert "guess" not in str(caught.value)


# ---------------------------------------------------------------------- trying again


def test_a_full_queue_is_tried_again_until_there_is_room() -> None:
    script = Script(default=["a"], end=False, step_seconds=0.02)
    with (
        live_server(script, settings(max_num_queued_reqs=1), max_num_seqs=1) as live,
        Wire(live) as running,
        Wire(live) as waiting,
    ):
        running.post("/v1/completions", {"prompt": "p", "max_tokens": 240, "stream": True})
        running.until(b"data: ")
        waiting.post("/v1/completions", {"prompt": "p", "max_tokens": 240})
        live.wait_until(lambda: live.engine.num_unfinished == 2)
        seen: list[int] = []

        def on_response(status: int) -> None:
            seen.append(status)
            if len(seen) == 2:
                running.close()
                waiting.close()
                live.settle()

        with client_of(live) as hasty, pytest.raises(openai.InternalServerError) as caught:
            hasty.completions.create(model=MODEL, prompt="p", max_tokens=1)
        assert "max_num_queued_reqs=1" in str(caught.value)
        assert caught.value.type == "ServiceUnavailableError"
        assert caught.value.response.headers["retry-after"] == "1"
        begun = time.monotonic()
        with client_of(live, retries=2, on_response=on_response) as patient:
            answer = patient.completions.create(model=MODEL, prompt="p", max_tokens=1)
        assert answer.choices[0].text == "a" and seen == [503, 503, 200]
        assert time.monotonic() - begun >= 2, "it waited as long as it was told"
        live.settle()


# ---------------------------------------------------------------------- steps that fail


def failing(*steps: int) -> Script:
    def fail(step: int) -> BaseException | None:
        return RuntimeError("device lost") if step in steps else None

    return Script(default=PIECES, fail_read=fail)


def test_a_step_that_fails_is_tried_again() -> None:
    seen: list[int] = []
    with (
        live_server(failing(3)) as live,
        client_of(live, retries=2, on_response=seen.append) as client,
    ):
        answer = client.chat.completions.create(model=MODEL, messages=HI)
        assert answer.choices[0].message.content == TEXT and seen == [500, 200]
        live.settle()


def test_a_step_that_fails_is_told() -> None:
    with live_server(failing(3, 10)) as live, client_of(live) as client:
        with pytest.raises(openai.InternalServerError, match="device lost") as whole:
            client.chat.completions.create(model=MODEL, messages=HI)
        assert (whole.value.type, whole.value.code) == ("InternalServerError", "500")
        live.settle()
        assert live.engine.stats().steps < 9, "the second failure is for the stream"
        with client.chat.completions.create(model=MODEL, messages=HI, stream=True) as stream:
            texts: list[str | None] = []
            with pytest.raises(openai.APIError, match="device lost") as caught:
                texts.extend(chunk.choices[0].delta.content for chunk in stream)
        assert texts[:2] == ["", "Once"]
        assert not isinstance(caught.value, openai.APIStatusError)
        assert (caught.value.type, caught.value.code) == ("InternalServerError", "500")
        assert isinstance(caught.value.body, dict) and caught.value.body["param"] is None
        live.settle()
        assert client.completions.create(model=MODEL, prompt="p").choices[0].text == TEXT


def test_a_step_that_fails_before_the_first_token_is_a_status() -> None:
    with live_server(failing(0)) as live, client_of(live) as client:
        with pytest.raises(openai.InternalServerError, match="device lost"):
            client.completions.create(model=MODEL, prompt="p", stream=True)
        live.settle()


# ---------------------------------------------------------------------- clients that give up


@pytest.fixture
def gate() -> threading.Event:
    opened = threading.Event()
    opened.set()
    return opened


@pytest.fixture
def endless(gate: threading.Event) -> Iterator[Live]:
    script = Script(default=["a"], end=False, step_seconds=0.005, gate=gate)
    with live_server(script) as live:
        yield live


LONG: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 200, "n": 2}


def aborted(live: Live) -> None:
    """All that ran was given up, not computed to its end."""
    live.settle()
    assert live.engine.stats().requests_finished == {"abort": LONG["n"]}


def test_a_stream_that_is_closed(endless: Live) -> None:
    with client_of(endless) as client:
        with client.chat.completions.create(stream=True, **LONG) as stream:
            for _ in zip(range(3), stream, strict=False):
                pass
        aborted(endless)


def test_a_helper_that_is_left(endless: Live) -> None:
    with client_of(endless) as client:
        with client.chat.completions.stream(**LONG) as stream:
            next(iter(stream))
        aborted(endless)


def test_a_client_that_is_out_of_time(endless: Live) -> None:
    with client_of(endless) as client:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.2).chat.completions.create(**LONG)
        aborted(endless)


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_stands_still(endless: Live, gate: threading.Event, *, begun: bool) -> None:
    with client_of(endless) as client:

        def read() -> None:
            hasty = client.with_options(timeout=0.2)
            if not begun:
                gate.clear()
            with hasty.chat.completions.create(stream=True, **LONG) as stream:
                for _ in stream:
                    gate.clear()

        try:
            with pytest.raises(openai.APITimeoutError):
                read()
        finally:
            gate.set()
        aborted(endless)


def test_a_task_that_is_cancelled(endless: Live) -> None:
    async def run() -> None:
        url = f"{endless.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any") as client:
            asking = asyncio.ensure_future(client.chat.completions.create(**LONG))
            while endless.engine.stats().num_running < LONG["n"]:
                await asyncio.sleep(0.005)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(run())
    aborted(endless)

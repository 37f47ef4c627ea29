"""OpenAI's own client over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from server.settings import ServerConfig
from tests.server.live import MODEL, Live, live_server
from tests.server.scripted import Script

PIECES = ["Once", " upon", " a", " time", "."]
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    script = Script(default=PIECES)
    script.reply("Long", ["a", "b"] * 40)
    with live_server(script) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="any", max_retries=0) as client:
        yield client
    live.settle()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "jaxpaged"
    with pytest.raises(openai.NotFoundError, match="Valid aliases"):
        client.models.retrieve("org/other")


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, n=2, logprobs=True, top_logprobs=2, max_completion_tokens=3
    )
    assert [choice.message.content for choice in answer.choices] == ["Once upon a"] * 2
    assert answer.choices[0].finish_reason == "length"
    scores = answer.choices[0].logprobs
    assert scores is not None and scores.content is not None
    assert [entry.token for entry in scores.content] == PIECES[:3]
    assert len(scores.content[0].top_logprobs) == 2
    assert answer.usage is not None and answer.usage.completion_tokens == 6
    assert answer.usage.completion_tokens_details is not None


def test_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Once upon a time."
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens == 6 and not chunks[-1].choices


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert "".join(texts) == whole.choices[0].message.content == "Once upon a time."
    assert whole.choices[0].finish_reason == "stop"


def test_leaving_a_stream(client: openai.OpenAI, live: Live) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Long"}], stream=True
    ) as stream:
        next(iter(stream))
    live.settle()


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["The cat", "sat"], echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    assert [choice.text for choice in answer.choices] == ["The cat", "sat"]
    scores = answer.choices[0].logprobs
    assert scores is not None and scores.token_logprobs is not None
    assert scores.token_logprobs[0] is None and len(scores.token_logprobs) > 1
    with client.completions.create(model=MODEL, prompt="p", stream=True, stop=["me."]) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Once upon a ti"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_extras_of_ours(client: openai.OpenAI) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "return_token_ids": True, "chat_template_kwargs": {"a": 1}}
    answer: Any = client.chat.completions.create(model=MODEL, messages=HI, extra_body=extra)
    assert len(answer.choices[0].token_ids) == 6 and len(answer.prompt_token_ids) > 3


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "BadRequestError")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=HI, stream=True)
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 999}]
        )


def test_a_full_queue_is_tried_again() -> None:
    script = Script(default=["a"], end=False, step_seconds=0.002)
    settings = ServerConfig(served_model_name=(MODEL,), max_num_queued_reqs=0)
    with live_server(script, settings) as live:
        seen: list[int] = []
        with openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="any", max_retries=2) as client:
            client._client.event_hooks["response"].append(lambda r: seen.append(r.status_code))
            with pytest.raises(openai.InternalServerError, match="max_num_queued_reqs"):
                client.completions.create(model=MODEL, prompt="p", max_tokens=1)
        assert seen == [503] * 3


def test_an_error_in_the_middle_of_a_stream() -> None:
    def fail(step: int) -> BaseException | None:
        return RuntimeError("device lost") if step == 3 else None

    with (
        live_server(Script(default=PIECES, fail_read=fail)) as live,
        openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="any") as client,
        client.chat.completions.create(model=MODEL, messages=HI, stream=True) as stream,
    ):
        texts = []

        def read() -> None:
            for chunk in stream:
                texts.append(chunk.choices[0].delta.content)

        with pytest.raises(openai.APIError, match="device lost") as caught:
            read()
        assert "Once" in texts and isinstance(caught.value.body, dict)
        assert caught.value.body["code"] == 500

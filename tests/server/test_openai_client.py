"""OpenAI's own client over a real socket: what it sends is understood, what it gets it can read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from server.settings import ServerConfig
from tests.server.live import MODEL, Live, live_server
from tests.server.scripted import Script

PIECES = ["Once", " upon", " a", " time", "."]
TEXT = "".join(PIECES)
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    script = Script(default=PIECES)
    script.reply("Lines", ["a\n", "b\r\n", "c\u2028", " é", "🙂", '"{'])
    with live_server(script, ServerConfig(served_model_name=(MODEL, "org/other"))) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="any", max_retries=0) as client:
        yield client
    live.settle()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "org/other"]
    for name in (MODEL, "org/other"):
        card = client.models.retrieve(name)
        assert (card.id, card.object, card.owned_by) == (name, "model", "jaxpaged")
        assert card.created > 1.7e9
    with pytest.raises(openai.NotFoundError, match="Valid aliases: scripted, org/other"):
        client.models.retrieve("org/unknown")


# ---------------------------------------------------------------------- chat


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="org/other",
        messages=HI,
        n=2,
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=3,
        seed=7,
        user="somebody",
        store=False,
        metadata={"a": "b"},
    )
    assert (answer.object, answer.model) == ("chat.completion", "org/other")
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert (choice.message.role, choice.message.content) == ("assistant", "Once upon a")
        assert choice.message.refusal is None and not choice.message.tool_calls
        assert choice.finish_reason == "length"
        scores = choice.logprobs
        assert scores is not None and scores.content is not None
        assert [entry.token for entry in scores.content] == PIECES[:3]
        for entry in scores.content:
            assert bytes(entry.bytes or ()).decode() == entry.token
            assert [entry.logprob, entry.token] in [
                [t.logprob, t.token] for t in entry.top_logprobs
            ]
            assert len(entry.top_logprobs) == 2
    usage = answer.usage
    assert usage is not None and usage.completion_tokens == 6
    assert usage.total_tokens == usage.prompt_tokens + 6
    assert usage.completion_tokens_details is not None and usage.prompt_tokens_details is not None


def test_a_stream_of_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL,
        messages=HI,
        n=2,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens == 12 and not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for index in range(2):
        told = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert [choice.delta.role for choice in told if choice.delta.role] == ["assistant"]
        assert told[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in told) == TEXT
        assert [c.finish_reason for c in told if c.finish_reason] == ["stop"]
        tokens = [e.token for c in told if c.logprobs for e in c.logprobs.content or ()]
        assert tokens[:5] == PIECES


def test_stop_and_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HI, stop=["me.", "nowhere"]
    ) as stream:
        events = list(stream)
        whole = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    (done,) = [event.content for event in events if event.type == "content.done"]
    assert "".join(deltas) == done == whole.choices[0].message.content == "Once upon a ti"
    assert whole.choices[0].finish_reason == "stop"


def test_every_character_arrives(client: openai.OpenAI) -> None:
    # The client splits lines itself, and not only where HTML's rules for events have it.
    content = "Lines"
    with client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], stream=True
    ) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == 'a\nb\r\nc\u2028 é🙂"{'


def test_roles_and_parts(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": [{"type": "text", "text": "hot"}]},
    ]
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=messages, extra_body={"return_prompt_text": True}
    )
    assert answer.choices[0].message.content == TEXT
    shown = answer.prompt_text
    assert "<|system|>\nBe brief." in shown and "<|user|>\nHi" in shown
    assert "<|tool|>\nhot" in shown and "None" not in shown and "developer" not in shown


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tools(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    parsed = client.chat.completions.parse(
        model=MODEL, messages=HI, tools=[TOOL], tool_choice=choice
    )
    assert parsed.choices[0].message.content == TEXT and not parsed.choices[0].message.tool_calls
    with client.chat.completions.stream(
        model=MODEL, messages=HI, tools=[TOOL], tool_choice=choice
    ) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == TEXT


def test_extras_of_vllm(client: openai.OpenAI) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [1000],
        "prompt_logprobs": 1,
        "cache_salt": "mine",
        "skip_special_tokens": False,
        "return_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "bad_words": ["never"],
        "allowed_token_ids": None,
    }
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=7, logit_bias={"5": 1}, extra_body=extra
    )
    # One token more than the reply has: its EOS was ignored.
    assert len(answer.choices[0].token_ids) == 7
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].stop_reason is None
    scores = answer.prompt_logprobs
    assert len(scores) == len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    assert scores[0] is None
    for token, entry in zip(answer.prompt_token_ids[1:], scores[1:], strict=True):
        assert entry[str(token)].keys() == {"logprob", "rank", "decoded_token"}


# ---------------------------------------------------------------------- completions


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {"Once upon"}
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    for prompt in ([5, 6, 7], [[5, 6], [7]]):
        given: Any = prompt
        answer = client.completions.create(model=MODEL, prompt=given, best_of=1)
        assert {choice.text for choice in answer.choices} == {TEXT}
        assert answer.usage is not None and answer.usage.prompt_tokens == 3


def test_the_score_of_a_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["The cat", "sat"], echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    assert [choice.text for choice in answer.choices] == ["The cat", "sat"]
    for choice in answer.choices:
        scores = choice.logprobs
        assert scores is not None
        assert scores.tokens is not None and scores.top_logprobs is not None
        assert scores.token_logprobs is not None and scores.text_offset is not None
        assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
        assert len(scores.token_logprobs) == len(scores.tokens) == len(scores.text_offset) > 1
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_a_stream_of_completions(client: openai.OpenAI) -> None:
    with client.completions.create(
        model=MODEL,
        prompt="p",
        echo=True,
        logprobs=0,
        n=2,
        stream=True,
        stop=["me."],
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[-1].usage is not None and not chunks[-1].choices
    for index in range(2):
        told = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(choice.text for choice in told) == "pOnce upon a ti"
        assert [choice.finish_reason for choice in told if choice.finish_reason] == ["stop"]
        scores = [c.logprobs for c in told if c.logprobs]
        tokens = [token for score in scores for token in score.tokens or ()]
        assert tokens[-5:] == PIECES


# ---------------------------------------------------------------------- other ways to use it


def test_raw_and_streamed_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HI, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["content-type"] == "application/json"
    assert int(raw.headers["content-length"]) == len(raw.content)
    assert raw.parse().id == "chatcmpl-mine-1"
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt="p", stream=True
    ) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-length" not in response.headers
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])


def test_many_at_once_from_one_event_loop(live: Live) -> None:
    async def run() -> None:
        url = f"{live.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:

            async def whole() -> str | None:
                answer = await client.chat.completions.create(model=MODEL, messages=HI)
                return answer.choices[0].message.content

            async def streamed() -> str:
                stream = await client.completions.create(model=MODEL, prompt="p", stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            async def helped() -> str | None:
                async with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
                    return (await stream.get_final_completion()).choices[0].message.content

            async with asyncio.timeout(30):
                jobs = [job() for _ in range(8) for job in (whole, streamed, helped)]
                assert await asyncio.gather(*jobs) == [TEXT] * 24
                assert [model.id async for model in client.models.list()] == [MODEL, "org/other"]

    asyncio.run(run())
    live.settle()

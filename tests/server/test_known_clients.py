"""Requests in the shape in which well-known programs send them, and what those need of the answer.

The bodies are written after what their sources send; where a program fails on something, a comment
says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from server.settings import ServerConfig
from tests.server.apps import parse_events, texts_of
from tests.server.live import MODEL, Live, live_server
from tests.server.scripted import Script

Json = dict[str, Any]
PIECES = ["Once", " upon", " a", " time", "."]
TEXT = "".join(PIECES)
KEY = "sk-anything"
QUESTION: Json = {"role": "user", "content": "Hi"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{i}",
            "description": "Does something. " * 20,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    }
    for i in range(20)
]


class Client:
    """One program, with the headers it sends."""

    def __init__(self, live: Live, **headers: str) -> None:
        sent = {"Authorization": f"Bearer {KEY}", **headers}
        self._http = httpx.Client(base_url=live.base_url, headers=sent, timeout=30)

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def post(self, path: str, body: Json) -> httpx.Response:
        return self._http.post(path, json=body)

    def ok(self, path: str, body: Json) -> Any:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chunks(self, path: str, body: Json) -> list[Json]:
        assert body["stream"] is True
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return parse_events(answer.content)

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    script = Script(default=PIECES)
    with live_server(script, ServerConfig(served_model_name=(MODEL,), api_key=(KEY,))) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    client = Client(live)
    yield client
    client.close()
    live.settle()


def told(chunks: list[Json]) -> list[Json]:
    """The chunks with choices: without any, some count an answer as failed."""
    found = [chunk for chunk in chunks if chunk["choices"]]
    assert found
    return found


# ---------------------------------------------------------------------- benchmarks


def test_vllm_bench_with_completions(client: Client) -> None:
    body = {
        "model": MODEL,
        "prompt": "p",
        "repetition_penalty": 1.0,
        "max_tokens": 9,
        "logprobs": None,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    *chunks, last = client.chunks("/v1/completions", body)
    assert all(choice["text"] is not None for c in told(chunks) for choice in c["choices"])
    # The number of tokens is taken from here, and has to be what was asked for.
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 9


def test_vllm_bench_with_chat(client: Client) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_completion_tokens": 9,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    *chunks, last = client.chunks("/v1/chat/completions", body)
    assert texts_of(told(chunks))[0].startswith(TEXT)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(client: Client, path: str) -> None:
    assert client.get("/health").status_code == 200
    (card,) = client.get("/v1/models").json()["data"]
    chat = path.endswith("chat/completions")
    body = {
        "model": card["id"],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "stop": None,
        **({"messages": [QUESTION], "max_completion_tokens": 9} if chat else {}),
        **({} if chat else {"prompt": "p", "max_tokens": 9}),
    }
    chunks = client.chunks(path, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 9 and counts[0] <= 1
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []


def test_aiperf(client: Client) -> None:
    # It drops records without `object`, and times the first chunk that has text.
    body: Json = {"model": MODEL, "messages": [QUESTION], "stream": True, "max_tokens": 3}
    chunks = client.chunks("/v1/chat/completions", body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    chunks = client.chunks("/v1/completions", {"model": MODEL, "prompt": "p", "stream": True})
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


# ---------------------------------------------------------------------- evaluation


def test_lm_eval_scores(client: Client) -> None:
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] and "chat_template" in info
    whole = client.ok("/tokenize", {"prompt": "The cat sat", "add_special_tokens": False})["tokens"]
    other = client.ok("/tokenize", {"prompt": "on a mat", "add_special_tokens": False})["tokens"]
    body = {
        "model": MODEL,
        "prompt": [whole, other],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = client.ok("/v1/completions", body)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, ids in zip(choices, (whole, other), strict=True):
        scores = choice["logprobs"]
        lengths = {len(values) for values in scores.values()}
        assert lengths == {len(ids) + 1}, "the prompt and one token more"
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        # The continuation begins after two tokens of context; the token that was drawn is cut off.
        greedy = True
        for own, top in list(zip(scores["token_logprobs"], scores["top_logprobs"], strict=True))[
            2:-1
        ]:
            assert isinstance(own, float) and top
            greedy = greedy and own == max(top.values())  # compared with ==
        assert greedy, "by the script each token of a prompt is the likeliest"


def test_lm_eval_generates(client: Client) -> None:
    until = ["\n\n", "Question:", "</s>", "<|im_end|>", " time", "."]  # more than OpenAI's four
    body = {
        "model": MODEL,
        "prompt": [[5, 6, 7], [8, 9]],
        "max_tokens": 64,
        "temperature": 0,
        "stop": until,
        "seed": 1234,
    }
    answer = client.ok("/v1/completions", body)
    assert [choice["text"] for choice in answer["choices"]] == ["Once upon a"] * 2
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi", "type": "text"}],
        "max_tokens": 64,
        "temperature": 0,
        "stop": until,
        "seed": 1234,
    }
    answer = client.ok("/v1/chat/completions", chat)
    assert answer["choices"][0]["message"]["content"] == "Once upon a"


# ---------------------------------------------------------------------- frameworks

_NUMBER = {"type": ["number", "null"]}
_TEXT = {"type": ["string", "null"]}
CHUNK_OF_AI_SDK: Json = {
    # It validates every chunk, and the stream fails with the first that is not so.
    "anyOf": [
        {
            "type": "object",
            "required": ["choices"],
            "properties": {
                "id": _TEXT,
                "created": _NUMBER,
                "model": _TEXT,
                "choices": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["index"],
                        "properties": {
                            "index": {"type": "number"},
                            "finish_reason": _TEXT,
                            "delta": {
                                "type": ["object", "null"],
                                "properties": {
                                    "role": {"enum": ["assistant", "", None]},
                                    "content": _TEXT,
                                    "reasoning_content": _TEXT,
                                },
                            },
                        },
                    },
                },
                "usage": {
                    "type": ["object", "null"],
                    "properties": {
                        "prompt_tokens": _NUMBER,
                        "completion_tokens": _NUMBER,
                        "total_tokens": _NUMBER,
                        "prompt_tokens_details": {
                            "type": ["object", "null"],
                            "properties": {"cached_tokens": _NUMBER},
                        },
                        "completion_tokens_details": {
                            "type": ["object", "null"],
                            "properties": {"reasoning_tokens": _NUMBER},
                        },
                    },
                },
            },
        },
        {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["message"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": _TEXT,
                        "code": {"type": ["string", "number", "null"]},
                    },
                }
            },
        },
    ]
}


def test_vercels_ai_sdk(client: Client) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, QUESTION],
        "temperature": 0,
        "tools": TOOLS,
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = client.chunks("/v1/chat/completions", body)
    for chunk in chunks:
        jsonschema.validate(chunk, CHUNK_OF_AI_SDK)
    assert texts_of(chunks) == {0: TEXT}
    error = client.post("/v1/chat/completions", {**body, "temperature": 9})
    assert error.status_code == 400
    jsonschema.validate(error.json(), CHUNK_OF_AI_SDK)


def test_langchain(client: Client) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which files?", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "type": "function",
                    "id": "call_1",
                    "function": {"name": "tool_1", "arguments": '{"path": "/"}'},
                }
            ],
        },
        {"role": "tool", "content": '["a", "b"]', "tool_call_id": "call_1"},
    ]
    body: Json = {
        "model": MODEL,
        "messages": messages,
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
        "temperature": 0.7,
    }
    chunks = client.chunks("/v1/chat/completions", body)
    assert texts_of(chunks) == {0: TEXT} and chunks[-1]["usage"]["total_tokens"] > 0
    whole = client.ok("/v1/chat/completions", {**body, "stream": False, "stream_options": None})
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert whole["system_fingerprint"] and whole["choices"][0]["finish_reason"] == "stop"
    # It tells this error by its words.
    long = {"model": MODEL, "messages": [{"role": "user", "content": "x " * 3000}]}
    error = client.post("/v1/chat/completions", long)
    assert error.status_code == 400
    assert "maximum context length is 256 tokens" in error.json()["error"]["message"]


def test_litellm(client: Client) -> None:
    body = {
        "model": MODEL,
        "messages": [QUESTION],
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "someone",
        "metadata": {"trace": "1"},
        "extra_headers": {},
        "num_retries": 2,
    }
    chunks = client.chunks("/v1/chat/completions", body)
    assert [chunk["choices"] for chunk in chunks if chunk.get("usage")] == [[]]


# ---------------------------------------------------------------------- chat programs and editors


def test_open_webui(live: Live, client: Client) -> None:
    listed = client.get("/v1/models")
    assert listed.status_code == 200
    assert [card["id"] for card in listed.json()["data"]] == [MODEL]
    stranger = httpx.get(f"{live.base_url}/v1/models", timeout=30)
    assert stranger.status_code == 401 and stranger.json()["error"]["message"]
    history = [
        QUESTION,
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": [{"type": "text", "text": "And then?"}]},
    ]
    chat = {
        "stream": True,
        "model": MODEL,
        "messages": history,
        "stream_options": {"include_usage": True},
        "params": {},
        "features": {"web_search": False},
        "session_id": "abc",
        "chat_id": "def",
        "id": "ghi",
        "background_tasks": {"title_generation": True},
    }
    chunks = client.chunks("/v1/chat/completions", chat)
    assert texts_of(chunks) == {0: TEXT}
    assert sum("usage" in chunk and chunk["usage"] is not None for chunk in chunks) == 1
    title = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "### Task:\nGenerate a title."}],
        "stream": False,
        "max_completion_tokens": 100,
    }
    answer = client.ok("/v1/chat/completions", title)
    assert answer["choices"][0]["message"]["content"] == TEXT


def test_usage_for_those_who_do_not_ask() -> None:
    settings = ServerConfig(served_model_name=(MODEL,), enable_force_include_usage=True)
    with live_server(Script(default=PIECES), settings) as live:
        client = Client(live)
        body = {"model": MODEL, "messages": [QUESTION], "stream": True}
        *chunks, last = client.chunks("/v1/chat/completions", body)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
        assert texts_of(chunks) == {0: TEXT}
        client.close()


EVERYTHING_NULL = dict.fromkeys(
    [
        *("temperature", "top_p", "top_k", "n", "stop", "max_tokens", "max_completion_tokens"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
        *("seed", "user", "tools", "tool_choice", "response_format", "stream_options", "audio"),
        *("functions", "function_call", "metadata", "store", "reasoning_effort", "modalities"),
        *("prediction", "service_tier", "verbosity", "web_search_options", "safety_identifier"),
        *("prompt_cache_key", "parallel_tool_calls", "best_of", "suffix", "echo", "stream"),
    ]
)


def test_continue_and_cline_and_roo(client: Client) -> None:
    # Parts even for plain text, long lists of tools, and null for all that is not set.
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "You are an editor."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<task>Fix it.</task>"},
                {"type": "text", "text": "<environment>x</environment>", "cache_control": None},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}], "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
    ]
    body = {**EVERYTHING_NULL, "model": MODEL, "messages": messages}
    answer = client.ok("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == TEXT
    streamed = {**body, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
    assert texts_of(client.chunks("/v1/chat/completions", streamed)) == {0: TEXT}
    completion = client.ok("/v1/completions", {**EVERYTHING_NULL, "prompt": "p"})
    assert completion["choices"][0]["text"] == TEXT


def test_extra_keys_in_messages(client: Client) -> None:
    # CodeCompanion, Swarm and AutoGen leave their own notes in the messages they send.
    messages = [
        {"role": "system", "content": "Be brief.", "id": 1, "opts": {"visible": False}},
        {"role": "user", "content": "Hi", "name": "ann", "sender": "ann", "cycle": 3},
        {
            "role": "assistant",
            "content": "Hello",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
            "reasoning_content": "They greet.",
            "sender": "agent",
        },
        {"role": "user", "content": "And?", "cache_control": {"type": "ephemeral"}},
    ]
    answer = client.ok("/v1/chat/completions", {"model": MODEL, "messages": messages})
    assert answer["choices"][0]["message"]["content"] == TEXT


def test_openais_agents_and_codex(client: Client) -> None:
    body = {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [
                {"type": "input_text", "text": "<permissions>none</permissions>"}]},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "Hi"}]},
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs.", "strict": False,
             "parameters": {"type": "object", "properties": {}}},
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "abc",
    }  # fmt: skip
    answer = client.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    events = [
        (lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: ")))
        for lines in (event.split("\n") for event in answer.text.strip().split("\n\n"))
    ]
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[0][0] == "response.created" and events[-1][0] == "response.completed"
    deltas = [data["delta"] for name, data in events if name == "response.output_text.delta"]
    assert "".join(deltas) == TEXT


def test_claude_code(live: Live) -> None:
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    body = {
        "model": MODEL,
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "You are Claude.", "cache_control": {"type": "ephemeral"}}
        ],
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "<system-reminder>x</system-reminder>"},
                {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        ],
        "tools": [{"name": "Bash", "description": "Runs.",
                   "input_schema": {"type": "object", "properties": {}}}],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "temperature": 1,
        "stream": True,
    }  # fmt: skip
    with httpx.Client(base_url=live.base_url, headers=headers, timeout=30) as http:
        answer = http.post("/v1/messages?beta=true", json=body)
        assert answer.status_code == 200, answer.text
        names = [line for line in answer.text.split("\n") if line.startswith("event: ")]
        assert names[0] == "event: message_start" and names[-1] == "event: message_stop"
        counted = {name: body[name] for name in ("model", "system", "messages", "tools")}
        count = http.post("/v1/messages/count_tokens?beta=true", json=counted)
        assert count.json()["input_tokens"] > 5
    live.settle()

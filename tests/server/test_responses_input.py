"""What a request to /v1/responses becomes in chat's words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from jaxpaged.errors import InvalidRequestError
from server.errors import ApiError, as_api_error
from server.protocol_responses import ResponsesRequest
from server.responses_input import chat_fields, in_words_of_responses, warn_of_left_out

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


def request(**fields: Any) -> ResponsesRequest:
    return msgspec.json.decode(
        msgspec.json.encode({"input": "Hi", **fields}), type=ResponsesRequest
    )


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = chat_fields(request(input=list(items), **fields))["messages"]
    return chat


def refusal(**fields: Any) -> ApiError:
    with pytest.raises((InvalidRequestError, ApiError)) as caught:
        chat_fields(request(**fields))
    return as_api_error(caught.value)


def call(call_id: str = "c1", name: str = "weather", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def test_a_text_is_one_user_message_and_nothing_else_is_sent() -> None:
    assert chat_fields(request()) == {"messages": [{"role": "user", "content": "Hi"}]}


def test_the_fields_find_their_names() -> None:
    fields = chat_fields(
        request(
            model="m",
            instructions="Be short.",
            max_output_tokens=7,
            temperature=0.0,
            top_p=0.5,
            top_k=3,
            seed=1,
            stop=["x"],
            stop_token_ids=None,
            stream=True,
            user="me",
            reasoning={"effort": "low", "summary": "auto"},
            metadata={"a": "b"},
            text={"format": {"type": "text"}, "verbosity": "low"},
        )
    )
    assert bytes(fields.pop("stop")) == b'["x"]'  # on its way to chat as it came
    assert fields == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Hi"},
        ],
        "max_completion_tokens": 7,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "seed": 1,
        "stream": True,
        "user": "me",
        "reasoning_effort": "low",
    }


def test_items_become_messages_in_their_order() -> None:
    assert messages(
        {"role": "developer", "content": "Rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "B", "annotations": []},
                {"type": "refusal", "refusal": "No"},
            ],
        },
        {"role": "user", "content": "C"},
    ) == [
        {"role": "developer", "content": "Rules"},
        {"role": "user", "content": [{"type": "text", "text": "A"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "B"}, {"type": "text", "text": "No"}],
        },
        {"role": "user", "content": "C"},
    ]


def test_calls_join_the_text_of_their_turn_and_outputs_follow() -> None:
    chat = messages(
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "Let me see."},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        call("c1", arguments='{"city": "Rome"}'),
        call("c2", "clock"),
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "noon"}],
        },
        call("c3"),
    )
    assert [message["role"] for message in chat] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert chat[1]["content"] == "Let me see."
    assert chat[1]["tool_calls"] == [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
        },
        {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]
    assert chat[2] == {
        "role": "tool",
        "tool_call_id": "c1",
        "name": "weather",
        "content": "sunny",
    }
    assert chat[3]["content"] == [{"type": "text", "text": "noon"}]
    assert chat[4]["content"] is None and len(chat[4]["tool_calls"]) == 1


def test_custom_calls_are_calls_with_one_argument() -> None:
    chat = messages(
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    )
    assert chat[0]["tool_calls"][0]["function"] == {
        "name": "patch",
        "arguments": {"input": "*** Begin"},
    }
    assert chat[1] == {"role": "tool", "tool_call_id": "c", "name": "patch", "content": "done"}


def test_function_tools_take_chats_shape_and_hosted_ones_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_left_out.cache_clear()
    body = request(tools=[WEATHER, {"type": "web_search"}, {"type": "custom", "name": "x"}])
    chat_fields(body)
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    fields = chat_fields(body)
    assert fields["tools"] == [{"type": "function", "function": function}]
    assert "tool_choice" not in fields
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "'web_search'" in told[0] and "'custom'" in told[1]


def test_only_hosted_tools_are_no_tools() -> None:
    fields = chat_fields(request(tools=[{"type": "web_search"}], tool_choice="auto"))
    assert "tools" not in fields and "tool_choice" not in fields


def test_tools_given_among_the_items_count() -> None:
    extra = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    fields = chat_fields(request(input=[extra, {"role": "user", "content": "Q"}]))
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["weather"]
    assert fields["messages"] == [{"role": "user", "content": "Q"}]


def test_allowed_tools_are_the_only_ones_offered() -> None:
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "clock"}],
    }
    fields = chat_fields(request(tools=[WEATHER, {**WEATHER, "name": "clock"}], tool_choice=choice))
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["clock"]
    assert fields["tool_choice"] == "auto"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 3}, 3),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
        ({"include": ["reasoning.encrypted_content"]}, None),
    ],
)
def test_logprobs_are_asked_for_in_either_way(fields: dict[str, Any], wanted: int | None) -> None:
    chat = chat_fields(request(**fields))
    assert chat.get("top_logprobs") == wanted
    assert chat.get("logprobs") == (None if wanted is None else True)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores nothing"),
        ({"conversation": "conv_1"}, "conversation", "stores nothing"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "stores nothing"),
        ({"background": True}, "background", "stream=true"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "not supported yet"),
        ({"text": {"format": "json"}}, "text.format", "not supported yet"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", "not supported yet"),
        (
            {"tool_choice": {"type": "function", "name": "weather"}},
            "tool_choice",
            "not supported yet",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
            "tool_choice",
            "'required'",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [["weather"]]}},
            "tool_choice",
            "list of tools",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0]"),
        ({"input": None}, "input", "null"),
        ({"input": 5}, "input", "got `int`"),
        ({"input": ["x"]}, "input[0]", "got `str`"),
        ({"tools": {}}, "tools", "got `object`"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "stores nothing"),
        ({"input": [{"type": "computer_call"}]}, "input", "computer_call"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "call_id"),
        ({"input": [{"type": "custom_tool_call", "name": "f"}]}, "input", "and input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "call_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c"}]},
            "input",
            "input[0].output",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "text only",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]},
            "input",
            "string",
        ),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input", "content[0]"),
        ({"input": [{"type": "additional_tools", "tools": "x"}]}, "input", "input[0].tools"),
    ],
)
def test_what_cannot_be_done_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert words in str(error)


def test_long_values_are_not_repeated_whole() -> None:
    name = "x" * 100_000
    for fields in (
        {"tool_choice": name},
        {"input": [{"type": name}]},
        {"input": [{"role": name}]},
        {"input": [{"role": "user", "content": {"a": name}}]},
        {"text": {"format": {"type": name}}},
    ):
        assert len(str(refusal(**fields))) < 1000


@pytest.mark.parametrize(
    ("param", "message", "expected"),
    [
        ("messages", "The chat template refused the messages.", ("input", "refused the messages")),
        ("max_tokens", "max_tokens=9 is too much.", ("max_output_tokens", "max_output_tokens=9")),
        (
            "max_completion_tokens",
            "max_completion_tokens=9 is too much.",
            ("max_output_tokens", "max_output_tokens=9"),
        ),
        ("top_p", "top_p must be ...", ("top_p", "top_p must be ...")),
        (None, "Full.", (None, "Full.")),
    ],
)
def test_errors_use_the_names_of_this_endpoint(
    param: str | None, message: str, expected: tuple[str | None, str]
) -> None:
    error = in_words_of_responses(ApiError(503, message, param=param, retry_after=2.0))
    assert error.param == expected[0]
    assert expected[1] in error.message
    assert error.status == 503 and error.retry_after == 2.0

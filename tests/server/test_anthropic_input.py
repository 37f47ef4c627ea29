"""What a request to /v1/messages becomes in chat's words, and errors in Anthropic's."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
import pytest

from jaxpaged.errors import InvalidRequestError
from server.anthropic_errors import anthropic_error, speaks_anthropic
from server.anthropic_events import stop_reason_of
from server.anthropic_input import chat_fields, prompt_fields, warn_of_left_out
from server.errors import ApiError, as_api_error
from server.protocol_anthropic import CountTokensRequest, MessagesRequest

T = TypeVar("T")
HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {}},
}


def request(**fields: Any) -> MessagesRequest:
    return decoded({"max_tokens": 8, "messages": HI, **fields}, MessagesRequest)


def decoded(fields: dict[str, Any], kind: type[T]) -> T:
    return msgspec.json.decode(msgspec.json.encode(fields), type=kind)


def converted(**fields: Any) -> dict[str, Any]:
    return chat_fields(request(**fields), 100)


def messages(*turns: tuple[str, Any], **fields: Any) -> list[dict[str, Any]]:
    given = [{"role": role, "content": content} for role, content in turns]
    chat: list[dict[str, Any]] = converted(messages=given, **fields)["messages"]
    return chat


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one} for one in texts]


def test_the_least_request() -> None:
    assert converted() == {"messages": HI, "max_tokens": 8}


def test_the_fields_find_their_names() -> None:
    fields = converted(
        model="m",
        system="Be short.",
        stop_sequences=["x"],
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        seed=4,
        stream=True,
        metadata={"user_id": "u"},
        output_config={"effort": "low"},
        service_tier="auto",
    )
    assert bytes(fields.pop("stop")) == b'["x"]'  # on its way to chat as it came
    assert fields == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be short."}, *HI],
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "seed": 4,
        "stream": True,
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize(("given", "sent"), [(99, 99), (100, 100), (32000, 100)])
def test_a_cap_above_the_context_means_all_that_fits(given: int, sent: int) -> None:
    assert converted(max_tokens=given)["max_tokens"] == sent


def test_system_blocks_are_text_parts() -> None:
    blocks = [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}, *text("B")]
    chat = messages(("user", "Q"), system=blocks)
    assert chat[0] == {"role": "system", "content": text("A", "B")}


def test_calls_and_results_of_tools() -> None:
    chat = messages(
        ("user", "Q"),
        (
            "assistant",
            [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                *text("Let me see."),
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}},
                {"type": "tool_use", "id": "t2", "name": "clock", "input": {}},
            ],
        ),
        (
            "user",
            [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "t2", "content": text("noon")},
                {"type": "tool_result", "tool_use_id": "t3", "is_error": True},
                *text("And now?"),
            ],
        ),
    )
    assert [message["role"] for message in chat] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "tool",
        "user",
    ]
    assert chat[1]["content"] == text("Let me see.")
    assert chat[1]["tool_calls"][0] == {
        "id": "t1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
    }
    assert chat[2] == {
        "role": "tool",
        "tool_call_id": "t1",
        "name": "weather",
        "content": "sunny",
    }
    assert chat[3]["content"] == text("noon")
    assert chat[4] == {"role": "tool", "tool_call_id": "t3", "content": ""}
    assert chat[5]["content"] == text("And now?")


def test_text_in_front_of_a_result_stays_in_front() -> None:
    chat = messages(
        ("user", [*text("A"), {"type": "tool_result", "tool_use_id": "t", "content": "B"}])
    )
    assert [message["role"] for message in chat] == ["user", "tool"]


def test_turns_of_one_role_in_a_row_are_one() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    chat = messages(
        ("user", "A"),
        ("user", text("B")),
        ("assistant", "C"),
        ("assistant", [use]),
        ("assistant", [use]),
    )
    assert [message["role"] for message in chat] == ["user", "assistant"]
    assert chat[0]["content"] == text("A", "B")
    assert chat[1]["content"] == text("C") and len(chat[1]["tool_calls"]) == 2


def test_a_begun_answer_is_continued() -> None:
    fields = converted(messages=[*HI, {"role": "assistant", "content": "The answer is"}])
    assert fields["continue_final_message"] is True
    assert fields["add_generation_prompt"] is False
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    fields = converted(messages=[*HI, {"role": "assistant", "content": [use]}])
    assert "continue_final_message" not in fields
    assert "continue_final_message" not in converted()


def test_plain_text_documents_are_read() -> None:
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "body"},
    }
    chat = messages(("user", [document, *text("Sum it up.")]))
    assert chat[0]["content"] == text("Notes\n\nbody", "Sum it up.")


def test_tools_with_a_schema_are_offered_and_others_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_left_out.cache_clear()
    body = request(
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    chat_fields(body, 100)
    fields = chat_fields(body, 100)
    assert fields["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Tells the weather.",
                "parameters": TOOL["input_schema"],
            },
        }
    ]
    assert fields["tool_choice"] == "auto"
    (told,) = [record.getMessage() for record in caplog.records]
    assert "'web_search_20250305'" in told


@pytest.mark.parametrize(
    ("thinking", "kwargs"),
    [
        (None, None),
        ({"type": "adaptive"}, None),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ],
)
def test_thinking_reaches_the_template(thinking: Any, kwargs: Any) -> None:
    assert converted(thinking=thinking).get("chat_template_kwargs") == kwargs


def test_own_template_arguments_win() -> None:
    fields = converted(
        thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False, "x": 1}
    )
    assert fields["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"stop_sequences": "x"}, "stop_sequences", "list of texts"),
        ({"messages": [{"role": "user", "content": "x"}] * 16385}, "messages", "at most 16384"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "Hi"}, "messages", "got `str`"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content"),
        ({"system": 5}, "system", "got `int`"),
        ({"system": [{"type": "image"}]}, "messages", "system[0]"),
        ({"tools": "x"}, "tools", "got `str`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages",
            "'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages",
            "'document'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages",
            "server_tool_use",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
            "messages",
            "needs id, name",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages",
            "tool_use_id",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [1]}],
                    }
                ]
            },
            "messages",
            "messages[0].content[0].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "messages",
            "string",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "not supported yet"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "not supported yet"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format",
            "not supported yet",
        ),
        ({"tools": [{"input_schema": {}}]}, "tools", "tools[0]"),
        ({"tools": [{"name": "x", "input_schema": None}]}, "tools", "tools[0]"),
    ],
)
def test_what_cannot_be_done_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises((InvalidRequestError, ApiError)) as caught:
        converted(**fields)
    error = as_api_error(caught.value)
    assert error.param == param
    assert words in error.message


def test_counting_needs_no_cap_and_sees_the_same_prompt() -> None:
    fields = {
        "messages": [*HI, {"role": "assistant", "content": "So"}],
        "tools": [TOOL],
        "system": "S",
        "thinking": {"type": "disabled"},
    }
    counted = prompt_fields(decoded(fields, CountTokensRequest))
    answered = converted(**fields)
    del answered["max_tokens"]
    assert counted == answered


@pytest.mark.parametrize(
    ("finish", "stop", "reached", "expected"),
    [
        ("stop", None, True, ("end_turn", None)),
        ("stop", 7, True, ("end_turn", None)),
        ("stop", "END", True, ("stop_sequence", "END")),
        ("length", None, True, ("max_tokens", None)),
        ("length", None, False, ("model_context_window_exceeded", None)),
    ],
)
def test_stop_reasons(finish: str, stop: Any, reached: bool, expected: Any) -> None:
    assert stop_reason_of(finish, stop, max_tokens_reached=reached) == expected


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    response = anthropic_error(ApiError(status, "Words.", param="x", retry_after=2))
    body = json.loads(bytes(response.body))
    assert response.status_code == status
    assert body["type"] == "error"
    assert body["error"] == {"type": kind, "message": "Words."}
    assert body["request_id"] == response.headers["request-id"]
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/v1/messages", "", True),
        ("/v1/messages/count_tokens", "", True),
        ("/api/v1/messages", "/api", True),
        ("/v1/messages2", "", False),
        ("/v1/chat/completions", "", False),
    ],
)
def test_whose_errors_a_path_wants(path: str, root: str, expected: bool) -> None:
    assert speaks_anthropic({"type": "http", "path": path, "root_path": root}) is expected

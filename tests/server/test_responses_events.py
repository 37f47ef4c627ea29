"""Events of /v1/responses, checked against the types of OpenAI's own client."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from server.protocol_responses import ResponsesRequest
from server.responses_events import Event, ResponseEvents, new_response, usage_of
from server.responses_input import chat_fields

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = usage_of(prompt_tokens=5, completion_tokens=2, cached_tokens=4)


def builder(**fields: Any) -> ResponseEvents:
    body = msgspec.json.decode(
        msgspec.json.encode({"input": "Hi", **fields}), type=ResponsesRequest
    )
    response = new_response(
        body,
        response_id="resp_1",
        model="m",
        created=123,
        temperature=0.5,
        top_p=1.0,
        tools=chat_fields(body).get("tools", ()),
    )
    return ResponseEvents(response)


def logprob(token: str) -> dict[str, Any]:
    data = list(token.encode())
    top = {"token": token, "logprob": -0.5, "bytes": data}
    return {**top, "top_logprobs": [top]}


def whole(finish_reason: str, *deltas: str, **fields: Any) -> list[Event]:
    events = builder(**fields)
    made = events.started()
    for delta in deltas:
        made += events.text(delta, [logprob(delta)] if fields.get("top_logprobs") else [])
    return made + events.finished(finish_reason, USAGE)


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 1}])
def test_every_event_is_one_that_the_client_knows(
    finish_reason: str, fields: dict[str, Any]
) -> None:
    events = whole(finish_reason, "He", "llo", **fields)
    status = "completed" if finish_reason == "stop" else "incomplete"
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        status,
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert STREAM_EVENT.validate_python(event, strict=True).type == event["type"]


def test_earlier_events_keep_what_they_said() -> None:
    events = whole("stop", "Hello")
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[2]["item"]["content"] == []


def test_the_last_event_holds_the_whole_answer() -> None:
    response = Response.model_validate(whole("stop", "He", "llo")[-1]["response"], strict=True)
    assert response.output_text == "Hello"
    assert response.status == "completed" and response.incomplete_details is None
    assert response.completed_at is not None
    assert response.usage is not None
    assert response.usage.total_tokens == 7
    assert response.usage.input_tokens_details.cached_tokens == 4


def test_a_cut_answer_says_so() -> None:
    response = Response.model_validate(whole("length", "He")[-1]["response"], strict=True)
    assert response.status == "incomplete" and response.completed_at is None
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].to_dict()["status"] == "incomplete"


def test_logprobs_of_all_deltas_are_in_the_end() -> None:
    events = whole("stop", "He", "llo", top_logprobs=1)
    assert events[4]["logprobs"] == [logprob("He")]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert part["logprobs"] == [logprob("He"), logprob("llo")]


def test_nothing_new_is_no_event() -> None:
    assert builder().text("", []) == []
    assert len(builder().text("", [logprob("x")])) == 1


def test_a_failure_ends_the_stream_with_what_there_was() -> None:
    events = builder()
    made = [*events.started(), *events.text("He", [])]
    made += events.failed("It broke.", USAGE)
    failed = STREAM_EVENT.validate_python(made[-1], strict=True)
    assert failed.type == "response.failed"
    assert failed.sequence_number == len(made) - 1
    assert failed.response.error.message == "It broke."
    assert failed.response.output_text == "He"


def test_a_failure_before_the_start_comes_after_created() -> None:
    created, failed = builder().failed("It broke.", USAGE)
    assert STREAM_EVENT.validate_python(created, strict=True).type == "response.created"
    assert STREAM_EVENT.validate_python(failed, strict=True).type == "response.failed"
    assert (created["sequence_number"], failed["sequence_number"]) == (0, 1)
    assert failed["response"]["output"] == []


def test_what_was_asked_comes_back() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    response = builder(
        instructions="Be short.",
        max_output_tokens=9,
        metadata={"a": "b"},
        user="me",
        tools=[tool, {"type": "web_search"}],
        tool_choice="none",
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        text={"verbosity": "low"},
        store=True,
        truncation="auto",
    ).response
    parsed = Response.model_validate(response, strict=True)
    assert parsed.instructions == "Be short." and parsed.max_output_tokens == 9
    assert parsed.metadata == {"a": "b"} and parsed.user == "me"
    assert [entry.type for entry in parsed.tools] == ["function"]
    assert parsed.tool_choice == "none" and parsed.parallel_tool_calls is False
    assert parsed.reasoning is not None and parsed.reasoning.effort == "low"
    assert parsed.text is not None and parsed.text.verbosity == "low"
    # Not what was asked, but what is so.
    assert response["store"] is False
    assert response["truncation"] == "disabled"

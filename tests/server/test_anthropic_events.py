"""Events of /v1/messages, checked against the types of Anthropic's own client."""

from __future__ import annotations

from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from server import anthropic_events

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def usage(completion_tokens: int) -> dict[str, int]:
    return anthropic_events.usage_of(
        prompt_tokens=10, completion_tokens=completion_tokens, cached_tokens=4
    )


def whole(*deltas: str, stop_sequence: str | None = None) -> list[anthropic_events.Event]:
    events = anthropic_events.started("msg_1", "m", usage(1))
    for delta in deltas:
        events += anthropic_events.text(delta)
    reason = "stop_sequence" if stop_sequence else "end_turn"
    return events + anthropic_events.finished(reason, stop_sequence, usage(3))


def test_every_event_is_one_that_the_client_knows() -> None:
    events = whole("He", "", "llo", stop_sequence="!")
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    for event in events:
        if event["type"] != "ping":  # which the client drops before it looks at types
            assert STREAM_EVENT.validate_python(event, strict=True).type == event["type"]


def test_the_events_add_up_to_a_message() -> None:
    data = anthropic_events.message_of(whole("He", "llo", stop_sequence="!"))
    message = Message.model_validate(data, strict=True)
    assert [block.to_dict() for block in message.content] == [
        {"type": "text", "text": "Hello", "citations": None}
    ]
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == "!"
    assert message.usage.output_tokens == 3
    assert message.usage.input_tokens == 6 and message.usage.cache_read_input_tokens == 4


def test_an_empty_answer_is_one_empty_block() -> None:
    message = Message.model_validate(anthropic_events.message_of(whole()), strict=True)
    assert len(message.content) == 1 and message.stop_reason == "end_turn"

"""The events of one message of /v1/messages, in the order that clients check.

`message_start`, `content_block_start`, `ping`, then `content_block_delta` ...,
`content_block_stop`, `message_delta` with the stop reason and the usage, `message_stop`. The answer
without a stream is put together from them, as a client would do it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]


def started(message_id: str, model: str, usage: dict[str, int]) -> list[Event]:
    message: Event = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    return [
        {"type": "message_start", "message": message},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": "", "citations": None},
        },
        {"type": "ping"},
    ]


def text(delta: str) -> list[Event]:
    if not delta:
        return []
    return [
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": delta},
        }
    ]


def finished(stop_reason: str, stop_sequence: str | None, usage: dict[str, int]) -> list[Event]:
    delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
    return [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": delta, "usage": usage},
        {"type": "message_stop"},
    ]


def stop_reason_of(
    finish_reason: str, stop: int | str | None, *, max_tokens_reached: bool
) -> tuple[str, str | None]:
    """Anthropic's stop_reason and stop_sequence. `stop` is what was met, where that was no EOS."""
    if finish_reason == "length":
        return ("max_tokens" if max_tokens_reached else "model_context_window_exceeded"), None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return "end_turn", None


def usage_of(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, int]:
    """`input_tokens` leaves out the cached ones here: clients add the three up."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": completion_tokens,
    }


def message_of(events: Iterable[Event]) -> dict[str, Any]:
    """The whole message that the events of a stream add up to."""
    message: dict[str, Any] = {}
    texts: list[str] = []
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = dict(event["message"])
        elif kind == "content_block_start":
            message["content"] = [dict(event["content_block"])]
        elif kind == "content_block_delta":
            texts.append(event["delta"]["text"])
        elif kind == "message_delta":
            message.update(event["delta"], usage=event["usage"])
    message["content"][0]["text"] = "".join(texts)
    return message

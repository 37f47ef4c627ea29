"""The events of one response of /v1/responses, in the order that clients check.

`response.created`, `in_progress`, then one message with one text part: `output_item.added`,
`content_part.added`, `output_text.delta` ..., `output_text.done`, `content_part.done`,
`output_item.done`, and `response.completed` or `response.incomplete`. A failure ends it at any
place with `response.failed`. Every event has the next `sequence_number`. The answer without a
stream is the response of the last event.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from server.protocol_responses import ResponsesRequest

Event = dict[str, Any]
_TOOL = {"type": "function", "description": None, "parameters": None, "strict": None}
"""Clients that check the reply want every field of a function tool to be there."""


class ResponseEvents:
    """Builds the events from what the model produces; each method returns the next ones."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        """The response as it is now; `status`, `output`, `usage` and the like are set here."""
        self._item_id = response["id"].replace("resp_", "msg_", 1)
        self._text: list[str] = []
        self._logprobs: list[Any] = []
        self._number = 0
        self._open = False

    def started(self) -> list[Event]:
        self._open = True
        return [
            self._created(),
            self._event("response.in_progress", response=dict(self.response)),
            self._event(
                "response.output_item.added", output_index=0, item=self._item("in_progress", [])
            ),
            self._event("response.content_part.added", **self._place(), part=_part("", [])),
        ]

    def text(self, delta: str, logprobs: Sequence[Any]) -> list[Event]:
        """`logprobs` holds one entry a token, in chat's shape; empty if none were asked for."""
        if not delta and not logprobs:
            return []
        self._text.append(delta)
        self._logprobs += logprobs
        return [
            self._event(
                "response.output_text.delta", **self._place(), delta=delta, logprobs=logprobs
            )
        ]

    def finished(self, finish_reason: str, usage: dict[str, Any]) -> list[Event]:
        """`finish_reason` is chat's: `length` makes the response incomplete."""
        cut = finish_reason == "length"
        status = "incomplete" if cut else "completed"
        part = _part("".join(self._text), self._logprobs)
        item = self._item(status, [part])
        events = [
            self._event(
                "response.output_text.done",
                **self._place(),
                text=part["text"],
                logprobs=self._logprobs,
            ),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=0, item=item),
        ]
        self.response.update(status=status, output=[item], usage=usage)
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        return [*events, self._event(f"response.{status}", response=dict(self.response))]

    def failed(self, message: str, usage: dict[str, Any]) -> list[Event]:
        # Clients want to hear of a response before it may fail.
        events = [] if self._open else [self._created()]
        if self._open:
            item = self._item("incomplete", [_part("".join(self._text), self._logprobs)])
            self.response["output"] = [item]
        error = {"code": "server_error", "message": message}
        self.response.update(status="failed", error=error, usage=usage)
        return [*events, self._event("response.failed", response=dict(self.response))]

    def _created(self) -> Event:
        return self._event("response.created", response=dict(self.response))

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }


def _part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def new_response(
    body: ResponsesRequest,
    *,
    response_id: str,
    model: str,
    created: int,
    temperature: float,
    top_p: float,
    tools: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """A response that has just begun. `temperature` and `top_p` are those in effect, `tools` those
    that the model was shown, in chat's shape.
    """
    reasoning = body.reasoning or {}
    text: dict[str, Any] = {"format": {"type": "text"}}
    if (body.text or {}).get("verbosity") is not None:
        text["verbosity"] = (body.text or {})["verbosity"]
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": temperature,
        "text": text,
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": [{**_TOOL, **tool["function"]} for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def usage_of(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + completion_tokens,
    }

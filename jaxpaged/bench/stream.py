"""What one answer tells while it streams: when its chunks came, its text, its token counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

DONE = b"[DONE]"


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    """One event of a streamed completion or chat: what of it we read."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


decode_chunk: Callable[[bytes | str], Chunk] = msgspec.json.Decoder(Chunk).decode
"""Raises `msgspec.DecodeError`."""


class EventReader:
    """Cuts an event stream into the values of its `data` fields, however its bytes are split."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(slots=True)
class Observer:
    """Takes the bytes of a streamed completion, of either endpoint, as they come."""

    times: list[float] = field(default_factory=list)
    """When each chunk with choices came."""
    texts: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    """From the server's usage; None where it gave none."""
    output_tokens: int | None = None
    error: str | None = None
    complete: bool = False
    """A finish_reason or [DONE] was seen."""
    _reader: EventReader = field(default_factory=EventReader)

    def feed(self, data: bytes, now: float) -> None:
        for payload in self._reader.feed(data):
            if payload == DONE:
                self.complete = True
            elif payload:
                self._take(payload, now)

    def _take(self, payload: bytes, now: float) -> None:
        try:
            chunk = decode_chunk(payload)
        except msgspec.DecodeError as error:
            shown = payload[:200].decode("utf-8", "replace")
            self.error = self.error or f"a chunk that cannot be read ({error}): {shown}"
            return
        if chunk.error is not None:
            self.error = self.error or error_text(chunk.error)
        if chunk.choices:
            self.times.append(now)
            for choice in chunk.choices:
                self.texts.append(_text(choice))
                self.complete = self.complete or choice.finish_reason is not None
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens or self.prompt_tokens
            self.output_tokens = chunk.usage.completion_tokens or self.output_tokens

    def verdict(self) -> str | None:
        """Why an answer with status 200 that has ended counts as failed; None if it does not."""
        if self.error is not None:
            return self.error
        if not self.times:
            return "status 200, but the stream had no choices."
        if not self.complete:
            return "the stream ended without a finish_reason or [DONE]."
        return None


def _text(choice: Choice) -> str:
    if choice.text is not None:
        return choice.text
    delta = choice.delta
    if delta is None:
        return ""
    return delta.content or delta.reasoning_content or delta.reasoning or ""


def failure_text(status: int, body: bytes) -> str:
    """What a server says in an answer whose status is not 200."""
    try:
        text = error_text(msgspec.json.decode(body))
    except msgspec.DecodeError:
        text = body[:500].decode("utf-8", "replace").strip()
    return f"status {status}: {text}" if text else f"status {status}"


def error_text(value: Any) -> str:
    """The message inside an error object of OpenAI's shape, or of most others."""
    while isinstance(value, dict):
        inner = value.get("error") or value.get("message") or value.get("detail")
        if inner is None:
            break
        value = inner
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text[:500]

"""The bytes of a stream's chunks. All but a few words of a chunk are the same for every token, so
they are encoded once a request.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from functools import lru_cache

import msgspec
from starlette.requests import Request

from server import sse
from server.context import Context
from server.protocol_common import GenerationRequest
from server.runs import Run, Usage

encode = msgspec.json.encode
WHOLE = 2**31
"""Tokens between two outputs of the engine for an answer that is sent at once."""
_ID_TAIL = re.compile(r"[\x21-\x7e]{1,128}")


def answer_id(request: Request, prefix: str, asked: str | None) -> str:
    """prefix-TAIL: the tail is the body's request_id or the header X-Request-Id, where they are 1
    to 128 printable characters, else random.
    """
    for tail in (asked, request.headers.get("x-request-id")):
        if tail is not None and _ID_TAIL.fullmatch(tail):
            return f"{prefix}-{tail}"
    return f"{prefix}-{secrets.token_hex(16)}"


def engine_id(wire_id: str) -> str:
    """What the engine calls a request: clients may send the same X-Request-Id twice at once."""
    return f"{wire_id}-{secrets.token_hex(4)}"


class Envelope:
    """What all chunks, or the one answer, of a request have in common."""

    def __init__(self, context: Context, wire_id: str, kind: str, model: str | None) -> None:
        """`kind` is the `object` of each chunk. Raises `ApiError` 404 for an unknown model."""
        self.id = wire_id
        self.created = int(time.time())
        self.model = context.model_named(model)
        self.fingerprint = context.fingerprint
        common = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        self._head = b"data: " + sse.one_line(encode(common))[:-1]

    def chunk(self, choice: bytes, usage: bytes = b"", more: bytes = b"") -> bytes:
        """One event with one choice. `usage` and `more` are further members of the object, each
        with a comma in front.
        """
        return b'%b,"choices":[%b]%b%b}\n\n' % (self._head, choice, usage, more)

    def usage_chunk(self, usage: msgspec.Struct) -> bytes:
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._head, encode(usage))


@lru_cache(maxsize=4096)
def index_member(index: int) -> bytes:
    """The beginning of a choice."""
    return b'{"index":%d' % index


def text_json(text: str) -> bytes:
    return sse.one_line(encode(text))


def ending_json(finish_reason: str | None, stop_reason: int | str | None) -> bytes:
    """The value of finish_reason, and once there is one the member stop_reason after it."""
    if finish_reason is None:
        return b"null"
    return b'%b,"stop_reason":%b' % (encode(finish_reason), sse.one_line(encode(stop_reason)))


class UsageTeller:
    """When a stream tells its usage, and how."""

    def __init__(
        self,
        context: Context,
        request: GenerationRequest,
        run: Run,
        make: Callable[[Usage], msgspec.Struct],
    ) -> None:
        options = request.stream_options
        forced = context.settings.enable_force_include_usage
        self.at_end = forced or bool(options is not None and options.include_usage)
        self._each = bool(self.at_end and options is not None and options.continuous_usage_stats)
        self._run = run
        self._make = make

    def total(self) -> msgspec.Struct:
        return self._make(self._run.usage())

    def member(self) -> bytes:
        """For each chunk: the usage so far, if asked for."""
        return b',"usage":' + encode(self.total()) if self._each else b""

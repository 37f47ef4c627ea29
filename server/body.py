"""The body of a request, checked; and the watch over the client that sent it."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from server.bounded import schema_error
from server.errors import ApiError

T = TypeVar("T")
_log = logging.getLogger(__name__)

_MEDIA_TYPE = "application/json"
_LOOKED_THROUGH = 256 * 1024
"""Bodies of more bytes are not searched for unknown fields."""
_MOST_TOLD = 16
"""Unknown names that one body is told about."""

IGNORED = frozenset(
    {
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
        "verbosity",
        "web_search_options",
    }
)
"""Fields of OpenAI's API that change nothing here, and are no mistake of the client's."""
RENAMED = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_output_tokens": "max_completion_tokens",
    "stop_words": "stop",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "eos_token_id": "stop_token_ids",
    "enable_thinking": "chat_template_kwargs",
}
"""Names of other APIs -> where the same is asked for here."""


class ClientGone(ApiError):
    """The client left before it was answered. Nobody reads what this becomes."""

    def __init__(self) -> None:
        super().__init__(499, "The client closed the connection.")


async def read_body(request: Request, kind: type[T]) -> T:
    """The JSON body as `kind`, a msgspec Struct. Raises `ApiError` 400, and `ClientGone`.

    Unknown fields are ignored; each name is warned about once a process.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != _MEDIA_TYPE:
        raise ApiError(400, f"Unsupported Media Type: Only '{_MEDIA_TYPE}' is allowed")
    try:
        data = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    return decode_body(data, kind)


def decode_body(data: bytes, kind: type[T]) -> T:
    """What `read_body` makes of a body's bytes."""
    if not data:
        raise schema_error(ValueError("The body is empty; a JSON object is required"))
    try:
        body = msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise schema_error(ValueError(f"The body is not UTF-8: {error.reason}")) from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise schema_error(error) from None
    if len(data) <= _LOOKED_THROUGH:
        _warn_of_unknown(data, kind)
    return body


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves; raises `ClientGone` then.

    Starlette does not cancel a handler that answers at once. The body must have been read before.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_until_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        # Also where this handler itself is cancelled.
        await cancel(task, gone)


async def wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs, and wait until it has: its clean-up is done then."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task


def _warn_of_unknown(data: bytes, kind: Any) -> None:
    known = _known_fields(kind)
    try:
        names = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys() - known
    except msgspec.MsgspecError:  # no object, or keys that are not text
        return
    for name in sorted(names)[:_MOST_TOLD]:
        _warn_once(name[:100], kind)


@lru_cache(maxsize=1024)
def _warn_once(name: str, kind: Any) -> None:
    hint = _hint(name, _known_fields(kind))
    _log.info("The request field %r is unknown and ignored.%s", name, hint)


@cache
def _known_fields(kind: Any) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind)) | IGNORED


def _hint(name: str, known: Iterable[str]) -> str:
    other = RENAMED.get(name)
    near = [other] if other else difflib.get_close_matches(name, sorted(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""

"""What all layers around the routes need: the path, a place for notes, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.anthropic_errors import anthropic_error, speaks_anthropic
from server.errors import ApiError, error_response


def route_path(scope: Scope) -> str:
    """The path that the routes see: without the root path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def state_of(scope: Scope) -> dict[str, Any]:
    """Notes on one request; handlers see them as `request.state`."""
    state: dict[str, Any] = scope.setdefault("state", {})
    return state


def refusal(scope: Scope, error: ApiError) -> Response:
    """The response that says `error` in the shape that this request's client expects."""
    if speaks_anthropic(scope):
        return anthropic_error(error, state_of(scope).get("request_id"))
    return error_response(error)


async def send_error(
    error: ApiError,
    scope: Scope,
    receive: Receive,
    send: Send,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Answer with `error`; `headers` are sent besides its own.

    The body need not have been read: the server takes and drops what still comes of it, so that
    the next request on the connection begins where it should.
    """
    response = refusal(scope, error)
    response.headers.update(headers or {})
    await response(scope, receive, send)

"""Errors as Anthropic's clients expect them, for everything under /v1/messages."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from server.errors import ApiError, json_response

PREFIX = "/v1/messages"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the client that sent this request expects Anthropic's errors."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(error.status)
    if kind is None:
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


def anthropic_error(error: ApiError, request_id: str | None = None) -> Response:
    """The answer to a request that was refused, or failed before it had a part of its answer."""
    request_id = request_id or new_request_id()
    headers = {**error.headers(), "request-id": request_id}
    return json_response(error_body(error, request_id), error.status, headers)

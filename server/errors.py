"""Errors as OpenAI's clients expect them: a status, and one JSON object that says what is wrong."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from jaxpaged.errors import EngineDeadError, InvalidRequestError, UnavailableError

_log = logging.getLogger(__name__)

_INTERNALS = re.compile(r"0x[0-9a-fA-F]{4,}|(?<![\w.])(?:/[\w.+-]+){2,}(?::\d+)?")
_TYPES = {
    400: "BadRequestError",
    401: "invalid_request_error",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    499: "ClientClosedRequestError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """What a request is answered with instead of a result.

    `type` and `code` default by status. `retry_after` is in seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        type: str | None = None,
        code: int | str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.type = type or _TYPES.get(status, "BadRequestError")
        self.code = status if code is None else code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def headers(self) -> dict[str, str]:
        if self.retry_after is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


def as_api_error(error: BaseException) -> ApiError:
    """The answer to a request whose handling raised `error`. What is not the user's fault is logged
    and told without its internals.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), retry_after=error.retry_after)
    if isinstance(error, EngineDeadError):
        return ApiError(500, "The engine has died; the server is about to stop.")
    _log.error("A request failed.", exc_info=error)
    return ApiError(500, "Internal server error; the server's log says more.")


def without_internals(text: str) -> str:
    """An error's text without file paths and addresses, which are nobody else's business."""
    return _INTERNALS.sub("...", text)


def json_response(
    body: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers())

"""The layers around the routes, as plain ASGI: none of them holds a body or delays a stream."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.answers import route_path, send_error, state_of
from server.context import Context
from server.errors import ApiError, as_api_error

_log = logging.getLogger(__name__)

_SLASHES = re.compile("/{2,}")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_HEADER = b"x-request-id"

WHILE_LOADING = frozenset(
    {
        *("/health", "/ready", "/ping", "/metrics", "/version", "/load", "/openapi.json"),
        *("/", "/debug/live"),
    }
)
"""Paths that answer before there is a model; so do the page's files."""


class LastResort:
    """Whatever a handler raises becomes an answer that tells nothing of our insides."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, note_start)
        except ClientDisconnect:
            pass  # nobody is left to answer
        except Exception as error:
            # To stop in the middle of an answer closes the connection, so the client sees that it
            # is not whole.
            answer = as_api_error(error)
            if not started:
                await send_error(answer, scope, receive, send)


class Paths:
    """One spelling for each path: no doubled slashes, none at the end. Nothing is redirected, as a
    redirected POST loses its body with some clients.

    `root_path` is taken off where a proxy has left it on.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            path = _SLASHES.sub("/", scope["path"])
            if self._root and (path == self._root or path.startswith(f"{self._root}/")):
                path = path[len(self._root) :]
            path = path.rstrip("/") or "/"
            scope["root_path"] = self._root
            scope["path"] = self._root + path
        await self._app(scope, receive, send)


class RequestIds:
    """Every request has an id: the client's X-Request-Id, or one made here where that is missing or
    nothing to put into a log. Handlers see it as that header. `echo` sends it back.
    """

    def __init__(self, app: ASGIApp, *, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == _HEADER]
        request_id = given[0] if len(given) == 1 else b""
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        if given != [request_id]:
            others = [(name, value) for name, value in scope["headers"] if name != _HEADER]
            scope["headers"] = [*others, (_HEADER, request_id)]
        state_of(scope)["request_id"] = request_id.decode()

        async def add_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id.decode()
            await send(message)

        await self._app(scope, receive, add_header if self._echo else send)


class WhileLoading:
    """503 for what needs the model, until it is there."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._engine = context.engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._engine.status == "loading":
            path = route_path(scope)
            if path not in WHILE_LOADING and not path.startswith("/static/"):
                done = ""
                if self._engine.progress is not None:
                    done = " ({}/{} programs compiled)".format(*self._engine.progress)
                error = ApiError(
                    503, f"The model is still loading{done}; try again later.", retry_after=5.0
                )
                await send_error(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """413 for a body of more than `limit` bytes: before any of it is read where its length is
    announced, else as soon as it is too long.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if lengths and _too_large(lengths[0], self._limit):
            await send_error(self._error(), scope, receive, send)
            return
        total = 0

        async def count() -> Message:
            nonlocal total
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > self._limit:
                    raise self._error()
            return message

        await self._app(scope, count, send)

    def _error(self) -> ApiError:
        return ApiError(
            413,
            f"The request body is larger than {self._limit} bytes, the limit of this server "
            "(--max-request-bytes).",
        )


def _too_large(length: bytes, limit: int) -> bool:
    # The HTTP library has checked that these are digits; int() refuses thousands of them.
    digits = length.lstrip(b"0")
    return len(digits) > 18 or (digits.isdigit() and int(digits) > limit)

"""What is counted and logged about every HTTP request."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.answers import route_path, state_of
from server.context import Context
from server.metrics import NOT_COUNTED, load_header

_log = logging.getLogger(__name__)

_CLIENT_GONE = 499
_LOAD_FORMAT = b"endpoint-load-metrics-format"


class Observe:
    """ASGI middleware: metrics, requests in flight, and with --enable-log-requests a line when a
    request comes and one when its answer has been sent.

    `handlers` maps endpoints to the templates of their routes: metrics have those for labels.
    """

    def __init__(self, app: ASGIApp, context: Context, handlers: Mapping[Any, str]) -> None:
        self._app = app
        self._context = context
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = self._context
        request = _Observed(receive, send)
        wanted = dict(scope["headers"]).get(_LOAD_FORMAT)
        if wanted is not None:
            request.load_header = load_header(context.engine, wanted.decode("latin-1"))
        # A stream that is watched, such as the page's, is no work to be waited for.
        counts = scope["method"] == "POST" and route_path(scope) not in NOT_COUNTED
        logs = counts and context.settings.enable_log_requests
        if logs:
            _log.info(
                "Request %s: POST %s from %s",
                state_of(scope)["request_id"],
                _printable(route_path(scope)[:200]),
                _client_of(scope),
            )
        context.in_flight += counts
        try:
            await self._app(scope, request.receive, request.send)
        finally:
            context.in_flight -= counts
            seconds = time.monotonic() - request.began
            status = request.status
            context.http.observe(
                self._handlers.get(scope.get("endpoint")),
                scope["method"],
                status,
                seconds,
                request.bytes_in,
                request.bytes_out,
            )
            if logs:
                _log.info(
                    "Request %s ended: status %d, key %s, %d bytes in, %d bytes out, %.3f s",
                    state_of(scope)["request_id"],
                    status,
                    state_of(scope).get("key_name", "none"),
                    request.bytes_in,
                    request.bytes_out,
                    seconds,
                )


class _Observed:
    """Stands between the server and the application for one request."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.began = time.monotonic()
        self.status = _CLIENT_GONE
        """Until an answer begins."""
        self.bytes_in = 0
        self.bytes_out = 0
        self.load_header: str | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.bytes_in += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.load_header is not None:
                MutableHeaders(scope=message)["endpoint-load-metrics"] = self.load_header
        elif message["type"] == "http.response.body":
            self.bytes_out += len(message.get("body", b""))
        await self._send(message)


def _client_of(scope: Scope) -> str:
    client = scope.get("client")
    return _printable(str(client[0])) if client else "a local socket"


def _printable(text: str) -> str:
    """Client's text for the log: no line breaks that look like lines of ours, no escapes."""
    return text.encode("unicode_escape").decode("ascii")

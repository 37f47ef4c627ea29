"""Server-sent events: framing, keep-alive comments, and an end that is always noticed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.body import cancel, wait_until_gone
from server.errors import ApiError, as_api_error

Flush = Callable[[], Awaitable[None]]
DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_LINE_ENDS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)
_AT_ONCE = 256
"""Events that are sent together at most."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def data(payload: bytes) -> bytes:
    """One event of a line of JSON."""
    return b"data: " + one_line(payload) + b"\n\n"


def named(name: str, payload: bytes) -> bytes:
    """One event with a name, as the APIs other than chat's have them."""
    return b"event: %b\n" % name.encode() + data(payload)


def one_line(payload: bytes) -> bytes:
    """JSON without the characters, legal in JSON's strings, at which some clients split lines."""
    if payload.isascii():  # the quick way for most tokens
        return payload
    for char, escape in _LINE_ENDS:
        if char in payload:
            payload = payload.replace(char, escape)
    return payload


def error_events(error: ApiError) -> bytes:
    """How an OpenAI stream ends that goes wrong after its start."""
    return data(msgspec.json.encode(error.body())) + DONE


async def event_response(
    events: AsyncIterator[bytes],
    *,
    keep_alive: float,
    close: Callable[[], None],
    status: int = 200,
    on_error: Callable[[ApiError], bytes] = error_events,
    before_waiting: Callable[[Flush], None] | None = None,
) -> Response:
    """A stream of whole, framed events.

    `before_waiting` is given a function that whoever makes the events calls before it waits: then
    all events that come without waiting are sent together. Without it each is sent at once.

    Waits up to `keep_alive` seconds (0: without limit) for the first event and raises what is
    raised before it; what is raised later is sent as the events that `on_error` makes of it. Idle
    for `keep_alive` seconds the stream sends a comment (0: never). `close` is called at the end,
    whatever the end is. Run this under `until_disconnect`: the client may leave while it waits.
    """
    first = asyncio.ensure_future(_next(events))
    response = EventResponse(events, first, keep_alive, close, status, on_error, before_waiting)
    try:
        await asyncio.wait((first,), timeout=keep_alive or None)
        if first.done():
            first.result()
    except BaseException:
        await response.end()
        raise
    return response


class EventResponse(Response):
    """Sends events until they or the client are at an end. Made by `event_response`."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        first: asyncio.Task[bytes | None],
        keep_alive: float,
        close: Callable[[], None],
        status: int,
        on_error: Callable[[ApiError], bytes],
        before_waiting: Callable[[Flush], None] | None,
    ) -> None:
        # Not Response's own: it would set the length of the body.
        self.status_code = status
        self.background = None
        self.init_headers(_HEADERS)
        self._events = events
        self._first = first
        self._keep_alive = keep_alive
        self._close = close
        self._on_error = on_error
        self._before_waiting = before_waiting
        self._made: list[bytes] = []
        """Events to be sent together."""
        self._broken: Exception | None = None
        """What sending has raised."""
        self._sending = asyncio.Lock()
        self._last_sent = time.monotonic()
        self._failed = False
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(wait_until_gone(receive))]
        try:
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            tasks.append(asyncio.ensure_future(self._send_all(send)))
            if self._keep_alive:
                tasks.append(asyncio.ensure_future(self._stay_alive(send)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except OSError:
            pass  # how some servers tell that the client has left
        finally:
            try:
                await cancel(*tasks)
            finally:
                await self.end()

    async def end(self) -> None:
        """Release everything. Idempotent."""
        self._close()
        await cancel(self._first)
        if isinstance(self._events, AsyncGenerator):
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        at_once = 1
        if self._before_waiting is not None:
            at_once = _AT_ONCE
            self._before_waiting(partial(self._flush, send))
        event = await self._told(self._first)
        while event is not None:
            self._made.append(event)
            if len(self._made) >= at_once:
                await self._flush(send)
            event = None if self._failed else await self._told(_next(self._events))
        await self._flush(send)
        self._ended = True
        async with self._sending:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _flush(self, send: Send) -> None:
        """Send the events that have been made."""
        if not self._made:
            return
        events = b"".join(self._made)
        self._made.clear()
        try:
            await self._send(send, events)
        except Exception as error:
            self._broken = error
            raise

    async def _send(self, send: Send, event: bytes) -> None:
        async with self._sending:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        self._last_sent = time.monotonic()

    async def _told(self, event: Awaitable[bytes | None]) -> bytes | None:
        """An event, or the events that tell of the error that came instead of one."""
        try:
            return await event
        except Exception as error:
            if error is self._broken:  # raised where the events are made, but not theirs
                raise
            self._failed = True
            return self._on_error(as_api_error(error))

    async def _stay_alive(self, send: Send) -> None:
        while not self._ended:
            idle = time.monotonic() - self._last_sent
            if idle < self._keep_alive:
                await asyncio.sleep(self._keep_alive - idle)
            else:
                await self._send(send, _KEEP_ALIVE)
        await asyncio.Event().wait()  # the end is for `_send_all` to tell


async def _next(events: AsyncIterator[bytes]) -> bytes | None:
    return await anext(events, None)

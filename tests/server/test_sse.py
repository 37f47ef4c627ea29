"""Framing, keep-alive, errors around the start of a stream, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server import sse
from server.body import until_disconnect
from server.errors import ApiError
from tests.server.apps import SECONDS, Call

LONG = 60.0


class Source:
    """Events as a test feeds them; an exception is raised where it comes."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.closes = 0
        self.released = False
        self.waiting = asyncio.Event()

    def put(self, *events: bytes | Exception | None) -> None:
        for event in events:
            self.queue.put_nowait(event)

    async def events(self) -> AsyncIterator[bytes]:
        try:
            while True:
                self.waiting.set()
                event = await self.queue.get()
                if event is None:
                    return
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.released = True

    def close(self) -> None:
        self.closes += 1


def app_of(source: Source, keep_alive: float = LONG, **options: Any) -> Starlette:
    async def handler(request: Request) -> Response:
        await request.body()
        made = sse.event_response(
            source.events(), keep_alive=keep_alive, close=source.close, **options
        )
        return await until_disconnect(request, made)

    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return Response(error.message, error.status)

    return Starlette(
        routes=[Route("/", handler, methods=["POST"])], exception_handlers={ApiError: on_error}
    )


def test_data_is_one_line_for_every_client() -> None:
    assert sse.data(b'{"a":"\xe2\x80\xa8\xe2\x80\xa9\xc2\x85\xc3\xa9"}') == (
        b'data: {"a":"\\u2028\\u2029\\u0085\xc3\xa9"}\n\n'
    )


def test_a_whole_stream() -> None:
    async def run() -> None:
        source = Source()
        source.put(sse.data(b"1"), sse.data(b"2"), None)
        call = Call(app_of(source), "/", b"{}")
        await call.ended()
        assert call.status == 200 and call.closed
        assert call.body == b"data: 1\n\ndata: 2\n\n"
        assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert call.headers["cache-control"] == "no-cache"
        assert call.headers["x-accel-buffering"] == "no"
        assert "content-length" not in call.headers
        assert source.released and source.closes >= 1

    asyncio.run(run())


def test_events_are_sent_as_they_come() -> None:
    async def run() -> None:
        source = Source()
        source.put(sse.data(b"1"))
        call = Call(app_of(source), "/", b"{}")
        await call.until(b"data: 1\n\n")
        source.put(sse.data(b"2"))
        await call.until(b"data: 2\n\n")
        assert not call.closed and source.closes == 0
        source.put(None)
        await call.ended()

    asyncio.run(run())


def test_what_comes_without_waiting_is_sent_together() -> None:
    """Whoever makes the events says when they have to be waited for."""

    async def run() -> None:
        flush: list[sse.Flush] = []
        go_on = asyncio.Event()

        async def events() -> AsyncIterator[bytes]:
            for number in range(4):
                yield sse.data(b"%d" % number)
            await flush[0]()
            await go_on.wait()
            yield sse.data(b"4")
            yield sse.data(b"5")
            raise ApiError(500, "broken")

        sent: list[bytes] = []
        response = await sse.event_response(
            events(), keep_alive=LONG, close=lambda: None, before_waiting=flush.append
        )

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.append(message["body"])
                go_on.set()

        async def receive() -> Any:
            await asyncio.Event().wait()

        await asyncio.wait_for(response({"type": "http"}, receive, send), SECONDS)
        parts = [body.count(b"data: ") for body in sent]
        assert parts == [4, 4]  # the error and DONE with what came before it
        assert b"broken" in sent[1] and sent[1].endswith(sse.DONE)

    asyncio.run(run())


def test_a_write_that_fails_is_no_event() -> None:
    """It is raised where the events are made, but tells nothing of them."""

    async def run() -> None:
        flush: list[sse.Flush] = []
        closed: list[bool] = []

        async def events() -> AsyncIterator[bytes]:
            yield sse.data(b"1")
            await flush[0]()
            yield sse.data(b"2")

        response = await sse.event_response(
            events(),
            keep_alive=LONG,
            close=lambda: closed.append(True),
            before_waiting=flush.append,
        )
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.append(message["body"])
                raise OSError("gone")

        async def receive() -> Any:
            await asyncio.Event().wait()

        await asyncio.wait_for(response({"type": "http"}, receive, send), SECONDS)
        assert sent == [sse.data(b"1")]
        assert closed

    asyncio.run(run())


def test_an_error_before_the_first_event_is_an_answer() -> None:
    async def run() -> None:
        source = Source()
        source.put(ApiError(418, "no"))
        call = Call(app_of(source), "/", b"{}")
        await call.ended()
        assert call.status == 418 and call.body == b"no"
        assert source.released and source.closes >= 1

    asyncio.run(run())


@pytest.mark.parametrize("first", [True, False])
def test_an_error_after_the_start_is_an_event(first: bool) -> None:
    async def run() -> None:
        source = Source()
        call = Call(app_of(source, keep_alive=LONG if first else 0.01), "/", b"{}")
        source.put(*[sse.data(b"1")] * first)
        await call.until(b"data: 1\n\n" if first else b": keep-alive\n\n")
        source.put(ApiError(500, "broken\nhere"), sse.data(b"never"))
        await call.ended()
        assert call.status == 200 and call.closed
        events = [e for e in call.body.split(b"\n\n") if not e.startswith(b": keep")]
        assert events[first:] == [
            b'data: {"error":{"message":"broken\\nhere","type":"InternalServerError",'
            b'"param":null,"code":500}}',
            b"data: [DONE]",
            b"",
        ]

    asyncio.run(run())


def test_foreign_errors_are_told_without_their_insides(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        source = Source()
        source.put(sse.data(b"1"), KeyError("/secret/path"))
        call = Call(app_of(source, on_error=lambda error: str(error).encode()), "/", b"{}")
        await call.ended()
        assert call.body == b"data: 1\n\nInternal server error; the server's log says more."

    asyncio.run(run())
    assert "/secret/path" in caplog.text


def test_comments_keep_an_idle_stream_alive() -> None:
    async def run() -> None:
        source = Source()
        call = Call(app_of(source, keep_alive=0.01), "/", b"{}")
        await call.until(b": keep-alive\n\n", count=3)  # also before the first event
        source.put(sse.data(b"1"))
        await call.until(b"data: 1\n\n")
        seen = call.body.count(b": keep-alive\n\n")
        await call.until(b": keep-alive\n\n", count=seen + 2)
        source.put(None)
        await call.ended()
        assert call.closed

    asyncio.run(run())


def test_a_busy_stream_has_no_comments() -> None:
    async def run() -> None:
        source = Source()
        source.put(*[sse.data(b"1")] * 50, None)
        call = Call(app_of(source, keep_alive=0.0), "/", b"{}")  # 0: never
        await call.ended()
        assert call.body == b"data: 1\n\n" * 50

    asyncio.run(run())


@pytest.mark.parametrize("started", [False, True])
def test_a_client_that_leaves_ends_it(started: bool) -> None:
    async def run() -> None:
        source = Source()
        call = Call(app_of(source), "/", b"{}")
        if started:
            source.put(sse.data(b"1"))
            await call.until(b"data: 1\n\n")
        else:
            await asyncio.wait_for(source.waiting.wait(), SECONDS)
        call.leave()
        await call.ended()
        assert source.released and source.closes >= 1
        assert call.status == (200 if started else 499)

    asyncio.run(run())


def test_a_client_that_leaves_while_it_does_not_read() -> None:
    async def run() -> None:
        source = Source()
        source.put(sse.data(b"1"))
        call = Call(app_of(source, keep_alive=0.01), "/", b"{}")
        await call.until(b"data: 1\n\n")
        call.send_gate.clear()
        source.put(sse.data(b"2"), sse.data(b"3"))
        while source.queue.qsize() == 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)  # several keep-alive intervals, with nothing to be sent
        call.leave()
        await call.ended()
        assert source.released and b"keep-alive" not in call.body and b"3" not in call.body

    asyncio.run(run())


class Broken(Call):
    """A server that tells by an error that the client has left."""

    async def _send(self, message: Any) -> None:
        raise OSError("closed")


def test_a_server_that_raises_when_the_client_left() -> None:
    async def run() -> None:
        source = Source()
        source.put(sse.data(b"1"), sse.data(b"2"))
        call = Broken(app_of(source), "/", b"{}")
        await call.ended()
        assert source.released and source.closes >= 1

    asyncio.run(run())

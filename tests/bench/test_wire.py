"""The measuring HTTP client against servers that behave and misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from jaxpaged.bench.wire import Client, WireError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Head and body of one request."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return head + await reader.readexactly(int(line.split(b":")[1]))
    return head


class Server:
    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        self.requests: list[bytes] = []


@asynccontextmanager
async def raw_server(*answers: bytes | Handler) -> AsyncIterator[Server]:
    """Answers the n-th request of each connection with the n-th answer, then closes."""
    server = Server()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            for answer in answers:
                server.requests.append(await read_request(reader))
                if isinstance(answer, bytes):
                    writer.write(answer)
                    await writer.drain()
                else:
                    await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()


@asynccontextmanager
async def client_of(url: str, **options: float) -> AsyncIterator[Client]:
    client = Client(url, {"x-test": "1"}, **{"timeout": 20.0, **options})
    try:
        yield client
    finally:
        await client.close()


def test_a_request_as_it_goes_out() -> None:
    async def main() -> None:
        async with raw_server(OK) as server, client_of(server.url + "/base/") as client:
            answer = await client.request("POST", "/v1/completions", b'{"a":1}')
            assert (answer.status, answer.body) == (200, b"ok")
            assert answer.headers["content-length"] == "2"
            head, _, body = server.requests[0].partition(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            assert lines[0] == b"POST /base/v1/completions HTTP/1.1"
            assert f"host: {server.url.removeprefix('http://')}".encode() in lines
            assert b"x-test: 1" in lines
            assert b"content-type: application/json" in lines
            assert b"content-length: 7" in lines
            assert body == b'{"a":1}'

    asyncio.run(main())


def test_connections_are_used_again() -> None:
    async def main() -> None:
        async with raw_server(OK, OK, OK) as server, client_of(server.url) as client:
            for _ in range(3):
                assert (await client.request("GET", "/")).body == b"ok"
            assert server.connections == 1
            await asyncio.gather(*(client.request("GET", "/") for _ in range(3)))
            assert server.connections == 4

    asyncio.run(main())


def test_an_idle_connection_that_the_server_closed_is_not_a_failure() -> None:
    async def main() -> None:
        async with raw_server(OK) as server, client_of(server.url) as client:
            for _ in range(3):  # each connection answers one request, then is closed
                assert (await client.request("GET", "/")).body == b"ok"
            assert server.connections == 3

    asyncio.run(main())


def test_a_body_is_handed_over_as_it_comes() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    more = asyncio.Event()

    async def slowly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"3\r\nabc\r\n")
        await writer.drain()
        await more.wait()
        writer.write(b"2;ext=1\r\nde\r\n0\r\nTrailer: x\r\n\r\n")

    async def main() -> None:
        ticks = iter(range(100))
        got: list[tuple[bytes, float]] = []

        def take(data: bytes, now: float) -> None:
            got.append((data, now))
            more.set()

        async with raw_server(slowly) as server:
            client = Client(server.url, {}, timeout=20.0, clock=lambda: float(next(ticks)))
            answer = await client.request("POST", "/", b"{}", on_data=take)
            await client.close()
        assert answer.body == b""
        assert [data for data, _ in got] == [b"abc", b"de"]
        assert got[0][1] < got[1][1]

    asyncio.run(main())


def test_errors_keep_their_body() -> None:
    refusal = b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nwait"

    async def main() -> None:
        async with raw_server(refusal, OK) as server, client_of(server.url) as client:
            got: list[bytes] = []
            answer = await client.request("GET", "/", on_data=lambda data, _: got.append(data))
            assert (answer.status, answer.body, got) == (429, b"wait", [])

    asyncio.run(main())


def test_bodies_without_a_length_and_interim_answers() -> None:
    old = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\n\r\nall of it"

    async def main() -> None:
        async with raw_server(old) as server, client_of(server.url) as client:
            for _ in range(2):
                assert (await client.request("GET", "/")).body == b"all of it"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "the server closed the connection before the answer was complete"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "closed the connection before"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", "closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
    ],
)
def test_broken_answers(answer: bytes, reason: str) -> None:
    async def main() -> None:
        async with raw_server(answer) as server, client_of(server.url) as client:
            with pytest.raises(WireError, match=reason):
                await client.request("GET", "/")

    asyncio.run(main())


def test_silence_ends() -> None:
    release = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()

    async def main() -> None:
        async with raw_server(silent) as server, client_of(server.url, timeout=0.05) as client:
            with pytest.raises(WireError, match=r"the server sent nothing for 0\.05 s"):
                await client.request("GET", "/")
            release.set()

    asyncio.run(main())


def test_a_cancelled_request_drops_its_connection() -> None:
    left = asyncio.Event()
    arrived = asyncio.Event()

    async def wait_for_end(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        arrived.set()
        try:
            await reader.read()
        finally:
            left.set()

    async def main() -> None:
        async with raw_server(wait_for_end) as server, client_of(server.url) as client:
            task = asyncio.create_task(client.request("GET", "/"))
            await asyncio.wait_for(arrived.wait(), 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(left.wait(), 20)

    asyncio.run(main())


def test_a_failing_reader_of_the_body_fails_the_request() -> None:
    def fail(data: bytes, now: float) -> None:
        raise LookupError("mine")

    async def main() -> None:
        async with raw_server(OK) as server, client_of(server.url) as client:
            with pytest.raises(LookupError, match="mine"):
                await client.request("GET", "/", on_data=fail)

    asyncio.run(main())


def test_nobody_there(unused_port: int) -> None:
    async def main() -> None:
        for host in ("127.0.0.1", "localhost"):
            async with client_of(f"http://{host}:{unused_port}") as client:
                with pytest.raises(WireError, match=f"{host}:{unused_port}: Connection refused"):
                    await client.request("GET", "/")

    asyncio.run(main())


def test_tls_where_there_is_none() -> None:
    async def main() -> None:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        listener = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with client_of(f"https://127.0.0.1:{port}") as client:
            with pytest.raises(WireError, match="(?i)wrong.version.number|record"):
                await client.request("GET", "/")
        listener.close()

    asyncio.run(main())


def test_a_connection_that_does_not_come_about() -> None:
    async def main() -> None:
        async with raw_server(OK) as server:  # it waits for a request, not for a TLS handshake
            url = server.url.replace("http://", "https://")
            async with client_of(url, connect_timeout=0.05) as client:
                with pytest.raises(WireError, match=r"no connection within 0\.05 s"):
                    await client.request("GET", "/")

    asyncio.run(main())


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a", "http://", "http://a:b", "http://a:-1"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(WireError, match="base URL"):
        Client(url, {}, timeout=1.0)

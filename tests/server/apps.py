"""The application over a scripted engine, called without sockets.

async with serving(Script(...)) as server:
    answer = await server.ok("/v1/completions", {"prompt": "p"})
    chunks = await server.chunks("/v1/completions", {"prompt": "p"})   # with stream: true
    call = server.call("/v1/completions", {...}); ...; call.leave()    # a client that goes away
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette

from jaxpaged.async_engine import AsyncEngine
from jaxpaged.config import EngineConfig
from server.app import create_app
from server.context import Context
from server.metrics import HttpMetrics
from server.settings import ServerConfig
from tests.server.scripted import Script, running, settled

MODEL = "tiny"
Json = dict[str, Any]
SECONDS = 30.0
"""Longest any single answer may take."""


class Server:
    def __init__(self, engine: AsyncEngine, settings: ServerConfig) -> None:
        self.engine = engine
        self.context = Context(engine, settings, HttpMetrics())
        self.app: Starlette = create_app(self.context)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] = {}) -> httpx.Response:
        """`body` is JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        return await self.request("POST", path, content=content, headers=headers)

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await asyncio.wait_for(client.request(method, path, **options), SECONDS)

    async def ok(self, path: str, body: Json, headers: Mapping[str, str] = {}) -> Any:
        response = await self.post(path, body, headers)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        return response.json()

    async def refused(self, path: str, body: Any, status: int = 400) -> Json:
        """The error object."""
        response = await self.post(path, body)
        assert response.status_code == status, (response.status_code, response.text)
        assert response.headers["content-type"] == "application/json"
        error: Json = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
        return error

    async def chunks(self, path: str, body: Json, headers: Mapping[str, str] = {}) -> list[Json]:
        """The chunks of a stream, without its [DONE]."""
        response = await self.post(path, {**body, "stream": True}, headers)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse_events(response.content)

    def call(self, path: str, body: Json) -> Call:
        return Call(self.app, path, json.dumps(body).encode())


class Call:
    """One request, seen message by message."""

    def __init__(self, app: Starlette, path: str, body: bytes) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.closed = False
        self._told = asyncio.Event()
        self._requests: asyncio.Queue[Json] = asyncio.Queue()
        self._requests.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._left = asyncio.Event()
        self.send_gate = asyncio.Event()
        """Unset: the client does not read."""
        self.send_gate.set()
        headers = [(b"content-type", b"application/json"), (b"host", b"t")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("t", 80),
            "state": {},
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Json:
        if not self._requests.empty():
            return self._requests.get_nowait()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.send_gate.wait()
        assert not self.closed, "something was sent after the end"
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.closed = not message.get("more_body", False)
        self._told.set()

    async def until(self, text: bytes, count: int = 1) -> None:
        """Wait until the body holds `text` that often."""

        async def wait() -> None:
            while self.body.count(text) < count:
                assert not self.task.done(), f"ended with {self.status}: {self.body!r}"
                self._told.clear()
                await self._told.wait()

        await asyncio.wait_for(wait(), SECONDS)

    def leave(self) -> None:
        """The client closes the connection."""
        self._left.set()

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, SECONDS)


@asynccontextmanager
async def serving(
    script: Script | None = None,
    config: EngineConfig | None = None,
    settings: Mapping[str, Any] = {},
    **options: Any,
) -> AsyncIterator[Server]:
    """`options` are those of `scripted.running`."""
    named = {"served_model_name": (MODEL, "other/name"), **settings}
    async with running(script, config, **options) as engine:
        yield Server(engine, ServerConfig(**named))


def drive(
    test: Callable[[Server], Awaitable[None]], script: Script | None = None, **options: Any
) -> None:
    """Run a test against a server of its own, and prove that it leaves nothing behind."""

    async def run() -> None:
        async with serving(script, **options) as server:
            await test(server)
            await settled(server.engine)

    asyncio.run(run())


def parse_events(body: bytes) -> list[Json]:
    """Chunks of a whole stream. Strict: every event is one line of JSON, the last is [DONE]."""
    assert body.endswith(b"\n\n")
    events = body[:-2].split(b"\n\n")
    assert all(event.startswith(b"data: ") for event in events), body
    payloads = [event.removeprefix(b"data: ") for event in events]
    for payload in payloads:
        # What any client could take for the end of a line, not only of bytes.
        assert len(payload.decode().splitlines()) == 1, payload
    assert payloads[-1] == b"[DONE]" and b"[DONE]" not in payloads[:-1]
    return [json.loads(payload) for payload in payloads[:-1]]


def texts_of(chunks: list[Json]) -> dict[int, str]:
    """Choice -> its text, of either endpoint."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def ends_of(chunks: list[Json]) -> dict[int, tuple[str, Any]]:
    """Choice -> finish_reason and stop_reason; asserts that each is told once."""
    ends: dict[int, tuple[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            if choice["finish_reason"] is not None:
                assert choice["index"] not in ends
                ends[choice["index"]] = choice["finish_reason"], choice["stop_reason"]
    return ends

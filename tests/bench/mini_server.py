"""An OpenAI server that answers from a script, for tests of our clients, on a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

SECONDS = 30.0
MODEL = "org/mini"


@dataclass
class Reply:
    """What a request is answered with."""

    chunks: list[str | dict[str, Any]] = field(default_factory=list)
    """Each is sent alone; dictionaries as JSON in an event, texts as they are."""
    status: int = 200
    body: Any = None
    """Of an answer whose status is not 200."""
    hold: Callable[[], bool] | None = None
    """The first chunk waits until this is true."""
    hang: bool = False
    """Never end after the chunks."""


def text_chunks(
    *texts: str, chat: bool, prompt_tokens: int = 7, tokens: int | None = None, usage: bool = True
) -> list[str | dict[str, Any]]:
    """A whole stream as vLLM and we send it; chats begin with a chunk that has only a role."""
    chunks: list[str | dict[str, Any]] = []
    if chat:
        chunks.append({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for place, text in enumerate(texts):
        ended = "length" if place == len(texts) - 1 else None
        content = {"delta": {"content": text}} if chat else {"text": text}
        chunks.append({"choices": [{"index": 0, "finish_reason": ended, **content}]})
    if usage:
        count = len(texts) if tokens is None else tokens
        chunks.append(
            {
                "choices": [],
                "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count},
            }
        )
    chunks.append("data: [DONE]\n\n")
    return chunks


@dataclass
class Seen:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class MiniServer:
    """`answer` makes the reply to a request; `count` counts tokens, where there is a /tokenize."""

    answer: Callable[[Seen], Reply]
    count: Callable[[str], int] | None = None
    models: list[dict[str, Any]] | None = field(
        default_factory=lambda: [{"id": MODEL, "object": "model", "max_model_len": 4096}]
    )
    """None: the server has no /v1/models."""
    seen: list[Seen] = field(default_factory=list)
    """Completions and chats, in the order in which they came."""
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        seen = Seen(request.url.path, dict(request.headers), body)
        self.seen.append(seen)
        reply = self.answer(seen)
        if reply.status != 200:
            if isinstance(reply.body, str):
                return Response(reply.body, status_code=reply.status)
            return JSONResponse(reply.body, status_code=reply.status)
        return StreamingResponse(self._stream(reply), media_type="text/event-stream")

    async def _stream(self, reply: Reply) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if reply.hold is not None:
                async with asyncio.timeout(SECONDS):
                    while not reply.hold():
                        await asyncio.sleep(0.002)
            for chunk in reply.chunks:
                yield chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}\n\n"
            if reply.hang:
                await asyncio.sleep(SECONDS)
        finally:
            self.running -= 1

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        self.tokenized.append(body)
        assert self.count is not None
        return JSONResponse({"count": self.count(body["prompt"]), "tokens": []})

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self.models})

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        if self.count is not None:
            routes.append(Route("/tokenize", self.tokenize, methods=["POST"]))
        if self.models is not None:
            routes.append(Route("/v1/models", self.list_models))
        return Starlette(routes=routes)


@contextmanager
def serving(server: MiniServer) -> Iterator[MiniServer]:
    """Runs the server in a thread."""
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        server.port = listener.getsockname()[1]
        config = uvicorn.Config(
            server.app(),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        runner = uvicorn.Server(config)
        thread = threading.Thread(
            target=lambda: asyncio.run(runner.serve(sockets=[listener])), daemon=True
        )
        thread.start()
        try:
            yield server
        finally:
            runner.should_exit = True
            thread.join(SECONDS)
            assert not thread.is_alive(), "the mini server did not stop"

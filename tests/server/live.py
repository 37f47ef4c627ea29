"""The whole server on a real socket, for tests with real clients.

    def test_it() -> None:
        with live_server(Script(default="hello")) as live:
            openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="x")...
            live.settle()  # nothing runs, no block is held

The event loop, the engine and uvicorn live in a thread, set up as `jaxpaged serve` does it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn

from jaxpaged.async_engine import AsyncEngine
from jaxpaged.config import EngineConfig
from server.app import create_app
from server.connection import Connection
from server.context import Context
from server.metrics import HttpMetrics
from server.settings import ServerConfig
from tests.server.scripted import Script, scripted_async_engine, settled

T = TypeVar("T")
SECONDS = 60.0
"""Longer than any part of a test takes."""
MODEL = "scripted"
"""The name under which tests serve their model, unless they say otherwise."""


def until(
    holds: Callable[[], object], seconds: float = 30.0, what: str = "it never came to that"
) -> None:
    """Poll until the condition holds; fails, saying `what` did not happen, after a while."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Live:
    """A running server. `base_url` has no path; everything may be used from the test's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, server: uvicorn.Server, context: Context, port: int
    ) -> None:
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}"
        self.context = context
        self.engine = context.engine
        self.server = server
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Poll until the condition holds; fails after a minute."""
        until(holds, SECONDS)

    def settle(self) -> None:
        """Wait until no request is left, and check that none left anything behind."""
        self.run(settled(self.engine))


@contextmanager
def live_server(
    script: Script | None = None,
    settings: ServerConfig | None = None,
    config: EngineConfig | None = None,
    *,
    make_engine: Callable[[], AsyncEngine] | None = None,
    wait_ready: bool = True,
    **options: Any,
) -> Iterator[Live]:
    """Serve the scripted engine, or what `make_engine` returns (not started). Stops at the end.

    `options` are those of `scripted_async_engine`. A request that a test leaves running is aborted.
    """
    settings = settings or ServerConfig(served_model_name=(MODEL,))
    queued_tokens = settings.max_num_queued_tokens
    assert not isinstance(queued_tokens, str)  # a size is a number by now

    def make() -> AsyncEngine:
        if make_engine is not None:
            return make_engine()
        return scripted_async_engine(
            script or Script(),
            config,
            max_queued_requests=settings.max_num_queued_reqs,
            max_queued_tokens=queued_tokens,
            **options,
        )

    started: list[Live] = []
    failed: list[BaseException] = []
    ready = threading.Event()

    def announce(live: Live) -> None:
        started.append(live)
        ready.set()

    def serve() -> None:
        try:
            asyncio.run(_serve(make, settings, announce, wait_ready=wait_ready))
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=serve, name="live-server", daemon=True)
    thread.start()
    assert ready.wait(SECONDS), "the server did not start"
    try:
        if started:
            yield started[0]
    finally:
        if started:
            started[0].server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive(), "the server did not stop"
    if failed:
        raise failed[0]


async def _serve(
    make_engine: Callable[[], AsyncEngine],
    settings: ServerConfig,
    announce: Callable[[Live], None],
    *,
    wait_ready: bool,
) -> None:
    engine = make_engine()
    engine.start()
    try:
        if wait_ready:
            await engine.wait_ready()
        context = Context(engine=engine, settings=settings, http=HttpMetrics())
        with socket.socket(proto=socket.IPPROTO_TCP) as listener:  # as server.listen does
            listener.bind(("127.0.0.1", 0))
            server = uvicorn.Server(
                uvicorn.Config(
                    create_app(context),
                    http=Connection,
                    ws="none",
                    lifespan="off",
                    log_config=None,
                    timeout_graceful_shutdown=2,
                )
            )
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            async with asyncio.timeout(SECONDS):
                while not server.started and not serving.done():
                    await asyncio.sleep(0.005)
            if not serving.done():
                port = listener.getsockname()[1]
                announce(Live(asyncio.get_running_loop(), server, context, port))
            await serving
    finally:
        await engine.close()

"""One server from start to end: listen, load, serve, drain, stop. It never hangs: what cannot be
interrupted (a compile in XLA, a step that is stuck) goes with the process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import ssl
import sys
import threading
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import uvicorn

from jaxpaged.async_engine import AsyncEngine
from jaxpaged.config import EngineConfig
from jaxpaged.engine_thread import Build
from jaxpaged.errors import ConfigError
from server import logs
from server.app import create_app
from server.auth import load_keys
from server.connection import Connection
from server.context import Context
from server.listen import BACKLOG, Listener, ListenError, listen
from server.log_line import log_stats
from server.metrics import HttpMetrics
from server.settings import ServerConfig

T = TypeVar("T")
_log = logging.getLogger(__name__)

DEAD_SECONDS = 5.0
"""How long a server whose engine has died still tells its clients so."""
_KEEP_ALIVE_SECONDS = 75
"""Idle connections stay open for longer than clients and proxies keep them, or one of these would
send a request just as the connection is closed."""
_WRITE_SECONDS = 5.0
"""How long clients may take to read the end of their answers."""
_CLOSE_SECONDS = 5.0
"""How long the engine may take to drop aborted requests, and then to end."""
_LOADING_CLOSE_SECONDS = 1.0
_CONNECTIONS_SECONDS = 2
_LOOK_SECONDS = 0.1
_SAME_SIGNAL_SECONDS = 0.25
"""A terminal signals its whole group, and some programs that start others pass the signal on: one
wish comes twice then."""
_OPEN_FILES = 65536
_SWITCH_SECONDS = 0.0002
"""How long one thread of Python keeps the others waiting. With Python's own 5 ms the event loop,
which lets go of the lock for every write to a socket, gets it back from a busy engine 200 times a
second, and the engine waits as long to launch a step while the loop is busy. See docs/host.md."""


def run(
    engine_config: EngineConfig,
    settings: ServerConfig,
    *,
    notes: Sequence[str] = (),
    build: Build | None = None,
) -> int:
    """Serve until a signal or the engine's death; returns the exit status.

    `notes` are warnings about how the settings were given; `build` is `AsyncEngine`'s. Raises
    `ConfigError`, and what loading the model raises. Call it from the main thread of a process that
    ends with it.
    """
    logs.set_up(settings)
    sys.setswitchinterval(_SWITCH_SECONDS)
    for note in notes:
        _log.warning("%s", note)
    queued_tokens = settings.max_num_queued_tokens
    assert not isinstance(queued_tokens, str)
    engine = AsyncEngine(
        engine_config,
        build=build,
        max_queued_requests=settings.max_num_queued_reqs,
        max_queued_tokens=queued_tokens,
    )
    context = Context(engine, settings, HttpMetrics())
    http = _http_server(context)
    try:
        listener = listen(settings)
    except ListenError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    try:
        _raise_file_limit()
        with asyncio.Runner(loop_factory=http.config.get_loop_factory()) as runner:
            code = runner.run(_Life(context, http, listener).run())
            listener.close()
            leave_if_stuck(code)  # before the loop is closed, which waits for threads too
            return code
    finally:
        listener.close()


class _Http(uvicorn.Server):
    """Leaves signals to `_Life`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Life:
    """A server's life on the event loop."""

    def __init__(self, context: Context, http: _Http, listener: Listener) -> None:
        self._context = context
        self._engine = context.engine
        self._http = http
        self._listener = listener
        self._stop = asyncio.Event()
        self._stopped_at = 0.0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        _welcome(self._listener, self._context)  # who reads it may send a signal at once
        self._engine.start()
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener.socket]))
        stats = asyncio.create_task(self._log_stats())
        close_seconds = _CLOSE_SECONDS
        try:
            await self._until_over(serving)
            if self._engine.status == "loading":
                close_seconds = _LOADING_CLOSE_SECONDS
            return await self._wind_up()
        finally:
            stats.cancel()
            self._http.should_exit = True
            await asyncio.wait((serving,), timeout=_WRITE_SECONDS + _CONNECTIONS_SECONDS)
            await _within(self._engine.close(), close_seconds)

    async def _until_over(self, serving: asyncio.Task[None]) -> None:
        """Until a signal comes or the engine dies. Raises what loading raised."""
        stopped = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self._engine.wait_ready())
        try:
            await asyncio.wait((stopped, loading, serving), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                _freeze_heap()
                self._announce()
        finally:
            stopped.cancel()
            loading.cancel()
        while not self._stop.is_set() and self._engine.status != "dead":
            if serving.done():
                serving.result()
                raise RuntimeError("The HTTP server has ended by itself.")
            await _within(self._stop.wait(), _LOOK_SECONDS)

    async def _wind_up(self) -> int:
        """Let what runs come to its end, as far as it can. Returns the exit status."""
        engine, seconds = self._engine, self._context.settings.shutdown_timeout
        if engine.status == "loading":
            _log.info("Stopping; the model has not been loaded.")
            await engine.drain(0)
            return 0
        if engine.status != "dead":
            _log.info(
                "Stopping: %d requests have %g s to end. A second signal ends at once.",
                engine.num_unfinished,
                seconds,
            )
            # Aborted requests are dropped between two steps.
            if not await _within(engine.drain(seconds), seconds + _CLOSE_SECONDS):
                _log.warning("Requests that had not ended after %g s were aborted.", seconds)
        if engine.status == "dead":
            _log.critical("The engine has died; the server ends in %g s.", DEAD_SECONDS)
            await _within(self._stop.wait(), DEAD_SECONDS)
            return 1
        deadline = asyncio.get_running_loop().time() + _WRITE_SECONDS
        while self._context.in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_LOOK_SECONDS / 4)
        return 0

    def _announce(self) -> None:
        info = self._engine.info
        _log.info(
            "Ready at %s as %s: context of %d tokens, %d sequences at once, %d KV blocks of %d "
            "tokens.",
            self._listener.url,
            ", ".join(self._context.served_names),
            info.max_model_len,
            info.max_num_seqs,
            info.num_blocks - 1,
            info.block_size,
        )

    def _on_signal(self, number: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._stop.is_set() and now < self._stopped_at + _SAME_SIGNAL_SECONDS:
            return
        if self._stop.is_set():
            _log.warning("A second signal: ending at once.")
            self._listener.close()
            leave(128 + number)
        self._stopped_at = now
        self._stop.set()

    async def _log_stats(self) -> None:
        if not self._context.settings.disable_log_stats:
            with suppress(Exception):  # why there is no engine is told elsewhere
                await log_stats(self._engine)


def _freeze_heap() -> None:
    """Libraries, model and tokenizer stay until the end. Python's garbage collector need not look
    at them again: it holds up both threads for 80 ms when it does.
    """
    gc.collect()
    gc.freeze()


def leave_if_stuck(code: int) -> None:
    """End the process here if a thread of the engine still runs: at the usual end, the interpreter
    would wait for those that tokenise, and pull the ground from under one inside XLA.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("jaxpaged-"):
            thread.join(timeout=_LOADING_CLOSE_SECONDS)
            if thread.is_alive():
                leave(code)


def leave(code: int) -> NoReturn:
    """End the process at once."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


async def _within(work: Awaitable[T], seconds: float) -> T | None:
    """The result, or None if it takes longer."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        return None


def _http_server(context: Context) -> _Http:
    settings = context.settings
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(settings, name)
        if path is not None:
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"{name} {path}: {error.strerror}.") from error
    config = uvicorn.Config(
        create_app(context),
        # Of h11: httptools drops the body of a request that offers to go on in HTTP/2, as Java's
        # client does with every one.
        http=Connection,
        ws="none",
        lifespan="off",
        workers=1,
        log_config=None,
        log_level=None if settings.log_config_file else settings.uvicorn_log_level,
        access_log=not settings.disable_uvicorn_access_log,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CONNECTIONS_SECONDS,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
    )
    try:
        config.load()
    except ssl.SSLError as error:
        files = f"ssl_certfile {settings.ssl_certfile}, ssl_keyfile {settings.ssl_keyfile}"
        raise ConfigError(
            f"{files}: no certificate and key in PEM that fit each other ({error.reason})."
        ) from error
    return _Http(config)


def _welcome(listener: Listener, context: Context) -> None:
    _log.info("Listening on %s; loading %s.", listener.url, context.engine.config.model)
    keys = load_keys(context.settings)
    if keys:
        _log.info("API keys are needed: %s.", ", ".join(key.name for key in keys))
    elif listener.is_local:
        _log.info("No API key is set: every program on this machine can use the server.")
    else:
        _log.warning(
            "No API key is set, and the server listens on %s: everybody who can reach that can use "
            "it. Set one with --api-key or JAXPAGED_API_KEY.",
            context.settings.host,
        )


def _raise_file_limit() -> None:
    """Each connection is an open file, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

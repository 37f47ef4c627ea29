"""What the page shows of the memory: one stream of events for everybody who looks, and a snapshot.

While somebody listens, one task a server looks at the engine, at most five times a second. While
nobody does there is no task, and the engine is not disturbed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpaged.async_engine import AsyncEngine
from jaxpaged.core.snapshot import take_snapshot
from server import sse
from server.body import until_disconnect
from server.context import context_of
from server.live_wire import View, change, counters_of, whole

if TYPE_CHECKING:
    from jaxpaged.engine import Engine

_log = logging.getLogger(__name__)

INTERVAL = 0.2
"""Seconds from one look at the engine to the next, at least."""

MOST_BEHIND = 10
"""Events that wait for a slow listener; instead of more it gets the whole view again."""

_KEEP_ALIVE = 15.0


class Listener:
    """The events for one client: an async iterator that ends when the server stops. `close` it."""

    def __init__(self, feed: LiveFeed) -> None:
        self.needs_whole = True
        """The next event has to be the whole view."""
        self._feed = feed
        self._events: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._ended = False

    def __aiter__(self) -> Listener:
        return self

    async def __anext__(self) -> bytes:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()

    def close(self) -> None:
        """Idempotent."""
        self.end()
        self._feed.leave(self)

    def end(self) -> None:
        """Nothing comes after what has been sent."""
        self._ended = True
        self._news.set()

    def send(self, data: bytes) -> None:
        if len(self._events) >= MOST_BEHIND:
            self._events.clear()
            self.needs_whole = True
        else:
            self._events.append(data)
            self._news.set()


class LiveFeed:
    """Shares one look at the engine among all listeners. Belongs to the event loop's thread."""

    def __init__(self, engine: AsyncEngine, *, interval: float = INTERVAL) -> None:
        self._engine = engine
        self._interval = interval
        self._listeners: set[Listener] = set()
        self._task: asyncio.Task[None] | None = None
        self._view: View | None = None
        """What the listeners have been told."""
        self._said: Any = None
        """The same while there is no engine to look at."""

    @property
    def is_looking(self) -> bool:
        return self._task is not None

    def listen(self) -> Listener:
        listener = Listener(self)
        self._listeners.add(listener)
        if self._task is None:
            self._view = self._said = None
            self._task = asyncio.create_task(self._look_on(), name="jaxpaged-live")
        elif self._said is not None:
            listener.send(_event("status", self._said))
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if not self._listeners and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _look_on(self) -> None:
        try:
            while not self._is_over():
                began = time.monotonic()
                if self._engine.status == "loading":
                    self._say({"status": "loading", "progress": self._engine.progress})
                else:
                    self._said = None
                    await self._publish(await look(self._engine))
                await asyncio.sleep(max(0.0, began + self._interval - time.monotonic()))
        except Exception:
            if not self._is_over():  # it may well have died or been closed meanwhile
                _log.exception("The live view has failed; it starts over when asked for.")
        self._task = None
        self._say({"status": self._engine.status}, name="end")
        for listener in self._listeners:
            listener.end()

    def _is_over(self) -> bool:
        """True when nothing more will happen. An open stream would hold up the shutdown."""
        engine = self._engine
        drained = engine.status == "draining" and not engine.num_unfinished
        return drained or engine.status in ("dead", "closed")

    def _say(self, what: dict[str, Any], *, name: str = "status") -> None:
        if what != self._said:
            self._said = what
            for listener in self._listeners:
                listener.send(_event(name, what))

    async def _publish(self, view: View) -> None:
        in_pool, before = self._engine.run_in_pool, self._view
        news = None if before is None else await in_pool(_change_event, before, view)
        joining = [listener for listener in self._listeners if listener.needs_whole]
        if joining:
            start = await in_pool(_whole_event, view)
            for listener in joining:
                listener.needs_whole = False
                listener.send(start)
        if news is not None:
            # Those that came while this was worked out get the whole next time.
            for listener in self._listeners.difference(joining):
                if not listener.needs_whole:
                    listener.send(news)
        self._view = view


async def look(engine: AsyncEngine) -> View:
    """One look, on the engine's thread between two steps. Raises what `AsyncEngine.call` does."""

    def take(running: Engine) -> View:
        pool, counters = take_snapshot(running.scheduler), counters_of(running.stats())
        return View(pool, counters, engine.status, round(time.monotonic(), 3))

    return await engine.call(take)


def _event(name: str, payload: Any) -> bytes:
    return sse.named(name, msgspec.json.encode(payload))


def _whole_event(view: View) -> bytes:
    return _event("whole", whole(view))


def _change_event(before: View, after: View) -> bytes | None:
    changed = change(before, after)
    return None if changed is None else _event("change", changed)


def _whole_json(view: View) -> bytes:
    return msgspec.json.encode(whole(view))


def feed_of(request: Request) -> LiveFeed:
    """The server's one feed, made when it is asked for the first time."""
    state = request.app.state
    if not hasattr(state, "live_feed"):
        state.live_feed = LiveFeed(context_of(request).engine)
    feed = state.live_feed
    assert isinstance(feed, LiveFeed)
    return feed


async def live(request: Request) -> Response:
    """`whole`, then `change` events (see `server/live_wire.py`); `status` while the model loads;
    `end` as the last one when the server stops."""
    listener = feed_of(request).listen()
    keep_alive = context_of(request).settings.sse_keep_alive_interval or _KEEP_ALIVE
    return await until_disconnect(
        request, sse.event_response(listener, keep_alive=keep_alive, close=listener.close)
    )


async def blocks(request: Request) -> Response:
    """The whole view at this moment."""
    engine = context_of(request).engine
    body = await engine.run_in_pool(_whole_json, await look(engine))
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


ROUTES = [
    Route("/debug/live", live, methods=["GET"]),
    Route("/debug/blocks", blocks, methods=["GET"]),
]

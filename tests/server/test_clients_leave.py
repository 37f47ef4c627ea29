"""Clients that go away, at any time and in any way: what they asked for is given up, not computed
to its end, and nothing stays behind.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.live import MODEL, Live, live_server
from tests.server.scripted import Script
from tests.server.wire import Wire, post, request

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
NUM_SAMPLES = 2
_numbers = itertools.count()


def body_of(path: str, *, stream: bool) -> dict[str, Any]:
    """A long prompt that nobody has cached, and a long answer."""
    text = f"{next(_numbers)} " + "q " * 60
    common: dict[str, Any] = {"stream": stream, "ignore_eos": True}
    if path == "/v1/responses":
        return {**common, "input": text, "max_output_tokens": 100}
    common["max_tokens"] = 100
    if path == "/v1/completions":
        return {**common, "prompt": text, "n": NUM_SAMPLES}
    common["messages"] = [{"role": "user", "content": text}]
    return {**common, "model": MODEL} if path == "/v1/messages" else {**common, "n": NUM_SAMPLES}


def samples_of(path: str) -> int:
    return NUM_SAMPLES if path.endswith("completions") else 1


def close(wire: Wire) -> None:
    wire.close()


def close_half(wire: Wire) -> None:
    # Counts as gone: a client that was killed looks just the same.
    wire.socket.shutdown(socket.SHUT_WR)


def reset(wire: Wire) -> None:
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.close()


WAYS = {"close": close, "half": close_half, "reset": reset}
in_any_way = pytest.mark.parametrize("leave", WAYS.values(), ids=WAYS)
with_and_without_stream = pytest.mark.parametrize("stream", [False, True])
at_every_path = pytest.mark.parametrize("path", PATHS)


class Watch:
    """What the engine has done since."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self._before = live.engine.stats()

    def generated(self) -> int:
        return self.live.engine.stats().generation_tokens - self._before.generation_tokens

    def prompt_tokens(self) -> int:
        return self.live.engine.stats().prompt_tokens - self._before.prompt_tokens

    def ends(self) -> dict[str, int]:
        """How the requests ended, after all of them have."""
        self.live.wait_until(lambda: self.live.context.in_flight == 0)
        self.live.settle()
        after = Counter(self.live.engine.stats().requests_finished)
        return dict(after - Counter(self._before.requests_finished))


@pytest.fixture(scope="module")
def talkative() -> Iterator[Live]:
    script = Script(default=["a"], end=False, step_seconds=0.005)
    with live_server(script) as live:
        yield live


@pytest.fixture(scope="module")
def slow_reading() -> Iterator[Live]:
    """A step takes eight tokens of a prompt."""
    script = Script(default=["a"], end=False, step_seconds=0.02)
    with live_server(script, max_num_batched_tokens=8) as live:
        yield live


@pytest.fixture(scope="module")
def narrow() -> Iterator[Live]:
    """One request runs, the others wait."""
    script = Script(default=["a"], end=False, step_seconds=0.005)
    with live_server(script, max_num_seqs=1) as live:
        yield live


@in_any_way
@with_and_without_stream
@at_every_path
def test_while_its_tokens_come(
    talkative: Live, path: str, leave: Callable[[Wire], None], *, stream: bool
) -> None:
    watch = Watch(talkative)
    with Wire(talkative) as wire:
        wire.post(path, body_of(path, stream=stream))
        if stream:
            wire.until(b"data: ", 5)
        else:
            talkative.wait_until(lambda: watch.generated() > 3)
        leave(wire)
        assert watch.ends() == {"abort": samples_of(path)}


@in_any_way
@with_and_without_stream
@at_every_path
def test_while_its_prompt_is_computed(
    slow_reading: Live, path: str, leave: Callable[[Wire], None], *, stream: bool
) -> None:
    watch = Watch(slow_reading)
    with Wire(slow_reading) as wire:
        wire.post(path, body_of(path, stream=stream))
        slow_reading.wait_until(lambda: watch.prompt_tokens() > 0)
        leave(wire)
        assert watch.ends() == {"abort": samples_of(path)}
        assert watch.generated() == 0


@in_any_way
@with_and_without_stream
@at_every_path
def test_while_it_waits(
    narrow: Live, path: str, leave: Callable[[Wire], None], *, stream: bool
) -> None:
    watch = Watch(narrow)
    with Wire(narrow) as first, Wire(narrow) as wire:
        first.post("/v1/completions", {"prompt": "p", "max_tokens": 240, "stream": True})
        first.until(b"data: ")
        wire.post(path, body_of(path, stream=stream))
        narrow.wait_until(lambda: narrow.engine.stats().num_waiting > 0)
        leave(wire)
        narrow.wait_until(lambda: narrow.engine.stats().num_waiting == 0)
        assert narrow.engine.stats().num_running == 1, "who runs is not touched"
        first.close()
        assert watch.ends() == {"abort": samples_of(path) + 1}
        assert watch.prompt_tokens() < 10


@with_and_without_stream
@at_every_path
def test_before_the_engine_has_seen_it(path: str, *, stream: bool) -> None:
    # The engine listens between two steps only, and here one does not end.
    gate = threading.Event()
    script = Script(default=["a"], end=False, step_seconds=0.005, gate=gate)
    try:
        with (
            live_server(script) as live,
            Wire(live) as first,
            Wire(live) as wire,
        ):
            watch = Watch(live)
            first.post("/v1/completions", {"prompt": "p", "max_tokens": 8})
            live.wait_until(lambda: live.engine.seconds_in_step > 0)
            wire.post(path, body_of(path, stream=stream))
            live.wait_until(lambda: live.context.in_flight == 2)
            wire.close()
            live.wait_until(lambda: live.context.in_flight == 1)
            gate.set()
            assert first.answer().status == 200
            ends = watch.ends()
            assert ends.pop("length") == 1 and ends in ({}, {"abort": samples_of(path)})
    finally:
        gate.set()


@pytest.mark.parametrize(
    "more",
    [b"\r\n", request("GET", "/version"), post("/v1/completions", {"prompt": "p"})],
    ids=["newline", "get", "post"],
)
@with_and_without_stream
def test_with_more_on_its_way(talkative: Live, more: bytes, *, stream: bool) -> None:
    """What a client sent after its request does not hide that it has left."""
    watch = Watch(talkative)
    with Wire(talkative) as wire:
        wire.post("/v1/completions", body_of("/v1/completions", stream=stream))
        wire.send(more)
        talkative.wait_until(lambda: watch.generated() > 3)
        wire.close()
        assert watch.ends() == {"abort": NUM_SAMPLES}

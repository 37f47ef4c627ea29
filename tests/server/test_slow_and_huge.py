"""Clients that do not read, and requests of megabytes: others do not notice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.apps import ends_of, parse_events, texts_of
from tests.server.live import Live, live_server
from tests.server.scripted import Script
from tests.server.wire import Wire

N = 32
TALKATIVE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 200,
    "n": N,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
}
"""Its answer is 8 MB, which the buffers of the kernel do not hold."""


# ---------------------------------------------------------------------- slow readers


@pytest.fixture(scope="module")
def quick() -> Iterator[Live]:
    with live_server(Script(default=["a"], end=False), max_num_seqs=64) as live:
        yield live


def test_a_client_that_reads_late_gets_everything(quick: Live) -> None:
    with Wire(quick, receive_buffer=4096) as wire:
        wire.post("/v1/chat/completions", TALKATIVE)
        wire.until(b"data: ")
        quick.settle()  # the engine does not wait: all has been computed, and all blocks are free
        time.sleep(1.0)
        assert quick.context.in_flight == 1
        (connection,) = quick.server.server_state.connections
        # What has not been sent waits as what it is, not as bytes.
        assert 0 < connection.transport.get_write_buffer_size() < 256 * 1024
        with Wire(quick) as other:
            other.post("/v1/completions", {"prompt": "p", "max_tokens": 3})
            assert other.answer().json()["choices"][0]["text"] == "aaa"
        answer = wire.answer()
    assert answer.status == 200 and len(answer.body) > 4_000_000
    chunks = parse_events(answer.body)
    assert texts_of(chunks) == dict.fromkeys(range(N), "a" * 200)
    assert ends_of(chunks) == dict.fromkeys(range(N), ("length", None))
    quick.settle()


def test_a_client_that_never_reads_and_leaves(quick: Live) -> None:
    with Wire(quick, receive_buffer=4096) as wire:
        wire.post("/v1/chat/completions", TALKATIVE)
        wire.until(b"data: ")
        quick.settle()
    quick.wait_until(lambda: quick.context.in_flight == 0)


# ---------------------------------------------------------------------- large requests


@contextmanager
def watched_stream(live: Live) -> Iterator[list[float]]:
    """A stream that goes on meanwhile; the seconds between each two of its reads."""
    gaps: list[float] = []
    stop = threading.Event()

    def read() -> None:
        last = time.monotonic()
        while not stop.is_set():
            assert wire.socket.recv(65536)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    with Wire(live) as wire:
        wire.post("/v1/completions", {"prompt": "p", "max_tokens": 3900, "stream": True})
        wire.until(b"data: ", 3)
        reading = threading.Thread(target=read)
        reading.start()
        try:
            yield gaps
        finally:
            stop.set()
            reading.join()


def large_text() -> str:
    # Of words that no cache of a tokenizer holds.
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz é", k=9)) for _ in range(20_000)]
    return " ".join(draw.choices(words, k=210_000))


TEXT = large_text()
CUT = {"truncate_prompt_tokens": 4, "max_tokens": 1}
"""Of a prompt that is to be cut, all is tokenised; another of that length is refused at once."""


@pytest.fixture(scope="module")
def patient() -> Iterator[Live]:
    script = Script(default=["a"], end=False, step_seconds=0.005)
    with live_server(script, max_model_len=4000, num_blocks=1100) as live:
        yield live


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": TEXT, **CUT}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], **CUT}, 200),
        ("/tokenize", {"prompt": TEXT}, 200),
        ("/detokenize", {"tokens": [*range(300)] * 3000}, 200),
        ("/v1/completions", {"prompt": [[5] * 2000] * 1023 + [[5000]]}, 400),
    ],
    ids=["completion", "chat", "tokenize", "detokenize", "ids"],
)
def test_a_large_request_holds_nobody_up(
    patient: Live, path: str, body: dict[str, Any], status: int
) -> None:
    with watched_stream(patient) as gaps, Wire(patient) as wire:
        time.sleep(0.1)
        begun = time.monotonic()
        wire.post(path, body)
        answer = wire.answer()
        seconds = time.monotonic() - begun
    assert answer.status == status, answer.body[:500]
    assert seconds > 0.05, "that was no load"
    # Where it is the loop that works, nothing comes for as long as that takes.
    assert max(gaps) < max(0.6, seconds / 2), (max(gaps), seconds)
    patient.settle()

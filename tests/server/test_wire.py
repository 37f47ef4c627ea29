"""Requests and answers as bytes on a socket: what HTTP allows and what clients do with it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from server.settings import ServerConfig
from tests.server.apps import parse_events, texts_of
from tests.server.live import MODEL, Live, live_server
from tests.server.scripted import Script
from tests.server.wire import Wire, chunked, post, request

# Everything that some client takes for the end of a line, and what JSON has to escape.
PIECES = [
    "a\n",
    "b\r\n",
    "\r",
    "c\u2028d",
    "\u2029",
    "\x85",
    "\x0b\x0c",
    "\x1c",
    '"\\',
    "\x00",
    "🙂",
]
TEXT = "".join(PIECES)
COMPLETION = {"prompt": "p", "max_tokens": 40}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}
RESPONSE = {"input": "Hi", "max_output_tokens": 40}
MESSAGE = {**CHAT, "model": MODEL}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
}
PATHS = pytest.mark.parametrize("path", BODIES)


def text_of(path: str, answer: Any) -> Any:
    if path == "/v1/completions":
        return answer["choices"][0]["text"]
    if path == "/v1/chat/completions":
        return answer["choices"][0]["message"]["content"]
    return answer["output" if path == "/v1/responses" else "content"][0]


def streamed(path: str) -> dict[str, Any]:
    return {**BODIES[path], "stream": True}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    settings = ServerConfig(served_model_name=(MODEL,), max_request_bytes=100_000)
    # Steps slow enough that each token is sent by itself.
    with live_server(Script(default=PIECES, step_seconds=0.01), settings) as live:
        yield live


@pytest.fixture
def wire(live: Live) -> Iterator[Wire]:
    with Wire(live) as wire:
        yield wire
    live.settle()


# ---------------------------------------------------------------------- framing


@PATHS
def test_how_a_stream_is_framed(wire: Wire, path: str) -> None:
    wire.post(path, streamed(path))
    answer = wire.answer()
    assert (answer.version, answer.status) == ("HTTP/1.1", 200)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["transfer-encoding"] == "chunked"
    # Readers that decode each read by itself see whole events, and so whole characters.
    assert all(chunk.endswith(b"\n\n") for chunk in answer.chunks)
    assert len(answer.chunks) > len(PIECES) // 2, "it was held back"
    for event in answer.body.removesuffix(b"\n\n").split(b"\n\n"):
        *names, data = event.split(b"\n")
        assert data.startswith(b"data: ") and len(names) <= 1
        assert not names or names[0].startswith(b"event: ")
        assert len(data.decode().splitlines()) == 1 and b"\r" not in event
    # The connection is as good as new.
    wire.get("/version")
    assert wire.answer().status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_character_survives(wire: Wire, path: str) -> None:
    wire.post(path, streamed(path))
    assert texts_of(parse_events(wire.answer().body)) == {0: TEXT}
    wire.post(path, BODIES[path])
    assert text_of(path, wire.answer().json()) == TEXT


@PATHS
def test_clients_of_http_1_0(live: Live, path: str) -> None:
    for body in (BODIES[path], streamed(path)):
        with Wire(live) as wire:
            wire.post(path, body, version="1.0")
            answer = wire.answer()
            assert answer.status == 200 and answer.headers["connection"] == "close"
            # It knows no chunks: the end of the connection is the end of the answer.
            assert "transfer-encoding" not in answer.headers
            assert wire.rest() == b""
            if "stream" in body:
                assert answer.body.startswith((b"data: {", b"event: "))
                assert answer.body.endswith((b"}\n\n", b"data: [DONE]\n\n"))
            else:
                assert text_of(path, answer.json())
    live.settle()


@PATHS
def test_compression_is_offered_in_vain(wire: Wire, path: str) -> None:
    # A stream that is compressed is held back by most who decompress it.
    for body in (BODIES[path], streamed(path)):
        wire.post(path, body, "Accept-Encoding: gzip, deflate, br, zstd")
        answer = wire.answer()
        assert answer.status == 200 and "content-encoding" not in answer.headers


def test_head_and_options(wire: Wire) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/v1/models/scripted"):
        wire.get(path)
        whole = wire.answer()
        wire.get(path, method="HEAD")
        head = wire.answer(head=True)
        assert head.status == whole.status == 200
        assert head.headers.get("content-type") == whole.headers.get("content-type")
    for path in BODIES:
        for method in ("HEAD", "OPTIONS", "GET", "DELETE"):
            wire.get(path, method=method)
            answer = wire.answer(head=method == "HEAD")
            assert (answer.status, answer.headers["allow"]) == (405, "POST")


def test_a_client_that_offers_http2_gets_its_chat(live: Live) -> None:
    upgrade = (
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    )
    for body in (CHAT, streamed("/v1/chat/completions")):
        data = json.dumps(body).encode()
        with Wire(live) as wire:
            for part in chunked("/v1/chat/completions", [data[:1], data[1:9], data[9:]], *upgrade):
                wire.send(part)
                time.sleep(0.01)  # in packets of their own
            answer = wire.answer()
            assert answer.status == 200 and b'"finish_reason":"stop"' in answer.body
    live.settle()


# ---------------------------------------------------------------------- several requests


def test_requests_that_do_not_wait_for_answers(wire: Wire) -> None:
    paths = [*BODIES, *BODIES]
    requests = [
        post(path, BODIES[path] if i < len(BODIES) else streamed(path))
        for i, path in enumerate(paths)
    ]
    wire.send(b"".join([*requests, request("GET", "/version"), post("/v1/completions", {})]))
    for i, path in enumerate(paths):
        answer = wire.answer()
        assert answer.status == 200
        if i < len(BODIES):
            assert text_of(path, answer.json())
        else:
            assert answer.headers["content-type"].startswith("text/event-stream")
    assert "version" in wire.answer().json()
    assert wire.answer().status == 400


def test_the_body_after_100_continue(wire: Wire) -> None:
    body = json.dumps(CHAT).encode()
    head = ("Content-Type: application/json", "Expect: 100-continue")
    wire.send(request("POST", "/v1/chat/completions", *head, f"Content-Length: {len(body)}"))
    assert wire.answer().status == 100
    wire.send(body)
    assert wire.answer().status == 200
    # Nobody has to send a body that is not wanted.
    wire.send(request("POST", "/v1/chat/completions", *head, "Content-Length: 200000"))
    assert wire.answer().status == 413


@pytest.mark.parametrize("headers", [(), ("Connection: close",)], ids=["kept", "closed"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_newline_after_the_body(headers: tuple[str, ...], *, stream: bool) -> None:
    script = Script(default=["a"], end=False, step_seconds=0.005)
    with live_server(script) as live, Wire(live) as wire:
        wire.post("/v1/completions", {**COMPLETION, "stream": stream}, *headers)
        live.wait_until(lambda: live.engine.stats().num_running > 0)
        wire.send(b"\r\n")
        answer = wire.answer()
        assert answer.status == 200 and b'"finish_reason":"length"' in answer.body
        assert answer.headers.get("connection") == ("close" if headers else None)
        if not headers:
            wire.send(b"\r\n")
            wire.get("/version")
            assert wire.answer().status == 200
        live.settle()


@pytest.mark.parametrize(
    "parts",
    [
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"],  # TLS
        [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
        [b"hello\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nno header\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"x" * 200_000 + b"\r\n\r\n"],
        [b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"],
        [request("POST", "/v1/completions", "Content-Length: 5", "Content-Length: 6"), b"{}"],
        [request("POST", "/v1/completions", "Content-Length: -1"), b"{}"],
        [request("POST", "/v1/completions", "Transfer-Encoding: gzip"), b"{}"],
    ],
    ids=lambda parts: repr(parts[0][:30]),
)
def test_what_is_no_http(live: Live, parts: list[bytes]) -> None:
    with Wire(live) as wire:
        try:
            wire.send(*parts)
            answer = wire.rest()
        except ConnectionError:  # it did not listen to the end
            answer = wire.received
        assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501")), answer
    with Wire(live) as wire:
        wire.get("/version")
        assert wire.answer().status == 200
    live.settle()


def test_chunks_that_are_none(live: Live) -> None:
    head, *_ = chunked("/v1/completions", [])
    with Wire(live) as wire:
        wire.send(head, b'5\r\n{"pro\r\n', b"zz\r\nmpt\r\n")
        answer = wire.rest()
    assert not answer or answer.startswith(b"HTTP/1.1 400 ")
    live.wait_until(lambda: live.context.in_flight == 0)
    live.settle()

"""A client made of a socket: sends any bytes, and sees the answer as it is on the wire.

with Wire(live) as wire:
    wire.post("/v1/completions", {"prompt": "p", "stream": True})
    answer = wire.answer()
    answer.chunks        # as they were framed
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tests.server.live import Live

SECONDS = 30.0
"""Longest wait for anything from the server."""


@dataclass
class Answer:
    version: str
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    """Of a body in chunked encoding, without the empty one at the end."""

    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """One connection."""

    def __init__(self, live: Live, *, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(SECONDS)
        if receive_buffer is not None:  # before connecting: it bounds what TCP announces
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", live.port))
        self.received = b""
        """What has come and is not taken by `answer`."""

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.socket.sendall(part)

    def get(self, path: str, *headers: str, method: str = "GET", version: str = "1.1") -> None:
        self.send(request(method, path, *headers, version=version))

    def post(self, path: str, body: Any, *headers: str, version: str = "1.1") -> None:
        """`body` is JSON, or bytes as they are."""
        self.send(post(path, body, *headers, version=version))

    def until(self, text: bytes, count: int = 1) -> None:
        """Receive until `text` has come that often."""
        while self.received.count(text) < count:
            self._more()

    def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        while data := self.socket.recv(65536):
            self.received += data
        everything, self.received = self.received, b""
        return everything

    def answer(self, *, head: bool = False) -> Answer:
        """The next answer, whole. `head`: it has no body, whatever it announces."""
        self.until(b"\r\n\r\n")
        lines = self._take(self.received.index(b"\r\n\r\n") + 4).decode("latin-1").split("\r\n")
        version, status, _ = lines[0].split(" ", 2)
        pairs = [line.split(": ", 1) for line in lines[1:-2]]
        answer = Answer(version, int(status), {name.lower(): value for name, value in pairs})
        assert len(answer.headers) == len(pairs), f"a header comes twice: {pairs}"
        if head or 100 <= answer.status < 200 or answer.status in (204, 304):
            return answer
        if answer.headers.get("transfer-encoding") == "chunked":
            assert "content-length" not in answer.headers
            answer.chunks = self._chunks()
            answer.body = b"".join(answer.chunks)
        elif "content-length" in answer.headers:
            answer.body = self._exactly(int(answer.headers["content-length"]))
        else:
            assert answer.headers["connection"] == "close"
            answer.body = self.rest()
        return answer

    def _chunks(self) -> list[bytes]:
        chunks: list[bytes] = []
        while True:
            self.until(b"\r\n")
            size = int(self._take(self.received.index(b"\r\n") + 2), 16)
            data = self._exactly(size)
            assert self._exactly(2) == b"\r\n"
            if not size:
                return chunks
            chunks.append(data)

    def _exactly(self, size: int) -> bytes:
        while len(self.received) < size:
            self._more()
        return self._take(size)

    def _take(self, size: int) -> bytes:
        taken, self.received = self.received[:size], self.received[size:]
        return taken

    def _more(self) -> None:
        data = self.socket.recv(65536)
        assert data, f"the server closed the connection after {self.received!r:.500}"
        self.received += data


def request(method: str, path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: x", *headers, "", ""]).encode()


def post(path: str, body: Any, *headers: str, version: str = "1.1") -> bytes:
    """A whole request; `body` is JSON, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    own = ("Content-Type: application/json", f"Content-Length: {len(data)}")
    return request("POST", path, *own, *headers, version=version) + data


def chunked(path: str, parts: list[bytes], *headers: str) -> list[bytes]:
    """The same in chunked encoding, piece by piece."""
    own = ("Content-Type: application/json", "Transfer-Encoding: chunked")
    framed = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
    return [request("POST", path, *own, *headers), *framed, b"0\r\n\r\n"]

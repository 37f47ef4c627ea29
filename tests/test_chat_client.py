"""`jaxpaged chat` against a scripted OpenAI server."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpaged.chat_client import Answer, _rate, _told
from jaxpaged.chat_connection import clean
from jaxpaged.cli import main
from tests.bench.mini_server import MODEL, MiniServer, Reply, Seen, serving, text_chunks

ROOT = Path(__file__).resolve().parent.parent


def echo(seen: Seen) -> Reply:
    """Repeats the last message, a word at a time."""
    words = seen.body["messages"][-1]["content"].split(" ")
    return Reply(text_chunks(*(f"{word} " for word in words), chat=True))


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAXPAGED_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a text the program's standard input."""

    def put(text: str) -> None:
        stdin = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)

    return put


def test_one_question(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(MiniServer(echo)) as server:
        status = main(
            [
                *("chat", "--url", server.url + "/v1", "-q", "hello you", "--temperature", "0.5"),
                *("--system", "be kind", "--max-tokens", "9", "--api-key", "k"),
            ]
        )
    assert status == 0
    out, err = capsys.readouterr()
    assert out == "hello you \n"
    assert err == ""  # figures are for terminals
    (seen,) = server.seen
    assert seen.headers["authorization"] == "Bearer k"
    assert seen.body == {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hello you"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 9,
    }


def test_a_conversation(
    type_in: Callable[[str], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "chat.json"
    type_in(
        "first\n\n/retry\ntwo\\\nlines\n/save " + str(saved) + "\n/new\nafresh\n"
        "/system short\nruled\n/system\nfree\n/nonsense\n/help\n/retry\n/quit\nnever\n"
    )
    with serving(MiniServer(echo)) as server:
        assert main(["chat", "--url", server.url, "--model", "m"]) == 0
    out, err = capsys.readouterr()
    assert out == "first \nfirst \ntwo\nlines \nafresh \nruled \nfree \nfree \n"
    assert "no command /nonsense" in err
    assert err.count("/system TEXT") == 2
    first, again, third, fourth, fifth, sixth, seventh = (s.body["messages"] for s in server.seen)
    assert first == again == [{"role": "user", "content": "first"}]
    assert third == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "first "},
        {"role": "user", "content": "two\nlines"},
    ]
    assert fourth == [{"role": "user", "content": "afresh"}]
    assert fifth == [{"role": "system", "content": "short"}, {"role": "user", "content": "ruled"}]
    assert sixth == seventh == [{"role": "user", "content": "free"}]
    assert json.loads(saved.read_text())["messages"][-1] == {
        "role": "assistant",
        "content": "two\nlines ",
    }


def test_failures_do_not_end_a_conversation(
    type_in: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    replies = iter(
        [
            Reply(status=400, body={"error": {"message": "too \x1b[31mlong"}}),
            Reply([*text_chunks("par", "tly", chat=True)[:2], {"error": {"message": "died"}}]),
            Reply(["data: [1]\n\n"]),
            Reply(text_chunks("good", chat=True)),
        ]
    )
    type_in("one\ntwo\nthree\nfour\n")
    with serving(MiniServer(lambda _: next(replies))) as server:
        assert main(["chat", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out == "par\ngood\n"
    assert "error: the server: status 400: too [31mlong\n" in err
    assert "error: died\n" in err
    assert "error: the server sent what is no chunk: [1]" in err
    assert server.seen[-1].body["messages"] == [{"role": "user", "content": "four"}]


def test_the_last_failure_is_the_status(type_in: Callable[[str], None]) -> None:
    type_in("one\n")
    with serving(MiniServer(lambda _: Reply(status=500, body="no"))) as server:
        assert main(["chat", "--url", server.url]) == 1


def test_retry_after_a_failure_keeps_the_conversation(type_in: Callable[[str], None]) -> None:
    replies = iter([None, Reply(status=500, body="no"), None])
    type_in("one\n/retry\n/retry\n")
    with serving(MiniServer(lambda seen: next(replies) or echo(seen))) as server:
        assert main(["chat", "--url", server.url]) == 0
    assert [s.body["messages"] for s in server.seen] == [[{"role": "user", "content": "one"}]] * 3


def test_what_a_terminal_would_obey_is_taken_out(capsys: pytest.CaptureFixture[str]) -> None:
    nasty = ["\x1b", "]0;title\x07", "a\x9b31m\tb\r\n", "\x00\x7f\u202ec"]
    with serving(MiniServer(lambda _: Reply(text_chunks(*nasty, chat=True)))) as server:
        assert main(["chat", "--url", server.url, "-q", "x"]) == 0
    assert capsys.readouterr().out == "]0;titlea31m\tb\nc\n"
    assert (
        clean("Gr\u00fc\u00dfe \u4f60\u597d \U0001f600\n")
        == "Gr\u00fc\u00dfe \u4f60\u597d \U0001f600\n"
    )


def test_a_key_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = Reply(status=401, body={"error": {"message": "Incorrect API key provided."}})
    with serving(MiniServer(lambda _: refusal)) as server:
        assert main(["chat", "--url", server.url, "-q", "x"]) == 1
    message = "status 401: Incorrect API key provided.; give a key with --api-key"
    assert message in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert main(["chat", "--url", f"http://127.0.0.1:{port}", "-q", "x"]) == 1
    err = capsys.readouterr().err
    assert f"no server at http://127.0.0.1:{port}/v1" in err
    assert "`jaxpaged serve MODEL` starts one" in err


@pytest.mark.parametrize("url", ["nowhere", "ftp://a", "http://[", "http://a:b"])
def test_urls_that_are_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url, "-q", "x"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_no_models(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(MiniServer(echo, models=None)) as server:
        assert main(["chat", "--url", server.url, "-q", "x"]) == 1
        assert "/v1/models: status 404" in capsys.readouterr().err
        server.models = []
    with serving(MiniServer(echo, models=[])) as server:
        assert main(["chat", "--url", server.url, "-q", "x"]) == 1
        assert "lists no model; name one with --model" in capsys.readouterr().err


def test_figures() -> None:
    answer = Answer("x", "length", tokens=11, seconds_to_first=0.25, seconds=2.25)
    told = "[11 tokens, 5.0 tokens/s, first after 250 ms, cut at the token limit]"
    assert _told(answer, stopped=False) == told
    assert _told(answer, stopped=True).endswith(", stopped]")
    assert _told(Answer(), stopped=False) == "[no tokens]"
    assert _rate(1, 0.5, 0.5) is None


class Terminal:
    """`jaxpaged chat` on a terminal of its own."""

    def __init__(self, url: str) -> None:
        self._screen, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxpaged", "chat", "--url", url],
            cwd=ROOT,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(terminal)
        self.seen = ""

    def until(self, text: str) -> str:
        """Read until `text` is on the screen; returns what came since the last call."""
        os.set_blocking(self._screen, False)
        deadline = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self._screen, 4096).decode()
            except BlockingIOError:
                time.sleep(0.01)
        came, _, self.seen = self.seen.partition(text)
        return came + text

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(20)
        os.close(self._screen)


def test_on_a_terminal() -> None:
    def answer(seen: Seen) -> Reply:
        if seen.body["messages"][-1]["content"] == "hang":
            return Reply(text_chunks("par", "tly", chat=True)[:2], hang=True)
        return echo(seen)

    with serving(MiniServer(answer)) as server:
        terminal = Terminal(server.url)
        try:
            assert f"{MODEL} at {server.url}/v1; /help lists" in terminal.until("> ")
            terminal.type("one two\n")
            terminal.until("one two \r\n")
            assert "\x1b[2m[2 tokens, " in terminal.until("\x1b[0m")
            terminal.until("> ")
            terminal.type("hang\n")
            terminal.until("par")
            terminal.process.send_signal(signal.SIGINT)  # stops the answer, not the program
            assert "stopped]" in terminal.until("> ")
            terminal.process.send_signal(signal.SIGINT)  # drops what was typed
            terminal.until("> ")
            terminal.type("more\n")
            terminal.until("more \r\n")
            terminal.until("> ")
            terminal.type("\x04")
            assert terminal.process.wait(20) == 0
        finally:
            terminal.close()
    assert [m["content"] for m in server.seen[-1].body["messages"]] == [
        "one two",
        "one two ",
        "hang",
        "par",
        "more",
    ]

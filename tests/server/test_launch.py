"""Whole servers as processes: they start, say what they do, and always end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server import live
from tests.tiny_models import tiny_llama

ROOT = Path(__file__).resolve().parent.parent.parent
TLS = ROOT / "tests" / "data" / "tls"
SECONDS = 120.0
"""Longer than any start on a busy machine."""
GRACE = 20.0
"""In which every server must have ended, on a busy machine."""
ENDLESS = {"default": "word " * 50, "end": False, "step_seconds": 0.01}
LONG = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
until = partial(live.until, seconds=SECONDS)


class Server:
    """A server process. What it writes is collected while it runs."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},  # for scripts/, where nothing is installed
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line.decode()

    @property
    def url(self) -> str:
        """As soon as it listens."""
        pattern = r"Listening on (http\S+);"
        until(lambda: bool(re.search(pattern, self.log)) or self.process.poll() is not None)
        found = re.search(pattern, self.log)
        assert found, self.log
        return found[1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_ready(self) -> None:
        until(lambda: "Ready at " in self.log or self.process.poll() is not None)
        assert self.process.poll() is None, self.log

    def status(self, path: str) -> int:
        return httpx.get(self.url + path, timeout=GRACE).status_code

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it, and return its exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(GRACE)
        self._reader.join(GRACE)
        return status


@contextmanager
def started(*command: str) -> Iterator[Server]:
    server = Server(command)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(GRACE)
        server._reader.join(GRACE)
        for stream in (server.process.stdout, server.process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def scripted(script: dict[str, Any], *flags: str) -> Iterator[Server]:
    command = ["-m", "tests.server.serve_scripted", json.dumps(script), "--port", "0", *flags]
    with started(*command) as server:
        yield server


class Stream:
    """A streamed completion, read in a thread. `events` are the payloads."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self.events: list[str] = []
        self.failed: Exception | None = None
        body = LONG | fields
        self._thread = threading.Thread(target=self._read, args=(server.url, body), daemon=True)
        self._thread.start()
        until(lambda: bool(self.events) or not self._thread.is_alive())

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
        except Exception as error:
            self.failed = error

    def finish(self) -> list[str]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.events


def assert_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        probe.bind(("127.0.0.1", port))
        probe.listen()


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


# ---------------------------------------------------------------------- the real command


def test_the_command_serves_a_model_and_ends(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "tiny")
    config = tmp_path / "server.yaml"
    config.write_text(
        f"model: {model}\nmax-num-seqs: 4\nmax-num-batched-tokens: 32\nenforce-eager: true\n"
        "served-model-name: [tiny]\nswap-space: 4\nenable-log-requests: true\n"
    )
    words = ["-m", "server", "--config", str(config), "--port", "0", "--api-key", "bob:k-7777"]
    with started(*words) as server:
        assert server.status("/health") == 200
        assert server.status("/ready") in (503, 200)
        server.wait_ready()
        answer = httpx.post(
            f"{server.url}/v1/completions?api_key=k-7777",  # has no effect, but must not be logged
            json={"prompt": "hi", "max_tokens": 3, "temperature": 0},
            headers={"Authorization": "Bearer k-7777"},
            timeout=SECONDS,
        )
        assert answer.status_code == 200
        assert answer.json()["model"] == "tiny"
        assert answer.json()["usage"]["completion_tokens"] == 3
        port = server.port
        assert children_of(server.process.pid) == []
        assert server.end() == 0
        assert_free(port)
    assert "swap-space in " in server.log
    assert "API keys are needed: bob." in server.log
    assert "key bob" in server.log
    assert '"POST /v1/completions HTTP/1.1" 200' in server.log
    assert "k-7777" not in server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["/no/such/model"], 2, "error: "),
        (["--ssl-certfile", "missing.pem"], 2, "error: ssl_certfile missing.pem: No such file"),
        (["--api-key-file", "missing"], 2, "error: api_key_file missing: No such file"),
        (
            ["--ssl-certfile", str(TLS / "cert.pem"), "--ssl-keyfile", str(TLS / "cert.pem")],
            2,
            "no certificate and key in PEM that fit each other",
        ),
        (["--log-config-file", "missing"], 2, "error: log_config_file missing: No such file"),
        (["--host", "192.0.2.1"], 1, "error: --host 192.0.2.1 is no address of this machine"),
        (["--host", "no.such.host.invalid"], 1, "error: --host no.such.host.invalid: "),
        (["--uds", "/no/such/folder/socket"], 1, "error: --uds /no/such/folder/socket: No such"),
    ],
)
def test_what_cannot_start_says_why(words: list[str], status: int, reason: str) -> None:
    with started("scripts/serve.py", *words, "--port", "0") as server:
        assert server.process.wait(SECONDS) == status
        server._reader.join(GRACE)
    assert reason in server.log.splitlines()[-1]
    assert "Traceback" not in server.log


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with started("-m", "jaxpaged", "serve", "/no/such/model", "--port", port) as server:
            assert server.process.wait(SECONDS) == 1
            server._reader.join(GRACE)
    assert f"error: 127.0.0.1:{port} is in use by another program" in server.log
    assert "loading" not in server.log


def test_a_model_that_is_broken_is_told() -> None:
    with scripted({"load": "fail"}) as server:
        assert server.process.wait(SECONDS) == 2
        server._reader.join(GRACE)
    assert server.log.splitlines()[-1] == "error: The model is broken; take another."
    assert "Traceback" not in server.log


# ---------------------------------------------------------------------- how it ends


def test_streams_may_end_before_the_server_does() -> None:
    script = {"default": "word " * 60, "step_seconds": 0.02}
    with scripted(script, "--shutdown-timeout", "60") as server:
        server.wait_ready()
        streams = [Stream(server, ignore_eos=False) for _ in range(5)]
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)  # at once: some wrappers send it twice
        until(lambda: server.status("/ready") == 503)
        assert server.status("/health") == 200
        refused = httpx.post(f"{server.url}/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        port = server.port
        for stream in streams:
            events = stream.finish()
            assert stream.failed is None
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"
        assert server.wait() == 0
        assert_free(port)
    assert "Traceback" not in server.log


def test_streams_that_take_too_long_are_told() -> None:
    with scripted(ENDLESS, "--shutdown-timeout", "0.2") as server:
        server.wait_ready()
        streams = [Stream(server) for _ in range(5)]
        waiting = httpx.Client()  # a connection that idles must not hold anything up
        assert waiting.get(f"{server.url}/health").status_code == 200
        assert server.end(signal.SIGINT) == 0
        for stream in streams:
            events = stream.finish()
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["error"]["code"] == 503
        waiting.close()
    assert "were aborted" in server.log
    assert "Traceback" not in server.log


def test_a_second_signal_ends_at_once() -> None:
    with scripted(ENDLESS, "--shutdown-timeout", "100") as server:
        server.wait_ready()
        Stream(server)
        port = server.port
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "Stopping: 1 requests" in server.log)
        time.sleep(0.5)  # not the same wish twice
        assert server.end() == 128 + signal.SIGTERM
        assert_free(port)


def test_loading_does_not_hold_up_the_end() -> None:
    with scripted({"load": "hang"}) as server:
        until(lambda: httpx.get(f"{server.url}/ready").json()["detail"] == "3/8 programs compiled")
        port = server.port
        assert server.end() == 0
        assert_free(port)
    assert "the model has not been loaded" in server.log


def test_a_step_that_never_ends_does_not_hold_up_the_end() -> None:
    with scripted({**ENDLESS, "hang_at": 20}, "--shutdown-timeout", "0.2") as server:
        server.wait_ready()
        stream = Stream(server)
        assert server.end() == 0
        assert stream.finish()[-1] == "[DONE]"


def test_an_engine_that_dies_takes_the_server_with_it() -> None:
    with scripted({**ENDLESS, "die_at": 30}) as server:
        server.wait_ready()
        streams = [Stream(server) for _ in range(3)]
        for stream in streams:
            events = stream.finish()
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["error"]["code"] == 500
        assert server.status("/health") == 503
        port = server.port
        assert server.wait() == 1
        assert_free(port)
    assert "The engine has died; the server ends in 5 s." in server.log


# ---------------------------------------------------------------------- where it listens


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    leftover = socket.socket(socket.AF_UNIX)
    leftover.bind(str(path))
    leftover.close()  # as a server leaves it that was killed
    with scripted({}, "--uds", str(path)) as server:
        until(lambda: "Ready at unix:" in server.log)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://x/health").status_code == 200
        with started("scripts/serve.py", "--uds", str(path)) as second:
            assert second.process.wait(SECONDS) == 1
            second._reader.join(GRACE)
            assert "another server listens on it" in second.log
        assert path.exists()
        assert server.end() == 0
    assert not path.exists()


def test_tls(tmp_path: Path) -> None:
    log_config = tmp_path / "log.yaml"
    log_config.write_text(
        "version: 1\nformatters: {own: {format: 'OWN %(message)s'}}\n"
        "handlers: {own: {class: logging.StreamHandler, formatter: own}}\n"
        "root: {level: INFO, handlers: [own]}\n"
    )
    words = ["--ssl-certfile", str(TLS / "cert.pem"), "--ssl-keyfile", str(TLS / "key.pem")]
    words += ["--log-config-file", str(log_config)]
    words += ["--disable-access-log-for-endpoints", "/health"]
    with scripted({}, *words) as server:
        server.wait_ready()
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=TLS / "cert.pem")
        with httpx.Client(base_url=server.url, verify=context) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/version?key=s3cret").status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                httpx.get(server.url.replace("https", "http"))
            assert client.get("/version").status_code == 200
        assert server.end() == 0
    assert "OWN Ready at https://127.0.0.1:" in server.log
    assert '"GET /version HTTP/1.1" 200' in server.log
    assert "s3cret" not in server.log
    assert "/health" not in server.log


def test_all_interfaces_without_a_key_are_worth_a_warning() -> None:
    with scripted({}, "--host", "0.0.0.0", "--log-level", "warning") as server:
        until(lambda: "No API key is set, and the server listens on 0.0.0.0" in server.log)
        assert server.end() == 0
    assert " INFO server." not in server.log

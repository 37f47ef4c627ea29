"""/health, /ready, /version, /load: true whatever the engine does, and at once."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from jaxpaged import __version__
from server.settings import ServerConfig
from tests.server.live import MODEL, Live, live_server, until
from tests.server.scripted import Script

LONG = {"prompt": "hi", "max_tokens": 50, "ignore_eos": True}


def config(**settings: object) -> ServerConfig:
    return ServerConfig.from_dict({"served_model_name": (MODEL,), **settings})


def probe(live: Live, path: str) -> tuple[int, str]:
    answer = httpx.get(live.base_url + path, timeout=30)
    return answer.status_code, answer.json()["status"] if path == "/ready" else answer.text


def complete(live: Live) -> httpx.Response:
    return httpx.post(f"{live.base_url}/v1/completions", json=LONG, timeout=60)


def test_a_server_at_rest() -> None:
    with live_server() as live:
        for path in ("/health", "/ping"):
            answer = httpx.get(live.base_url + path)
            assert (answer.status_code, answer.content) == (200, b"")
        assert httpx.post(f"{live.base_url}/ping").status_code == 200
        assert probe(live, "/ready") == (200, "ready")
        assert httpx.get(f"{live.base_url}/version").json() == {"version": __version__}
        assert httpx.get(f"{live.base_url}/load").json() == {"server_load": 0}


def test_while_loading_it_lives_but_is_not_ready() -> None:
    gate = threading.Event()
    with live_server(load_gate=gate, wait_ready=False) as live:
        try:
            assert probe(live, "/health")[0] == 200
            until(lambda: live.engine.progress is not None)
            answer = httpx.get(f"{live.base_url}/ready")
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "5"
            detail = {"detail": "1/8 programs compiled", "programs": "1/8"}
            assert answer.json() == {"status": "loading", **detail}
        finally:
            gate.set()
        until(lambda: probe(live, "/ready") == (200, "ready"))


def test_under_load_it_answers_at_once() -> None:
    script = Script(default="word " * 100, end=False, step_seconds=0.02)
    with live_server(script) as live, ThreadPoolExecutor(16) as pool:
        running = [pool.submit(complete, live) for _ in range(16)]
        until(lambda: live.engine.stats().num_running > 4)
        seconds = []
        with httpx.Client(base_url=live.base_url) as client:
            for _ in range(10):
                start = time.monotonic()
                assert client.get("/health").status_code == 200
                seconds.append(time.monotonic() - start)
            assert client.get("/load").json()["server_load"] > 0
        assert live.engine.num_unfinished > 0, "there was no load"
        assert sorted(seconds)[len(seconds) // 2] < 0.1
        assert all(answer.result().status_code == 200 for answer in running)
        assert httpx.get(f"{live.base_url}/load").json() == {"server_load": 0}
        live.settle()


def test_a_step_that_hangs_is_told() -> None:
    gate = threading.Event()
    script = Script(gate=gate)
    settings = config(request_stall_timeout=0.2)
    with live_server(script, settings) as live, ThreadPoolExecutor(1) as pool:
        try:
            running = pool.submit(complete, live)
            until(lambda: probe(live, "/health")[0] == 503)
            assert "one step has been running for" in probe(live, "/health")[1]
            assert probe(live, "/ready") == (503, "stalled")
        finally:
            gate.set()
        assert running.result().status_code == 200
        until(lambda: probe(live, "/health")[0] == 200)


def test_a_step_that_takes_long_is_no_reason_to_restart() -> None:
    gate = threading.Event()
    with live_server(Script(gate=gate)) as live, ThreadPoolExecutor(1) as pool:
        try:
            running = pool.submit(complete, live)
            until(lambda: live.engine.seconds_in_step > 0.3)
            assert probe(live, "/health")[0] == 200
        finally:
            gate.set()
        assert running.result().status_code == 200


def test_when_the_engine_dies_everybody_is_told() -> None:
    # What no handler of ordinary errors stops: the thread ends.
    script = Script(fail_read=lambda step: SystemExit(1) if step == 3 else None)
    with live_server(script) as live, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(complete, live) for _ in range(4)]
        for answer in running:
            assert answer.result().status_code == 500
            assert "engine has died" in answer.result().json()["error"]["message"]
        assert probe(live, "/health")[0] == 503
        assert probe(live, "/ready") == (503, "dead")
        assert httpx.get(f"{live.base_url}/ping").status_code == 503
        assert complete(live).status_code == 500
        assert httpx.get(f"{live.base_url}/metrics").status_code == 200


def test_while_draining_it_lives_but_is_not_ready() -> None:
    gate = threading.Event()
    with live_server(Script(gate=gate)) as live, ThreadPoolExecutor(1) as pool:
        try:
            running = pool.submit(complete, live)
            until(lambda: live.engine.stats().num_running > 0)
            drained = asyncio.run_coroutine_threadsafe(live.engine.drain(30), live._loop)
            until(lambda: probe(live, "/ready") == (503, "draining"))
            assert probe(live, "/health")[0] == 200
            refused = complete(live)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
        finally:
            gate.set()
        assert running.result().status_code == 200
        assert drained.result(30)

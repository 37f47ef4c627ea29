"""The live view of the memory: who gets what, and that nobody looks when nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from jaxpaged.async_engine import AsyncEngine, RequestStream
from jaxpaged.sampling_params import SamplingParams
from server.live import MOST_BEHIND, Listener, LiveFeed
from server.settings import ServerConfig
from tests.server.live import MODEL, live_server
from tests.server.metrics_support import parsed, value
from tests.server.scripted import Script, running, scripted_async_engine

SECONDS = 20.0
FAST = 0.002


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await work()

    asyncio.run(bounded())


async def heard(listener: Listener) -> tuple[str, Any]:
    """The next event."""
    event = await anext(listener)
    found = re.fullmatch(rb"event: (\w+)\ndata: (.*)\n\n", event)
    assert found is not None, event
    return found[1].decode(), json.loads(found[2])


async def heard_until(listener: Listener, wanted: Callable[[str, Any], bool]) -> Any:
    while True:
        name, told = await heard(listener)
        if wanted(name, told):
            return told


async def until(reached: Callable[[], object]) -> None:
    while not reached():
        await asyncio.sleep(0.001)


class Looks:
    """Counts how often the engine is asked anything."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        call = engine.call

        async def counted(function: Any) -> Any:
            self.number += 1
            return await call(function)

        monkeypatch.setattr(engine, "call", counted)


@contextlib.asynccontextmanager
async def request_of(
    engine: AsyncEngine, prompt: str, max_tokens: int = 40
) -> AsyncIterator[RequestStream]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    stream = await engine.submit("0123456789abcdef-00000000", prompt, params)
    try:
        yield stream
    finally:
        stream.close()


def test_nobody_looks_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running(Script()) as engine:
            looks, feed = Looks(engine, monkeypatch), LiveFeed(engine, interval=FAST)
            async with request_of(engine, "hello") as stream:
                async for _ in stream:
                    pass
            assert (looks.number, feed.is_looking) == (0, False)
            first, second = feed.listen(), feed.listen()
            await until(lambda: looks.number >= 5)
            first.close()
            assert feed.is_looking
            second.close()
            second.close()
            assert not feed.is_looking
            # The task is gone, so there is nothing left that could look.
            await asyncio.sleep(0)
            assert not await looking()
            before = looks.number
            async with request_of(engine, "hello again") as stream:
                async for _ in stream:
                    pass
            assert looks.number == before
            third = feed.listen()
            assert (await heard(third))[0] == "whole"
            third.close()

    run(work)


def test_it_looks_at_most_once_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running(Script()) as engine:
            looks, feed = Looks(engine, monkeypatch), LiveFeed(engine, interval=0.05)
            began = time.monotonic()
            listeners = [feed.listen() for _ in range(20)]
            await until(lambda: looks.number >= 4)
            assert time.monotonic() - began >= 3 * 0.05
            for listener in listeners:
                listener.close()

    run(work)


def test_the_whole_first_then_changes_then_silence() -> None:
    async def work() -> None:
        async with running(Script(step_seconds=0.005, end=False), num_blocks=65) as engine:
            feed = LiveFeed(engine, interval=FAST)
            listener = feed.listen()
            name, told = await heard(listener)
            assert name == "whole"
            assert told["states"] == "0" + 64 * "f"
            assert (told["block_size"], told["requests"]) == (4, [])
            async with request_of(engine, "abcdefghij", max_tokens=30) as stream:
                name, told = await heard(listener)
                assert name == "change"
                [request] = told["requests"]["new"]
                assert request["id"] == "89abcdef"
                assert request["prompt"] == len(stream.prompt_token_ids)
                busy = await heard_until(listener, lambda _, t: t["running"] == 1)
                assert busy["counts"]["held"] > 0
                ended = await heard_until(listener, lambda _, t: t["running"] == 0)
                assert ended["counts"]["held"] == 0
                assert ended["requests"]["order"] == []
            quiet = asyncio.ensure_future(heard(listener))
            done, _ = await asyncio.wait((quiet,), timeout=0.1)
            assert not done, "an event though nothing has changed"
            quiet.cancel()
            listener.close()

    run(work)


def test_one_who_comes_later_gets_the_whole_and_agrees_with_the_first() -> None:
    async def work() -> None:
        async with running(Script(step_seconds=0.002, end=False)) as engine:
            feed = LiveFeed(engine, interval=FAST)
            first = feed.listen()
            assert (await heard(first))[0] == "whole"
            async with request_of(engine, "some text to begin with", max_tokens=150) as stream:
                await heard_until(first, lambda _, told: told["running"] == 1)
                second = feed.listen()
                name, told = await heard(second)
                assert name == "whole"
                assert [r["tokens"] >= len(stream.prompt_token_ids) for r in told["requests"]] == [
                    True
                ]
                name, later = await heard(second)
                assert name == "change"
                same = await heard_until(first, lambda _, t: t["seconds"] == later["seconds"])
                assert same == later
            first.close()
            second.close()

    run(work)


def test_one_who_does_not_keep_up_gets_the_whole_again() -> None:
    async def work() -> None:
        async with running(Script(step_seconds=0.001, end=False)) as engine:
            feed = LiveFeed(engine, interval=FAST)
            slow, quick = feed.listen(), feed.listen()
            assert (await heard(slow))[0] == "whole"
            async with request_of(engine, "text", max_tokens=240) as stream:
                number = 0
                while number < 3 * MOST_BEHIND:  # slow reads nothing meanwhile
                    name, _ = await heard(quick)
                    number += name == "change"
                waiting = [await heard(slow) for _ in range(2)]
                stream.close()
            names = [name for name, _ in waiting]
            # It may have been caught in the middle of a new run of changes.
            while "whole" not in names:
                assert len(names) <= MOST_BEHIND + 1
                names.append((await heard(slow))[0])
            slow.close()
            quick.close()

    run(work)


def test_while_the_model_loads_it_says_how_far_it_is() -> None:
    async def work() -> None:
        gate = threading.Event()
        engine = scripted_async_engine(Script(), load_gate=gate)
        feed = LiveFeed(engine, interval=FAST)
        engine.start()
        try:
            listener = feed.listen()
            told = await heard_until(listener, lambda _, t: t["progress"] is not None)
            assert told == {"status": "loading", "progress": [1, 8]}
            late = feed.listen()
            assert await heard(late) == ("status", told)
            gate.set()
            assert await heard_until(listener, lambda name, _: name == "whole")
            assert await heard_until(late, lambda name, _: name == "whole")
            listener.close()
            late.close()
        finally:
            gate.set()
            await engine.close()

    run(work)


def test_streams_end_once_the_server_has_drained() -> None:
    async def work() -> None:
        async with running(Script(step_seconds=0.005, end=False)) as engine:
            feed = LiveFeed(engine, interval=FAST)
            listener = feed.listen()
            async with request_of(engine, "text", max_tokens=40) as stream:
                await heard_until(listener, lambda _, told: told["running"] == 1)
                draining = asyncio.ensure_future(engine.drain(SECONDS))
                seen = await heard_until(listener, lambda _, told: told["status"] == "draining")
                assert seen["running"] == 1  # it can be watched to the end
                async for _ in stream:
                    pass
            assert await draining
            told = await heard_until(listener, lambda name, _: name == "end")
            assert told == {"status": "draining"}
            with pytest.raises(StopAsyncIteration):
                await anext(listener)
            assert not feed.is_looking
            late = feed.listen()
            assert await heard(late) == ("end", {"status": "draining"})
            late.close()
            listener.close()

    run(work)


def test_streams_end_when_the_engine_dies() -> None:
    async def work() -> None:
        async with running(Script()) as engine:
            feed = LiveFeed(engine, interval=FAST)
            listener = feed.listen()
            assert (await heard(listener))[0] == "whole"

            def die(_: object) -> None:
                raise SystemExit("killed by the test")

            with contextlib.suppress(Exception):
                await engine.call(die)
            told = await heard_until(listener, lambda name, _: name == "end")
            assert told == {"status": "dead"}
            listener.close()

    run(work)


def test_a_look_that_fails_is_logged_and_ends_the_streams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with running(Script()) as engine:
            feed = LiveFeed(engine, interval=FAST)

            async def broken(_: object) -> None:
                raise RuntimeError("no such luck")

            with monkeypatch.context() as patch:
                patch.setattr(engine, "call", broken)
                listener = feed.listen()
                assert await heard(listener) == ("end", {"status": "ready"})
            assert "no such luck" in caplog.text
            again = feed.listen()
            assert (await heard(again))[0] == "whole"
            again.close()
            listener.close()

    run(work)


# ---------------------------------------------------------------- over the network


GAUGES = {
    "vllm:num_requests_running": lambda told: told["running"],
    "vllm:num_requests_waiting": lambda told: told["waiting"],
    "vllm:prefix_cache_hits_total": lambda told: told["counters"]["prefix_hit_tokens"],
    "vllm:prefix_cache_queries_total": lambda told: told["counters"]["prefix_query_tokens"],
    "vllm:num_preemptions_total": lambda told: told["counters"]["preemptions"],
    "vllm:kv_cache_usage_perc": lambda told: (
        (told["counts"]["held"] + told["counts"]["shared"]) / (len(told["states"]) - 1)
    ),
}
STATES = ("free", "cached", "held", "shared")


def scrape(text: bytes) -> dict[str, float]:
    families = parsed(text)
    found = {name: value(families, name) for name in GAUGES}
    return found | {state: value(families, "jaxpaged:kv_blocks", state=state) for state in STATES}


def test_the_snapshot_agrees_with_the_metrics_and_tells_no_text() -> None:
    secret = "xylophone"
    script = Script(step_seconds=0.04, end=False)
    with (
        live_server(script, num_blocks=65) as live,
        httpx.Client(base_url=live.base_url, timeout=SECONDS) as client,
    ):
        body = {"model": MODEL, "prompt": f"{secret} " * 5, "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
        body |= {"stream": True, "max_tokens": 120, "n": 2}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            deadline = time.monotonic() + SECONDS
            while True:  # the engine goes on: compare what was looked at within one step
                before = scrape(client.get("/metrics").content)
                response = client.get("/debug/blocks")
                if scrape(client.get("/metrics").content) == before:
                    break
                assert time.monotonic() < deadline
        live.settle()
        after = client.get("/debug/blocks").json()
    told = response.json()
    assert response.headers["content-type"] == "application/json"
    assert response.headers["cache-control"] == "no-store"
    assert secret not in response.text
    assert {name: gauge(told) for name, gauge in GAUGES.items()} == pytest.approx(
        {name: before[name] for name in GAUGES}
    )
    assert {state: told["counts"][state] for state in STATES} == {s: before[s] for s in STATES}
    assert before["vllm:num_requests_running"] == 2
    assert before["vllm:prefix_cache_hits_total"] > 0 and before["shared"] > 0
    # The second sample is a fork of the first: it has looked nothing up.
    assert [(r["sample"], r["cached"] > 0) for r in told["requests"]] == [(0, True), (1, False)]
    assert after["counts"]["held"] == after["counts"]["shared"] == 0 < after["counts"]["cached"]


def test_both_need_the_key_when_there_is_one() -> None:
    settings = ServerConfig(served_model_name=(MODEL,), api_key=("sesame",))
    with live_server(settings=settings) as live, httpx.Client(timeout=SECONDS) as client:
        for path in ("/debug/blocks", "/debug/live"):
            assert client.get(live.base_url + path).status_code == 401
        key = {"Authorization": "Bearer sesame"}
        assert client.get(f"{live.base_url}/debug/blocks", headers=key).status_code == 200
        with client.stream("GET", f"{live.base_url}/debug/live", headers=key) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-accel-buffering"] == "no"
            lines = response.iter_lines()
            assert next(lines) == "event: whole"


async def looking() -> bool:
    return any(task.get_name() == "jaxpaged-live" for task in asyncio.all_tasks())


def test_a_client_that_leaves_is_noticed_though_nothing_happens() -> None:
    with live_server() as live, httpx.Client(timeout=SECONDS) as client:
        for _ in range(2):
            with client.stream("GET", f"{live.base_url}/debug/live") as response:
                lines = response.iter_lines()
                assert next(lines) == "event: whole"
                assert live.run(looking())
            deadline = time.monotonic() + SECONDS
            while live.run(looking()):
                assert time.monotonic() < deadline, "the server still looks"
                time.sleep(0.005)


def test_blocks_while_loading_is_a_503() -> None:
    gate = threading.Event()
    try:
        with live_server(wait_ready=False, load_gate=gate) as live:
            response = httpx.get(f"{live.base_url}/debug/blocks", timeout=SECONDS)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            gate.set()
    finally:
        gate.set()

"""The engine's thread: streams of deltas, aborts, drains, deaths. No device is involved."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from jaxpaged.async_engine import AsyncEngine
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Request
from jaxpaged.engine import Engine
from jaxpaged.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    UnavailableError,
)
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import SamplingParams
from tests.server.scripted import Script, running, scripted_async_engine, settled

LONG = SamplingParams(max_tokens=None, ignore_eos=True)


async def collect(engine: AsyncEngine, request_id: str, prompt: Any,
                  params: SamplingParams | BeamSearchParams,
                  **options: Any) -> list[RequestOutput]:  # fmt: skip
    stream = await engine.submit(request_id, prompt, params, **options)
    try:
        return [output async for output in stream]
    finally:
        stream.close()


def text_of(outputs: list[RequestOutput], index: int = 0) -> str:
    return "".join(o.text for output in outputs for o in output.outputs if o.index == index)


def test_deltas_join_to_the_whole() -> None:
    async def run() -> None:
        async with running(Script("one two three")) as engine:
            params = SamplingParams(max_tokens=50, logprobs=2, prompt_logprobs=1)
            outputs = await collect(engine, "a", "Say it", params)
            assert text_of(outputs) == "one two three"
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[-1].outputs[0].finish_reason == "stop"
            tokens = [t for o in outputs for c in o.outputs for t in c.token_ids]
            assert len(tokens) == len(outputs) > 3  # one token a delta
            logprobs = [e for o in outputs for c in o.outputs for e in c.logprobs or []]
            assert [next(iter(entry)) for entry in logprobs] == tokens
            told = [o.prompt_logprobs for o in outputs]
            assert told[0] is not None and told[1:] == [None] * (len(told) - 1)
            assert len(told[0]) == len(outputs[0].prompt_token_ids)
            times = outputs[-1].times
            assert times is not None and times.scheduled and times.first_token and times.last_token
            assert times.arrival <= times.scheduled <= times.first_token < times.last_token
            await settled(engine)

    asyncio.run(run())


@pytest.mark.parametrize("interval", [1, 2, 3, 100])
def test_a_delta_comes_first_then_every_few_tokens_and_at_the_end(interval: int) -> None:
    async def run() -> None:
        async with running(Script([5, 6, 7, 8, 9, 10, 11, 12], end=False)) as engine:
            params = SamplingParams(max_tokens=8)
            outputs = await collect(engine, "a", "Say it", params, stream_interval=interval)
            sizes = [len(o.outputs[0].token_ids) for o in outputs]
            assert sizes == {1: [1] * 8, 2: [1, 2, 2, 2, 1], 3: [1, 3, 3, 1], 100: [1, 7]}[interval]

    asyncio.run(run())


def test_samples_of_one_request_are_told_apart() -> None:
    async def run() -> None:
        async with running(Script("one two three")) as engine:
            params = SamplingParams(max_tokens=50, n=3)
            outputs = await collect(engine, "a", "Say it", params)
            assert [text_of(outputs, i) for i in range(3)] == ["one two three"] * 3
            ends = [c.index for o in outputs for c in o.outputs if c.finish_reason]
            assert sorted(ends) == [0, 1, 2]

    asyncio.run(run())


def test_samples_end_one_by_one_and_are_told_once() -> None:
    async def run() -> None:
        replies = [["a"] * 7, ["b"], ["c"] * 3]
        async with running(Script(default=["x"], samples=replies)) as engine:
            params = SamplingParams(max_tokens=50, n=3)
            outputs = await collect(engine, "a", "Say it", params)
            assert [text_of(outputs, i) for i in range(3)] == ["a" * 7, "b", "ccc"]
            ends = [c.index for o in outputs for c in o.outputs if c.finish_reason]
            assert ends == [1, 2, 0]
            shown = [c.index for o in outputs for c in o.outputs]
            assert [shown.count(i) for i in range(3)] == [8, 2, 4]  # each token, EOS too
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            stats = engine.stats()
            assert (stats.forks, stats.prompt_tokens) == (2, len(outputs[0].prompt_token_ids))
            await settled(engine)

    asyncio.run(run())


def test_a_beam_search_is_told_at_its_end() -> None:
    async def run() -> None:
        async with running(Script([5, 6, 7, 8], end=False)) as engine:
            params = BeamSearchParams(beam_width=4, max_tokens=6)
            [output] = await collect(engine, "a", "Say it", params)
            assert output.finished and [c.index for c in output.outputs] == [0, 1, 2, 3]
            assert output.outputs[0].token_ids == [5, 6, 7, 8, 5, 6]
            scores = [c.score or 0.0 for c in output.outputs]
            assert scores == sorted(scores, reverse=True) and scores[0] < 0
            await settled(engine)

    asyncio.run(run())


GROUPS: dict[str, SamplingParams | BeamSearchParams] = {
    "samples": SamplingParams(n=3, max_tokens=None, ignore_eos=True),
    "beams": BeamSearchParams(beam_width=3, max_tokens=None, ignore_eos=True),
}
PHASES: dict[str, tuple[Callable[[Engine], bool], dict[str, int]]] = {
    "waiting": (lambda engine: engine.scheduler.num_waiting == 3, {"max_num_seqs": 3}),
    "prompt": (
        lambda engine: any(7 < r.num_computed_tokens < 41 for r in grouped(engine)),
        {"max_num_batched_tokens": 8},
    ),
    "mid-decode": (
        lambda engine: any(r.num_output_tokens > 5 for r in grouped(engine)),
        {},
    ),
    "preempted": (
        lambda engine: engine.stats().preemptions > 0 and engine.scheduler.num_waiting == 3,
        {"num_blocks": 40},
    ),
}


def grouped(engine: Engine) -> list[Request]:
    return [request for request in engine.scheduler.running if request.group is not None]


@pytest.mark.parametrize("cancelled", [False, True], ids=["closed", "cancelled"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", GROUPS)
def test_a_group_is_left_in_any_phase(kind: str, phase: str, cancelled: bool) -> None:
    reached, limits = PHASES[phase]

    async def run() -> None:
        script = Script([5, 6, 7], end=False, step_seconds=0.005)
        async with running(script, **limits) as engine:
            other = SamplingParams(max_tokens=110, ignore_eos=True)
            stays = asyncio.create_task(collect(engine, "stays", [9] * 7, other))
            while engine.stats().num_running == 0:
                await asyncio.sleep(0.001)
            before = engine.stats().preemptions
            reader = asyncio.create_task(collect(engine, "gone", [8] * 41, GROUPS[kind]))
            while "gone" not in engine._streams or not await engine.call(reached):
                await asyncio.sleep(0.001)
            assert (engine.stats().preemptions > before) == (phase == "preempted")
            if cancelled:
                reader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reader
            else:
                engine._streams["gone"].close()
                for output in await reader:  # what it had read before
                    assert not output.finished
            outputs = await stays
            tokens = [t for o in outputs for c in o.outputs for t in c.token_ids]
            assert tokens == ([5, 6, 7] * 37)[:110]
            await settled(engine)
            whole = {"length": 1, "abort": 3 if kind == "samples" else 1}
            assert engine.stats().requests_finished == whole
            assert await engine.call(lambda e: (len(e._states), len(e._changed))) == (0, 0)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_a_group_has_in_common_waits_in_the_queue_once() -> None:
    async def run() -> None:
        script = Script([5, 6], end=False, step_seconds=0.02)
        async with running(script, max_queued_tokens=9, max_num_seqs=4) as engine:
            streams = [await engine.submit("0", [1] * 4, LONG)]
            await anext(streams[0])
            streams.append(await engine.submit("1", [1] * 4, GROUPS["samples"]))
            await anext(streams[1])
            for request_id, kind in (("2", "samples"), ("3", "beams")):
                streams.append(await engine.submit(request_id, [2] * 4, GROUPS[kind]))
            with pytest.raises(UnavailableError, match="8 prompt tokens are waiting"):
                await engine.submit("4", [1] * 2, LONG)
            for stream in streams:
                stream.close()
            await settled(engine)

    asyncio.run(run())


def test_bad_requests_are_refused_before_anything_runs() -> None:
    async def run() -> None:
        async with running(Script([5], end=False, step_seconds=0.01)) as engine:
            with pytest.raises(InvalidRequestError, match="vocabulary"):
                await engine.submit("a", [10**9], LONG)
            with pytest.raises(InvalidRequestError, match="maximum context length is 256 tokens"):
                await engine.submit("a", [1] * 256, LONG)
            assert engine.stats().steps == 0
            stream = await engine.submit("a", "x", LONG)
            with pytest.raises(InvalidRequestError, match="in use"):
                await engine.submit("a", "x", LONG)
            stream.close()
            await settled(engine)

    asyncio.run(run())


def test_closing_a_stream_aborts_wherever_the_request_is() -> None:
    async def run() -> None:
        script = Script([5, 6, 7], end=False, step_seconds=0.02)
        async with running(script, max_num_seqs=2, max_num_batched_tokens=8) as engine:
            decoding = await engine.submit("decoding", [8] * 4, LONG)
            long_prompt = await engine.submit("chunked", [7] * 200, LONG)
            waiting = await engine.submit("waiting", [9] * 4, LONG)
            assert (await anext(decoding)).outputs[0].token_ids == [5]
            for stream in (waiting, long_prompt, decoding):
                stream.close()
                stream.close()
                assert [output async for output in stream] == []
            await settled(engine)
            assert engine.stats().requests_finished == {"abort": 3}

    asyncio.run(run())


def test_a_cancelled_submission_leaves_nothing() -> None:
    async def run() -> None:
        gate = threading.Event()
        async with running(Script([5, 6], end=False, gate=gate)) as engine:
            first = await engine.submit("first", [1, 2], LONG)
            # The engine waits at the gate, so this cannot be accepted yet.
            second = asyncio.create_task(engine.submit("second", [3, 4], LONG))
            while "second" not in engine._streams:
                await asyncio.sleep(0.001)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            gate.set()
            first.close()
            await settled(engine)

    asyncio.run(run())


def test_samples_and_beams_wait_as_one_request() -> None:
    async def run() -> None:
        script = Script([5, 6], end=False, step_seconds=0.02)
        async with running(script, max_queued_requests=2, max_num_seqs=4) as engine:
            streams = [await engine.submit("0", [1] * 4, LONG)]
            await anext(streams[0])
            for request_id, kind in (("1", "samples"), ("2", "beams"), ("3", "samples")):
                streams.append(await engine.submit(request_id, [2] * 4, GROUPS[kind]))
                if request_id == "1":  # it runs besides the first
                    await anext(streams[1])
            with pytest.raises(UnavailableError, match="2 requests are waiting"):
                await engine.submit("4", [1], LONG)
            streams.pop().close()
            streams.append(await engine.submit("4", [1], LONG))
            for stream in streams:
                stream.close()
            await settled(engine)
            assert await engine.call(lambda e: (e.num_queued, e.num_queued_tokens)) == (0, 0)

    asyncio.run(run())


def test_queue_limits() -> None:
    async def run() -> None:
        script = Script([5, 6], end=False, step_seconds=0.02)
        limits = {"max_queued_requests": 2, "max_queued_tokens": 9, "max_num_seqs": 1}
        async with running(script, **limits) as engine:
            streams = [await engine.submit("0", [1] * 4, LONG)]
            await anext(streams[0])
            streams += [await engine.submit(str(i), [1] * 4, LONG) for i in (1, 2)]
            with pytest.raises(UnavailableError, match="max_num_queued_reqs=2") as caught:
                await engine.submit("3", [1], LONG)
            assert caught.value.retry_after == 1.0
            streams.pop().close()
            with pytest.raises(UnavailableError, match="max_num_queued_tokens=9"):
                await engine.submit("3", [1] * 6, LONG)
            streams.append(await engine.submit("3", [1] * 5, LONG))
            for stream in streams:
                stream.close()
            await settled(engine)

    asyncio.run(run())


def test_draining_waits_then_aborts() -> None:
    async def run() -> None:
        async with running(Script("one two three")) as engine:
            streams = [await engine.submit(str(i), "x", SamplingParams()) for i in range(3)]
            assert await engine.drain(30)
            assert [o.finished async for o in streams[0]][-1]
            with pytest.raises(UnavailableError, match="shutting down"):
                await engine.submit("late", "x", LONG)
        async with running(Script([5], end=False, step_seconds=0.01)) as engine:
            stream = await engine.submit("endless", "x", LONG)
            assert not await engine.drain(0.05)
            assert [o async for o in stream][-1].outputs[0].finish_reason == "abort"
            assert engine.num_unfinished == 0

    asyncio.run(run())


def test_a_failed_step_is_survived() -> None:
    async def run() -> None:
        script = Script("one two three")
        script.fail_read = lambda step: RuntimeError("device lost") if step == 3 else None
        async with running(script) as engine:
            outputs = await collect(engine, "a", "x", LONG)
            assert outputs[-1].outputs[0].finish_reason == "error"
            assert "device lost" in (outputs[-1].outputs[0].error or "")
            assert text_of(await collect(engine, "b", "x", SamplingParams())) == "one two three"
            assert engine.status == "ready" and engine.stats().failed_steps == 2  # it and the next

    asyncio.run(run())


def raise_exit(engine: object) -> None:
    raise SystemExit("stop")


def test_a_dead_thread_ends_every_request() -> None:
    async def run() -> None:
        gate = threading.Event()
        gate.set()
        async with running(Script([5], end=False, step_seconds=0.005, gate=gate)) as engine:
            streams = [await engine.submit(str(i), "x", LONG) for i in range(3)]
            with pytest.raises(EngineDeadError):
                await engine.call(raise_exit)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="SystemExit"):
                    [_ async for _ in stream]
            assert engine.status == "dead" and engine.num_unfinished == 0
            for call in (engine.submit("n", "x", LONG), engine.call(lambda e: None)):
                with pytest.raises(EngineDeadError):
                    await call

    asyncio.run(run())


def test_loading() -> None:
    async def run() -> None:
        gate = threading.Event()
        engine = scripted_async_engine(Script(), load_gate=gate)
        engine.start()
        while engine.progress is None:
            await asyncio.sleep(0.001)
        assert engine.status == "loading" and engine.progress == (1, 8)
        calls: list[Callable[[], Any]] = [lambda: engine.info, lambda: engine.tokenizer]
        for call in calls:
            with pytest.raises(UnavailableError, match="1/8 programs"):
                call()
        with pytest.raises(UnavailableError, match="loading"):
            await engine.submit("a", "x", LONG)
        assert engine.stats().steps == 0
        gate.set()
        await engine.wait_ready()
        assert engine.status == "ready" and engine.info.block_size == 4
        await engine.close()
        await engine.close()
        assert engine.status == "closed"
        with pytest.raises(UnavailableError):
            await engine.submit("a", "x", LONG)

    asyncio.run(run())


def test_what_loading_raises_is_told() -> None:
    async def run() -> None:
        def build(config: EngineConfig, progress: object) -> Any:
            raise ConfigError("no such thing")

        engine = AsyncEngine(EngineConfig(), build=build)
        engine.start()
        with pytest.raises(ConfigError, match="no such thing"):
            await engine.wait_ready()
        assert engine.status == "dead"
        with pytest.raises(EngineDeadError):
            await engine.submit("a", "x", LONG)
        await engine.close()

    asyncio.run(run())


def test_several_processes_are_refused() -> None:
    config = EngineConfig(num_processes=2, coordinator="127.0.0.1:1234")
    with pytest.raises(ConfigError, match="one process"):
        AsyncEngine(config)


def test_two_thousand_aborts_leave_nothing() -> None:
    async def run() -> None:
        async with running(Script([5, 6, 7], end=False)) as engine:
            for i in range(2000):
                stream = await engine.submit(str(i), [1 + i % 100, 2, 3], LONG)
                if i % 3:
                    await anext(stream)
                stream.close()
            await settled(engine)
            sizes = await engine.call(lambda e: (len(e._states), len(e._changed)))
            assert sizes == (0, 0)

    asyncio.run(run())

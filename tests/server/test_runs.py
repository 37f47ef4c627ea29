"""Several prompts and samples as one stream of pieces."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.errors import EngineDeadError
from jaxpaged.intake import ParsedPrompt
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.request_stream import RequestStream
from jaxpaged.sampling_params import SamplingParams
from server.context import Context
from server.errors import ApiError
from server.metrics import HttpMetrics
from server.runs import Piece, Run, start_run
from server.settings import ServerConfig
from tests.server.scripted import Script, running, settled

LONG = SamplingParams(max_tokens=None, ignore_eos=True)


def context_for(engine: Any, **settings: Any) -> Context:
    return Context(engine, ServerConfig(**settings), HttpMetrics())


async def pieces_of(run: Run) -> list[Piece]:
    try:
        return [piece async for piece in run]
    finally:
        run.close()


def joined(pieces: list[Piece]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for piece in pieces:
        texts[piece.index] = texts.get(piece.index, "") + piece.text
    return texts


def test_prompts_times_samples() -> None:
    async def run() -> None:
        short, long = ["one", " two"], ["three", " four"] * 60
        script = Script(default=short, replies={"first": long}, step_seconds=0.002)
        async with running(script) as engine:
            seen = threading.Event()

            def stand_still(step: int) -> None:
                """Once the short ones have ended, until that was seen."""
                assert engine.stats().requests_finished.get("stop", 0) < 2 or seen.wait(60)

            script.fail_read = stand_still
            params = SamplingParams(n=2, max_tokens=200, prompt_logprobs=0)
            run = await start_run(context_for(engine), "r", ["the first", "the other"], params)
            pieces = []
            while len(ends := [p.index for p in pieces if p.finish_reason is not None]) < 2:
                pieces.append(await anext(run))
            assert sorted(ends) == [2, 3]
            seen.set()
            pieces += await pieces_of(run)
            texts = {0: long, 1: long, 2: short, 3: short}
            assert joined(pieces) == {i: "".join(reply) for i, reply in texts.items()}
            ends = [p.index for p in pieces if p.finish_reason is not None]
            assert sorted(ends) == [0, 1, 2, 3]
            usage = run.usage()
            assert usage.prompt_tokens == sum(len(p.prompt_token_ids) for p in run.prompts)
            assert usage.completion_tokens == sum(len(p.token_ids) for p in pieces)
            told = [p.index for p in pieces if p.prompt_logprobs is not None]
            assert sorted(told) == [0, 2]
            await settled(engine)

    asyncio.run(run())


def test_what_was_there_before_anybody_listened_is_told() -> None:
    """Outputs, and after them the failure of an engine that died meanwhile."""
    stream = RequestStream("r", ParsedPrompt(None, [1], None), lambda request_id: None)
    output = RequestOutput("r", None, [1], [CompletionOutput(0, "a", [5])], False)
    stream.push(output)
    stream.fail(EngineDeadError("gone"))
    calls: list[None] = []
    stream.notify(lambda: calls.append(None))
    assert len(calls) == 2
    assert stream.take() is output
    with pytest.raises(EngineDeadError):
        stream.take()


def test_of_a_search_the_best_are_told() -> None:
    async def run() -> None:
        async with running(Script([5, 6, 7], end=False)) as engine:
            context, search = context_for(engine), BeamSearchParams(beam_width=3, max_tokens=4)
            whole = await pieces_of(await start_run(context, "a", [[8], [9]], search))
            assert [p.index for p in whole] == list(range(6))
            assert [p.finish_reason for p in whole] == ["length"] * 6
            assert whole[0].token_ids == [5, 6, 7, 5]
            run = await start_run(context, "b", [[8], [9]], search, n=2)
            best = await pieces_of(run)
            assert [p.index for p in best] == list(range(4))
            assert [p.token_ids for p in best] == [whole[i].token_ids for i in (0, 1, 3, 4)]
            assert run.usage().completion_tokens == 16
            await settled(engine)

    asyncio.run(run())


def test_one_bad_prompt_refuses_all() -> None:
    async def run() -> None:
        async with running(Script([5], end=False, step_seconds=0.005)) as engine:
            with pytest.raises(ApiError, match="prompt 2: .*vocabulary") as caught:
                await start_run(context_for(engine), "r", ["a", "b", [10**6], "c"], LONG)
            assert caught.value.status == 400 and caught.value.param == "prompt"
            await settled(engine)

    asyncio.run(run())


def test_close_and_cancel_leave_nothing() -> None:
    async def run() -> None:
        async with running(Script([5], end=False, step_seconds=0.005)) as engine:
            run = await start_run(context_for(engine), "r", ["a", "b"], LONG)
            await anext(run)
            run.close()
            run.close()
            assert [piece async for piece in run] == []
            await settled(engine)

            run = await start_run(context_for(engine), "r", ["a", "b", "c"], LONG)
            reading = asyncio.create_task(pieces_of(run))
            await asyncio.sleep(0.02)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await settled(engine)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not {task for task in others if not task.done()}

    asyncio.run(run())


def test_cancelling_the_submission_aborts_what_was_accepted() -> None:
    async def run() -> None:
        gate = threading.Event()
        async with running(Script([5], end=False, gate=gate)) as engine:
            context = context_for(engine)
            first = await start_run(context, "first", ["a"], LONG)
            starting = asyncio.create_task(start_run(context, "r", ["b", "c"], LONG))
            while engine.num_unfinished < 3:
                await asyncio.sleep(0.001)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            gate.set()
            first.close()
            await settled(engine)

    asyncio.run(run())


def test_failures_and_aborts_are_errors() -> None:
    async def run() -> None:
        script = Script([5], end=False, step_seconds=0.005)
        error = RuntimeError("device lost at 0x7f0011223344 in /opt/venv/lib/xla.py:12, line 3")
        script.fail_read = lambda step: error if step == 4 else None
        async with running(script) as engine:
            run = await start_run(context_for(engine), "r", ["a", "b"], LONG)
            with pytest.raises(ApiError, match="device lost") as caught:
                await pieces_of(run)
            assert caught.value.status == 500
            assert caught.value.message.endswith("device lost at ... in ..., line 3")
            await settled(engine)

            run = await start_run(context_for(engine), "r", ["a"], LONG)
            await engine.drain(0.02)
            with pytest.raises(ApiError, match="shutting down") as caught:
                await pieces_of(run)
            assert caught.value.status == 503 and caught.value.headers()["Retry-After"] == "5"

    asyncio.run(run())

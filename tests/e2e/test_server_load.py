"""Many clients at once on the real model: answers as offline, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxpaged import LLM
from jaxpaged.async_engine import AsyncEngine
from jaxpaged.config import EngineConfig
from jaxpaged.sampling_params import SamplingParams
from server.settings import ServerConfig
from tests.server.live import Live, live_server

_log = logging.getLogger(__name__)

NUM_STREAMS = 64
ROUNDS = 2
MAX_TOKENS = 12
TOPICS = ("the sea", "a clock", "bread", "a river", "winter", "music", "a bridge", "salt")
LIMITS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 128,
    "decode_buckets": (32,),
    "prefill_buckets": (128,),
    # Fewer than 32 requests of this length need, so some have to be put back.
    "num_gpu_blocks_override": 72,
    "dtype": "float32",
    "disable_progress": True,
}


def question(number: int) -> list[dict[str, str]]:
    topic = TOPICS[number % len(TOPICS)]
    return [{"role": "user", "content": f"Number {number}: tell me about {topic}."}]


def params_of(number: int) -> dict[str, Any]:
    """Half of the requests draw, each with its own seed."""
    return {"temperature": 0.0 if number % 2 else 0.8, "seed": number, "max_tokens": MAX_TOKENS}


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def ask(client: openai.AsyncOpenAI, number: int) -> str:
    stream = await client.chat.completions.create(
        model="m", messages=question(number), stream=True, **params_of(number)
    )
    text, reasons = "", []
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert len(reasons) == 1 and reasons[0] in ("stop", "length"), reasons
    return text


async def leave_early(client: openai.AsyncOpenAI, rng: random.Random) -> None:
    """Reads a few chunks, or none, and closes the connection."""
    stream = await client.chat.completions.create(
        model="m", messages=question(rng.randrange(999)), stream=True, max_tokens=150
    )
    chunks = aiter(stream)
    for _ in range(rng.randrange(4)):
        await anext(chunks)
    await stream.close()


async def be_refused(client: openai.AsyncOpenAI, rng: random.Random) -> None:
    bad: list[dict[str, Any]] = [
        {"messages": question(1) * 100},
        {"messages": question(1), "temperature": -1},
        {"messages": question(1), "extra_body": {"allowed_token_ids": [10**7]}},
        {"messages": []},
    ]
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(
            model="m", stream=bool(rng.randrange(2)), **bad[rng.randrange(len(bad))]
        )


async def one_round(base_url: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="k", timeout=300) as client:
        answers = [asyncio.ensure_future(ask(client, i)) for i in range(NUM_STREAMS)]
        others = [
            asyncio.ensure_future((leave_early if i % 2 else be_refused)(client, rng))
            for i in range(NUM_STREAMS // 2)
        ]
        await asyncio.gather(*others)
        return await asyncio.gather(*answers)


def tasks_left(live: Live) -> set[str]:
    async def names() -> set[str]:
        return {str(t.get_coro()) for t in asyncio.all_tasks() if "names" not in str(t.get_coro())}

    return live.run(names())


@pytest.mark.slow
def test_many_clients(smollm2_path: Path) -> None:
    config = EngineConfig(model=str(smollm2_path), **LIMITS)
    with LLM(config=config) as llm:
        params = [SamplingParams(**params_of(i)) for i in range(NUM_STREAMS)]
        outputs = llm.chat([question(i) for i in range(NUM_STREAMS)], params, use_tqdm=False)
        expected = [output.outputs[0].text for output in outputs]
    settings = ServerConfig(served_model_name=("m",))
    with live_server(settings=settings, make_engine=lambda: AsyncEngine(config)) as live:
        before = tasks_left(live)
        memory = []
        for seed in range(ROUNDS):
            assert asyncio.run(one_round(live.base_url, seed)) == expected
            live.settle()
            memory.append(resident_bytes())
        stats = live.engine.stats()
        assert stats.requests_finished.get("abort", 0) > 0, "no client left early"
        assert stats.preemptions > 0, "the pool was never short"
        assert stats.compiles_after_warmup == 0
        assert tasks_left(live) == before
        assert [t.name for t in threading.enumerate() if t.name == "jaxpaged-engine"]
        grown = memory[-1] - memory[0]
        assert grown < 64 * 2**20, f"{grown / 2**20:.0f} MiB more after a second round"
        _log.info("%d streams, %d rounds: %s, %+d bytes", NUM_STREAMS, ROUNDS, stats, grown)

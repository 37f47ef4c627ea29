"""Requests that share KV by forks and copies give the bits of requests that run alone: samples,
beams and exact hits, in every type. Each way of running them proves that what it is for happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.engine import Engine
from tests.e2e.support import Params, Watch, engine_over, run, run_alone, small_llm, watched

TYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, plain XLA": {"attention_backend": "reference"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8 cache, plain XLA": {
        "dtype": "bfloat16",
        "kv_cache_dtype": "int8",
        "attention_backend": "reference",
    },
}


@pytest.fixture(scope="module", params=TYPES.values(), ids=TYPES.keys())
def llm(request: pytest.FixtureRequest, tiny_llama_path: Path) -> Iterator[LLM]:
    with small_llm(tiny_llama_path, **request.param) as made:
        yield made


def prompt(first: int, count: int) -> list[int]:
    return [(7 * i + first) % 500 + 5 for i in range(count)]


def sampled(seed: int, **settings: Any) -> SamplingParams:
    defaults = {"temperature": 1.0, "max_tokens": 22, "ignore_eos": True, "logprobs": 3}
    return SamplingParams(seed=seed, **{**defaults, **settings})


REQUESTS: list[tuple[list[int], Params]] = [
    (prompt(3, 18), sampled(5, n=4)),  # their tail has to be copied
    (prompt(3, 20), sampled(6, n=3, prompt_logprobs=2)),  # the last block is full
    (prompt(50, 17), BeamSearchParams(beam_width=3, max_tokens=14, ignore_eos=True)),
    (prompt(3, 18), sampled(5)),  # the first one's first sample
    (prompt(90, 33), sampled(7, temperature=0.0, n=2)),
    (prompt(50, 17), BeamSearchParams(beam_width=2, max_tokens=9, length_penalty=0.0)),
    (prompt(3, 30), sampled(8, repetition_penalty=1.3, top_p=0.9)),
]
TEXTS, PARAMS = [text for text, _ in REQUESTS], [params for _, params in REQUESTS]


@dataclass(frozen=True)
class Way:
    """Of running them all; `engine` are limits, `arrivals` is for `run`."""

    engine: dict[str, Any] = field(default_factory=dict)
    arrivals: dict[str, Any] = field(default_factory=dict)
    preempts: bool = False
    cuts: bool = False
    """Prompts are computed in chunks."""
    caches: bool = True


WAYS = {
    "together": Way(),
    "one step at a time": Way({"async_scheduling": False}),
    "in chunks": Way({"max_num_batched_tokens": 9}, cuts=True),
    "in short chunks beside others": Way({"long_prefill_token_threshold": 3}, cuts=True),
    "in a small pool": Way({"num_blocks": 33}, preempts=True),
    "in a small pool, in chunks": Way(
        {"num_blocks": 33, "max_num_batched_tokens": 9}, preempts=True, cuts=True
    ),
    "without a cache": Way({"enable_prefix_caching": False}, caches=False),
    "without a cache, in a small pool": Way(
        {"enable_prefix_caching": False, "num_blocks": 33}, preempts=True, caches=False
    ),
    "backwards, one after the other": Way(
        arrivals={"order": range(len(TEXTS) - 1, -1, -1), "gaps": [0, 2, 1, 3, 0, 2, 5]}
    ),
    "samples parted": Way({"max_num_seqs": 3}),
}


def counted(engine: Engine, watch: Watch, way: Way) -> None:
    """What a way is for has happened."""
    stats = engine.stats()
    assert stats.forks > 0
    assert watch.copies == stats.copied_blocks > 0
    assert watch.first_draws > 0, "no sample drew its first token from another one's logits"
    assert (stats.preemptions > 0) == way.preempts
    assert (stats.prefix_hit_tokens > 0) == way.caches
    if way.cuts:
        assert any(chunks for _, _, chunks in watch.steps)
    if way.preempts:
        assert stats.recomputed_tokens > 0


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_samples_and_beams_have_their_bits_in_any_company(llm: LLM, way: Way) -> None:
    expected = run_alone(llm, TEXTS, PARAMS)
    assert len({one.token_ids for one in expected[0]}) == 4, "four samples, four texts"
    assert expected[3] == expected[0][:1], "n changes nothing for the first of n samples"
    assert len({one.score for one in expected[2]}) == 3
    engine = engine_over(llm, **way.engine)
    with watched(engine) as watch:
        found = run(engine, TEXTS, PARAMS, **way.arrivals)
    for index, (ours, alone) in enumerate(zip(found, expected, strict=True)):
        assert ours == alone, f"request {index}"
    counted(engine, watch, way)


@pytest.mark.parametrize("count", [2, 4, 5, 7, 16, 17, 63, 65])
def test_an_exact_hit_computes_one_token_and_has_the_bits_of_a_cold_run(
    llm: LLM, count: int
) -> None:
    params = [sampled(3, max_tokens=9), sampled(0, temperature=0.0, max_tokens=9, n=2)]
    text = prompt(11, count)
    cold = run_alone(llm, [text, text], params)
    engine = engine_over(llm)
    run(engine, [text], params[0])
    for index, one in enumerate(params):
        before = engine.stats()
        assert run(engine, [text], one) == [cold[index]]
        after = engine.stats()
        assert after.prefix_hit_tokens - before.prefix_hit_tokens == count - 1
        assert after.prompt_tokens - before.prompt_tokens == 1
        copied = after.copied_blocks - before.copied_blocks
        if index == 0:  # the second one's samples copy too, when they part
            assert copied == (0 if count % 4 == 1 else 1)
    # Both hit at once, while a stranger runs, and the block they copied from is still right.
    company = [prompt(400, 21), text, text]
    found = run(engine, company, [sampled(9), *params], gaps=[0, 2, 0])
    assert found[1:] == cold


def test_whole_blocks_and_an_exact_tail_beside_each_other(llm: LLM) -> None:
    """Prompts that are the beginnings of one another, each found as far as it goes."""
    text = prompt(200, 31)
    lengths = [31, 30, 18, 16, 15, 31, 18]
    params = [sampled(20 + n) for n in lengths]
    expected = run_alone(llm, [text[:n] for n in lengths], params)
    engine = engine_over(llm)
    hits = []
    for n, one, alone in zip(lengths, params, expected, strict=True):
        before = engine.stats().prefix_hit_tokens
        assert run(engine, [text[:n]], one) == [alone]
        hits.append(engine.stats().prefix_hit_tokens - before)
    assert hits[0] == 0
    assert hits[5:] == [30, 17], "found again whole, but for the last token"
    assert all(hit >= (n - 1) // 4 * 4 for hit, n in zip(hits[1:], lengths[1:], strict=True))

"""Requests of one wave that begin alike: what they share is computed once, and every one of them
gets the bits that it gets alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from jaxpaged import LLM, SamplingParams
from tests.e2e.support import Params, engine_over, run, run_alone

SHARED, TAIL, COUNT = 48, 7, 8


def shared(group: int = 0) -> list[int]:
    return [(11 * i + 31 * group) % 500 + 5 for i in range(SHARED)]


def wave(group: int = 0, count: int = COUNT) -> list[list[int]]:
    """Prompts that share all but their tails."""
    begin = shared(group)
    return [[*begin, *((13 * i + 7 * n) % 500 + 5 for i in range(TAIL))] for n in range(count)]


def sampled(seed: int, **settings: Any) -> SamplingParams:
    defaults = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    return SamplingParams(seed=seed, **{**defaults, **settings})


LIMITS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "one step at a time": {"async_scheduling": False},
    "in chunks": {"max_num_batched_tokens": 10},
    "in chunks side by side": {"long_prefill_token_threshold": 8},
    "by priority": {"policy": "priority"},
}


def prompt_tokens(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[Params], **limits: Any
) -> int:
    """Run the wave on an empty cache; the prompt tokens that were computed."""
    expected = run_alone(llm, prompts, params)
    engine = engine_over(llm, **limits)
    found = run(engine, prompts, params)
    for index, (ours, alone) in enumerate(zip(found, expected, strict=True)):
        assert ours == alone, f"request {index}"
    assert engine.stats().preemptions == 0
    return engine.stats().prompt_tokens


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
def test_a_wave_costs_one_prefix_and_the_tails(tiny_llm: LLM, limits: dict[str, Any]) -> None:
    prompts = [p for pair in zip(wave(0, 4), wave(1, 4), strict=True) for p in pair]
    params = [sampled(seed) for seed in range(COUNT)]
    assert prompt_tokens(tiny_llm, prompts, params, **limits) == 2 * SHARED + COUNT * TAIL


def test_samples_of_a_wave(tiny_llm: LLM) -> None:
    params = [sampled(seed, n=2) for seed in range(4)]
    assert prompt_tokens(tiny_llm, wave(count=4), params) == SHARED + 4 * TAIL


def test_equal_prompts_are_computed_once_and_each_draws_its_own(tiny_llm: LLM) -> None:
    (prompt,) = wave(count=1)
    params: list[Params] = [sampled(seed) for seed in range(4)]
    params += [sampled(9, n=2), sampled(10, temperature=0.0), sampled(11, repetition_penalty=1.5)]
    for text in (prompt, prompt[:-3]):  # the second one fills its last block
        assert prompt_tokens(tiny_llm, [text] * len(params), params) == len(text)


def test_equal_prompts_with_a_scored_one_among_them(tiny_llm: LLM) -> None:
    """It computes its prompt itself, all of it, wherever it stands."""
    (prompt,) = wave(count=1)
    params = [sampled(0), sampled(1, prompt_logprobs=1), sampled(2)]
    expected = run_alone(tiny_llm, [prompt] * 3, params)
    engine = engine_over(tiny_llm, max_num_batched_tokens=len(prompt) + 8)
    assert run(engine, [prompt] * 3, params) == expected
    assert engine.stats().prompt_tokens in (2 * len(prompt), 2 * len(prompt) + 1)
    assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_is_aborted_half_way(tiny_llm: LLM, overlap: bool) -> None:
    prompts, params = wave(), [sampled(seed) for seed in range(COUNT)]
    expected = run_alone(tiny_llm, prompts, params)
    engine = engine_over(tiny_llm, async_scheduling=overlap, max_num_batched_tokens=16)
    engine.add_request("first", prompts[0], params[0])
    for index in range(1, COUNT):
        engine.add_request(str(index), prompts[index], params[index])
    engine.step()
    (first,) = engine.scheduler.running
    assert 0 < first.num_computed_tokens < SHARED
    engine.abort("first")
    done = {}
    while engine.has_unfinished_requests():
        done.update({o.request_id: o for o in engine.step() if o.finished})
    found = [tuple(done[str(i)].outputs[0].token_ids) for i in range(1, COUNT)]
    assert found == [one[0].token_ids for one in expected[1:]]
    assert engine.stats().prompt_tokens == SHARED + (COUNT - 1) * TAIL

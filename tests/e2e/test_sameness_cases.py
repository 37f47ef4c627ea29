"""Scheduling accidents that made other engines answer wrongly, each against running alone.

Every step these tests launch is checked by `support.check_step`: never empty, never past a
request's tokens, a token drawn exactly where the known tokens end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.engine import Engine
from tests.e2e.support import CPU_BACKENDS, engine_over, ids, run, run_alone, small_llm, watched


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=5)


def span(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def generate(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], int]:
    """Tokens, and how many prompt tokens came from the cache."""
    engine.add_request("one", prompt, params)
    while True:
        for output in engine.step():
            if output.finished:
                return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.fixture(scope="module", params=CPU_BACKENDS)
def tiny_llm(request: pytest.FixtureRequest, tiny_llama_path: Path) -> Iterator[LLM]:
    """In the place of the session's, with either backend."""
    with small_llm(tiny_llama_path, attention_backend=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def wide_llm(tiny_llama_path: Path, tiny_llm: LLM) -> Iterator[LLM]:
    """Blocks of 16, and chunks of 16 tokens; the backend of `tiny_llm`."""
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 16,
        "prefill_buckets": (16,),
        "block_size": 16,
        "num_gpu_blocks_override": 40,
        "attention_backend": tiny_llm.config.attention_backend,
    }
    with small_llm(tiny_llama_path, **settings) as llm:
        yield llm


def test_evicted_blocks_are_not_found_again(tiny_llm: LLM) -> None:
    texts = [span(1, 12), span(101, 12), span(201, 12)]
    expected = ids(run_alone(tiny_llm, texts, greedy(4)))
    engine = engine_over(tiny_llm, num_blocks=6, max_model_len=20)
    for text, tokens in [*zip(texts, expected, strict=True)] * 2:
        found, cached = generate(engine, text, greedy(4))
        assert tuple(found) == tokens
        assert cached == 0, "two others of four blocks each have passed through the five"
    found, cached = generate(engine, texts[2], greedy(4))
    assert tuple(found) == expected[2]
    assert cached == 11, "the last token is always computed, into a copy of its block"
    assert engine.stats().copied_blocks == 1


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_prefixes_found_when_admitted_again(tiny_llm: LLM, async_scheduling: bool) -> None:
    texts = [span(11, 16) + span(100 + 20 * i, i) for i in range(1, 13)]
    expected = run_alone(tiny_llm, texts, greedy(24))
    engine = engine_over(
        tiny_llm,
        num_blocks=17,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=64,
        async_scheduling=async_scheduling,
    )
    with watched(engine):
        assert run(engine, texts, greedy(24)) == expected
    assert engine.stats().preemptions > 0
    assert engine.scheduler.stats.prefix_hit_tokens > 0
    assert engine.scheduler.stats.preempted_hit_tokens > 0


def test_prefixes_under_a_sliding_window(window_llm: LLM) -> None:
    """The window is a mask and no block is given up behind it, so every hit is whole."""
    first = span(20, 40)
    second = first[:20] + span(300, 7)
    expected = run_alone(window_llm, [first, second], greedy(16))
    without = engine_over(window_llm, enable_prefix_caching=False)
    assert run(without, [first, second], greedy(16)) == expected
    engine = engine_over(window_llm)
    for text, alone, hit in ((first, 0, 0), (second, 1, 20), (first, 0, 39)):
        before = engine.stats().prefix_hit_tokens
        assert run(engine, [text], greedy(16)) == [expected[alone]]
        assert engine.stats().prefix_hit_tokens - before == hit


@pytest.mark.parametrize("budget", [8, 64])
def test_whatever_a_hit_leaves_over(tiny_llm: LLM, budget: int) -> None:
    texts = [span(1, 16) + span(200, k) for k in range(10)]
    expected = run_alone(tiny_llm, texts, greedy(6))
    engine = engine_over(tiny_llm, max_num_batched_tokens=budget)
    run(engine, texts[:1], greedy(6))
    for k, text in enumerate(texts):
        before = engine.stats().prefix_hit_tokens
        with watched(engine):
            assert run(engine, [text], greedy(6)) == [expected[k]]
        assert engine.stats().prefix_hit_tokens - before >= (16 if k else 12)
    engine = engine_over(tiny_llm, max_num_batched_tokens=budget)
    with watched(engine):
        run(engine, texts[:1], greedy(6))
        assert run(engine, texts, greedy(6)) == expected


def test_a_resumed_request_computes_all_its_tokens(tiny_llm: LLM) -> None:
    texts = [span(30 * i, 9 + i) for i in range(1, 6)]
    expected = run_alone(tiny_llm, texts, greedy(30))
    engine = engine_over(
        tiny_llm,
        num_blocks=16,
        max_num_batched_tokens=8,
        max_model_len=60,
        enable_prefix_caching=False,
    )
    with watched(engine) as watch:
        assert run(engine, texts, greedy(30)) == expected
    assert watch.preemptions > 0
    assert watch.resumed_chunks > 0


def test_chunks_between_decodes(tiny_llm: LLM) -> None:
    texts = [span(15 * i, n) for i, n in enumerate((1, 7, 8, 9, 15, 16, 17, 24, 25), 1)]
    expected = run_alone(tiny_llm, texts, greedy(12))
    arrivals = {"order": range(9), "gaps": [0, 2, 2, 0, 0, 3, 0, 1, 1]}
    for budget in (8, 64):
        engine = engine_over(tiny_llm, max_num_batched_tokens=budget)
        with watched(engine) as watch:
            assert run(engine, texts, greedy(12), **arrivals) == expected  # type: ignore[arg-type]
        cut = sum(chunks for _, _, chunks in watch.steps)
        drawn = sum(tokens for _, tokens, _ in watch.steps)
        assert drawn == 9 * 12, "one draw a token, none for an unfinished chunk"
        assert (cut > 0) == (budget == 8)
        mixed = any(tokens > 1 and chunks for _, tokens, chunks in watch.steps)
        assert mixed == (budget == 8)


def test_padding_is_never_read(tiny_llm: LLM, wide_llm: LLM) -> None:
    texts = [span(40 * i, n) for i, n in enumerate((1, 5, 8, 9, 13), 1)]
    expected = run_alone(tiny_llm, texts, greedy(1))
    for llm in (tiny_llm, wide_llm):
        for count in range(1, 6):
            engine = engine_over(llm)
            assert run(engine, texts[:count], greedy(1)) == expected[:count]
    k_pool, v_pool = tiny_llm.engine.runner.read_pool(0)
    assert not k_pool[:4].any(), "padding wrote into the null block"
    assert not v_pool[:4].any(), "padding wrote into the null block"
    assert k_pool.any()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_rows_that_have_ended_keep_no_step_alive(tiny_llm: LLM, async_scheduling: bool) -> None:
    texts = [span(40 * i, 5) for i in range(1, 5)]
    params = [greedy(1), greedy(20), greedy(1), greedy(1)]
    expected = run_alone(tiny_llm, texts, params)
    engine = engine_over(tiny_llm, async_scheduling=async_scheduling)
    assert run(engine, texts, params) == expected
    assert engine.stats().steps == 20


def test_every_row_reads_its_own_blocks(tiny_llm: LLM, wide_llm: LLM) -> None:
    texts = [span(50 * i, n) for i, n in enumerate((3, 5, 16, 17, 1), 1)]
    expected = run_alone(tiny_llm, texts, greedy(8))
    for llm in (tiny_llm, wide_llm):
        for count in range(1, 6):
            assert run(engine_over(llm), texts[:count], greedy(8)) == expected[:count]


@pytest.mark.parametrize("last", [9, 10])
def test_prompts_at_and_over_the_bucket(tiny_llm: LLM, last: int) -> None:
    """64 prompt tokens fill a step exactly; of 65, one is left for the next."""
    texts = [span(60 * i, n) for i, n in enumerate((20, 35, last), 1)]
    expected = run_alone(tiny_llm, texts, greedy(4))
    engine = engine_over(tiny_llm)
    with watched(engine) as watch:
        assert run(engine, texts, greedy(4)) == expected
    assert watch.steps[0] == ((64, 3, 0) if last == 9 else (64, 2, 1))


SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=20, ignore_eos=True)


def test_a_seed_gives_its_tokens_in_any_company(tiny_llm: LLM) -> None:
    prompt = span(77, 13)
    (alone,) = run_alone(tiny_llm, [prompt], SEEDED)
    assert len(set(alone[0].token_ids)) > 5, "one random number cannot serve all steps"
    unseeded = SamplingParams(temperature=1.0, max_tokens=25, ignore_eos=True)
    texts = [span(20 * i, 5 + i) for i in range(7)]
    for place in (0, 3, 7):
        company = [*texts[:place], prompt, *texts[place:]]
        params = [unseeded] * place + [SEEDED] + [unseeded] * (7 - place)
        assert run(engine_over(tiny_llm), company, params)[place] == alone
    twins = run(engine_over(tiny_llm), [prompt, prompt], SEEDED)
    assert twins == [alone, alone]
    chunked = engine_over(tiny_llm, long_prefill_token_threshold=3)
    assert run(chunked, [prompt], SEEDED) == [alone]
    small = engine_over(tiny_llm, num_blocks=33)
    found = run(small, [*texts, prompt], [unseeded] * 7 + [SEEDED])
    assert found[7] == alone
    assert small.stats().preemptions > 0


def test_unseeded_requests_differ(tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    found = ids(run(engine_over(tiny_llm), [span(77, 13)] * 4, params))
    assert len(set(found)) == 4


def test_logprobs_are_raw_and_those_of_the_prompt(tiny_llm: LLM) -> None:
    """Output logprobs know nothing of temperature, filters and biases, and equal, to the last bit,
    the prompt logprobs of the same tokens."""
    prompt = span(33, 21)
    params = SamplingParams(
        temperature=0.5,
        top_k=2,
        logit_bias={9: 5.0, 40: -100.0},
        repetition_penalty=1.3,
        seed=1,
        max_tokens=20,
        ignore_eos=True,
        logprobs=5,
    )
    ((done,),) = run(engine_over(tiny_llm), [prompt], params)
    assert done.logprobs is not None
    scored = SamplingParams(max_tokens=1, prompt_logprobs=5)
    ((given,),) = run(engine_over(tiny_llm), [[*prompt, *done.token_ids]], scored)
    assert given.prompt_logprobs is not None
    assert given.prompt_logprobs[0] is None
    assert given.prompt_logprobs[len(prompt) :] == done.logprobs
    assert any(entry[0][2] > 2 for entry in done.logprobs), "the bias and the filter drew these"
    for entry, token in zip(done.logprobs, done.token_ids, strict=True):
        assert entry[0][0] == token
        ranked = sorted(entry, key=lambda item: item[2])
        values = [value for _, value, _ in ranked]
        assert values == sorted(values, reverse=True)
        assert [rank for _, _, rank in ranked][:5] == [1, 2, 3, 4, 5]
    total = sum(entry[0][1] for entry in done.logprobs)
    assert done.cumulative_logprob == pytest.approx(total)

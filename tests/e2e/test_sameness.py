"""A request's tokens and logprobs are the same to the last bit, however it is scheduled.

Every way of running requests is compared with running each one alone on an empty cache. Numbers
are those of XLA:CPU, where the engine promises this; the drawing of tokens is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged import LLM, SamplingParams
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.models.layers import matmul
from tests.e2e.support import (
    CPU_BACKENDS,
    Answer,
    Params,
    Result,
    engine_over,
    run,
    run_alone,
    small_llm,
    watched,
)

VOCAB = 512
# Long enough for three chunks of the reference attention's 64 context tokens, with the outputs.
SHARED = ([(7 * i) % 500 + 5 for i in range(99)], [(11 * i + 3) % 500 + 5 for i in range(50)])
TOKENS = st.integers(3, VOCAB - 1)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Often the beginning of a sequence that other prompts begin with, too."""
    shared = draw(st.sampled_from(((), *SHARED)))
    cut = draw(st.integers(0, len(shared)))
    own = draw(st.lists(TOKENS, min_size=0 if cut else 1, max_size=8))
    return [*shared[:cut], *own]


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    """All parameters; greedy or with a seed."""
    required = {
        "temperature": st.sampled_from((0.0, 0.0, 0.4, 1.0, 1.7)),
        "seed": st.integers(0, 2**64 - 1),
        "max_tokens": st.integers(3, 20),
        "ignore_eos": st.booleans(),
    }
    optional = {
        "n": st.sampled_from((2, 3, 4)),
        "top_k": st.sampled_from((1, 2, 10, 100, 300)),
        "top_p": st.sampled_from((0.05, 0.5, 0.9, 0.999)),
        "min_p": st.sampled_from((0.01, 0.3)),
        "repetition_penalty": st.sampled_from((0.7, 1.3)),
        "frequency_penalty": st.sampled_from((-0.5, 0.8)),
        "presence_penalty": st.sampled_from((-0.5, 0.8)),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from((-100.0, 4.0)), max_size=3),
        "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=30),
        "bad_words": st.just(["the", " dog", "in"]),
        "min_tokens": st.just(3),
        "stop_token_ids": st.lists(TOKENS, max_size=20),
        "stop": st.just(["e", "th"]),
        "logprobs": st.sampled_from((0, 1, 5, 20)),
        "prompt_logprobs": st.sampled_from((0, 5)),
    }
    return st.fixed_dictionaries(required, optional=optional).map(lambda f: SamplingParams(**f))


def beam_params() -> st.SearchStrategy[BeamSearchParams]:
    """Of searches that fit the smallest pool."""
    fields = {
        "beam_width": st.integers(1, 3),
        "max_tokens": st.integers(1, 10),
        "length_penalty": st.sampled_from((0.0, 1.0, 2.0)),
        "early_stopping": st.sampled_from((True, False, "never")),
        "temperature": st.sampled_from((0.0, 0.7)),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(TOKENS, max_size=20),
    }
    return st.fixed_dictionaries(fields).map(lambda f: BeamSearchParams(**f))


REQUESTS: st.SearchStrategy[list[tuple[list[int], Params]]] = st.lists(
    st.tuples(prompts(), sampling_params())
    | st.tuples(prompts().map(lambda prompt: prompt[:40]), beam_params()),
    min_size=2,
    max_size=12,
)


@st.composite
def schedules(draw: st.DrawFn, count: int) -> dict[str, Any]:
    """In which order, and after how many steps each, the requests arrive."""
    return {
        "order": draw(st.permutations(range(count))),
        "gaps": draw(st.lists(st.sampled_from((0, 0, 1, 3)), min_size=count, max_size=count)),
    }


PLANS = st.fixed_dictionaries(
    {
        "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "long_prefill_token_threshold": st.sampled_from((0, 1, 3, 17)),
    }
)
"""What differs between engines beside shapes."""

PROGRAMS: dict[str, dict[str, Any]] = {
    "16 rows, blocks of 1": {
        "max_num_seqs": 16,
        "decode_buckets": (16,),
        "block_size": 1,
        "num_gpu_blocks_override": 400,
    },
    "8 or 32 rows, blocks of 3": {
        "max_num_seqs": 32,
        "decode_buckets": (8, 32),
        "block_size": 3,
        "num_gpu_blocks_override": 200,
    },
    "chunks of 16, blocks of 16": {
        "max_num_batched_tokens": 16,
        "prefill_buckets": (16,),
        "block_size": 16,
        "num_gpu_blocks_override": 40,
    },
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8 cache of bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
}


@pytest.fixture(scope="module", params=CPU_BACKENDS)
def tiny_llm(request: pytest.FixtureRequest, tiny_llama_path: Path) -> Iterator[LLM]:
    """In the place of the session's, with either backend."""
    with small_llm(tiny_llama_path, attention_backend=request.param) as llm:
        yield llm


@pytest.fixture(scope="module", params=PROGRAMS.values(), ids=PROGRAMS.keys())
def programs(request: pytest.FixtureRequest, tiny_llama_path: Path, tiny_llm: LLM) -> Iterator[LLM]:
    """Engines with the backend of `tiny_llm`, whose programs have other shapes."""
    backend = tiny_llm.config.attention_backend
    with small_llm(tiny_llama_path, attention_backend=backend, **request.param) as llm:
        yield llm


def types_of(llm: LLM) -> tuple[str, str]:
    return llm.config.dtype, llm.config.kv_cache_dtype


def assert_same(found: list[list[Result]], expected: list[list[Result]]) -> None:
    for index, (ours, alone) in enumerate(zip(found, expected, strict=True)):
        assert ours == alone, f"request {index}"


@settings(max_examples=20)  # with each backend
@given(
    requests=REQUESTS,
    plan=PLANS,
    budget=st.sampled_from((8, 9, 30, 64)),
    num_blocks=st.sampled_from((33, 40, 100)),
    data=st.data(),
)
def test_any_schedule_gives_the_same_bits(
    tiny_llm: LLM,
    requests: list[tuple[list[int], Params]],
    plan: dict[str, Any],
    budget: int,
    num_blocks: int,
    data: st.DataObject,
) -> None:
    """Cache on and off, hits and misses, forks and beams, chunks, budgets, arrivals, overlap,
    preemptions.
    """
    texts, params = [p for p, _ in requests], [q for _, q in requests]
    expected = run_alone(tiny_llm, texts, params)
    engine = engine_over(tiny_llm, max_num_batched_tokens=budget, num_blocks=num_blocks, **plan)
    with watched(engine):
        assert_same(run(engine, texts, params), expected)
        assert_same(
            run(engine, texts, params, **data.draw(schedules(len(texts)), label="arrivals")),
            expected,
        )


@settings(max_examples=6)
@given(requests=REQUESTS, plan=PLANS, data=st.data())
def test_other_programs_give_the_same_bits(
    programs: LLM,
    tiny_llm: LLM,
    requests: list[tuple[list[int], Params]],
    plan: dict[str, Any],
    data: st.DataObject,
) -> None:
    """Other numbers of rows, chunk buckets and block sizes; and other types against themselves, in
    pools of any size that holds the longest request.
    """
    texts, params = [p for p, _ in requests], [q for _, q in requests]
    same_type = types_of(programs) == types_of(tiny_llm)
    expected = run_alone(tiny_llm if same_type else programs, texts, params)
    if not same_type:
        plan = {**plan, "num_blocks": data.draw(st.sampled_from((33, 40, 100)), label="blocks")}
    engine = engine_over(programs, **plan)
    with watched(engine):
        assert_same(run(engine, texts, params), expected)
        assert_same(
            run(engine, texts, params, **data.draw(schedules(len(texts)), label="arrivals")),
            expected,
        )


MIXED = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=5),
    SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, logprobs=0),
    SamplingParams(
        temperature=0.8, seed=4, top_p=0.9, max_tokens=24, ignore_eos=True, prompt_logprobs=5
    ),
    SamplingParams(
        temperature=1.3,
        seed=5,
        top_k=20,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        max_tokens=24,
        ignore_eos=True,
    ),
]
TEXTS = [[*SHARED[i % 2][: 20 + 3 * i], 100 + i] for i in range(8)]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_preempted_requests_give_the_same_bits(
    tiny_llm: LLM, policy: str, async_scheduling: bool
) -> None:
    params = [MIXED[i % 4] for i in range(8)]
    expected = run_alone(tiny_llm, TEXTS, params)
    engine = engine_over(
        tiny_llm,
        num_blocks=40,
        max_num_batched_tokens=16,
        policy=policy,
        async_scheduling=async_scheduling,
    )
    with watched(engine) as watch:
        assert_same(run(engine, TEXTS, params), expected)
    assert engine.stats().preemptions > 0
    assert engine.stats().recomputed_tokens > 0
    assert watch.resumed_chunks > 0, "no preempted request came back in several chunks"


def test_a_hit_gives_the_bits_of_a_cold_run(tiny_llm: LLM) -> None:
    params = [MIXED[i % 2] for i in range(8)]
    expected = run_alone(tiny_llm, TEXTS, params)
    engine = engine_over(tiny_llm)
    assert_same(run(engine, TEXTS, params), expected)
    first = engine.stats().prefix_hit_tokens
    assert first > 0, "prompts of one step that begin alike share blocks"
    assert_same(run(engine, TEXTS, params), expected)
    hits = engine.stats().prefix_hit_tokens - first
    assert hits == sum(len(text) - 1 for text in TEXTS), "all but the last token of each"


@pytest.mark.parametrize("shape", [(3, 5, 64, 576), (2, 1536, 576)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_has_the_bits_of_its_own_row(shape: tuple[int, ...], dtype: str) -> None:
    """At sizes of a real model: the tiny ones are too small for XLA to choose another way."""
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)
    x = rng.standard_normal((288, shape[-1]), np.float32)
    multiply = jax.jit(matmul)
    expected = np.asarray(multiply(x[:8], weight))
    assert expected.shape == (8, *shape[:-1])
    for rows in (16, 32, 40, 64, 96, 288):
        np.testing.assert_array_equal(np.asarray(multiply(x[:rows], weight))[:8], expected)


@pytest.mark.slow
def test_the_embedded_model_gives_the_same_bits(
    smollm2_llm: LLM, smollm2_answers: list[Answer]
) -> None:
    """At the size of a real model: alone, in chunks and after hits as in the batch of 32."""
    chosen = smollm2_answers[::8]
    texts = [answer.prompt_token_ids for answer in chosen]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=5),
        SamplingParams(temperature=0.9, seed=11, max_tokens=24, ignore_eos=True, logprobs=5),
        SamplingParams(temperature=1.0, seed=12, top_p=0.9, max_tokens=24, prompt_logprobs=5),
        SamplingParams(temperature=1.1, seed=13, top_k=100, max_tokens=24, logprobs=0),
    ]
    expected = run_alone(smollm2_llm, texts, params)
    assert expected[0][0].token_ids == tuple(chosen[0].output.token_ids[:24])
    drawn = [
        entry[token].logprob
        for entry, token in zip(
            chosen[0].output.logprobs or (), chosen[0].output.token_ids, strict=True
        )
    ]
    assert expected[0][0].logprobs is not None
    assert [entry[0][1] for entry in expected[0][0].logprobs] == drawn[:24]
    assert_same(run(smollm2_llm.engine, texts, params), expected)
    assert smollm2_llm.stats().prefix_hit_tokens > 0
    crowd = [answer.prompt_token_ids for answer in smollm2_answers[1::4]]
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    chunked = engine_over(smollm2_llm, long_prefill_token_threshold=13, num_blocks=40)
    found = run(chunked, [*crowd, *texts], [greedy] * len(crowd) + params)
    assert_same(found[len(crowd) :], expected)
    assert chunked.stats().preemptions > 0

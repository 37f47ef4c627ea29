"""Logprobs of drawn and given tokens: raw, of the right shape, whatever befell the request."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from jaxpaged import LLM, EngineConfig, RequestOutput, SamplingParams
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import LogprobDict
from tests.e2e.engine_support import (
    BLOCK_SIZE,
    EOS,
    GREEDY,
    PROMPT,
    SETTINGS,
    VOCAB,
    drain,
    fresh_engine,
    greedy_tokens,
    model_folder,
    run_one,
    shared_llm,
)

LONG = [(5 * i) % 400 + 10 for i in range(100)]


def check_entry(entry: LogprobDict, token: int, k: int) -> None:
    """The token first, then the k likeliest in order: k + 1 entries if it is not one of them."""
    assert next(iter(entry)) == token
    chosen = entry[token]
    assert chosen.rank is not None and chosen.logprob <= 0.0
    assert len(entry) == (max(k, 1) if chosen.rank <= k else k + 1)
    others = [value for other, value in entry.items() if other != token]
    ranks = [value.rank for value in others]
    want = [rank for rank in range(1, k + 1) if rank != chosen.rank]
    assert ranks == want
    ordered = sorted(entry.values(), key=lambda value: value.rank or 0)
    values = [value.logprob for value in ordered]
    assert values == sorted(values, reverse=True)
    assert sum(math.exp(value) for value in values) <= 1.0 + 1e-5
    tokenizer = shared_llm().get_tokenizer()
    assert all(value.decoded_token == tokenizer.token(key) for key, value in entry.items())


@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_of_drawn_tokens(k: int, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, logprobs=k, max_tokens=12, seed=4, ignore_eos=True
    )
    output = run_one(fresh_engine(), PROMPT, params).outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == 12
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        check_entry(entry, token, k)
    drawn = [e[t].logprob for e, t in zip(output.logprobs, output.token_ids, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(drawn), abs=1e-9)
    ranks = [e[t].rank for e, t in zip(output.logprobs, output.token_ids, strict=True)]
    assert (set(ranks) == {1}) == (temperature == 0.0)


def test_none_means_none() -> None:
    output = run_one(fresh_engine(), PROMPT, GREEDY)
    assert output.prompt_logprobs is None
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)


def test_logprobs_change_no_token() -> None:
    params = SamplingParams(seed=9, max_tokens=12, top_p=0.9, ignore_eos=True)
    engine = fresh_engine()
    plain = run_one(engine, PROMPT, params).outputs[0].token_ids
    for fields in ({"logprobs": 5}, {"prompt_logprobs": 5}, {"logprobs": 0, "prompt_logprobs": 0}):
        with_them = dataclasses.replace(params, **fields)
        assert run_one(engine, PROMPT, with_them).outputs[0].token_ids == plain


def test_logprobs_when_the_first_token_ends_it() -> None:
    """LP-02."""
    params = SamplingParams(logit_bias={EOS: 100}, logprobs=2, max_tokens=5)
    output = run_one(fresh_engine(), PROMPT, params).outputs[0]
    assert (output.token_ids, output.finish_reason) == ([EOS], "stop")
    assert output.logprobs is not None and len(output.logprobs) == 1
    check_entry(output.logprobs[0], EOS, 2)


def test_logprobs_are_raw() -> None:
    """LP-05: before temperature, filters, bias and penalties; the same as scoring the tokens."""
    params = SamplingParams(
        temperature=0.5, top_k=2, seed=3, logit_bias={40: 3.0}, repetition_penalty=1.5,
        logprobs=3, max_tokens=15, ignore_eos=True,
    )  # fmt: skip
    drawn = run_one(fresh_engine(), PROMPT, params).outputs[0]
    scored = run_one(
        fresh_engine(),
        PROMPT + drawn.token_ids,
        SamplingParams(max_tokens=0, prompt_logprobs=3),
    )
    assert drawn.logprobs is not None and scored.prompt_logprobs is not None
    assert any(e[t].rank != 1 for e, t in zip(drawn.logprobs, drawn.token_ids, strict=True))
    for ours, theirs in zip(drawn.logprobs, scored.prompt_logprobs[len(PROMPT) :], strict=True):
        assert theirs is not None and list(ours) == list(theirs)
        for token in ours:
            assert ours[token].rank == theirs[token].rank
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


@pytest.mark.parametrize("k", [0, 1, 7])
@pytest.mark.parametrize("length", [1, 2, 3, BLOCK_SIZE, 63, 64, 65, 100])
def test_prompt_logprobs(length: int, k: int) -> None:
    output = run_one(fresh_engine(), LONG[:length], dataclasses.replace(GREEDY, prompt_logprobs=k))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == length
    assert output.prompt_logprobs[0] is None
    for token, entry in zip(LONG[1:length], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        check_entry(entry, token, k)
    assert output.outputs[0].token_ids == greedy_tokens(tuple(LONG[:length]))


def scored(**settings: Any) -> tuple[RequestOutput, Any]:
    """LONG scored, with a second request beside it, so that a small pool runs out."""
    engine = fresh_engine(**settings)
    params = dataclasses.replace(GREEDY, prompt_logprobs=3, logprobs=2, max_tokens=20)
    engine.add_request("other", LONG[:30], dataclasses.replace(GREEDY, max_tokens=60))
    engine.add_request("scored", LONG, params)
    return drain(engine)["scored"], engine.stats()


def test_prompt_logprobs_in_chunks_and_after_preemption() -> None:
    want, _ = scored()
    for threshold in (1, 7, 64):
        got, stats = scored(long_prefill_token_threshold=threshold)
        assert stats.steps > 100 / threshold
        assert got == want
    got, stats = scored(num_blocks=38)
    assert stats.preemptions > 0
    assert got.outputs == want.outputs and got.prompt_logprobs == want.prompt_logprobs


def test_prompt_logprobs_skip_the_cache_and_fill_it() -> None:
    engine = fresh_engine()
    cold = run_one(engine, LONG, dataclasses.replace(GREEDY, prompt_logprobs=2))
    again = run_one(engine, LONG, dataclasses.replace(GREEDY, prompt_logprobs=2))
    assert again == cold and again.num_cached_tokens == 0
    assert engine.stats().prefix_query_tokens == 0, "a look-up that was skipped must not count"
    plain = run_one(engine, LONG, GREEDY)
    assert plain.num_cached_tokens == len(LONG) - 1
    assert plain.outputs == cold.outputs


def test_prompt_logprobs_are_shown_when_they_are_complete() -> None:
    engine = fresh_engine(long_prefill_token_threshold=30)
    engine.add_request("one", LONG, dataclasses.replace(GREEDY, prompt_logprobs=0, max_tokens=3))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [len(out.prompt_logprobs or []) for out in outputs] == [len(LONG)] * 3
    engine.add_request("gone", LONG, dataclasses.replace(GREEDY, prompt_logprobs=0))
    engine.step()
    engine.abort("gone")
    assert drain(engine)["gone"].prompt_logprobs is None


def test_neighbours_with_and_without_logprobs() -> None:
    """Each request gets what it asked for, whatever the others in its steps ask."""
    asked: dict[str, dict[str, int | None]] = {
        "none": {},
        "zero": {"logprobs": 0},
        "three": {"logprobs": 3},
        "prompt": {"prompt_logprobs": 2},
        "both": {"logprobs": 20, "prompt_logprobs": 20},
    }
    engine = fresh_engine()
    for i, (key, fields) in enumerate(asked.items()):
        engine.add_request(key, LONG[i : i + 20 + i], dataclasses.replace(GREEDY, **fields))
    together = drain(engine)
    for i, (key, fields) in enumerate(asked.items()):
        alone = run_one(fresh_engine(), LONG[i : i + 20 + i], dataclasses.replace(GREEDY, **fields))
        assert together[key].outputs == alone.outputs, key
        assert together[key].prompt_logprobs == alone.prompt_logprobs, key
        wanted = fields.get("logprobs")
        for token, entry in zip(
            alone.outputs[0].token_ids, alone.outputs[0].logprobs or [], strict=wanted is not None
        ):
            assert wanted is not None
            check_entry(entry, token, wanted)


@pytest.mark.slow
def test_all_logprobs() -> None:
    """max_logprobs=-1 allows -1, which is the whole vocabulary; 512 means the same."""
    settings = SETTINGS | {"max_logprobs": -1, "prefill_buckets": (8,), "max_num_batched_tokens": 8}
    with LLM(config=EngineConfig(model=str(model_folder()), **settings)) as llm:
        for k in (-1, VOCAB):
            params = dataclasses.replace(GREEDY, logprobs=k, prompt_logprobs=k, max_tokens=2)
            (output,) = llm.generate([PROMPT], params, use_tqdm=False)
            entries = (output.outputs[0].logprobs or []) + (output.prompt_logprobs or [])[1:]
            assert len(entries) == 2 + len(PROMPT) - 1
            for entry in entries:
                assert entry is not None and len(entry) == VOCAB
                total = sum(math.exp(value.logprob) for value in entry.values())
                assert total == pytest.approx(1.0, abs=1e-4)
        with pytest.raises(InvalidRequestError, match="logprobs=513.*512"):
            llm.generate([PROMPT], dataclasses.replace(GREEDY, logprobs=513), use_tqdm=False)
        assert llm.stats().compiles_after_warmup == 0

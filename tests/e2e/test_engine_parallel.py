"""n samples of one prompt."""

from __future__ import annotations

import dataclasses

import pytest

from jaxpaged import SamplingParams
from tests.e2e.engine_support import (
    BLOCK_SIZE,
    EOS,
    GREEDY,
    drain,
    fresh_engine,
    greedy_tokens,
    piece,
    run_one,
    scripted,
)

PROMPT = list(range(30, 50))
SAMPLED = SamplingParams(seed=11, max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
def test_samples_differ_and_the_first_is_that_of_n_1(overlap: bool) -> None:
    engine = fresh_engine(async_scheduling=overlap)
    alone = run_one(engine, PROMPT, SAMPLED)
    five = run_one(engine, PROMPT, dataclasses.replace(SAMPLED, n=5))
    assert [c.index for c in five.outputs] == list(range(5))
    assert five.outputs[0] == alone.outputs[0]
    assert len({tuple(c.token_ids) for c in five.outputs}) == 5
    # Sample i is not the request of seed + i, and does not depend on n.
    for i in range(1, 5):
        other = run_one(engine, PROMPT, dataclasses.replace(SAMPLED, seed=11 + i))
        assert other.outputs[0].token_ids not in [c.token_ids for c in five.outputs]
    three = run_one(engine, PROMPT, dataclasses.replace(SAMPLED, n=3))
    assert three.outputs == five.outputs[:3]


def test_greedy_samples_are_equal() -> None:
    output = run_one(fresh_engine(), PROMPT, dataclasses.replace(GREEDY, n=3))
    assert [c.token_ids for c in output.outputs] == [greedy_tokens(tuple(PROMPT))] * 3


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("tokens", "copies"), [(20, 0), (18, 3)])
def test_samples_share_the_blocks_of_the_prompt(tokens: int, copies: int, caching: bool) -> None:
    """It is computed once. Its last block, if not full, is copied by all but the last that writes
    to it.
    """
    engine = fresh_engine(enable_prefix_caching=caching)
    engine.add_request("one", PROMPT[:tokens], dataclasses.replace(SAMPLED, n=4, max_tokens=3))
    engine.step()
    tables = [r.block_ids.tolist() for r in engine.scheduler.running]
    full = tokens // BLOCK_SIZE
    assert len(tables) == 4 and {tuple(table[:full]) for table in tables} == {
        tuple(tables[0][:full])
    }
    assert len({table[full] for table in tables}) == 4
    drain(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.prefix_hit_tokens) == (tokens, 0)
    assert engine.scheduler.stats.scheduled_tokens == tokens + 4 * (3 - 1)
    assert (stats.forks, stats.copied_blocks) == (3, copies)
    assert stats.peak_blocks_used == full + 4


def test_more_samples_than_sequences() -> None:
    engine = fresh_engine(max_num_seqs=2)
    output = run_one(engine, PROMPT, dataclasses.replace(SAMPLED, n=7))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 7
    assert engine.stats().peak_running == 2
    plain = run_one(fresh_engine(), PROMPT, dataclasses.replace(SAMPLED, n=7))
    assert output.outputs == plain.outputs


def test_samples_with_preemption_and_without_cache() -> None:
    want = run_one(fresh_engine(), PROMPT, dataclasses.replace(SAMPLED, n=4, max_tokens=25))
    for caching in (True, False):
        engine = fresh_engine(num_blocks=20, enable_prefix_caching=caching)
        got = run_one(engine, PROMPT, dataclasses.replace(SAMPLED, n=4, max_tokens=25))
        assert engine.stats().preemptions > 0
        assert got.outputs == want.outputs


def test_a_request_ends_with_its_last_sample() -> None:
    """Samples that end early are shown as finished; the request is finished once, with the last."""
    engine = fresh_engine()
    params = SamplingParams(seed=3, n=4, max_tokens=40, logit_bias={EOS: 4.5})
    engine.add_request("one", PROMPT, params)
    finished: list[int] = []
    lengths = [0] * 4
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert [c.index for c in output.outputs] == [0, 1, 2, 3]
            for completion in output.outputs:
                grown = len(completion.token_ids) - lengths[completion.index]
                assert 0 <= grown <= 1
                lengths[completion.index] += grown
            ended = sum(c.finished() for c in output.outputs)
            finished.append(ended)
            assert output.finished == (ended == 4)
    assert finished == sorted(finished) and finished[-1] == 4 and finished.count(4) == 1
    assert len(set(finished)) > 2, "all samples ended together"


def test_each_sample_has_its_own_stop_string() -> None:
    engine = scripted({"one": [piece("ab"), piece("x"), piece("END")]})
    output = run_one(engine, PROMPT, SamplingParams(n=3, stop="END", max_tokens=9))
    assert [(c.text, c.stop_reason) for c in output.outputs] == [("abx", "END")] * 3


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_ends_all_samples(steps: int) -> None:
    engine = fresh_engine(max_num_seqs=3)
    engine.add_request("one", PROMPT, dataclasses.replace(SAMPLED, n=5))
    for _ in range(steps):
        engine.step()
    engine.abort("one")
    output = drain(engine)["one"]
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 5
    assert [c.index for c in output.outputs] == list(range(5))


def test_the_prompt_is_scored_once() -> None:
    params = dataclasses.replace(SAMPLED, n=3, prompt_logprobs=2, logprobs=1)
    engine = fresh_engine()
    output = run_one(engine, PROMPT, params)
    assert engine.stats().prompt_tokens == len(PROMPT)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)
    alone = run_one(fresh_engine(), PROMPT, dataclasses.replace(params, n=1))
    assert output.prompt_logprobs == alone.prompt_logprobs
    assert output.outputs[0] == alone.outputs[0]
    assert all(len(c.logprobs or []) == 10 for c in output.outputs)

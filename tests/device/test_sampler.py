from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from jaxpaged.device import sampler
from jaxpaged.sampling_params import SamplingParams
from tests.device.sampler_reference import (
    VOCAB,
    Ask,
    acceptable,
    log_softmax,
    mixed,
    noise,
    processed,
    sample,
    uniform_numbers,
    weights,
)


def check_against_reference(asks: Sequence[Ask], *, num_rows: int) -> None:
    out = sample(asks, num_rows=num_rows)
    uniforms = uniform_numbers(asks, num_rows)
    assert (out.status == sampler.STATUS_OK).all()
    for row, ask in enumerate(asks):
        token = int(out.tokens[row])
        assert token in acceptable(ask, uniforms[row]), (row, ask.params)
        logprobs, k = log_softmax(ask.logits), ask.params.logprobs
        assert k is not None
        np.testing.assert_allclose(out.logprob[row], logprobs[token], atol=2e-5)
        assert out.rank[row] == np.sum(ask.logits >= ask.logits[token])
        order = np.argsort(-ask.logits, kind="stable")[:k]
        assert out.top_ids[row, :k].tolist() == order.tolist()
        np.testing.assert_allclose(out.top_logprobs[row, :k], logprobs[order], atol=2e-5)


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
@pytest.mark.parametrize("n", range(6))
def test_the_pipeline_against_the_reference(n: int, step: float) -> None:
    check_against_reference(mixed(n, scale=1.0 + n, step=step), num_rows=32)


def test_a_real_vocabulary_against_the_reference() -> None:
    asks = [mixed(77, 49152, scale=s)[i] for i, s in ((0, 2), (8, 1), (9, 1), (13, 1), (14, 2))]
    asks += [mixed(78, 49152)[i] for i in (12, 18, 21)]
    check_against_reference(asks, num_rows=8)


def test_the_number_of_rows_does_not_matter_with_a_real_vocabulary() -> None:  # A6
    asks = [mixed(79, 49152, scale=1.0)[i] for i in (0, 7, 8, 9, 13, 14, 18, 21)]
    few, many = sample(asks), sample(asks[::-1], num_rows=16)
    assert few.tokens.tolist() == many.tokens[::-1].tolist()
    assert few.logprob.tobytes() == many.logprob[::-1].tobytes()


def test_every_drawn_id_is_in_all_sets() -> None:  # A2
    base = noise(3, 1.0)
    params = SamplingParams(
        top_k=150, top_p=0.9, min_p=0.02, allowed_token_ids=list(range(0, VOCAB, 2)), logprobs=0
    )
    w = weights(processed(Ask(base, params)), params)
    seen = set()
    for n in range(20):
        out = sample([Ask(base, params, seed=32 * n + i) for i in range(32)], num_rows=32)
        seen |= set(out.tokens.tolist())
    assert seen <= set(np.flatnonzero(w).tolist())
    assert len(seen) > 50


def test_greedy_ignores_seed_and_filters() -> None:  # A1
    x = noise(4)
    variants = [
        {},
        {"seed": 9},
        {"top_k": 3},
        {"top_p": 0.1},
        {"min_p": 0.5},
        {"top_k": 100, "top_p": 0.99},
    ]
    asks = [
        Ask(x, SamplingParams.from_dict({"temperature": 0.0, **v}), seed=i)
        for i, v in enumerate(variants)
    ]
    assert set(sample(asks).tokens.tolist()) == {int(np.argmax(x))}


@pytest.mark.parametrize("at", [0, 127, 128, 300, VOCAB - 1])
def test_greedy_takes_the_first_of_equals(at: int) -> None:
    x = np.minimum(noise(5), 9.0)
    x[at:] = np.where(np.arange(at, VOCAB) % 3 == at % 3, np.float32(9.5), x[at:])
    assert sample([Ask(x, SamplingParams(temperature=0.0))]).tokens[0] == at


@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_top_1_filters_equal_argmax(settings: dict[str, float]) -> None:
    if not settings:
        settings = {"temperature": 0.0}
    asks = [Ask(noise(n), SamplingParams.from_dict(settings), seed=n) for n in range(32)]
    expected = [int(np.argmax(ask.logits)) for ask in asks]
    assert sample(asks, num_rows=32).tokens.tolist() == expected


def test_neighbouring_floats_are_told_apart_by_top_k() -> None:
    x = np.full(VOCAB, -5.0, np.float32)
    x[100], x[200] = 20.0, np.nextafter(np.float32(20.0), np.float32(0))
    asks = [Ask(x, SamplingParams(top_k=1, temperature=2.0), seed=n) for n in range(8)]
    assert set(sample(asks).tokens.tolist()) == {100}


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_k": 100}, {"top_p": 0.999}]
)
def test_one_token_left(settings: dict[str, float]) -> None:  # A3, A4
    asks = []
    for n in range(8):
        x = np.full(VOCAB, -np.inf, np.float32)
        x[37 * n] = -1e30 if n % 2 else 1e30
        params = SamplingParams.from_dict({"logprobs": 2, **settings})
        asks.append(Ask(x, params, seed=n))
    out = sample(asks)
    assert out.tokens.tolist() == [37 * n for n in range(8)]
    assert (out.status == sampler.STATUS_OK).all()
    assert (out.logprob == 0).all()
    assert (out.rank == 1).all()
    assert (out.top_logprobs[:, 1] == -np.inf).all()


def test_few_tokens_left_give_no_nan() -> None:  # A4
    x = np.full(VOCAB, -np.inf, np.float32)
    x[[3, 300]] = [1.0, 1.0]
    params = SamplingParams(top_k=70, top_p=0.9, min_p=0.1, logprobs=6)
    out = sample([Ask(x, params, seed=n) for n in range(32)], num_rows=32)
    assert set(out.tokens.tolist()) == {3, 300}
    assert not np.isnan(out.top_logprobs).any()
    np.testing.assert_allclose(out.logprob, -math.log(2), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("settings", [{}, {"top_k": 100, "top_p": 0.99}, {"temperature": 0.0}])
def test_a_broken_row_is_reported_and_disturbs_nobody(
    settings: dict[str, float], bad: float
) -> None:
    good = [Ask(noise(n), SamplingParams.from_dict(settings), seed=n) for n in range(6)]
    broken = noise(50)
    broken[200] = bad
    hidden = SamplingParams.from_dict({**settings, "allowed_token_ids": [1, 2]})
    asks = [*good[:2], Ask(broken, good[0].params), *good[2:], Ask(broken, hidden)]
    out, alone = sample(asks), sample(good)
    assert out.status.tolist() == [0, 0, 1, 0, 0, 0, 0, 1]
    assert np.delete(out.tokens, [2, 7]).tolist() == alone.tokens.tolist()
    assert out.tokens[[2, 7]].tolist() == [0, 0]


def test_a_row_with_every_token_forbidden_is_reported() -> None:
    x = noise(1)
    asks = [
        Ask(x, SamplingParams(allowed_token_ids=[5, 6], min_tokens=1), stop_ids=[5, 6]),
        Ask(x, SamplingParams(allowed_token_ids=[5, 6], min_tokens=1), stop_ids=[5]),
        Ask(x, SamplingParams(temperature=0.0, allowed_token_ids=[5], min_tokens=1), stop_ids=[5]),
        Ask(np.full(VOCAB, -np.inf, np.float32)),
        Ask(x, SamplingParams(allowed_token_ids=[5], logit_bias={5: 100.0}), stop_ids=[5]),
    ]
    out = sample(asks)
    assert out.status.tolist() == [2, 0, 2, 2, 0]
    assert out.tokens[[1, 4]].tolist() == [6, 5]


@pytest.mark.parametrize("valid", [503, 384, 1])
def test_columns_beyond_the_vocabulary_do_not_exist(valid: int) -> None:
    wide = noise(9)
    wide[valid:] = 50.0
    wide[valid + 1 :: 2] = np.nan
    narrow = np.ascontiguousarray(wide[:valid])
    params = [
        SamplingParams(logprobs=1),
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(top_k=400, top_p=0.999, temperature=2.0, logprobs=1),
    ]
    out = sample([Ask(wide, p, seed=n) for n, p in enumerate(params)], valid_vocab=valid)
    assert (out.status == sampler.STATUS_OK).all()
    assert (out.tokens < valid).all()
    want = log_softmax(narrow)
    np.testing.assert_allclose(out.logprob, want[out.tokens], atol=2e-5)
    assert out.top_ids[:, 0].tolist() == [int(np.argmax(narrow))] * 3
    assert (out.rank <= valid).all()


SEEDS = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63]


def test_every_64_bit_seed_has_its_own_stream() -> None:  # SA-11
    flat = np.zeros(VOCAB, np.float32)
    streams = {}
    for seed in SEEDS:
        asks = [Ask(flat, seed=seed, prompt=[1] * (n + 1)) for n in range(8)]
        first, second = sample(asks).tokens.tolist(), sample(asks).tokens.tolist()
        assert first == second
        assert len(set(first)) > 1  # each position has its own number
        streams[seed] = tuple(first)
    assert len(set(streams.values())) == len(SEEDS)
    twin = [Ask(flat, seed=-(2**63), prompt=[1] * (n + 1)) for n in range(8)]
    assert sample(twin).tokens.tolist() == list(streams[2**63])  # the same 64 bits

"""Logprobs of what tokens are drawn from, against a float64 reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxpaged.device import sampler
from jaxpaged.sampling_params import SamplingParams
from tests.device.sampler_reference import (
    MAX_LOGPROBS,
    VOCAB,
    Ask,
    inputs,
    log_softmax,
    mixed,
    noise,
    processed,
    sample,
    sample_output,
    weights,
)

_CLOSE = 3e-5
"""Of a float32 log-softmax over 503 logits, whose largest terms are some tens."""


def asking(ask: Ask, mode: str = "processed", logprobs: int = MAX_LOGPROBS) -> Ask:
    params = dataclasses.replace(ask.params, logprobs=logprobs, logprobs_mode=mode)
    return dataclasses.replace(ask, params=params)


def expected(ask: Ask) -> np.ndarray:
    """The log-probability of each token, float64; one of zero weight has minus infinity."""
    x = processed(ask)
    if ask.params.greedy:
        return log_softmax(x)
    kept = weights(x, ask.params) > 0
    return log_softmax(np.where(kept, x / ask.params.temperature, -np.inf))


@pytest.mark.parametrize("n", range(4))
def test_they_are_what_the_token_is_drawn_from(n: int) -> None:
    asks = [asking(ask) for ask in mixed(n)]
    out = sample(asks, num_rows=32)
    assert np.isfinite(out.logprob).all()
    num_cut = 0
    for row, ask in enumerate(asks):
        want, token, top = expected(ask), out.tokens[row], out.top_ids[row]
        assert out.logprob[row] == pytest.approx(want[token], abs=_CLOSE), ask.params
        assert out.rank[row] == np.sum(want >= want[token])
        # Infinities must stand in the same places.
        np.testing.assert_allclose(out.top_logprobs[row], want[top], atol=_CLOSE)
        num_cut += int(np.sum(want[top] == -np.inf))
    assert num_cut > 10


def test_their_exponentials_sum_to_one() -> None:
    asks = [
        asking(Ask(noise(n, vocab=MAX_LOGPROBS), SamplingParams(**fields), seed=n))
        for n, fields in enumerate(
            [
                {},
                {"temperature": 0.4},
                {"top_k": 3},
                {"top_p": 0.6},
                {"min_p": 0.2},
                {"temperature": 0.0},
                {"logit_bias": {1: -50.0}},
                {"allowed_token_ids": [2, 4]},
            ]
        )
    ]
    out = sample(asks)
    np.testing.assert_allclose(np.exp(out.top_logprobs).sum(axis=1), 1.0, atol=1e-6)
    assert (np.exp(out.top_logprobs) == 0).any()


def test_the_drawn_token_is_never_cut() -> None:
    """Neither at the edge of min_p, where weights are rounded: logits a hair apart around it."""
    rng = np.random.default_rng(0)
    edge = np.float32(np.log(0.5))
    asks = []
    for seed in range(24):
        x = (edge + rng.integers(-20, 20, VOCAB) * np.float32(6e-8)).astype(np.float32)
        x[seed] = 0.0
        ask = Ask(x, SamplingParams(min_p=0.5, top_k=300, top_p=0.99), seed=seed)
        asks.append(asking(ask))
    out = sample(asks, num_rows=32)
    assert np.isfinite(out.logprob).all()
    assert len(set(out.tokens.tolist())) > 5


def test_a_row_keeps_its_bits_whatever_the_others_ask_for() -> None:
    asks = mixed(7)
    modes = {"raw": [asking(a, "raw") for a in asks], "processed": [asking(a) for a in asks]}
    whole = {mode: sample(rows, num_rows=32) for mode, rows in modes.items()}
    both = [modes["raw" if i % 2 else "processed"][i] for i in range(len(asks))]
    together = sample(both, num_rows=32)
    alone = {mode: [sample([row]) for row in rows] for mode, rows in modes.items()}
    for i in range(len(asks)):
        mode = "raw" if i % 2 else "processed"
        for name in ("tokens", "rank", "logprob", "top_ids", "top_logprobs"):
            mine = getattr(together, name)[i]
            assert np.array_equal(mine, getattr(whole[mode], name)[i]), (name, asks[i].params)
            assert np.array_equal(mine, getattr(alone[mode][i], name)[0]), (name, asks[i].params)


def test_the_mode_changes_no_token() -> None:
    asks = mixed(8)
    raw = sample([asking(a, "raw", 0) for a in asks], num_rows=32)
    of_draws = sample([asking(a, "processed", 0) for a in asks], num_rows=32)
    assert raw.tokens.tolist() == of_draws.tokens.tolist()
    assert (raw.logprob != of_draws.logprob).sum() > 10


def test_without_filters_both_modes_agree() -> None:
    """What a trainer relies on that samples at temperature 1."""
    asks = [Ask(noise(n), seed=n) for n in range(8)]
    raw, of_draws = (sample([asking(a, mode) for a in asks]) for mode in ("raw", "processed"))
    np.testing.assert_allclose(raw.logprob, of_draws.logprob, atol=1e-6)
    assert np.array_equal(raw.top_ids, of_draws.top_ids)


def test_forbidden_tokens_and_padding() -> None:
    """A wholly masked row keeps its status, and its neighbours their numbers."""
    masked = Ask(noise(1), SamplingParams(allowed_token_ids=[3], min_tokens=1), stop_ids=[3])
    asks = [asking(masked), asking(Ask(noise(2), seed=2))]
    out = sample(asks)
    assert out.status.tolist() == [sampler.STATUS_ALL_MASKED, sampler.STATUS_OK]
    assert out.logprob[1] == sample(asks[1:]).logprob[0]
    padded = sampler.unpack(np.asarray(sample_output(*inputs(asks, 8), valid_vocab=VOCAB).packed))
    assert padded.tokens[2:].tolist() == [0] * 6

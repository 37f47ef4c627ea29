from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.device import sampler
from jaxpaged.device.sampling_state import rows_from_packed
from jaxpaged.sampling_params import SamplingParams
from tests.device.sampler_reference import (
    MAX_LOGPROBS,
    SETTINGS,
    VOCAB,
    Ask,
    inputs,
    log_softmax,
    mixed,
    noise,
    sample,
    sample_output,
)


def test_logprobs_do_not_change_the_tokens() -> None:  # A8
    for n in range(3):
        asks = mixed(n)
        bare = [
            dataclasses.replace(a, params=dataclasses.replace(a.params, logprobs=None))
            for a in asks
        ]
        with_logprobs, without = sample(asks, num_rows=32), sample(bare, num_rows=32)
        assert with_logprobs.tokens.tolist() == without.tokens.tolist()


def test_logprobs_are_log_probabilities() -> None:  # A7
    out = sample([Ask(noise(n), SamplingParams(logprobs=6), seed=n) for n in range(8)])
    assert (out.logprob <= 0).all()
    assert (out.top_logprobs <= 0).all()
    assert (np.exp(out.top_logprobs).sum(axis=1) <= 1 + 1e-6).all()
    assert (np.diff(out.top_logprobs, axis=1) <= 0).all()
    for row in range(8):
        if out.rank[row] <= 6:  # the drawn token's entry equals its place in the list, to the bit
            place = out.top_ids[row].tolist().index(out.tokens[row])
            assert out.top_logprobs[row, place] == out.logprob[row]


def test_logprobs_are_raw_and_equal_the_prompts() -> None:  # LP-05
    params = SamplingParams(temperature=0.5, top_k=2, logit_bias={3: 5.0}, logprobs=4)
    asks = [Ask(noise(n), params, seed=n) for n in range(8)]
    out = sample(asks)
    score = jax.jit(sampler.prompt_logprobs, static_argnames=("max_logprobs", "valid_vocab"))
    logits, wanted = inputs(asks, 8)[0], np.full(8, 4, np.int32)
    given = score(logits, out.tokens, wanted, max_logprobs=6, valid_vocab=VOCAB)
    scored = sampler.unpack(np.asarray(given.packed))
    for name in ("tokens", "status", "rank", "logprob", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(scored, name), getattr(out, name)), name
    np.testing.assert_allclose(
        out.logprob,
        [log_softmax(a.logits)[t] for a, t in zip(asks, out.tokens, strict=True)],
        atol=2e-5,
    )


def test_prompt_rows_outside_the_vocabulary_are_padding() -> None:
    logits = np.stack([noise(n) for n in range(8)])
    tokens = np.array([-1, VOCAB, 2**31 - 1, 0, VOCAB - 1, 5, 6, 7], np.int32)
    out = sampler.prompt_logprobs(
        jnp.asarray(logits),
        jnp.asarray(tokens),
        jnp.zeros(8, jnp.int32),
        max_logprobs=0,
        valid_vocab=VOCAB,
    )
    assert np.asarray(out.tokens).tolist() == [0, 0, 0, 0, VOCAB - 1, 5, 6, 7]
    want = log_softmax(logits[4])[VOCAB - 1]
    np.testing.assert_allclose(np.asarray(out.logprob)[4], want, atol=2e-5)
    assert out.packed.shape == (8, 4)


def test_padding_rows_give_token_0_and_no_complaint() -> None:
    args = inputs([Ask(noise(1)), Ask(noise(2))], 8)  # the padding rows' logits are NaN
    out = sampler.unpack(np.asarray(sample_output(*args, valid_vocab=VOCAB).packed))
    assert out.tokens[2:].tolist() == [0] * 6
    assert out.status.tolist() == [0] * 8


def test_the_packed_array_carries_everything() -> None:
    out = sample_output(*inputs(mixed(3)[:8], 8), valid_vocab=VOCAB)
    assert out.packed.dtype == jnp.int32
    assert out.packed.shape == (8, 4 + 2 * MAX_LOGPROBS)
    host = sampler.unpack(np.asarray(out.packed))
    for name in ("tokens", "status", "rank", "logprob", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(host, name), np.asarray(getattr(out, name))), name


def test_one_program_serves_every_request_and_sends_little() -> None:  # JX-05
    traces = 0

    def step(x: jax.Array, *rest: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        state, ints, floats = rest
        rows = rows_from_packed(ints, floats)
        return sampler.sample(x, state, rows, max_logprobs=20, valid_vocab=VOCAB).packed

    jitted = jax.jit(step)
    for n in range(12):
        settings = SETTINGS[n]
        params = SamplingParams.from_dict({**settings, "logprobs": n if n % 2 else None})
        packed = jitted(*inputs([Ask(noise(n), params)] * (n % 8 + 1), 8))
        assert packed.nbytes < 8 * (20 + 2) * 16
    assert traces == 1


def primitives(jaxpr: Any, *, in_branches: bool) -> set[str]:
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        if eqn.primitive.name == "cond" and not in_branches:
            continue
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found |= primitives(inner, in_branches=in_branches)
    return found


def test_plain_greedy_steps_do_no_more_than_they_need() -> None:
    args = inputs([Ask(noise(1))], 8)
    jaxpr = jax.make_jaxpr(lambda *a: sample_output(*a, valid_vocab=VOCAB))(*args).jaxpr
    everywhere = primitives(jaxpr, in_branches=True)
    always = primitives(jaxpr, in_branches=False)
    costly = {"exp", "random_bits", "top_k", "cumsum", "scatter", "scatter-add", "while"}
    assert costly <= everywhere, costly - everywhere
    assert not costly & always
    assert "sort" not in everywhere


def test_float16_logits_are_widened_first() -> None:
    x = noise(2).astype(np.float16).astype(np.float32)
    args = inputs([Ask(x, SamplingParams(logprobs=2), seed=n) for n in range(8)], 8)
    wide, narrow = (
        np.asarray(sample_output(args[0].astype(t), *args[1:], valid_vocab=VOCAB).packed)
        for t in (np.float32, np.float16)
    )
    assert np.array_equal(wide, narrow)

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.device import sampler
from jaxpaged.device.sampling_state import (
    SlotState,
    empty_slot_state,
    pack_slot,
    record_tokens,
    rows_from_packed,
    write_slot,
)
from jaxpaged.sampling_params import SamplingParams
from tests.device.sampler_reference import MAX_LEN, Ask, ask_fields, inputs, packed_rows, processed

VOCAB = 503


@jax.jit
def process(x: jax.Array, state: SlotState, ints: jax.Array, floats: jax.Array) -> jax.Array:
    return sampler.process_logits(x, state, rows_from_packed(ints, floats))


def run(asks: Sequence[Ask], slots: Sequence[int] | None = None) -> np.ndarray:
    return np.asarray(process(*inputs(asks, 8, slots)))[: len(asks)]


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 4


flat = functools.partial(np.full, VOCAB, dtype=np.float32)


@pytest.mark.parametrize("logit", [3.0, -3.0])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Offsets of tokens 10..14, for prompt [10, 10, 11] and output [12, 12, 13].
        ({"repetition_penalty": 1.5}, None),
        ({"frequency_penalty": 0.7}, [0, 0, -1.4, -0.7, 0]),
        ({"presence_penalty": 0.7}, [0, 0, -0.7, -0.7, 0]),
        ({"frequency_penalty": -0.7}, [0, 0, 1.4, 0.7, 0]),
    ],
)
def test_which_tokens_a_penalty_touches(
    settings: dict[str, float], expected: list[float] | None, logit: float
) -> None:
    ask = Ask(flat(logit), SamplingParams(**settings), prompt=[10, 10, 11], outputs=[12, 12, 13])
    out = run([ask])[0]
    if expected is None:
        repeated = logit / 1.5 if logit > 0 else logit * 1.5
        want = np.array([repeated] * 4 + [logit])
    else:
        want = logit + np.array(expected)
    np.testing.assert_allclose(out[10:15], want, rtol=1e-6)
    untouched = np.delete(out, range(10, 15))
    assert (untouched == np.float32(logit)).all()


def test_penalties_are_applied_in_order() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    out = run([Ask(flat(4.0), params, prompt=[1], outputs=[2, 2])])[0]
    # The repetition penalty divides first: (4 / 2) - 2 x 0.5 - 0.25.
    assert out[:3].tolist() == [4.0, 2.0, 0.75]


@pytest.mark.parametrize("known", [1, 255, 256, 257, 512, 513, MAX_LEN - 1, MAX_LEN])
def test_the_whole_history_counts_once(known: int) -> None:
    params = SamplingParams(frequency_penalty=1.0)
    tokens = np.arange(known) % 5
    ask = Ask(flat(0.0), params, prompt=tokens[:1], outputs=tokens[1:])
    out = run([ask, Ask(flat(0.0), params, prompt=[7], outputs=[9])])
    counts = np.bincount(tokens[1:], minlength=VOCAB)
    assert (out[0] == -counts).all()
    assert out[1, 9] == -1.0
    assert np.count_nonzero(out[1]) == 1


def test_an_extreme_repetition_penalty_stays_below_infinity() -> None:
    x = flat(1e10)
    x[2] = -np.inf
    x[3] = -1.0
    out = run(
        [Ask(x, SamplingParams(repetition_penalty=r), prompt=[1, 2, 3]) for r in (1e-40, 1e30)]
    )
    assert out[0, 1] == np.finfo(np.float32).max
    assert (out[:, 2] == -np.inf).all()
    np.testing.assert_allclose(out[1, [1, 3]], [1e-20, -1e30], rtol=1e-6)


def test_recorded_tokens_are_penalised_in_a_context_shorter_than_a_chunk() -> None:
    fields = ask_fields(Ask(flat(1.0), SamplingParams(presence_penalty=1.0), prompt=[4]), 1)
    state = jax.jit(write_slot)(
        empty_slot_state(2, 5), jnp.int32(1), pack_slot(SamplingParams(), [], [], [4], 5)
    )
    x = jnp.asarray(np.tile(flat(1.0), (8, 1)))
    for position, token, expected in ((1, 9, []), (2, 8, [9]), (3, 7, [8, 9])):
        rows = rows_from_packed(
            *map(jnp.asarray, packed_rows([{**fields, "position": position}], 8, 2))
        )
        seen = np.flatnonzero(np.asarray(jax.jit(sampler.process_logits)(x, state, rows))[0] == 0.0)
        assert seen.tolist() == expected
        state = record_tokens(state, rows, jnp.full(8, token, jnp.int32))
    assert np.asarray(state.history).tolist() == [[-1] * 5, [4, 9, 8, 7, -1]]


def test_allowed_ids() -> None:
    out = run([Ask(flat(1.0), SamplingParams(allowed_token_ids=[0, 7, 502]))])[0]
    assert np.flatnonzero(out > -np.inf).tolist() == [0, 7, 502]


@pytest.mark.parametrize(
    ("word", "outputs", "masked"),
    [
        ([7], [], True),
        ([7], [7, 7], True),
        ([8, 7], [1, 8], True),
        ([8, 7], [8, 1], False),
        ([8, 7], [], False),  # the prompt ends with 8, which is not the model's output
        ([8, 8, 7], [8], False),  # half in the prompt
        ([8, 8, 7], [8, 8], True),
        ([*list(range(20, 35)), 7], list(range(20, 35)), True),  # the longest word
        ([*list(range(20, 35)), 7], list(range(21, 35)), False),
    ],
)
def test_bad_words(word: list[int], outputs: list[int], masked: bool) -> None:
    params = SamplingParams(bad_words=["x"])
    ask = Ask(flat(1.0), params, prompt=[8, 8], outputs=outputs, bad_words=[[300], word])
    out = run([ask])[0]
    assert np.flatnonzero(out == -np.inf).tolist() == ([7, 300] if masked else [300])


def test_min_tokens_masks_every_stop_id_and_no_other() -> None:
    params = SamplingParams(min_tokens=2, max_tokens=5)
    asks = [Ask(flat(1.0), params, stop_ids=[2, 3], outputs=[9] * n) for n in range(3)]
    asks.append(Ask(flat(1.0), params))  # a model without EOS: the last id must not suffer
    masked = [np.flatnonzero(row == -np.inf).tolist() for row in run(asks)]
    assert masked == [[2, 3], [2, 3], [], []]


def test_logit_bias_adds_and_cannot_lift_a_mask() -> None:
    params = SamplingParams(
        logit_bias={7: 100.0, 8: -2.5, 3: 100.0}, allowed_token_ids=[7, 8], min_tokens=1
    )
    out = run([Ask(flat(1.0), params, stop_ids=[7])])[0]
    assert out[[3, 7, 8]].tolist() == [-np.inf, -np.inf, -1.5]


def test_rows_without_rules_and_padding_rows_keep_their_bits() -> None:
    everything = SamplingParams(
        allowed_token_ids=list(range(100)),
        bad_words=["x"],
        min_tokens=3,
        logit_bias={1: 3.0},
        repetition_penalty=1.3,
        frequency_penalty=0.3,
        presence_penalty=0.3,
    )
    busy = Ask(noise(1), everything, outputs=[4], stop_ids=[5], bad_words=[[6]])
    plain = Ask(noise(2), SamplingParams())
    args = inputs([busy, plain], 8, [11, 3])
    args[0][2:] = noise(3)
    out = np.asarray(process(*args))
    assert (out[1:] == args[0][1:]).all()
    assert (out[0] != args[0][0]).any()


def test_all_rules_together_match_the_reference() -> None:
    rng = np.random.default_rng(5)
    asks = []
    for n in range(8):
        params = SamplingParams(
            allowed_token_ids=list(range(0, VOCAB, 2)) if n % 3 == 0 else None,
            bad_words=["x"] if n % 2 else None,
            min_tokens=n,
            logit_bias={int(t): float(b) for t, b in enumerate(rng.normal(size=50))},
            repetition_penalty=float(rng.uniform(0.5, 2.0)),
            frequency_penalty=float(rng.uniform(-2, 2)),
            presence_penalty=float(rng.uniform(-2, 2)),
        )
        outputs = rng.integers(0, 40, size=n * 20).tolist()
        words = [[11], [*outputs[-2:], 12], [0, 1, 13]]
        asks.append(
            Ask(
                noise(n),
                params,
                prompt=rng.integers(0, 40, size=30).tolist(),
                outputs=outputs,
                stop_ids=[14, 15],
                bad_words=words,
            )
        )
    out = run(asks, slots=rng.permutation(40)[:8])
    want = np.stack([processed(ask) for ask in asks])
    assert ((out == -np.inf) == (want == -np.inf)).all()
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.device import sampling_state as ss
from jaxpaged.errors import InvalidRequestError
from jaxpaged.sampling_params import SamplingParams
from tests.device.sampler_reference import packed_rows


def test_a_plain_request_asks_for_nothing() -> None:
    fields = ss.row_fields(SamplingParams(), 7, vocab_size=512)
    assert fields.flags == ss.DRAWS
    assert (fields.num_logprobs, fields.top_k, fields.top_p, fields.min_p) == (-1, 0, 1.0, 0.0)
    assert not ss.needs_slot(fields)


def test_a_greedy_request_has_no_filters() -> None:
    params = SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5)
    fields = ss.row_fields(params, 7, vocab_size=512)
    assert (fields.flags, fields.top_k, fields.top_p, fields.min_p) == (0, 0, 1.0, 0.0)
    assert fields.temperature > 0


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"logit_bias": {3: 1.0}}, ss.USES_BIAS),
        ({"allowed_token_ids": [3]}, ss.USES_ALLOWED),
        ({"bad_words": ["x"]}, ss.USES_BAD_WORDS),
        ({"repetition_penalty": 1.1}, ss.USES_PENALTIES),
        ({"frequency_penalty": -0.1}, ss.USES_PENALTIES),
        ({"presence_penalty": 0.1}, ss.USES_PENALTIES),
    ],
)
def test_each_rule_sets_its_flag(settings: dict[str, object], flag: int) -> None:
    fields = ss.row_fields(SamplingParams.from_dict(settings), 0, vocab_size=512)
    assert fields.flags == ss.DRAWS | flag
    assert ss.needs_slot(fields)


def test_stops_are_masked_until_min_tokens() -> None:
    fields = ss.row_fields(SamplingParams(min_tokens=2, max_tokens=5), 0, vocab_size=512)
    masked = [bool(fields.flags_after(n) & ss.MASK_STOPS) for n in range(4)]
    assert masked == [True, True, False, False]
    assert ss.needs_slot(fields)


@pytest.mark.parametrize(
    ("top_k", "expected"), [(-1, 0), (0, 0), (1, 1), (511, 511), (512, 0), (513, 0), (2**40, 0)]
)
def test_top_k_off_values(top_k: int, expected: int) -> None:
    assert ss.row_fields(SamplingParams(top_k=top_k), 0, vocab_size=512).top_k == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, -1), (0, 0), (5, 5), (-1, 512)])
def test_num_logprobs(asked: int | None, expected: int) -> None:
    fields = ss.row_fields(SamplingParams(logprobs=asked), 0, vocab_size=512)
    assert fields.num_logprobs == expected


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, 2**63, -2, -(2**63)])
def test_all_64_bits_of_a_seed_survive(seed: int) -> None:
    fields = ss.row_fields(SamplingParams(), seed, vocab_size=512)
    words = np.array([fields.seed_lo, fields.seed_hi], np.int32).view(np.uint32)
    assert int(words[0]) + (int(words[1]) << 32) == seed % 2**64


def test_pack_slot_layout() -> None:
    params = SamplingParams(logit_bias={9: 2.5, 4: -200.0}, allowed_token_ids=[8, 6])
    values = ss.pack_slot(params, [2, 3], [[7], [5, 6, 7]], [10, 11], 5)
    assert values.history.tolist() == [10, 11, -1, -1, -1]
    assert values.stop_ids[:3].tolist() == [2, 3, -1]
    assert values.bias_ids[:3].tolist() == [9, 4, -1]
    assert values.bias_values[:3].tolist() == [2.5, -100.0, 0.0]
    assert values.allowed_ids[:3].tolist() == [8, 6, -1]
    assert values.bad_words[0, -2:].tolist() == [-1, 7]
    assert values.bad_words[1, -4:].tolist() == [-1, 5, 6, 7]
    assert (values.bad_words[2:] == -1).all()


@pytest.mark.parametrize(
    ("stop_ids", "bad_words", "param", "number"),
    [
        (range(257), [], "stop_token_ids", "256"),
        ([], [[1]] * 129, "bad_words", "128"),
        ([], [[1] * 17], "bad_words", "17"),
        ([], [[]], "bad_words", "0 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(
    stop_ids: list[int], bad_words: list[list[int]], param: str, number: str
) -> None:
    with pytest.raises(InvalidRequestError, match=number) as error:
        ss.pack_slot(SamplingParams(), list(stop_ids), bad_words, [], 8)
    assert error.value.param == param


def test_the_largest_request_fits() -> None:
    params = SamplingParams(
        allowed_token_ids=list(range(1024)), logit_bias=dict.fromkeys(range(1024), 1.0)
    )
    values = ss.pack_slot(params, range(256), [[1] * 16] * 128, range(8), 8)
    for field in dataclasses.fields(values):
        assert (getattr(values, field.name) >= 0).all(), field.name


def test_write_slot_changes_one_slot_only() -> None:
    values = ss.pack_slot(SamplingParams(logit_bias={9: 2.5}), [2], [[7]], [10, 11], 5)
    write = jax.jit(ss.write_slot)
    empty = ss.empty_slot_state(4, 5)
    state = write(empty, jnp.int32(2), values)
    for field in dataclasses.fields(ss.SlotState):
        before, after = (np.asarray(getattr(s, field.name)) for s in (empty, state))
        assert after.dtype == before.dtype
        assert (after[2] == getattr(values, field.name)).all(), field.name
        assert (after[[0, 1, 3]] == before[[0, 1, 3]]).all(), field.name


def test_write_slot_drops_padding_and_takes_several() -> None:
    values = [ss.pack_slot(SamplingParams(), [n], [], [n], 5) for n in (1, 2, 3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *values)
    state = ss.write_slot(ss.empty_slot_state(4, 5), jnp.array([3, 4, 0], jnp.int32), stacked)
    assert np.asarray(state.history[:, 0]).tolist() == [3, -1, -1, 1]
    assert np.asarray(state.stop_ids[:, 0]).tolist() == [3, -1, -1, 1]


def test_record_tokens_drops_padding() -> None:
    fields = dict.fromkeys(ss.INT_FIELDS + ss.FLOAT_FIELDS, 0)
    asked = [fields | {"slot": s, "position": p} for s, p in ((1, 0), (0, 4), (3, 1), (1, 5))]
    rows = ss.rows_from_packed(*map(jnp.asarray, packed_rows(asked, 4, 3)))
    tokens = jnp.array([7, 8, 9, 6], jnp.int32)
    state = ss.record_tokens(ss.empty_slot_state(3, 5), rows, tokens)
    expected = np.full((3, 5), -1)
    expected[1, 0], expected[0, 4] = 7, 8
    assert np.asarray(state.history).tolist() == expected.tolist()

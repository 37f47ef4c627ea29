from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from jaxpaged.device import sampler
from jaxpaged.device.sampling_state import DRAWS, FLOAT_FIELDS, INT_FIELDS, rows_from_packed
from tests.device.sampler_reference import (
    packed_rows,
)

MANY = 6000


PROBS = (0.40, 0.22, 0.18, 0.08, 0.05, 0.04, 0.02, 0.01)


@jax.jit
def draw(x: jax.Array, ints: jax.Array, floats: jax.Array) -> jax.Array:
    return sampler.draw(x, rows_from_packed(ints, floats))


def draw_many(logits: Sequence[float], **settings: float) -> np.ndarray:
    """Counts of each id over MANY draws of one distribution, at positions 0..MANY-1."""
    neutral: dict[str, float] = dict.fromkeys(INT_FIELDS + FLOAT_FIELDS, 0)
    neutral |= {"flags": DRAWS, "temperature": 1.0, "top_p": 1.0, "seed_lo": 12345} | settings
    fields = [neutral | {"position": n} for n in range(MANY)]
    x = np.tile(np.asarray(logits, np.float32), (MANY, 1))
    tokens = np.asarray(draw(x, *packed_rows(fields, MANY, 1)))
    return np.bincount(tokens, minlength=len(logits))


def chi_square(counts: np.ndarray, w: np.ndarray) -> float:
    """The statistic over its critical value at 1e-4 (Wilson-Hilferty): below 1 passes."""
    likely = w > 0
    want = MANY * w[likely] / w.sum()
    statistic = ((counts[likely] - want) ** 2 / want).sum()
    freedom = max(likely.sum() - 1, 1)
    z = 3.719
    critical = freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3
    return float(statistic / critical)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, range(8)),
        ({"top_k": 3, "top_p": 0.77}, [0, 1]),  # of the renormalised three
        ({"top_p": 0.77}, [0, 1, 2]),
        ({"top_p": 0.0}, [0]),
        ({"top_p": 1e-9}, [0]),
        ({"top_p": 1e-45}, [0]),
        ({"top_p": 0.99}, range(7)),
        ({"top_p": 1.0}, range(8)),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.0}, range(8)),
        ({"min_p": 0.19}, [0, 1, 2, 3]),
        ({"top_k": 2, "min_p": 0.9}, [0]),
        ({"min_p": 0.15, "top_p": 0.90}, [0, 1, 2]),  # of the renormalised four: .91 above .08
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 8}, range(8)),
        ({"top_k": 9}, range(8)),
        ({"top_k": 2**31 - 1}, range(8)),
        ({"temperature": 2.0}, range(8)),
        ({"temperature": 0.5, "top_k": 4}, [0, 1, 2, 3]),
    ],
)
def test_the_set_and_the_distribution(settings: dict[str, float], expected: Sequence[int]) -> None:
    counts = draw_many(np.log(PROBS), **settings)
    assert np.flatnonzero(counts).tolist() == list(expected)
    w = np.array(PROBS) ** (1 / settings.get("temperature", 1.0))
    w = np.where(np.isin(np.arange(8), list(expected)), w, 0)
    assert chi_square(counts, w) < 1


def test_the_chi_square_test_can_fail() -> None:
    counts = draw_many(np.log(PROBS), temperature=1.15)
    assert chi_square(counts, np.array(PROBS)) > 1


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 1}])
def test_ties_are_kept(settings: dict[str, float]) -> None:
    counts = draw_many([0.5] * 8, **settings)
    assert chi_square(counts, np.ones(8)) < 1


def test_ties_at_the_threshold_only() -> None:
    counts = draw_many([3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 0.0, 0.0], top_k=2)
    assert chi_square(counts, np.exp([3.0, 2, 2, 2, -np.inf, -np.inf, -np.inf, -np.inf])) < 1
    assert np.flatnonzero(counts).tolist() == [0, 1, 2, 3]


def test_most_tokens_masked() -> None:
    x = np.full(8, -np.inf)
    x[[2, 5]] = [1.0, 2.0]
    for settings in ({}, {"top_k": 4}, {"top_p": 0.95}, {"min_p": 0.1}):
        counts = draw_many(x, **settings)
        assert chi_square(counts, np.exp(x)) < 1
        assert np.flatnonzero(counts).tolist() == [2, 5]


@pytest.mark.parametrize("word", ["seed_lo", "seed_hi", "sample_index"])
def test_the_distribution_over_seeds_at_one_position(word: str) -> None:
    neutral: dict[str, float] = dict.fromkeys(INT_FIELDS + FLOAT_FIELDS, 0)
    neutral |= {"flags": DRAWS, "temperature": 1.0, "top_p": 1.0, "position": 17}
    rows = packed_rows([neutral | {word: n} for n in range(MANY)], MANY, 1)
    x = np.tile(np.log(PROBS).astype(np.float32), (MANY, 1))
    counts = np.bincount(np.asarray(draw(x, *rows)), minlength=8)
    assert chi_square(counts, np.array(PROBS)) < 1


def test_sample_indices_and_seeds_are_independent_streams() -> None:
    streams = [
        draw_many([0.0] * 8, **settings)
        for settings in ({}, {"sample_index": 1}, {"sample_index": 2}, {"seed_hi": 1})
    ]
    for counts in streams:
        assert chi_square(counts, np.ones(8)) < 1
    assert len({tuple(counts) for counts in streams}) == len(streams)


def test_far_positions_have_their_own_numbers() -> None:
    neutral: dict[str, float] = dict.fromkeys(INT_FIELDS + FLOAT_FIELDS, 0)
    neutral |= {"flags": DRAWS, "temperature": 1.0, "top_p": 1.0}
    positions = [0, 1, 2**20, 2**24, 2**24 + 1, 2**30, 2**31 - 2, 2**31 - 1]
    rows = packed_rows([neutral | {"position": p} for p in positions], 8, 1)
    tokens = np.asarray(draw(np.zeros((8, 512), np.float32), *rows))
    assert len(set(tokens.tolist())) == 8
    assert ((tokens >= 0) & (tokens < 512)).all()


def test_extreme_uniforms_choose_a_token_with_weight() -> None:
    inverse_cdf = jax.jit(sampler._inverse_cdf)
    w = np.zeros((4, 512), np.float32)
    w[:, [130, 200, 201, 390]] = [1.0, 1e-30, 2.0, 1.0]
    uniforms = np.array([0.0, 0.25, 1 - 2.0**-24, 1.0], np.float32)
    assert np.asarray(inverse_cdf(w, uniforms)).tolist() == [130, 201, 390, 390]

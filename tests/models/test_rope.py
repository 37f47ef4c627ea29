"""Frequencies and tables: numbers of transformers, rules for lengths, the same bits for any T."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jaxpaged.models.rope import RopeConfig, apply_rope, inverse_frequencies, rope_table

LONGROPE = RopeConfig(
    10000.0,
    "longrope",
    4.0,
    original_max_position=64,
    attention_factor=1.25,
    short_factor=tuple(1 + i / 8 for i in range(8)),
    long_factor=tuple(2 + i for i in range(8)),
)
DYNAMIC = RopeConfig(10000.0, "dynamic", 4.0, original_max_position=64)
YARN = RopeConfig(10000.0, "yarn", 4.0, original_max_position=64, attention_factor=1.125)

# Numbers of transformers 5.24 (torch 2.13).
FREQUENCIES: list[tuple[RopeConfig, int, list[float]]] = [
    (
        RopeConfig(10000.0),
        16,
        [1.0, 0.31622776389, 0.1, 0.031622778624, 0.01, 0.0031622778624, 0.001, 0.00031622778624],
    ),
    (
        RopeConfig(500000.0),
        16,
        [
            *(1.0, 0.1939227581, 0.0376060307, 0.0072926650751, 0.0014142134459),
            *(0.00027424818836, 5.3182957345e-05, 1.0313385246e-05),
        ],
    ),
    (
        RopeConfig(10000.0, "linear", factor=4.0),
        16,
        [
            *(0.25, 0.079056940973, 0.025, 0.0079056946561, 0.0025),
            *(0.00079056946561, 0.00025, 7.9056946561e-05),
        ],
    ),
    (
        RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),
        32,
        [
            *(1.0, 0.44036662579, 0.1939227581, 0.085397101939, 0.0376060307, 0.016560440883),
            *(0.0072926650751, 0.0032114461064, 0.00052484602202, 7.7846554632e-05),
            *(3.4281023545e-05, 1.5096217794e-05, 6.6478696681e-06, 2.9274997360e-06),
            *(1.2891731558e-06, 5.6770880974e-07),
        ],
    ),
    (
        RopeConfig(10000.0, "llama3", 32.0, 1.0, 4.0, 64),
        16,
        [
            *(1.0, 0.23668710887, 0.0037253550254, 0.00098821183201, 0.00031249999302),
            *(9.8821183201e-05, 3.1250001484e-05, 9.8821183201e-06),
        ],
    ),
    (
        RopeConfig(10000.0, "yarn", 4.0, original_max_position=64),
        16,
        [
            *(1.0, 0.23717081547, 0.04999999702, 0.0079056946561, 0.0024999999441),
            *(0.00079056946561, 0.00025000001187, 7.9056946561e-05),
        ],
    ),
    (
        RopeConfig(
            *(10000.0, "yarn", 40.0),
            original_max_position=4096,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
        16,
        [
            *(1.0, 0.31622776389, 0.10000000149, 0.031622778624, 0.0057901046239),
            *(0.00012395245722, 2.4999999368e-05, 7.9056944742e-06),
        ],
    ),
]


@pytest.mark.parametrize(("rope", "dim", "expected"), FREQUENCIES, ids=lambda x: str(x)[:40])
def test_inverse_frequencies(rope: RopeConfig, dim: int, expected: list[float]) -> None:
    freqs = inverse_frequencies(rope, dim)
    assert freqs.dtype == np.float32
    np.testing.assert_allclose(freqs, expected, rtol=3e-7)


def table(rope: RopeConfig, positions: list[int], lengths: list[int]) -> npt.NDArray[np.float32]:
    run = jax.jit(lambda p, n: rope_table(rope, 16, p, n))
    return np.asarray(run(jnp.array(positions, jnp.int32), jnp.array(lengths, jnp.int32)))


def angles(freqs: npt.NDArray[np.float32], position: int) -> npt.NDArray[np.float64]:
    return position * freqs.astype(np.float64)


def test_longrope_goes_by_the_length_of_the_sequence() -> None:
    got = table(LONGROPE, [0, 3, 3, 3, 70, 70], [0, 0, 64, 65, 64, 71])
    for column, (position, long) in enumerate(
        [(0, False), (3, False), (3, False), (3, True), (70, False), (70, True)]
    ):
        freqs = inverse_frequencies(LONGROPE, 16, long=long)
        factors = LONGROPE.long_factor if long else LONGROPE.short_factor
        np.testing.assert_allclose(
            freqs, inverse_frequencies(RopeConfig(10000.0), 16) / np.float32(factors), rtol=2e-7
        )
        expected = 1.25 * np.cos(angles(freqs, position))
        np.testing.assert_allclose(got[0, column], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("position", "length", "seq_len"),
    [(3, 0, 64), (3, 64, 64), (3, 65, 65), (3, 100, 100), (70, 10, 71), (63, 10, 64), (70, 90, 90)],
)
def test_dynamic_goes_by_the_prompt_and_then_by_the_position(
    position: int, length: int, seq_len: int
) -> None:
    base = 10000.0 * (4.0 * seq_len / 64 - 3.0) ** (16 / 14)
    freqs = base ** (-np.arange(0, 16, 2) / 16)
    got = table(DYNAMIC, [position], [length])[:, 0]
    expected = [np.cos(position * freqs), np.sin(position * freqs)]
    np.testing.assert_allclose(got, expected, atol=2e-5)
    if seq_len == 64:
        assert (got == table(RopeConfig(10000.0), [position], [0])[:, 0]).all()


@pytest.mark.parametrize(
    "rope", [RopeConfig(10000.0), DYNAMIC, LONGROPE, YARN], ids=lambda r: r.kind
)
def test_a_token_gets_the_same_bits_in_any_batch(rope: RopeConfig) -> None:
    rng = np.random.default_rng(0)
    positions, lengths = rng.integers(0, 300, 64).tolist(), rng.integers(0, 300, 64).tolist()
    whole = table(rope, positions, lengths)
    for rows in (1, 8, 24, 40):
        part = table(rope, positions[-rows:], lengths[-rows:])
        assert part.tobytes() == np.ascontiguousarray(whole[:, -rows:]).tobytes()


@pytest.mark.parametrize("position", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("dim", [16, 12])
def test_rotation_of_pairs(position: int, dim: int) -> None:
    """Element i and i + D/2 are a point that turns by position x frequency; the rest stays."""
    rope = RopeConfig(10000.0)
    freqs = inverse_frequencies(rope, dim)
    x = np.random.default_rng(position).standard_normal((1, 2, 3, 16), np.float32)
    turning = rope_table(rope, dim, jnp.array([position]), jnp.array([0]))
    got = np.asarray(apply_rope(jnp.asarray(x), turning))
    points = x[..., : dim // 2].astype(complex) + 1j * x[..., dim // 2 : dim]
    turned = points * np.exp(1j * angles(freqs, position))
    expected = np.concatenate([turned.real, turned.imag, x[..., dim:]], axis=-1)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    if position == 0:
        assert (got == x).all()


def test_rules_for_the_scheduler() -> None:
    assert (LONGROPE.rule, LONGROPE.threshold) == ("longrope", 64)
    assert (DYNAMIC.rule, DYNAMIC.threshold) == ("dynamic", 64)
    for rope in (RopeConfig(10000.0), YARN, RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 64)):
        assert (rope.rule, rope.threshold) == ("fixed", 0)

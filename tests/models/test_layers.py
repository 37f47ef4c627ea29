from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.models.config import RopeConfig
from jaxpaged.models.layers import (
    Attention,
    GatedMLP,
    RMSNorm,
    apply_rope,
    inverse_frequencies,
    matmul,
    mean_of_squares,
    rope_table,
)

F32 = jnp.dtype(jnp.float32)

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
]


@pytest.mark.parametrize(("rope", "dim", "expected"), FREQUENCIES, ids=lambda x: str(x)[:40])
def test_inverse_frequencies(rope: RopeConfig, dim: int, expected: list[float]) -> None:
    freqs = inverse_frequencies(rope, dim)
    assert freqs.dtype == np.float32
    np.testing.assert_allclose(freqs, expected, rtol=3e-7)


@pytest.mark.parametrize("position", [0, 1, 63, 64, 65, 200])
def test_rotation_of_pairs(position: int) -> None:
    """Element i and i + H/2 are a point that turns by position x frequency."""
    freqs = inverse_frequencies(RopeConfig(10000.0), 16)
    x = np.random.default_rng(position).standard_normal((1, 2, 3, 16), np.float32)
    got = np.asarray(apply_rope(jnp.asarray(x), rope_table(jnp.array([position]), freqs)))
    points = x[..., :8].astype(complex) + 1j * x[..., 8:]
    turned = points * np.exp(1j * position * freqs.astype(np.float64))
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    if position == 0:
        assert (got == x).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matmul_rounds_inputs_and_sums_in_float32(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 512), np.float32)
    weight = jnp.asarray(rng.standard_normal((7, 512), np.float32), dtype)
    got = matmul(jnp.asarray(x), weight)
    assert got.dtype == jnp.float32 and got.shape == (5, 7)
    rounded = np.asarray(jnp.asarray(x).astype(dtype), np.float64)
    expected = rounded @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_mean_of_squares_gives_a_row_the_same_bits_in_any_batch() -> None:
    x = np.random.default_rng(0).standard_normal((64, 96), np.float32)
    run = jax.jit(mean_of_squares)
    whole = np.asarray(run(x))
    np.testing.assert_allclose(whole[:, 0], (x.astype(np.float64) ** 2).mean(axis=1), rtol=1e-6)
    for rows in (8, 16, 24, 40):
        assert np.asarray(run(x[:rows])).tobytes() == whole[:rows].tobytes()


def filled(module: nnx.Module, seed: int) -> dict[str, np.ndarray]:
    """Put random numbers into every parameter; returns them by attribute name."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, value in vars(module).items():
        if isinstance(value, nnx.Param):
            values[name] = rng.normal(0, 0.3, value[...].shape).astype(np.float32)
            value[...] = jnp.asarray(values[name])
    return values


def test_rms_norm() -> None:
    norm = RMSNorm(32, 1e-2, F32)
    weight = filled(norm, 0)["weight"]
    x = np.random.default_rng(1).standard_normal((8, 32), np.float32) * 0.1
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-2) * weight
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


def test_gated_mlp() -> None:
    mlp = GatedMLP(16, 24, F32)
    weights = filled(mlp, 0)
    gate, up = np.unstack(weights["gate_up"], axis=1)
    x = np.random.default_rng(1).standard_normal((8, 16), np.float32)
    opened = x @ gate.T
    expected = (opened / (1 + np.exp(-opened)) * (x @ up.T)) @ weights["down"].T
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_attention_hands_over_heads_in_order(heads: int, kv_heads: int) -> None:
    """Query head n belongs to KV head n // G; q and k are turned, v is not; window and scale."""
    dim, hidden = 8, 12
    layer = Attention(hidden, heads, kv_heads, dim, F32, window=5)
    weights = filled(layer, 0)
    group = heads // kv_heads
    x = np.random.default_rng(1).standard_normal((8, hidden), np.float32)
    table = rope_table(jnp.arange(8), inverse_frequencies(RopeConfig(100.0), dim))
    seen: dict[str, Any] = {}

    def attend(q: Any, k: Any, v: Any, layer_kv: Any, meta: Any, **settings: Any) -> Any:
        seen.update(q=q, k=k, v=v, meta=meta, **settings)
        return q * 2.0, (layer_kv[1], layer_kv[0])

    pools = (jnp.zeros(1), jnp.ones(1))
    out, new_pools = layer(jnp.asarray(x), table, pools, "meta", attend)
    assert new_pools == (pools[1], pools[0]) and seen["meta"] == "meta"
    assert (seen["window"], seen["soft_cap"]) == (5, None)
    assert math.isclose(seen["scale"], dim**-0.5)

    def turned(weight: np.ndarray) -> np.ndarray:
        flat = jnp.asarray(x @ weight.T)[:, None, None, :]
        return np.asarray(apply_rope(flat, table))[:, 0, 0]

    qkv = weights["qkv"]
    for n in range(heads):
        expected = turned(qkv[n // group, n % group])
        np.testing.assert_allclose(seen["q"][:, n], expected, atol=1e-5)
    for n in range(kv_heads):
        np.testing.assert_allclose(seen["k"][:, n], turned(qkv[n, group]), atol=1e-5)
        np.testing.assert_allclose(seen["v"][:, n], x @ qkv[n, group + 1].T, atol=1e-5)
    expected = 2.0 * np.asarray(seen["q"]).reshape(8, -1) @ weights["out"].T
    np.testing.assert_allclose(out, expected, atol=1e-5)

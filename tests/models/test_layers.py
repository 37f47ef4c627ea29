from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.models.layers import Attention, GatedMLP, LayerNorm, RMSNorm, matmul, mean_of_squares
from jaxpaged.models.rope import RopeConfig, apply_rope, rope_table
from tests.device.model_shapes import TINY

F32 = jnp.dtype(jnp.float32)


def table_of(rope: RopeConfig, dim: int, positions: np.ndarray) -> jax.Array:
    where = jnp.asarray(positions, jnp.int32)
    return rope_table(rope, dim, where, jnp.zeros_like(where))


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


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(affine: bool) -> None:
    norm = LayerNorm(32, 1e-2, F32, affine=affine)
    parameters = filled(norm, 0)
    assert set(parameters) == ({"weight", "bias"} if affine else set())
    x = np.random.default_rng(1).standard_normal((8, 32), np.float32) * 0.1 + 3.0
    wide = x.astype(np.float64)
    wide -= wide.mean(axis=1, keepdims=True)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-2)
    if affine:
        expected = expected * parameters["weight"] + parameters["bias"]
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5, atol=2e-6)


def test_layer_norm_gives_a_row_the_same_bits_in_any_batch() -> None:
    norm = LayerNorm(96, 1e-5, F32, affine=False)
    x = np.random.default_rng(0).standard_normal((64, 96), np.float32)
    run = jax.jit(norm)
    whole = np.asarray(run(x))
    for rows in (8, 16, 24, 40):
        assert np.asarray(run(x[:rows])).tobytes() == whole[:rows].tobytes()


def test_gated_mlp() -> None:
    config = dataclasses.replace(TINY, hidden_size=16, intermediate_size=24)
    mlp = GatedMLP(config, F32)
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
    config = dataclasses.replace(
        TINY, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim
    )
    layer = Attention(config, F32, window=5)
    weights = filled(layer, 0)
    group = heads // kv_heads
    x = np.random.default_rng(1).standard_normal((8, hidden), np.float32)
    table = table_of(RopeConfig(100.0), dim, np.arange(8))
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

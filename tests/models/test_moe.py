from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxpaged.models import moe
from jaxpaged.models.layers import matmul
from jaxpaged.models.moe import Experts, route
from jaxpaged.models.routines import LiveRows, live_rows
from jaxpaged.models.sources import HostArray, Index
from jaxpaged.sharding import TENSOR_AXIS
from tests.device.model_shapes import TINY

HIDDEN = 24
CONFIG = dataclasses.replace(TINY, hidden_size=HIDDEN)


def weights_of(experts: int, width: int, hidden: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((experts, width, 2, hidden), np.float32) * 0.3
    down = rng.standard_normal((experts, hidden, width), np.float32) * 0.3
    return jnp.asarray(gate_up, dtype), jnp.asarray(down, dtype)


def module(gate_up: jax.Array, down: jax.Array, devices: int = 1) -> Experts:
    config = dataclasses.replace(CONFIG, hidden_size=down.shape[1], tensor_parallel=devices)
    count = gate_up.shape[0]
    experts = Experts(config, gate_up.dtype, count=count, width=gate_up.shape[1])
    experts.gate_up[...] = experts.gate_up[...].at[:count].set(gate_up)
    experts.down[...] = experts.down[...].at[:count].set(down)
    return experts


def routing(tokens: int, experts: int, per_token: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, HIDDEN), np.float32)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :per_token].astype(np.int32)
    return x, ids, rng.random((tokens, per_token), np.float32)


def expected(
    gate_up: Any, down: Any, x: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Token by token, in float64."""
    gate_up, down = np.asarray(gate_up, np.float64), np.asarray(down, np.float64)
    out = np.zeros(x.shape)
    for token, slot in np.ndindex(ids.shape):
        expert = ids[token, slot]
        gate, up = gate_up[expert, :, 0] @ x[token], gate_up[expert, :, 1] @ x[token]
        out[token] += weights[token, slot] * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("platform", ["cpu", "others"])
@pytest.mark.parametrize(("tokens", "per_token"), [(1, 1), (8, 2), (100, 3)])
def test_every_token_gets_its_experts(
    platform: str, tokens: int, per_token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform == "others":
        monkeypatch.setattr(moe, "_by_tiles", moe._by_ragged_dot)
    experts = module(*weights_of(5, 40, HIDDEN, jnp.float32))
    given = routing(tokens, 5, per_token)
    found = jax.jit(experts)(*given)
    wanted = expected(experts.gate_up[...], experts.down[...], *given)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "others"])
def test_padding_goes_to_no_expert(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it holds; an expert that only padding would go to is not read. Elsewhere than on a
    CPU padding is computed as well, and finite.
    """
    other = np.float32(np.nan)
    if platform == "others":
        monkeypatch.setattr(moe, "_by_tiles", moe._by_ragged_dot)
        other = np.float32(1e3)
    gate_up, down = weights_of(5, 40, HIDDEN, jnp.float32)
    experts = module(gate_up.at[4].set(other), down.at[4].set(other))
    x, ids, weights = routing(50, 4, 2)
    live = LiveRows(jnp.asarray([3, 20], jnp.int32), 8, 50)
    matters = np.zeros(50, bool)
    matters[:3] = matters[8:28] = True
    assert (np.asarray(live.mask()) == matters).all()
    x[~matters], ids[~matters], weights[~matters] = other, 4, other

    def run(*given: Any) -> jax.Array:
        with live_rows(live):
            out: jax.Array = experts(*given)
        return out

    found = np.asarray(jax.jit(run)(x, ids, weights))
    wanted = expected(gate_up, down, x[matters], ids[matters], weights[matters])
    np.testing.assert_allclose(found[matters], wanted, rtol=1e-5, atol=1e-5)
    assert not found[~matters].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_all_tokens_at_one_expert_and_the_others_are_not_read(dtype: str) -> None:
    """NaN in an expert that has no token must reach none. Both tile sizes are used."""
    gate_up, down = weights_of(4, 40, HIDDEN, dtype)
    others = jnp.asarray([0, 1, 3])
    poisoned = module(gate_up.at[others].set(jnp.nan), down.at[others].set(jnp.nan))
    for tokens in (9, 150):
        x, _, weights = routing(tokens, 4, 1)
        given = (x, np.full((tokens, 1), 2, np.int32), weights)
        found = jax.jit(poisoned)(*given)
        np.testing.assert_allclose(found, expected(gate_up, down, *given), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("experts", "per_token", "width"), [(8, 2, 96), (32, 8, 28)])
def test_a_token_has_the_same_bits_in_any_batch(
    dtype: str, experts: int, per_token: int, width: int
) -> None:
    hidden = 64
    graph, state = nnx.split(module(*weights_of(experts, width, hidden, dtype)))
    rng = np.random.default_rng(2)
    router = rng.standard_normal((experts, hidden), np.float32) * 0.3
    x = rng.standard_normal((512, hidden), np.float32)

    @jax.jit
    def run(state: nnx.State, x: jax.Array) -> tuple[jax.Array, ...]:
        ids, weights = route(matmul(x, jnp.asarray(router)), per_token, normalise=False)
        return ids, weights, nnx.merge(graph, state)(x, ids, weights)

    together = [np.asarray(out) for out in run(state, x)]
    for token in (0, 77, 500):
        alone = np.zeros((8, hidden), np.float32)
        alone[5] = x[token]
        for out, whole in zip(run(state, alone), together, strict=True):
            np.testing.assert_array_equal(out[5], whole[token])
    for first, count in ((0, 8), (40, 64)):
        for out, whole in zip(run(state, x[first : first + count]), together, strict=True):
            np.testing.assert_array_equal(out, whole[first : first + count])


def test_devices_sum_up_to_the_whole() -> None:
    """Five experts on two devices: the second has two, and one of zeros."""
    gate_up, down = weights_of(5, 40, HIDDEN, jnp.float32)
    x, ids, weights = routing(30, 5, 2)
    experts = module(gate_up, down, devices=2)
    assert experts.gate_up[...].shape == (6, 40, 2, HIDDEN)
    graph, state = nnx.split(experts)
    parts = jax.tree.map(lambda weight: weight.reshape(2, 3, *weight.shape[1:]), state)

    def on_device(part: nnx.State) -> jax.Array:
        found: jax.Array = nnx.merge(graph, part)(*map(jnp.asarray, (x, ids, weights)))
        return found

    found = jax.vmap(on_device, axis_name=TENSOR_AXIS)(parts)
    first = np.where(ids < 3, weights, 0)
    for of_device, theirs in zip(found, (first, weights - first), strict=True):
        np.testing.assert_allclose(of_device, expected(gate_up, down, x, ids, theirs), atol=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_routing(normalise: bool) -> None:
    logits = np.random.default_rng(3).standard_normal((40, 12)).astype(np.float32) * 4
    ids, weights = (np.asarray(a) for a in route(jnp.asarray(logits), 3, normalise=normalise))
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1)[:, :3])
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum(axis=1, keepdims=True)
    wanted = np.take_along_axis(probs, ids, axis=1)
    wanted = wanted / wanted.sum(axis=1, keepdims=True) if normalise else wanted
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)


def test_of_equal_experts_the_first_is_chosen_and_large_logits_do_not_overflow() -> None:
    logits = jnp.asarray([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-500.0, 500.0, 0.0, 499.0]])
    ids, weights = route(logits, 2, normalise=True)
    np.testing.assert_array_equal(ids, [[1, 2], [0, 1], [1, 3]])
    np.testing.assert_allclose(weights, [[0.5, 0.5], [0.5, 0.5], [0.7310586, 0.2689414]], rtol=1e-6)


COUNT, WIDTH = 5, 6


def checkpoint() -> dict[str, HostArray]:
    """Both forms of the same experts."""
    rng = np.random.default_rng(4)
    gate, up = rng.standard_normal((2, COUNT, WIDTH, HIDDEN)).astype(ml_dtypes.bfloat16)
    down = rng.standard_normal((COUNT, HIDDEN, WIDTH)).astype(ml_dtypes.bfloat16)
    tensors = {"fused.gate_up_proj": np.concatenate([gate, up], axis=1), "fused.down_proj": down}
    for expert in range(COUNT):
        tensors[f"x.{expert}.w1.weight"] = gate[expert]
        tensors[f"x.{expert}.w3.weight"] = up[expert]
        tensors[f"x.{expert}.w2.weight"] = down[expert]
    return tensors


@pytest.mark.parametrize("form", ["x.", "fused."])
def test_sources_read_experts_one_by_one_or_fused(form: str) -> None:
    every = checkpoint()
    tensors = {name: value for name, value in every.items() if name.startswith(form)}
    sources = Experts.sources(
        CONFIG, "x.", count=COUNT, width=WIDTH, names=("w1", "w3", "w2"), fused="fused."
    )
    used = {path: source.among(tensors) for path, source in sources.items()}
    assert {t.name: t.stored_shape for s in used.values() for t in s.tensors} == {
        name: value.shape for name, value in tensors.items()
    }

    def read(name: str, index: Index) -> HostArray:
        return tensors[name][index]

    gates, ups = np.split(every["fused.gate_up_proj"], 2, axis=1)
    zeros = ((0, 1), (0, 0), (0, 0))  # six experts for two devices
    both = np.stack([np.pad(gates, zeros), np.pad(ups, zeros)], axis=2)
    down = np.pad(every["fused.down_proj"], zeros)
    for experts in (slice(0, 3), slice(3, 6), slice(5, 6), slice(None)):
        found = used["gate_up"].read(read, both.shape, (experts,))
        np.testing.assert_array_equal(found, both[experts])
        found = used["down"].read(read, down.shape, (experts,))
        np.testing.assert_array_equal(found, down[experts])
    inner = (slice(1, 3), slice(2, 5), slice(1, 2), slice(4, 9))
    np.testing.assert_array_equal(used["gate_up"].read(read, both.shape, inner), both[inner])

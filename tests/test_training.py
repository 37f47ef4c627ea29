"""Models as plain Flax modules: the numbers of every architecture, and their gradients."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged import EngineConfig
from jaxpaged.device.model_loader import load_model
from jaxpaged.device.weight_update import by_path
from jaxpaged.models.base import CausalLM
from jaxpaged.training import build_module, forward, parameters, token_logprobs
from jaxpaged.weights.source import resolve_source
from tests.tiny_models import tiny_llama
from tests.zoo.case import all_cases, stored, write_case

CASES = {case.name: case for case in all_cases()}


def module_of(folder: Path, dtype: str = "float32") -> CausalLM:
    config = EngineConfig(model=str(folder), dtype=dtype, disable_progress=True)
    loaded = load_model(config, resolve_source(config))
    params = by_path(loaded.parts, loaded.weights)
    return build_module(loaded.model_class, loaded.config, params, jnp.dtype(dtype))


@pytest.mark.parametrize("name", CASES)
def test_every_architecture_scores_as_transformers_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = module_of(write_case(tmp_path / name, case))
    prompts, wanted = case.prompt_ids(), stored(case)["outputs"]
    longest = max(len(p) for p in prompts)
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.array([len(p) for p in prompts])
    found = np.asarray(jax.jit(token_logprobs)(model, jnp.asarray(tokens), lengths))
    for row, prompt in enumerate(prompts):
        # Positions that depend on the length beyond the original context: the stored numbers are
        # of prompt and output together.
        if not case.one_pass and len(prompt) > model.rope.original_max_position:
            continue
        scored = found[row, : len(prompt) - 1]
        np.testing.assert_allclose(scored, wanted[row]["prompt"], atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_finite_differences(dtype: str, tmp_path: Path) -> None:
    model = module_of(tiny_llama(tmp_path / "m", vocab_size=64, num_hidden_layers=1), dtype)
    tokens = jnp.array([[5, 9, 30, 7, 12, 40]])

    def loss(model: CausalLM) -> jax.Array:
        return -jnp.mean(token_logprobs(model, tokens))

    value, grads = nnx.jit(nnx.value_and_grad(loss))(model)
    flat = parameters(grads)
    assert set(flat) == set(parameters(model))
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in flat.values())
    if dtype == "float32":
        graph, state = nnx.split(model)
        norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in flat.values()))
        step = 1e-2 / norm
        moved = jax.tree.map(lambda p, g: p - step * g, state, nnx.state(grads))
        change = float(loss(nnx.merge(graph, moved))) - float(value)
        assert change == pytest.approx(-step * norm**2, rel=0.05)


def test_what_stands_behind_a_sequence_does_not_count(tmp_path: Path) -> None:
    model = module_of(tiny_llama(tmp_path / "m"))
    a = jnp.array([[5, 9, 30, 7, 12, 40], [9, 8, 7, 6, 5, 4]])
    b = a.at[0, 4:].set(100)
    first, second = forward(model, a), forward(model, b)
    np.testing.assert_allclose(first[0, :4], second[0, :4], atol=1e-5)
    np.testing.assert_allclose(first[1], second[1], atol=1e-5)
    assert not np.allclose(first[0, 4], second[0, 4])


def test_a_module_is_a_copy(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tiny_llama(tmp_path / "m")), disable_progress=True)
    loaded = load_model(config, resolve_source(config))
    params = by_path(loaded.parts, loaded.weights)
    module = build_module(loaded.model_class, loaded.config, params, jnp.dtype(loaded.dtype))
    mine, theirs = parameters(module), {k: v.unsafe_buffer_pointer() for k, v in params.items()}
    assert all(mine[k].unsafe_buffer_pointer() != theirs[k] for k in theirs)
    assert json.dumps(sorted(mine)) == json.dumps(sorted(params))

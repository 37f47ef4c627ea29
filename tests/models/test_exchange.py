"""Parameters of every architecture, back as tensors and over to other numbers of devices."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.device.step import take_apart
from jaxpaged.models.exchange import as_tensors, parameters, recut
from jaxpaged.models.registry import find_model
from tests.zoo.case import all_cases, fill, stored

CASES = {case.name: case for case in all_cases()}
FLOAT = jnp.dtype("float32")


def parameters_of(name: str, devices: int, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    model, config = find_model(json.loads(json.dumps(stored(CASES[name])["config"])), name)
    cut = config.over(devices)
    shapes = take_apart(model, cut, FLOAT).shapes
    sources = {path: s.among(tensors) for path, s in model.sources(cut).items()}

    def read(tensor: str, index: tuple[slice, ...]) -> np.ndarray:
        return tensors[tensor][index]

    return {path: sources[path].read(read, shape.shape) for path, shape in shapes.items()}


@pytest.mark.parametrize("name", CASES)
def test_back_to_the_tensors_they_came_from(name: str) -> None:
    tensors = fill(stored(CASES[name])["tensors"])
    model, config = find_model(stored(CASES[name])["config"], name)
    back = as_tensors(model, config, parameters_of(name, 1, tensors))
    again = parameters_of(name, 1, back)
    for path, value in parameters_of(name, 1, tensors).items():
        assert np.array_equal(again[path], value), path
    # Tensors may go by other names (a checkpoint's older form), but those that agree are equal.
    same = back.keys() & tensors.keys()
    assert len(same) > len(tensors) / 2 or "moe" in name or "mixtral" in name, back.keys()
    for tensor in same:
        assert np.array_equal(back[tensor], tensors[tensor]), tensor


@pytest.mark.parametrize("name", CASES)
def test_over_to_other_devices_and_back(name: str) -> None:
    model, config = find_model(stored(CASES[name])["config"], name)
    devices = max(n for n in (1, 2, 3, 4) if config.splits_into(n))
    tensors = fill(stored(CASES[name])["tensors"])
    one, several = (parameters_of(name, n, tensors) for n in (1, devices))
    sources, cut_sources = model.sources(config), model.sources(config.over(devices))
    for path in one:
        cut = recut(one[path], sources[path], cut_sources[path], several[path].shape)
        assert np.array_equal(cut, several[path]), path
        back = recut(cut, cut_sources[path], sources[path], one[path].shape)
        assert np.array_equal(back, one[path]), path


def test_padding_and_copies_are_undone() -> None:
    """A vocabulary and an MLP that nothing divides, two KV heads on four devices."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 31,
        "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 1, "hidden_act": "silu",
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    model, one = find_model(config, "here")
    four = one.over(4)
    shapes = {n: take_apart(model, c, FLOAT).shapes for n, c in ((1, one), (4, four))}
    rng = np.random.default_rng(0)
    for path, shape in shapes[1].items():
        value = rng.normal(size=shape.shape).astype(np.float32)
        there = model.sources(one)[path], model.sources(four)[path]
        cut = recut(value, *there, shapes[4][path].shape)
        if path in ("embedding", "layers.0.mlp.gate_up", "layers.0.attention.qkv"):
            assert cut.shape != value.shape
        assert np.array_equal(recut(cut, *there[::-1], value.shape), value), path


def test_paths() -> None:
    leaf = np.zeros(1)
    assert list(parameters({"a": {"b": leaf}, "c.d": leaf, "e": [leaf, leaf], "f": None})) == [
        "a.b", "c.d", "e.0", "e.1",
    ]  # fmt: skip

"""Single layers against the torch modules of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.models.layers import GatedMLP, LayerNorm, RMSNorm
from tests.device.model_shapes import TINY

torch = pytest.importorskip("torch", reason="the oracle of these tests is torch")
llama = pytest.importorskip("transformers.models.llama.modeling_llama", exc_type=ImportError)
F32 = jnp.dtype(jnp.float32)


def put(parameter: nnx.Param[Any], value: Any) -> None:
    parameter[...] = jnp.asarray(value.detach().numpy())


def inputs(*shape: int) -> tuple[Any, Any]:
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    return jnp.asarray(x), torch.from_numpy(x)


def test_rms_norm() -> None:
    theirs = llama.LlamaRMSNorm(48, eps=1e-5)
    torch.nn.init.normal_(theirs.weight)
    ours = RMSNorm(48, 1e-5, F32)
    put(ours.weight, theirs.weight)
    x, tx = inputs(8, 48)
    np.testing.assert_allclose(ours(x), theirs(tx).detach(), rtol=1e-5, atol=1e-6)


def test_mlp() -> None:
    config = llama.LlamaConfig(hidden_size=48, intermediate_size=80, num_attention_heads=2)
    theirs = llama.LlamaMLP(config)
    ours = GatedMLP(dataclasses.replace(TINY, hidden_size=48, intermediate_size=80), F32)
    put(ours.gate_up, torch.stack([theirs.gate_proj.weight, theirs.up_proj.weight], dim=1))
    put(ours.down, theirs.down_proj.weight)
    x, tx = inputs(8, 48)
    np.testing.assert_allclose(ours(x), theirs(tx).detach(), rtol=1e-5, atol=1e-6)


def test_layer_norm() -> None:
    theirs = torch.nn.LayerNorm(48)
    torch.nn.init.normal_(theirs.weight)
    torch.nn.init.normal_(theirs.bias)
    ours = LayerNorm(48, 1e-5, F32)
    assert ours.weight is not None and ours.bias is not None
    put(ours.weight, theirs.weight)
    put(ours.bias, theirs.bias)
    x, tx = inputs(8, 48)
    np.testing.assert_allclose(ours(x), theirs(tx).detach(), rtol=1e-5, atol=2e-6)

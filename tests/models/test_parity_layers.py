"""Single layers against the torch modules of transformers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.models.config import RopeConfig
from jaxpaged.models.layers import (
    GatedMLP,
    RMSNorm,
    apply_rope,
    inverse_frequencies,
    rope_table,
)

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
    ours = GatedMLP(48, 80, F32)
    put(ours.gate_up, torch.stack([theirs.gate_proj.weight, theirs.up_proj.weight], dim=1))
    put(ours.down, theirs.down_proj.weight)
    x, tx = inputs(8, 48)
    np.testing.assert_allclose(ours(x), theirs(tx).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(10000.0),
        RopeConfig(10000.0, "linear", 4.0),
        RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 64),
    ],
    ids=lambda rope: rope.kind,
)
def test_rotary_positions(rope: RopeConfig) -> None:
    settings: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        settings["factor"] = rope.factor
    if rope.kind == "llama3":
        settings |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    config = llama.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters=settings,
    )
    positions = np.array([0, 1, 2, 63, 64, 65, 128, 200])
    x, tx = inputs(8, 3, 1, 32)
    cos, sin = llama.LlamaRotaryEmbedding(config)(tx, torch.from_numpy(positions)[None])
    theirs, _ = llama.apply_rotary_pos_emb(
        tx[:, :, 0].transpose(0, 1)[None], tx[:, :, 0].transpose(0, 1)[None], cos, sin
    )
    table = rope_table(jnp.asarray(positions, jnp.int32), inverse_frequencies(rope, 32))
    ours = np.asarray(apply_rope(x, table))[:, :, 0]
    np.testing.assert_allclose(ours, theirs[0].transpose(0, 1), atol=2e-5)

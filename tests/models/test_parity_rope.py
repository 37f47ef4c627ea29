"""Rope settings, as transformers saves them, give the tables of its own modules."""

from __future__ import annotations

import copy
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.models.config_reader import ConfigReader
from jaxpaged.models.rope import read_rope, rope_table

torch = pytest.importorskip("torch", reason="the oracle of these tests is torch")
llama = pytest.importorskip("transformers.models.llama.modeling_llama", exc_type=ImportError)
phi3 = pytest.importorskip("transformers.models.phi3.modeling_phi3", exc_type=ImportError)

FAMILIES = {
    "llama": (llama.LlamaConfig, llama.LlamaRotaryEmbedding),
    "phi3": (phi3.Phi3Config, phi3.Phi3RotaryEmbedding),
}
HEAD_DIM = 32
POSITIONS = [0, 1, 63, 64, 65, 200]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    short, long = [1.0 + 0.1 * i for i in range(pairs)], [1.0 + 0.5 * i for i in range(pairs)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **more}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "default": ("llama", {"rope_type": "default"}, {}),
    "theta": ("llama", {"rope_type": "default", "rope_theta": 5e5}, {}),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}, {}),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {},
    ),
    "yarn": ("llama", YARN, {}),
    "yarn, both mscales": ("llama", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}, {}),
    "yarn, equal mscales": ("llama", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, {}),
    "yarn, one mscale counts for nothing": ("llama", {**YARN, "mscale": 2.0}, {}),
    "yarn, attention factor": ("llama", {**YARN, "attention_factor": 1.3}, {}),
    "yarn, attn factor, which is not used": ("llama", {**YARN, "attn_factor": 0.8}, {}),
    "yarn, betas": ("llama", {**YARN, "beta_fast": 8, "beta_slow": 2}, {}),
    "yarn, not truncated": ("llama", {**YARN, "truncate": False}, {}),
    "yarn, factor from the lengths": ("llama", {**YARN, "factor": None}, {}),
    "yarn, ramp of no width": (
        "llama",
        {**YARN, "original_max_position_embeddings": 4, "rope_theta": 1e6},
        {},
    ),
    "longrope": ("phi3", longrope(16), {"original_max_position_embeddings": 64}),
    "longrope, factor": (
        "llama",
        longrope(16, factor=8.0, original_max_position_embeddings=64),
        {},
    ),
    "longrope, attention factor, part of a head": (
        "phi3",
        longrope(12, attention_factor=1.19, partial_rotary_factor=0.75),
        {"original_max_position_embeddings": 64},
    ),
    "the original length outside counts": (
        "llama",
        longrope(16, original_max_position_embeddings=128),
        {"original_max_position_embeddings": 64},
    ),
    "part of a head": ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}, {}),
}


def check(
    family: str, scaling: dict[str, Any], more: dict[str, Any], seq_lens: list[int], limit: int
) -> None:
    make_config, make_rotary = FAMILIES[family]
    fields = {
        "hidden_size": 2 * HEAD_DIM,
        "num_attention_heads": 2,
        "max_position_embeddings": limit,
        "rope_parameters": {"rope_theta": 1e4, **scaling},
        **more,
    }
    config = make_config(**copy.deepcopy(fields))
    rotary = make_rotary(config)
    for spelling in (fields, config.to_dict()):
        rope = read_rope(ConfigReader(spelling, "here"), partial=True)
        for seq_len in seq_lens:
            # A forward pass: its last position says how long it is.
            positions = np.array([min(p, seq_len - 1) for p in POSITIONS])
            positions[-1] = seq_len - 1
            cos, sin = rotary(torch.zeros(1), torch.from_numpy(positions)[None])
            dim = rope.rotary_dim(HEAD_DIM)
            assert cos.shape[-1] == dim
            theirs = torch.stack([cos[0], sin[0]])[:, :, : dim // 2].numpy()
            lengths = jnp.full(len(positions), seq_len, jnp.int32)
            ours = rope_table(rope, dim, jnp.asarray(positions, jnp.int32), lengths)
            np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_tables(name: str) -> None:
    check(*CASES[name], seq_lens=[1, 64, 65, 201], limit=256)


def test_dynamic_tables() -> None:
    check("llama", {"rope_type": "dynamic", "factor": 4.0}, {}, [1, 63, 64, 65, 201, 240], 64)

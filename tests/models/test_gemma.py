"""What Gemma does around its layers, and to the logits."""

from __future__ import annotations

import importlib.util

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpaged.models.gemma import GemmaConfig, GemmaForCausalLM
from jaxpaged.models.rope import RopeConfig

VOCAB = 512


def tiny(dtype: jnp.dtype, hidden: int = 60, logits_cap: float | None = None) -> GemmaForCausalLM:
    config = GemmaConfig(
        architecture="Gemma2ForCausalLM",
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        norm_eps=1e-6,
        rope=RopeConfig(1e4),
        max_position=64,
        tie_embeddings=True,
        logits_cap=logits_cap,
    )
    return GemmaForCausalLM(config, np.dtype(dtype))


@pytest.mark.parametrize(
    ("hidden", "dtype", "scale"),
    [
        (3072, "bfloat16", 55.5),
        (3072, "float32", np.float32(3072) ** np.float32(0.5)),
        (60, "bfloat16", 7.75),
        (60, "float16", 7.746),
        (64, "bfloat16", 8.0),
    ],
)
def test_the_scale_of_embeddings_is_rounded_to_the_weights(
    hidden: int, dtype: str, scale: float
) -> None:
    found = tiny(jnp.dtype(dtype), hidden).embedding_scale
    assert found == pytest.approx(scale, abs=1e-4 if dtype == "float16" else 0)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch, the oracle")
def test_embeddings_are_those_of_transformers_to_the_bit() -> None:
    import torch
    from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

    weight = np.random.default_rng(0).normal(0, 1, (VOCAB, 60)).astype(ml_dtypes.bfloat16)
    theirs = Gemma2TextScaledWordEmbedding(VOCAB, 60, 0, embed_scale=60**0.5)
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(weight.astype(np.float32)))
        wanted = theirs.to(torch.bfloat16)(torch.arange(VOCAB)).float().numpy()
    model = tiny(jnp.bfloat16)
    model.embedding[...] = jnp.asarray(weight)
    tokens = jnp.arange(VOCAB, dtype=jnp.int32)
    found = model.embed(tokens, tokens).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(np.asarray(found), wanted)


def test_the_cap_bends_logits_and_keeps_their_order() -> None:
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.normal(0, 1, (VOCAB, 60)), jnp.float32)
    x = jnp.asarray(rng.normal(0, 1, (3, 60)), jnp.float32)
    free, capped = tiny(jnp.float32), tiny(jnp.float32, logits_cap=5.0)
    for model in (free, capped):
        model.embedding[...] = weight
    plain, bent = np.asarray(free.logits(x), np.float64), np.asarray(capped.logits(x))
    assert np.abs(plain).max() > 10
    assert np.abs(bent).max() <= 5.0
    np.testing.assert_allclose(bent, 5.0 * np.tanh(plain / 5.0), atol=1e-5)


def test_a_norm_weight_of_zero_is_one() -> None:
    x = jnp.asarray(np.random.default_rng(2).normal(0, 3, (4, 60)), jnp.float32)
    normed = np.asarray(tiny(jnp.float32).norm(x))  # type: ignore[operator]
    np.testing.assert_allclose((normed**2).mean(axis=1), 1.0, rtol=1e-5)

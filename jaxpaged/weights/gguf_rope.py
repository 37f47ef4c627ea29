"""`rope_scaling` of a Hugging Face config, from GGUF metadata and frequency tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.weights.gguf_metadata import Metadata, shortest

ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"


def rope_scaling(meta: Metadata, head_dim: int, theta: float) -> dict[str, Any] | None:
    """None, linear, yarn, or (from the divisors in `rope_freqs.weight`) llama3.

    Raises `UnsupportedModelError` for other kinds.
    """
    original = meta.get("rope.scaling.original_context_length")
    if meta.has(ROPE_FREQS):
        return _llama3(meta, head_dim, theta)
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.get("rope.scaling.factor") or meta.get("rope.scale_linear") or 1.0
    if kind in ("none", "linear"):
        return None if factor == 1.0 else {"rope_type": "linear", "factor": shortest(factor)}
    if kind != "yarn":
        raise meta.refusal(f"rope.scaling.type={kind!r}")
    if original is None:
        raise meta.refusal("yarn without rope.scaling.original_context_length")
    scaling = {
        "rope_type": "yarn",
        "factor": shortest(factor),
        "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length"),
    }
    for key in ("beta_fast", "beta_slow"):
        value = meta.optional_number(f"rope.scaling.yarn_{key}")
        if value is not None:
            scaling[key] = value
    return scaling


def longrope_scaling(meta: Metadata, rotary_dim: int, context: int) -> dict[str, Any] | None:
    """Phi-3's two tables of divisors, for sequences within and beyond the original context.

    The attention factor is left out where it follows from the two context lengths, as in the
    published configs.
    """
    original = meta.integer("rope.scaling.original_context_length", context)
    stored = meta.optional_number("rope.scaling.attn_factor")
    if not meta.has(LONG_FACTORS) and not meta.has(SHORT_FACTORS):
        if stored not in (None, 1.0):
            raise meta.refusal(f"rope.scaling.attn_factor={stored} without {LONG_FACTORS}")
        return None
    if not (meta.has(LONG_FACTORS) and meta.has(SHORT_FACTORS)):
        raise meta.refusal(f"one of {LONG_FACTORS} and {SHORT_FACTORS} without the other")
    tables = {
        key: [shortest(f) for f in meta.vector(tensor, rotary_dim // 2)]
        for key, tensor in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS))
    }
    scaling = {
        "rope_type": "longrope",
        **tables,
        "original_max_position_embeddings": original,
    }
    ratio = context / original
    implied = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    if stored is not None and not math.isclose(stored, implied, rel_tol=1e-6):
        scaling["attention_factor"] = stored
    return scaling


def _llama3(meta: Metadata, head_dim: int, theta: float) -> dict[str, Any]:
    """Recover Llama 3's scaling parameters from the frequency divisors stored in the file.

    Converters store the divisors only. They are 1 for fast and `factor` for slow frequencies;
    the published models all use 1, 4 and 8192 for the rest, so that is checked, not fitted.
    """
    stored = meta.vector(ROPE_FREQS, head_dim // 2)
    factor, low, high, original = shortest(float(stored.max())), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    if not np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise UnsupportedModelError(
            f"{meta.file.path}: {ROPE_FREQS} does not follow Llama 3's scaling (low 1, high 4, "
            f"original context {original}); other frequency tables are not supported."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }

"""Rotary position embeddings (Su et al., 2021): frequencies, and their application.

Legend: `T` tokens, `D` rotated dimensions of a head, `H` head_dim.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpaged.models.rope_settings import (
    NO_ROPE,
    RopeConfig,
    context_length,
    read_max_position,
    read_rope,
    read_rope_settings,
    yarn_mscale,
)

__all__ = [
    "NO_ROPE",
    "RopeConfig",
    "apply_rope",
    "context_length",
    "inverse_frequencies",
    "read_max_position",
    "read_rope",
    "read_rope_settings",
    "rope_table",
    "yarn_mscale",
]

Floats = npt.NDArray[np.float32]


def inverse_frequencies(rope: RopeConfig, dim: int, *, long: bool = False) -> Floats:
    """f32 [D / 2] radians per position, as transformers computes them.

    For "dynamic" those within the original context; for "longrope" those of short sequences, or
    with `long` of the others.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    wavelengths = (np.float32(rope.theta) ** exponents).astype(np.float32)  # over 2 pi
    if rope.kind == "longrope":
        factors = np.asarray(rope.long_factor if long else rope.short_factor, np.float32)
        assert factors.shape == wavelengths.shape, (factors.shape, dim)
        return np.float32(1.0) / (factors * wavelengths)
    freqs = np.float32(1.0) / wavelengths
    if rope.kind == "linear":
        return freqs / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, freqs)
    if rope.kind == "yarn":
        return _yarn(rope, freqs)
    assert rope.kind in ("default", "dynamic"), rope.kind
    return freqs


def _llama3(rope: RopeConfig, freqs: Floats) -> Floats:
    """Slow frequencies are divided, fast ones stay, those between are blended (the Llama 3.1
    release).
    """
    wavelength = np.float32(2 * math.pi) / freqs
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / span
    blended = (1 - smooth) * freqs / rope.factor + smooth * freqs
    freqs = np.where(wavelength > low, freqs / rope.factor, freqs)
    between = (wavelength <= low) & (wavelength >= high)
    return np.where(between, blended, freqs).astype(np.float32)


def _yarn(rope: RopeConfig, freqs: Floats) -> Floats:
    """Dimensions that turn less than `beta_slow` times over the original context are divided, those
    that turn more than `beta_fast` times stay, with a ramp between (Peng et al., 2023).
    """
    pairs = len(freqs)

    def turning(times: float) -> float:
        """The pair, as a fraction, that turns so many times."""
        span = rope.original_max_position / (times * 2 * math.pi)
        return pairs * math.log(span) / math.log(rope.theta)

    first, last = turning(rope.beta_fast), turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001
    ramp = np.clip((np.arange(pairs, dtype=np.float32) - first) / (last - first), 0, 1)
    ramp = ramp.astype(np.float32)
    blended: Floats = freqs / np.float32(rope.factor) * ramp + freqs * (1 - ramp)
    return blended


def rope_table(rope: RopeConfig, dim: int, positions: jax.Array, lengths: jax.Array) -> jax.Array:
    """f32 [2, T, D / 2]: cosines and sines. Computed once a step; every layer uses it.

    `positions` i32 [T]; `lengths` i32 [T]: the length that decides the frequencies of the token's
    sequence, where they depend on it (`Request.rope_length`):

    longrope  the long factors where it is beyond the original context, for all tokens of the
              sequence.
    dynamic   it is the length of the prompt, and a token goes by that or, if it comes later, by
              its own position: as transformers does when it generates. Tokens of one sequence so
              have different frequencies, and keep them.
    """
    freqs = jnp.asarray(inverse_frequencies(rope, dim))[None, :]
    if rope.kind == "longrope":
        others = jnp.asarray(inverse_frequencies(rope, dim, long=True))[None, :]
        freqs = jnp.where((lengths > rope.original_max_position)[:, None], others, freqs)
    elif rope.kind == "dynamic":
        freqs = freqs * _shrink(rope, dim, jnp.maximum(lengths, positions + 1))
    angles = positions.astype(jnp.float32)[:, None] * freqs
    table = jnp.stack([jnp.cos(angles), jnp.sin(angles)])
    return table if rope.attention_factor == 1.0 else table * rope.attention_factor


def _shrink(rope: RopeConfig, dim: int, lengths: jax.Array) -> jax.Array:
    """f32 [T, D / 2] to multiply frequencies with for sequences of i32 [T] tokens: the base grows
    with the length so that the slowest pair is stretched by as much as the context ("NTK-aware").
    """
    beyond = jnp.maximum(lengths - rope.original_max_position, 0).astype(jnp.float32)
    growth = 1.0 + beyond * (rope.factor / rope.original_max_position)
    exponents = -np.arange(0, dim, 2, dtype=np.float32) / np.float32(max(dim - 2, 1))
    return jnp.power(growth[:, None], jnp.asarray(exponents)[None, :])


def apply_rope(x: jax.Array, table: jax.Array) -> jax.Array:
    """Rotate the first D dimensions of f32 [T, A, B, H] by pairs (i, i + D/2), the half-split
    layout; the others stay.
    """
    cos, sin = table[0][:, None, None, :], table[1][:, None, None, :]
    half = table.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*parts, rest] if rest.shape[-1] else parts, axis=-1)

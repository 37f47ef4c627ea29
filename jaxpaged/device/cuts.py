"""The smallest logit that top_k and top_p keep, without sorting the vocabulary.

Up to 64 of the largest logits come from `lax.top_k`; whatever they cannot answer is found by an
exact bisection over the floats in their order. Which way a row goes depends on that row alone.

Legend: R sample rows, V vocabulary, N the number of largest logits looked at.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.device.sampling_state import SampleRows

NUM_LARGEST = 64


def keep_cut(
    x: jax.Array, weights: jax.Array, top: jax.Array, rows: SampleRows, draws: jax.Array
) -> jax.Array:
    """Cut f32[R]: the row keeps x >= cut. -inf where nothing is cut.

    `x` f32[R, V] are processed logits, `weights` f32[R, V] their exp, 1 at the largest; `top`
    f32[R] the largest logits, `draws` bool[R]. min_p counts too: top_p renormalises what it left.
    """
    uses_k = draws & (rows.top_k > 0) & (rows.top_k < x.shape[1])
    uses_p = draws & (rows.top_p < 1.0)

    def find(x: jax.Array, weights: jax.Array) -> jax.Array:
        largest = lax.top_k(x, min(NUM_LARGEST, x.shape[1]))[0]
        cut = _top_k_cut(x, largest, top, rows, uses_k)

        def of_p(x: jax.Array, weights: jax.Array) -> jax.Array:
            return _top_p_cut(x, weights, largest, cut, top, rows, uses_p)

        def only_k(x: jax.Array, weights: jax.Array) -> jax.Array:
            return cut

        out: jax.Array = lax.cond(jnp.any(uses_p), of_p, only_k, x, weights)
        return out

    def keep_all(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.full_like(top, -jnp.inf)

    out: jax.Array = lax.cond(jnp.any(uses_k | uses_p), find, keep_all, x, weights)
    return out


def _top_k_cut(
    x: jax.Array, largest: jax.Array, top: jax.Array, rows: SampleRows, uses_k: jax.Array
) -> jax.Array:
    """The k-th largest logit; both ways find the same number."""
    count = largest.shape[1]
    nearby = jnp.take_along_axis(largest, (rows.top_k - 1)[:, None], axis=1, mode="clip")[:, 0]
    cut = jnp.where(uses_k & (rows.top_k <= count), nearby, -jnp.inf)
    far = uses_k & (rows.top_k > count)

    def search(x: jax.Array) -> jax.Array:
        def enough(value: jax.Array) -> jax.Array:
            return jnp.sum(x >= value[:, None], axis=1, dtype=jnp.int32) >= rows.top_k

        low = jnp.full_like(top, -jnp.inf)
        found, _ = _bisect(enough, _key(low), _key(top) + 1, far)
        return jnp.where(far, _value(found), cut)

    def done(x: jax.Array) -> jax.Array:
        return cut

    out: jax.Array = lax.cond(jnp.any(far), search, done, x)
    return out


def _top_p_cut(
    x: jax.Array,
    weights: jax.Array,
    largest: jax.Array,
    cut: jax.Array,
    top: jax.Array,
    rows: SampleRows,
    uses_p: jax.Array,
) -> jax.Array:
    """The smallest logit x such that what lies strictly above it weighs less than top_p."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    rest = jnp.where((x >= cut[:, None]) & (weights >= rows.min_p[:, None]), weights, 0.0)
    goal = rows.top_p * jnp.sum(rest, axis=1)

    near_weights = jnp.exp((largest - top[:, None]) / temperature)
    sums = jnp.cumsum(near_weights, axis=1)
    above = sums - near_weights
    num_kept = jnp.sum(above < goal[:, None], axis=1, dtype=jnp.int32)
    last = jnp.maximum(num_kept - 1, 0)[:, None]
    near_cut = jnp.take_along_axis(largest, last, axis=1, mode="clip")[:, 0]
    cut = jnp.where(uses_p, jnp.maximum(cut, near_cut), cut)
    far = uses_p & (sums[:, -1] < goal)

    def search(x: jax.Array, rest: jax.Array) -> jax.Array:
        def too_low(value: jax.Array) -> jax.Array:
            above = jnp.sum(jnp.where(x > value[:, None], rest, 0.0), axis=1)
            return above >= goal

        low = jnp.full_like(top, -jnp.inf)
        _, found = _bisect(too_low, _key(low), _key(largest[:, -1]), far)
        return jnp.where(far, _value(found), cut)

    def done(x: jax.Array, rest: jax.Array) -> jax.Array:
        return cut

    out: jax.Array = lax.cond(jnp.any(far), search, done, x, rest)
    return out


def _bisect(
    holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array, needed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Narrow (low, high) to neighbours: `holds` is true from low down and false from high up.

    Bounds are keys i32[R]; rows that are not `needed` do not prolong the loop.
    """

    def apart(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        low, high = bounds
        return jnp.any(needed & (low < high) & (low + 1 != high))

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        true = holds(_value(middle))
        return jnp.where(true, middle, low), jnp.where(true, high, middle)

    found: tuple[jax.Array, jax.Array] = lax.while_loop(apart, halve, (low, high))
    return found


def _key(value: jax.Array) -> jax.Array:
    """Integers i32 in the order of the floats."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _value(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)

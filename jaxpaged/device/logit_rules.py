"""The request rules that change logits before a token is chosen: masks, bias and penalties."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged.device.sampling_state import (
    BAD_WORD_TOKENS,
    CHANGES_LOGITS,
    MASK_STOPS,
    USES_ALLOWED,
    USES_BAD_WORDS,
    USES_BIAS,
    USES_PENALTIES,
    SampleRows,
    SlotState,
    live_flags,
)

HISTORY_CHUNK = 256
"""Tokens of history counted at a time."""
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


def process_logits(logits: jax.Array, state: SlotState, rows: SampleRows) -> jax.Array:
    """Apply the rows' rules to logits f32[R, V]; a forbidden token becomes -inf.

    Order: allowed ids, bad words, min_tokens, logit bias, repetition, frequency and presence
    penalty. A step in which no row has a rule skips all of it, and each rule is skipped alone.
    A row without a rule keeps its logits bit for bit.
    """
    flags = live_flags(state, rows)

    def all_rules(x: jax.Array) -> jax.Array:
        for flag, rule in (
            (USES_ALLOWED, _mask_disallowed),
            (USES_BAD_WORDS, _mask_bad_words),
            (MASK_STOPS, _mask_stops),
            (USES_BIAS, _add_bias),
            (USES_PENALTIES, _penalise),
        ):
            x = _when_used(flag, rule, x, state, rows, flags)
        return x

    with jax.named_scope("process_logits"):
        any_rule = jnp.any((flags & CHANGES_LOGITS) != 0)
        out: jax.Array = lax.cond(any_rule, all_rules, _unchanged, logits)
    return out


Rule = Callable[[jax.Array, SlotState, SampleRows, jax.Array], jax.Array]


def _when_used(
    flag: int, rule: Rule, x: jax.Array, state: SlotState, rows: SampleRows, flags: jax.Array
) -> jax.Array:
    used = (flags & flag) != 0

    def apply(x: jax.Array) -> jax.Array:
        return rule(x, state, rows, used)

    out: jax.Array = lax.cond(jnp.any(used), apply, _unchanged, x)
    return out


def _unchanged(x: jax.Array) -> jax.Array:
    return x


def _of_slot(table: jax.Array, rows: SampleRows) -> jax.Array:
    """The rows' entries of a per-slot table; padding rows read the last slot, and use nothing."""
    return table.at[rows.slot].get(mode="clip")


def _targets(ids: jax.Array, used: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """Indices for a scatter into [R, V]; padding (-1) and unused rows point past the end.

    Negative indices would wrap to the last column, so they must be moved before the scatter.
    """
    row = jnp.broadcast_to(jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None], ids.shape)
    return row, jnp.where(used[:, None] & (ids >= 0), ids, vocab)


def _forbid(x: jax.Array, ids: jax.Array, used: jax.Array) -> jax.Array:
    return x.at[_targets(ids, used, x.shape[1])].set(-jnp.inf, mode="drop")


def _mask_disallowed(
    x: jax.Array, state: SlotState, rows: SampleRows, used: jax.Array
) -> jax.Array:
    ids = _of_slot(state.allowed_ids, rows)
    restricted = used & jnp.any(ids >= 0, axis=1)
    allowed = jnp.zeros(x.shape, jnp.bool_)
    allowed = allowed.at[_targets(ids, used, x.shape[1])].set(True, mode="drop")
    return jnp.where(allowed | ~restricted[:, None], x, -jnp.inf)


def _mask_bad_words(x: jax.Array, state: SlotState, rows: SampleRows, used: jax.Array) -> jax.Array:
    words = _of_slot(state.bad_words, rows)  # [R, W, N]
    start, last = words[:, :, :-1], words[:, :, -1]
    back = jnp.arange(1 - BAD_WORD_TOKENS, 0, dtype=jnp.int32)
    where = rows.position[:, None] + back[None, :]
    tail = state.history.at[rows.slot[:, None], jnp.maximum(where, 0)].get(mode="clip")
    # Only the output counts: a word that begins in the prompt is not the model's doing.
    tail = jnp.where(where >= rows.prompt_len[:, None], tail, -2)
    completed = jnp.all((start == -1) | (start == tail[:, None, :]), axis=2)
    return _forbid(x, jnp.where(completed, last, -1), used)


def _mask_stops(x: jax.Array, state: SlotState, rows: SampleRows, used: jax.Array) -> jax.Array:
    return _forbid(x, _of_slot(state.stop_ids, rows), used)


def _add_bias(x: jax.Array, state: SlotState, rows: SampleRows, used: jax.Array) -> jax.Array:
    targets = _targets(_of_slot(state.bias_ids, rows), used, x.shape[1])
    return x.at[targets].add(_of_slot(state.bias_values, rows), mode="drop")


def _penalise(x: jax.Array, state: SlotState, rows: SampleRows, used: jax.Array) -> jax.Array:
    in_prompt, count = _count_history(x.shape, state, rows, used)
    repetition, frequency, presence = (
        jnp.where(used, value, neutral)[:, None]
        for value, neutral in ((rows.repetition, 1.0), (rows.frequency, 0.0), (rows.presence, 0.0))
    )
    repeated = jnp.where(x > 0, x / repetition, x * repetition)
    out = jnp.where(in_prompt | (count > 0), repeated, x)
    out = out - frequency * count.astype(jnp.float32)
    out = out - jnp.where(count > 0, presence, 0.0)
    # A tiny repetition penalty must not reach +inf: the softmax would turn it into NaN.
    out = jnp.minimum(out, _LARGEST_FLOAT)
    return jnp.where(used[:, None], out, x)


def _count_history(
    shape: tuple[int, ...], state: SlotState, rows: SampleRows, used: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Which tokens are in the prompt (bool[R, V]) and how often in the output (i32[R, V]).

    The work follows the longest history in the step, not L.
    """
    length = state.history.shape[1]
    chunk = min(HISTORY_CHUNK, length)
    known = jnp.where(used, jnp.minimum(rows.position, length), 0)
    num_chunks = (jnp.max(known) + (chunk - 1)) // chunk

    def add_chunk(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        in_prompt, count = carry
        start = jnp.minimum(i * chunk, length - chunk)  # the last chunk overlaps the one before
        tokens = _of_slot(lax.dynamic_slice_in_dim(state.history, start, chunk, axis=1), rows)
        where = (start + jnp.arange(chunk, dtype=jnp.int32))[None, :]
        tokens = jnp.where((where >= i * chunk) & (where < known[:, None]), tokens, -1)
        is_prompt = where < rows.prompt_len[:, None]
        prompt = _targets(jnp.where(is_prompt, tokens, -1), used, shape[1])
        output = _targets(jnp.where(is_prompt, -1, tokens), used, shape[1])
        in_prompt = in_prompt.at[prompt].set(True, mode="drop")
        return in_prompt, count.at[output].add(1, mode="drop")

    zero = jnp.zeros(shape, jnp.bool_), jnp.zeros(shape, jnp.int32)
    counted: tuple[jax.Array, jax.Array] = lax.fori_loop(0, num_chunks, add_chunk, zero)
    return counted

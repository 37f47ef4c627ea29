"""Choosing tokens inside the jitted step: greedy, temperature, min_p, top_k, top_p, logprobs.

A row's result depends on that row alone, bit for bit: whatever the number of rows and whatever
the other rows ask for. So a filter yields only a row's cut (the smallest logit it keeps), by a
way that the row itself decides, and the drawing that follows is one piece of code for all rows.

Logprobs are of the model's logits ("raw"), or, for rows that ask for it, of what their token is
drawn from ("processed"). Both come from one piece of code, which sees one array of logits.

Legend: R sample rows, V vocabulary, K max_logprobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxpaged.device.cuts import keep_cut
from jaxpaged.device.logit_rules import process_logits
from jaxpaged.device.sampling_state import (
    DRAWS,
    PROCESSED_LOGPROBS,
    SampleRows,
    SlotState,
    live_flags,
)

__all__ = [
    "STATUS_ALL_MASKED",
    "STATUS_NOT_FINITE",
    "STATUS_OK",
    "HostSamples",
    "SampleOutput",
    "draw",
    "gather_logprobs",
    "process_logits",
    "prompt_logprobs",
    "sample",
    "unpack",
]

STATUS_OK = 0
STATUS_NOT_FINITE = 1
"""The model's logits hold NaN or +inf in this row; its token is meaningless."""
STATUS_ALL_MASKED = 2
"""Every token of this row is forbidden; its token is meaningless."""

TILE = 128
"""Columns that one inner step of the two-level searches covers."""

_Logprobs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Logprob f32[R], rank i32[R], top ids i32[R, K], top logprobs f32[R, K]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleOutput:
    """Results of a step, on the device."""

    tokens: jax.Array  # i32[R]; always a valid id, 0 where status is not OK
    status: jax.Array  # i32[R]
    logprob: jax.Array  # f32[R]; log-probability of the token (natural log)
    rank: jax.Array  # i32[R]; tokens at least as likely, the token included
    top_ids: jax.Array  # i32[R, K]; likeliest first
    top_logprobs: jax.Array  # f32[R, K]
    packed: jax.Array  # i32[R, 4 + 2K]; all of the above: one copy to the host carries it


@dataclass(frozen=True, slots=True)
class HostSamples:
    """`SampleOutput` on the host: views of the packed array."""

    tokens: npt.NDArray[np.int32]
    status: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


def sample(
    logits: jax.Array,
    state: SlotState,
    rows: SampleRows,
    *,
    max_logprobs: int,
    valid_vocab: int,
    drawable: int | None = None,
) -> SampleOutput:
    """Choose one token per row of logits [R, V]; also its logprobs for rows that ask.

    Columns from `valid_vocab` on are padding of the weights: never drawn, probability zero. Those
    from `drawable` on are tokens of the model that stand for nothing: never drawn either, but
    their logprobs are the model's.
    Logprobs are raw, before every rule and before temperature; in rows with PROCESSED_LOGPROBS they
    are the log-softmax of the rules' result over the temperature (1 in greedy rows), minus infinity
    for what min_p, top_k or top_p cut. `max_logprobs` (K) is at most V; rows use their first
    num_logprobs entries. What a row did not ask for is unspecified. Padding rows give token 0 and
    status 0.
    """
    flags = live_flags(state, rows)
    raw = _tidy(logits, valid_vocab)
    processed = process_logits(raw, state, rows)
    if drawable is not None:
        processed = _without_columns(processed, drawable)
    with jax.named_scope("draw"):
        asks = (flags & PROCESSED_LOGPROBS) != 0
        drawn = _draw(processed, rows, draws := (flags & DRAWS) != 0, asks)
    live = rows.slot < state.history.shape[0]
    status = jnp.where(live, _status(raw, drawn.top), STATUS_OK)
    tokens = jnp.where(live & (status == STATUS_OK), drawn.tokens, 0)
    wanted = jnp.where(live, rows.num_logprobs, -1)
    of_draws = _OfDraws(processed, drawn, _temperature(rows, draws), asks)
    return _output(raw, tokens, status, wanted, max_logprobs, of_draws)


def prompt_logprobs(
    logits: jax.Array,
    next_tokens: jax.Array,
    num_logprobs: jax.Array,
    *,
    max_logprobs: int,
    valid_vocab: int,
) -> SampleOutput:
    """Score given tokens i32[R] (the prompt's next ones) with logits [R, V]; nothing is drawn.

    The numbers are those `sample` gives for a drawn token. Rows with num_logprobs -1, and rows
    whose token is outside the vocabulary, are padding.
    """
    raw = _tidy(logits, valid_vocab)
    inside = (next_tokens >= 0) & (next_tokens < valid_vocab)
    wanted = jnp.where(inside, num_logprobs, -1)
    status = jnp.where(wanted >= 0, _status(raw, jnp.max(raw, axis=1)), STATUS_OK)
    return _output(raw, jnp.where(inside, next_tokens, 0), status, wanted, max_logprobs)


def draw(logits: jax.Array, rows: SampleRows) -> jax.Array:
    """Tokens i32[R] from processed logits f32[R, V].

    Rows without DRAWS take the first of the largest logits. Others draw from the softmax at their
    temperature, cut by min_p, then top_k (ties kept), then top_p of the renormalised rest (ties
    kept; at least one token stays), with one uniform number made from the seed, the sample index
    and the position. Rows that are NaN or wholly masked give some valid id.
    """
    never = jnp.zeros(logits.shape[0], jnp.bool_)
    return _draw(logits, rows, (rows.flags & DRAWS) != 0, never).tokens


def gather_logprobs(raw_logits: jax.Array, tokens: jax.Array, *, k_max: int) -> _Logprobs:
    """Log-softmax of the tokens i32[R] and of the `k_max` likeliest: no V-wide result is kept.

    Returns the tokens' logprobs f32[R], their ranks i32[R] (how many are at least as likely; 1 is
    best), top ids i32[R, k_max] (lower id first among equals) and top logprobs f32[R, k_max].
    """
    assert k_max <= raw_logits.shape[1], "more logprobs than the vocabulary has"
    largest = jnp.max(raw_logits, axis=1, keepdims=True)
    log_total = jnp.log(jnp.sum(jnp.exp(raw_logits - largest), axis=1, keepdims=True))
    chosen = jnp.take_along_axis(raw_logits, tokens[:, None], axis=1, mode="clip")
    rank = jnp.sum(raw_logits >= chosen, axis=1, dtype=jnp.int32)
    logprob = ((chosen - largest) - log_total)[:, 0]
    if k_max == 0:
        none = jnp.zeros((raw_logits.shape[0], 0), jnp.float32)
        return logprob, rank, none.astype(jnp.int32), none
    values, ids = lax.top_k(raw_logits, k_max)
    return logprob, rank, ids.astype(jnp.int32), (values - largest) - log_total


def unpack(packed: npt.NDArray[np.int32]) -> HostSamples:
    """Split a host copy of `SampleOutput.packed` [R, 4 + 2K]."""
    k = (packed.shape[1] - 4) // 2
    return HostSamples(
        tokens=packed[:, 0],
        status=packed[:, 1],
        rank=packed[:, 2],
        logprob=packed.view(np.float32)[:, 3],
        top_ids=packed[:, 4 : 4 + k],
        top_logprobs=packed.view(np.float32)[:, 4 + k :],
    )


def _tidy(logits: jax.Array, valid_vocab: int) -> jax.Array:
    """Float32 logits whose width is a multiple of the tile; columns of no token are -inf."""
    x = logits.astype(jnp.float32)
    vocab = x.shape[1]
    assert 0 < valid_vocab <= vocab
    return _whole_tiles(_without_columns(x, valid_vocab))


def _without_columns(x: jax.Array, first: int) -> jax.Array:
    """Minus infinity from the column `first` on."""
    if first >= x.shape[1]:
        return x
    column = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(column < first, x, -jnp.inf)


def _whole_tiles(x: jax.Array) -> jax.Array:
    missing = -x.shape[1] % TILE
    return jnp.pad(x, ((0, 0), (0, missing)), constant_values=-jnp.inf) if missing else x


def _tiles(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1, TILE)


def _tile(x: jax.Array, index: jax.Array) -> jax.Array:
    """Tile number `index` i32[R] of each row: [R, TILE]."""
    return jnp.take_along_axis(_tiles(x), index[:, None, None], axis=1, mode="clip")[:, 0]


def _status(raw: jax.Array, top: jax.Array) -> jax.Array:
    """Status i32[R] from the raw logits and the largest processed ones (f32[R]).

    A NaN in the raw logits counts even where a rule has masked it. It is looked for by itself:
    XLA's maximum on CPU loses NaNs.
    """
    broken = jnp.any(~(raw < jnp.inf), axis=1)
    masked = jnp.where(top == -jnp.inf, STATUS_ALL_MASKED, STATUS_OK)
    return jnp.where(broken, STATUS_NOT_FINITE, masked).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Drawn:
    tokens: jax.Array  # i32[R]
    top: jax.Array  # f32[R]; the largest logit
    lowest: jax.Array  # f32[R]; the smallest logit that was kept, where asked for; else -inf


def _draw(x: jax.Array, rows: SampleRows, draws: jax.Array, asks_lowest: jax.Array) -> _Drawn:
    x = _whole_tiles(x)
    tile_max = jnp.max(_tiles(x), axis=2)
    best_tile = jnp.argmax(tile_max, axis=1).astype(jnp.int32)
    inside = jnp.argmax(_tile(x, best_tile), axis=1).astype(jnp.int32)
    greedy = best_tile * TILE + inside
    top = jnp.max(tile_max, axis=1)

    def at_random(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn, lowest = _draw_at_random(x, top, rows, draws, asks_lowest)
        return jnp.where(draws, drawn, greedy), lowest

    def all_greedy(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return greedy, jnp.full_like(top, -jnp.inf)

    tokens, lowest = lax.cond(jnp.any(draws), at_random, all_greedy, x)
    return _Drawn(tokens, top, lowest)


def _draw_at_random(
    x: jax.Array, top: jax.Array, rows: SampleRows, draws: jax.Array, asks_lowest: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tokens i32[R], and the smallest kept logit f32[R] of rows that draw and ask for it."""
    # A masked-out or broken row must stay in its lane: its weights become 0 or NaN, nothing else.
    largest = jnp.where(jnp.isfinite(top), top, 0.0)[:, None]
    weights = jnp.exp((x - largest) / _temperature(rows, draws))  # the largest is exactly 1
    cut = keep_cut(x, weights, top, rows, draws)
    kept = (x >= cut[:, None]) & (weights >= rows.min_p[:, None])
    tokens = _inverse_cdf(jnp.where(kept, weights, 0.0), _uniform(rows))

    def smallest(x: jax.Array, weights: jax.Array) -> jax.Array:
        kept = (x >= cut[:, None]) & (weights >= rows.min_p[:, None])
        found = jnp.min(jnp.where(kept, x, jnp.inf), axis=1)
        # Should XLA compute a weight at the edge twice and round it differently, the drawn token
        # is among the kept ones all the same.
        own = jnp.take_along_axis(x, tokens[:, None], axis=1, mode="clip")[:, 0]
        return jnp.where(draws, jnp.minimum(found, own), -jnp.inf)

    def unasked(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.full_like(top, -jnp.inf)

    lowest: jax.Array = lax.cond(jnp.any(asks_lowest & draws), smallest, unasked, x, weights)
    return tokens, lowest


def _temperature(rows: SampleRows, draws: jax.Array) -> jax.Array:
    """f32[R, 1], 1 in greedy rows."""
    return jnp.where(draws & (rows.temperature > 0), rows.temperature, 1.0)[:, None]


def _uniform(rows: SampleRows) -> jax.Array:
    """One number in [0, 1) a row, a multiple of 2**-24, from (seed, sample index, position)."""

    def one(hi: jax.Array, lo: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.stack([hi, lo]), impl="threefry2x32")
        # Sample 0 uses the plain key, so that n = 1 and the first of n samples agree.
        key = jnp.where(index > 0, jax.random.fold_in(key, index), key)
        return jax.random.bits(jax.random.fold_in(key, position), (), jnp.uint32)

    words = [rows.seed_hi, rows.seed_lo, rows.sample_index, rows.position]
    bits = jax.vmap(one)(*(lax.bitcast_convert_type(word, jnp.uint32) for word in words))
    return (bits >> 8).astype(jnp.float32) * (2.0**-24)


def _inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first index whose cumulative weight exceeds uniform x total, found in two levels.

    Tokens of weight 0 are never chosen: rounding may leave a running sum that a zero weight
    seems to cross, so both levels look at positive entries only.
    """
    tile_sums = jnp.sum(_tiles(weights), axis=2)
    sums = jnp.cumsum(tile_sums, axis=1)
    target = uniform * sums[:, -1]
    tile = _first_beyond(sums, tile_sums, target)
    before = jnp.take_along_axis(sums - tile_sums, tile[:, None], axis=1, mode="clip")[:, 0]
    inner = _tile(weights, tile)
    return tile * TILE + _first_beyond(jnp.cumsum(inner, axis=1), inner, target - before)


def _first_beyond(sums: jax.Array, parts: jax.Array, target: jax.Array) -> jax.Array:
    """First index with a positive part and a sum > target; else the last positive part."""
    positive = parts > 0
    beyond = positive & (sums > target[:, None])
    last = parts.shape[1] - 1 - jnp.argmax(positive[:, ::-1], axis=1)
    return jnp.where(jnp.any(beyond, axis=1), jnp.argmax(beyond, axis=1), last).astype(jnp.int32)


@dataclass(frozen=True)
class _OfDraws:
    """What tokens are drawn from, for the rows whose logprobs are of that."""

    x: jax.Array  # f32[R, V]; after the rules
    drawn: _Drawn
    temperature: jax.Array  # f32[R, 1]
    asked: jax.Array  # bool[R]

    def scores(self, raw: jax.Array) -> jax.Array:
        """f32[R, V]; their softmax is what each row's logprobs are of."""
        top = self.drawn.top
        largest = jnp.where(jnp.isfinite(top), top, 0.0)[:, None]
        kept = self.x >= self.drawn.lowest[:, None]
        scaled = jnp.where(kept, (self.x - largest) / self.temperature, -jnp.inf)
        # Behind the barrier is the same code as for raw logits: were this fused into it, a raw
        # row could get other bits beside a row that asks than without.
        scores: jax.Array = lax.optimization_barrier(jnp.where(self.asked[:, None], scaled, raw))
        return scores


def _output(
    raw: jax.Array,
    tokens: jax.Array,
    status: jax.Array,
    wanted: jax.Array,
    max_logprobs: int,
    of_draws: _OfDraws | None = None,
) -> SampleOutput:
    """Attach logprobs where any row wants them, and pack everything."""
    rows = raw.shape[0]

    def with_top(x: jax.Array) -> _Logprobs:
        return gather_logprobs(x, tokens, k_max=max_logprobs)

    def alone(x: jax.Array) -> _Logprobs:
        logprob, rank, _, _ = gather_logprobs(x, tokens, k_max=0)
        return logprob, rank, *_no_top(rows, max_logprobs)

    def skip(x: jax.Array) -> _Logprobs:
        none = jnp.zeros(rows, jnp.float32)
        return none, none.astype(jnp.int32), *_no_top(rows, max_logprobs)

    branches = [skip, alone, with_top]
    chosen = jnp.any(wanted >= 0).astype(jnp.int32) + jnp.any(wanted > 0).astype(jnp.int32)
    if of_draws is not None:
        branches += [lambda x: alone(of_draws.scores(x)), lambda x: with_top(of_draws.scores(x))]
        chosen += 2 * jnp.any(of_draws.asked & (wanted >= 0)).astype(jnp.int32)
    with jax.named_scope("logprobs"):
        logprob, rank, ids, logprobs = lax.switch(chosen, branches, raw)
    columns = [tokens, status, rank, lax.bitcast_convert_type(logprob, jnp.int32)]
    packed = jnp.concatenate(
        [jnp.stack(columns, axis=1), ids, lax.bitcast_convert_type(logprobs, jnp.int32)], axis=1
    )
    return SampleOutput(tokens, status, logprob, rank, ids, logprobs, packed)


def _no_top(rows: int, k: int) -> tuple[jax.Array, jax.Array]:
    return jnp.full((rows, k), -1, jnp.int32), jnp.full((rows, k), -math.inf, jnp.float32)

"""What the sampler reads: per-slot request data on the device, and one row per token to draw.

Legend: S slots (max_num_seqs), R sample rows of a step, L max_model_len, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxpaged.errors import InvalidRequestError
from jaxpaged.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

STOP_IDS = 2 * MAX_STOP_TOKEN_IDS
"""Stop ids a slot holds: the request's own and the model's EOS ids."""
BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
"""Each bad word is tokenised with and without a leading space."""
BAD_WORD_TOKENS = 16
"""Tokens of the longest bad word."""

DRAWS = 1
"""The row draws at random; without it the row takes the largest logit."""
MASK_STOPS = 2
"""The request has fewer outputs than min_tokens: its stop ids cannot be drawn."""
USES_BIAS = 4
USES_ALLOWED = 8
USES_BAD_WORDS = 16
USES_PENALTIES = 32
PROCESSED_LOGPROBS = 64
"""The row's logprobs are those of what it draws from, not the model's."""
BEAM = 128
"""The row is a beam of a search: its likeliest tokens are wanted, and none is drawn."""
CHANGES_LOGITS = MASK_STOPS | USES_BIAS | USES_ALLOWED | USES_BAD_WORDS | USES_PENALTIES

_INT32_MAX = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """Request data that lives on the device, one row a slot. Donated to the step and rebound."""

    history: jax.Array  # i32[S, L]; the token at each absolute position
    stop_ids: jax.Array  # i32[S, STOP_IDS]; -1 padded, like every id array below
    bias_ids: jax.Array  # i32[S, MAX_LOGIT_BIAS]
    bias_values: jax.Array  # f32[S, MAX_LOGIT_BIAS]
    allowed_ids: jax.Array  # i32[S, MAX_ALLOWED_TOKEN_IDS]; all -1: unrestricted
    bad_words: jax.Array  # i32[S, BAD_WORD_SEQUENCES, BAD_WORD_TOKENS]; -1 padded on the LEFT


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotValues:
    """The same fields for one slot (or, with a leading axis, for several), on the host."""

    history: npt.NDArray[np.int32]
    stop_ids: npt.NDArray[np.int32]
    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]
    allowed_ids: npt.NDArray[np.int32]
    bad_words: npt.NDArray[np.int32]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleRows:
    """One row per token to draw in this step."""

    slot: jax.Array  # i32[R]; S or more marks a padding row
    position: jax.Array  # i32[R]; absolute position of the drawn token = tokens known before it
    prompt_len: jax.Array  # i32[R]
    flags: jax.Array  # i32[R]; DRAWS | MASK_STOPS | USES_... | PROCESSED_LOGPROBS
    num_logprobs: jax.Array  # i32[R]; -1 none, 0 the drawn token's only, k the k likeliest too
    top_k: jax.Array  # i32[R]; 0 is off
    sample_index: jax.Array  # i32[R]; which of the request's n samples
    seed_lo: jax.Array  # i32[R]; bits 0..31 of the request's seed
    seed_hi: jax.Array  # i32[R]; bits 32..63
    temperature: jax.Array  # f32[R]
    top_p: jax.Array  # f32[R]; 1 is off
    min_p: jax.Array  # f32[R]; 0 is off
    repetition: jax.Array  # f32[R]; 1 is off
    frequency: jax.Array  # f32[R]; 0 is off
    presence: jax.Array  # f32[R]; 0 is off


INT_FIELDS = (
    "slot",
    "position",
    "prompt_len",
    "flags",
    "num_logprobs",
    "top_k",
    "sample_index",
    "seed_lo",
    "seed_hi",
)
FLOAT_FIELDS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")


def rows_from_packed(ints: jax.Array, floats: jax.Array) -> SampleRows:
    """Rows from i32[len(INT_FIELDS), R] and f32[len(FLOAT_FIELDS), R], in the fields' order."""
    assert ints.shape[0] == len(INT_FIELDS) and floats.shape[0] == len(FLOAT_FIELDS)
    fields: dict[str, Any] = {name: ints[i] for i, name in enumerate(INT_FIELDS)}
    fields |= {name: floats[i] for i, name in enumerate(FLOAT_FIELDS)}
    return SampleRows(**fields)


@dataclass(frozen=True, slots=True)
class RowFields:
    """What a request contributes to each of its sample rows; constant over its life."""

    flags: int
    num_logprobs: int
    top_k: int
    seed_lo: int
    seed_hi: int
    temperature: float
    top_p: float
    min_p: float
    repetition: float
    frequency: float
    presence: float
    min_tokens: int

    def flags_after(self, num_outputs: int) -> int:
        """Flags of the row that draws output number `num_outputs` (the first is 0)."""
        return self.flags | MASK_STOPS if num_outputs < self.min_tokens else self.flags


def row_fields(params: SamplingParams, seed: int, *, vocab_size: int) -> RowFields:
    """Translate a request's parameters.

    `seed` is any integer; its low 64 bits count. `vocab_size` resolves logprobs=-1 and tells
    when top_k is off. Greedy requests get neutral filters, so that they never cause a search.
    """
    flags = 0 if params.greedy else DRAWS
    flags |= USES_BIAS if params.logit_bias else 0
    flags |= USES_ALLOWED if params.allowed_token_ids is not None else 0
    flags |= USES_BAD_WORDS if params.bad_words else 0
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    flags |= USES_PENALTIES if penalties != (1.0, 0.0, 0.0) else 0
    logprobs = -1 if params.logprobs is None else params.logprobs
    if params.logprobs is not None and params.logprobs_mode == "processed":
        flags |= PROCESSED_LOGPROBS
    if params.logprobs == -1:
        logprobs = vocab_size
    top_k = params.top_k if 0 < params.top_k < vocab_size and not params.greedy else 0
    return RowFields(
        flags=flags,
        num_logprobs=logprobs,
        top_k=top_k,
        seed_lo=_signed32(seed),
        seed_hi=_signed32(seed >> 32),
        temperature=1.0 if params.greedy else params.temperature,
        top_p=1.0 if params.greedy else params.top_p,
        min_p=0.0 if params.greedy else params.min_p,
        # Far below this, float32 arithmetic takes it for zero.
        repetition=max(params.repetition_penalty, 1e-30),
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        min_tokens=params.min_tokens,
    )


def _signed32(value: int) -> int:
    low = value & 0xFFFFFFFF
    return low - 2**32 if low > _INT32_MAX else low


def needs_slot(fields: RowFields) -> bool:
    """Whether any of the request's rows reads `SlotState`; if not, its slot may hold old data."""
    return bool(fields.flags & CHANGES_LOGITS) or fields.min_tokens > 0


def pack_slot(
    params: SamplingParams,
    stop_ids: Sequence[int],
    bad_word_sequences: Sequence[Sequence[int]],
    tokens: Sequence[int],
    max_model_len: int,
) -> SlotValues:
    """Arrays of one slot for a request that starts (or resumes) with `tokens` known.

    `stop_ids` holds all EOS and stop ids. Ids must have been checked against the vocabulary.
    Raises `InvalidRequestError` when there are too many stop ids or bad words, or one is too long.
    """
    assert len(tokens) <= max_model_len, "the scheduler admits no sequence beyond max_model_len"
    if len(stop_ids) > STOP_IDS:
        raise InvalidRequestError(
            f"stop_token_ids and the model's EOS ids are {len(stop_ids)} together, at most "
            f"{STOP_IDS} can be masked; pass fewer stop_token_ids.",
            param="stop_token_ids",
        )
    if len(bad_word_sequences) > BAD_WORD_SEQUENCES:
        raise InvalidRequestError(
            f"bad_words make {len(bad_word_sequences)} token sequences, at most "
            f"{BAD_WORD_SEQUENCES} are possible; pass fewer words.",
            param="bad_words",
        )
    bad_words = np.full((BAD_WORD_SEQUENCES, BAD_WORD_TOKENS), -1, np.int32)
    for row, sequence in enumerate(bad_word_sequences):
        if not 1 <= len(sequence) <= BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words has a word of {len(sequence)} tokens, each must have 1 to "
                f"{BAD_WORD_TOKENS}; shorten it.",
                param="bad_words",
            )
        bad_words[row, BAD_WORD_TOKENS - len(sequence) :] = sequence
    bias = params.logit_bias or {}
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_values[: len(bias)] = list(bias.values())
    return SlotValues(
        history=_padded(tokens, max_model_len),
        stop_ids=_padded(stop_ids, STOP_IDS),
        bias_ids=_padded(list(bias), MAX_LOGIT_BIAS),
        bias_values=bias_values,
        allowed_ids=_padded(params.allowed_token_ids or (), MAX_ALLOWED_TOKEN_IDS),
        bad_words=bad_words,
    )


def _padded(ids: Sequence[int], length: int) -> npt.NDArray[np.int32]:
    out = np.full(length, -1, np.int32)
    out[: len(ids)] = ids
    return out


def empty_slot_state(num_slots: int, max_model_len: int) -> SlotState:
    """A state in which no slot restricts anything."""
    return SlotState(
        history=jnp.full((num_slots, max_model_len), -1, jnp.int32),
        stop_ids=jnp.full((num_slots, STOP_IDS), -1, jnp.int32),
        bias_ids=jnp.full((num_slots, MAX_LOGIT_BIAS), -1, jnp.int32),
        bias_values=jnp.zeros((num_slots, MAX_LOGIT_BIAS), jnp.float32),
        allowed_ids=jnp.full((num_slots, MAX_ALLOWED_TOKEN_IDS), -1, jnp.int32),
        bad_words=jnp.full((num_slots, BAD_WORD_SEQUENCES, BAD_WORD_TOKENS), -1, jnp.int32),
    )


def slot_state_bytes(num_slots: int, max_model_len: int) -> int:
    """Bytes of `empty_slot_state(num_slots, max_model_len)`."""
    shapes = jax.eval_shape(lambda: empty_slot_state(num_slots, max_model_len))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def write_slot(state: SlotState, slot: jax.Array, values: SlotValues) -> SlotState:
    """Put one request's data into its slot; runs under jit with `state` donated.

    `slot` is an i32 scalar, or i32[A] with `values` stacked on a leading axis A. A slot of S or
    more (padding) writes nothing. Slots in one call must differ.
    """
    updated = {
        field.name: getattr(state, field.name)
        .at[slot]
        .set(jnp.asarray(getattr(values, field.name)), mode="drop")
        for field in dataclasses.fields(SlotState)
    }
    return SlotState(**updated)


def record_tokens(state: SlotState, rows: SampleRows, tokens: jax.Array) -> SlotState:
    """Write the drawn tokens i32[R] into the history at the rows' positions.

    Padding rows, and positions beyond the history, write nothing.
    """
    history = state.history.at[rows.slot, rows.position].set(tokens, mode="drop")
    return dataclasses.replace(state, history=history)


def live_flags(state: SlotState, rows: SampleRows) -> jax.Array:
    """Flags i32[R], zero for padding rows whatever they carry."""
    return jnp.where(rows.slot < state.history.shape[0], rows.flags, lax.full_like(rows.flags, 0))

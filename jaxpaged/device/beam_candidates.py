"""The best next tokens of beams, inside the jitted step: a search needs no more of the logits.

Legend: R sample rows, V vocabulary, C candidates a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxpaged.beam_params import MAX_BEAM_WIDTH
from jaxpaged.device.sampling_state import BEAM, SampleRows, SlotState, live_flags

MAX_ENDING_TOKENS = 16
"""EOS and stop ids of a search that is narrower than this."""


def num_candidates(max_num_seqs: int, drawable: int) -> int:
    """C: enough for the widest search to go on though as many of them end as it has beams, or as
    there are tokens that end it.
    """
    width = min(max_num_seqs, MAX_BEAM_WIDTH)
    return min(width + max(width, MAX_ENDING_TOKENS), drawable)


def beam_candidates(
    logits: jax.Array,
    state: SlotState,
    rows: SampleRows,
    *,
    count: int,
    valid_vocab: int,
    drawable: int,
) -> jax.Array:
    """i32[R, 2C]: for each row with BEAM the ids of its `count` (C) likeliest tokens, best first
    and the lower id first among equals, then the bits of their float32 log-probabilities at the
    row's temperature. Unspecified for other rows, and computed only if there is one with BEAM.

    Columns from `valid_vocab` on count for nothing; those from `drawable` on have a probability,
    but are never candidates.
    """

    def find(logits: jax.Array) -> jax.Array:
        column = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
        x = logits.astype(jnp.float32) / rows.temperature[:, None]
        x = jnp.where(column < valid_vocab, x, -jnp.inf)
        largest = jnp.max(x, axis=1, keepdims=True)
        log_total = jnp.log(jnp.sum(jnp.exp(x - largest), axis=1, keepdims=True))
        values, ids = lax.top_k(jnp.where(column < drawable, x, -jnp.inf), count)
        logprobs = (values - largest) - log_total
        return jnp.concatenate(
            [ids.astype(jnp.int32), lax.bitcast_convert_type(logprobs, jnp.int32)], axis=1
        )

    def skip(logits: jax.Array) -> jax.Array:
        return jnp.zeros((logits.shape[0], 2 * count), jnp.int32)

    any_beam = jnp.any((live_flags(state, rows) & BEAM) != 0)
    found: jax.Array = lax.cond(any_beam, find, skip, logits)
    return found


def split_candidates(
    packed: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Ids and log-probabilities [R, C] of a host copy of `beam_candidates`."""
    count = packed.shape[1] // 2
    return packed[:, :count], packed.view(np.float32)[:, count:]

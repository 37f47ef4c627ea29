"""A model's own numbers for one sequence: the logits and hidden states of every position.

The engine never needs them whole. They come from the same modules, attention backend and paged
pools as those of a step, so what is wrong here is wrong there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec

from jaxpaged.core.plan import ScheduledRow
from jaxpaged.core.request import Request
from jaxpaged.device.attention import AttentionSizes
from jaxpaged.device.attention_choice import choose_backend
from jaxpaged.device.buckets import ROW_MULTIPLE, StepShape
from jaxpaged.device.compile_ledger import known_deprecations
from jaxpaged.device.kv_cache import KVLayout, make_pools
from jaxpaged.device.model_loader import LoadedModel
from jaxpaged.device.packing import RowRequest, pack
from jaxpaged.device.programs import layout_of, over_mesh
from jaxpaged.device.sampling_state import empty_slot_state, row_fields
from jaxpaged.device.step import EngineState, StepSettings, Weights, make_trunk
from jaxpaged.errors import InvalidRequestError
from jaxpaged.sampling_params import SamplingParams

Floats = npt.NDArray[np.float32]
_SLOT = 0
_LEAST_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Forward:
    """What the model makes of T tokens."""

    logits: Floats
    """[T, V]: the prediction after each token."""
    hidden: list[Floats]
    """[T, E] each: after the embedding, then after each layer; the final norm comes later."""


def forward(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    *,
    block_size: int = 16,
    attention_backend: str = "auto",
) -> Forward:
    """One pass over a sequence, as one prompt chunk. `make_forward` for several sequences."""
    return make_forward(loaded, block_size=block_size, attention_backend=attention_backend)(
        token_ids
    )


def make_forward(
    loaded: LoadedModel, *, block_size: int = 16, attention_backend: str = "auto"
) -> Callable[[Sequence[int]], Forward]:
    """A function that does `forward`; one program serves lengths up to the same power of two.

    It takes T x V x 4 bytes on the device and again on the host. It raises `InvalidRequestError`
    for no tokens, more than the model has positions, and ids outside the vocabulary.
    """
    model = loaded.config
    sizes = AttentionSizes.of(
        model, block_size=block_size, dtype=loaded.dtype, cache_dtype=loaded.cache_dtype
    )
    backend, _ = choose_backend(attention_backend, sizes, loaded.mesh.local_devices[0])
    kv_layout = KVLayout.of(model)
    settings = StepSettings(block_size, 0, model.vocab_size, model.vocab_size, kv_layout)
    run = _program(loaded, make_trunk(loaded.parts, backend, settings))

    def one(token_ids: Sequence[int]) -> Forward:
        request = _request(loaded, token_ids, block_size, len(kv_layout.windows))
        count = len(token_ids)
        padded = max(_LEAST_TOKENS, 1 << (count - 1).bit_length())
        layout = layout_of(StepShape(ROW_MULTIPLE, padded), padded, block_size, backend, kv_layout)
        row = ScheduledRow(request, request.epoch, 0, count, False, True)
        fields = row_fields(SamplingParams(temperature=0.0), 0, vocab_size=model.vocab_size)
        packed = pack([row], [RowRequest(fields, 0, True)], layout, 1)
        blocks = 1 + len(kv_layout.windows) * layout.table_width
        pools = make_pools(model, blocks, block_size, loaded.cache_dtype, loaded.mesh)
        state = EngineState(pools, empty_slot_state(1, padded))
        with known_deprecations():
            logits, hidden = run(loaded.weights, state, packed.ints, layout)
        # A single token is packed as a decode row.
        start = packed.prompt_start[0]
        first = packed.order[0] if start < 0 else layout.shape.rows + start
        return Forward(
            np.asarray(logits)[first : first + count, : model.vocab_size],
            [np.asarray(x)[first : first + count] for x in hidden],
        )

    return one


def _program(loaded: LoadedModel, trunk: Any) -> Any:
    """(weights, state, ints, layout) -> f32 [R + P, V] and the list of f32 [R + P, E]."""

    spread = over_mesh(loaded, inputs=1, outputs=PartitionSpec())

    def jaxpaged_forward(weights: Weights, state: EngineState, ints: jax.Array, layout: Any) -> Any:
        def run(weights: Weights, state: EngineState, ints: jax.Array) -> Any:
            model, _, hidden = trunk(weights, state, layout.split(ints), layout)
            return model.logits(hidden[-1]), hidden

        return spread(run)(weights, state, ints)

    return jax.jit(jaxpaged_forward, static_argnames="layout")


def _request(
    loaded: LoadedModel, token_ids: Sequence[int], block_size: int, num_groups: int
) -> Request:
    """A request in slot 0 whose tables hold blocks of their own for every position."""
    ids, model = [int(token) for token in token_ids], loaded.config
    if not 1 <= len(ids) <= model.max_position:
        raise InvalidRequestError(
            f"token_ids has {len(ids)} tokens, the model takes 1 to {model.max_position}.",
            param="token_ids",
        )
    outside = [token for token in ids if not 0 <= token < model.vocab_size]
    if outside:
        raise InvalidRequestError(
            f"token_ids has {outside[0]}, the vocabulary is 0 to {model.vocab_size - 1}.",
            param="token_ids",
        )
    request = Request("forward", ids, max_tokens=0, arrival_time=0.0)
    request.slot = _SLOT
    request.rope_length = len(ids)
    width = -(-len(ids) // block_size)
    request.tables = [
        array("i", range(1 + group * width, 1 + (group + 1) * width)) for group in range(num_groups)
    ]
    return request

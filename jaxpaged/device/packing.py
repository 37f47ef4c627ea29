"""One step's host data as two flat arrays, and back into fields inside the program.

One int32 and one float32 array cross to the device each step. They are made afresh every time and
never written after launch: JAX may alias host memory, and a reused buffer would change under a step
that is still queued.

Legend: `R` rows, `P` prompt tokens, `NT` tiles, `M` block-table width, `L` groups of layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxpaged.core.plan import ScheduledRow
from jaxpaged.device.buckets import StepShape, round_up
from jaxpaged.device.sampling_state import (
    BEAM,
    FLOAT_FIELDS,
    INT_FIELDS,
    RowFields,
    SampleRows,
    rows_from_packed,
)
from pallas_kernels.reference import TILES_PER_GROUP

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

_INT_INDEX = {name: i for i, name in enumerate(INT_FIELDS)}
_FLOAT_INDEX = {name: i for i, name in enumerate(FLOAT_FIELDS)}
FROM_HISTORY = -1
"""A decode token the host does not know yet; the step reads it from the slot's history."""
NO_TARGET = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a step's fields. Field order in the int array is the order of `fields`."""

    shape: StepShape
    table_width: int
    tile: int
    num_groups: int = 1
    """Groups of layers, each with a block table."""

    @property
    def num_tiles(self) -> int:
        """Every sequence may waste one partial tile."""
        if self.shape.tokens == 0:
            return 0
        return round_up(self.shape.tokens // self.tile + self.shape.rows, TILES_PER_GROUP)

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        rows, tokens, tiles = self.shape.rows, self.shape.tokens, self.num_tiles
        return {
            "num_tiles": (1,),
            "decode_token": (rows,),
            "decode_position": (rows,),
            "row_slot": (rows,),
            "rope_length": (rows,),
            "logits_index": (rows,),
            "sample": (len(INT_FIELDS), rows),
            "block_tables": (self.num_groups, rows, self.table_width),
            "prompt_token": (tokens,),
            "token_tile": (tokens,),
            "prompt_target": (tokens,),
            "tile_row": (tiles,),
            "tile_start": (tiles,),
            "tile_len": (tiles,),
            "tile_position": (tiles,),
        }

    @property
    def num_ints(self) -> int:
        return sum(math.prod(shape) for shape in self.fields.values())

    @property
    def num_floats(self) -> int:
        return len(FLOAT_FIELDS) * self.shape.rows

    def split(self, ints: Any) -> dict[str, Any]:
        """Views of the fields, of a numpy array on the host or a traced one in the program."""
        views, start = {}, 0
        for name, shape in self.fields.items():
            size = math.prod(shape)
            views[name] = ints[start : start + size].reshape(shape)
            start += size
        return views

    def sample_rows(self, ints: jax.Array, floats: jax.Array) -> SampleRows:
        rows = floats.reshape(len(FLOAT_FIELDS), self.shape.rows)
        return rows_from_packed(ints, rows)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What packing needs of a row's request beside the scheduler's view: its sampling fields."""

    fields: RowFields
    sample_index: int
    wants_prompt_logprobs: bool


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Arrays to launch. `order[i]` is the row of the program for scheduled row i; `prompt_start[i]`
    the offset of its first token among the prompt tokens, or -1 for a decode row.
    """

    layout: Layout
    ints: IntArray
    floats: FloatArray
    order: list[int]
    prompt_start: list[int]
    has_beams: bool
    """Some row is a beam's."""


def is_decode(row: ScheduledRow, request: RowRequest) -> bool:
    """One token, and no prompt logprob wanted at it: then it takes a decode row, whatever phase it
    is in.
    """
    if row.num_tokens != 1:
        return False
    return not (request.wants_prompt_logprobs and row.start + 1 < row.request.num_prompt_tokens)


def pack(
    rows: Sequence[ScheduledRow], requests: Sequence[RowRequest], layout: Layout, num_slots: int
) -> PackedStep:
    """Fill the arrays of one step. Decode rows come first, longest context first (rows of a group
    cost what its longest does), then the rows of prompt chunks, then samples that draw from the
    logits of one of these; everything else is padding that computes and never writes.
    """
    ints = np.zeros(layout.num_ints, np.int32)
    floats = np.zeros(layout.num_floats, np.float32)
    f = layout.split(ints)
    f["decode_position"].fill(-1)
    f["row_slot"].fill(num_slots)
    f["token_tile"].fill(-1)
    f["prompt_target"].fill(NO_TARGET)
    sample = f["sample"]
    sample[_INT_INDEX["slot"]].fill(num_slots)
    sample[_INT_INDEX["num_logprobs"]].fill(-1)
    values = floats.reshape(len(FLOAT_FIELDS), layout.shape.rows)
    for name in ("temperature", "top_p", "repetition"):
        values[_FLOAT_INDEX[name]].fill(1.0)

    kinds = [is_decode(row, request) for row, request in zip(rows, requests, strict=True)]
    decode = sorted((i for i, kind in enumerate(kinds) if kind), key=lambda i: -rows[i].start)
    prompts = [i for i, kind in enumerate(kinds) if not kind and rows[i].num_tokens]
    forked = [i for i, row in enumerate(rows) if not row.num_tokens]
    order, prompt_start = [0] * len(rows), [-1] * len(rows)
    has_beams = False
    for place, i in enumerate(decode + prompts + forked):
        row = rows[i]
        order[i] = place
        has_beams = has_beams or bool(requests[i].fields.flags & BEAM)
        f["row_slot"][place] = row.request.slot
        f["rope_length"][place] = row.request.rope_length
        for group, table in enumerate(row.request.tables):
            f["block_tables"][group, place, : len(table)] = table
        if row.samples:
            _pack_sample(sample[:, place], values[:, place], row, requests[i])
    for place, i in enumerate(decode):
        row = rows[i]
        known = row.request.token_ids
        f["decode_token"][place] = known[row.start] if row.start < len(known) else FROM_HISTORY
        f["decode_position"][place] = row.start
        f["logits_index"][place] = place
    _pack_prompts(f, rows, requests, prompts, order, prompt_start, layout)
    for i in forked:
        f["logits_index"][order[i]] = f["logits_index"][order[rows[i].source]]
    return PackedStep(layout, ints, floats, order, prompt_start, has_beams)


def _pack_prompts(
    f: dict[str, IntArray],
    rows: Sequence[ScheduledRow],
    requests: Sequence[RowRequest],
    prompts: list[int],
    order: list[int],
    prompt_start: list[int],
    layout: Layout,
) -> None:
    offset = tiles = 0
    for i in prompts:
        row, count = rows[i], rows[i].num_tokens
        prompt_start[i] = offset
        known = row.request.token_ids
        f["prompt_token"][offset : offset + count] = known[row.start : row.start + count]
        if requests[i].wants_prompt_logprobs:
            last = min(row.start + count + 1, row.request.num_prompt_tokens)
            targets = known[row.start + 1 : last]
            f["prompt_target"][offset : offset + len(targets)] = targets
        used = -(-count // layout.tile)
        starts = np.arange(used, dtype=np.int32) * layout.tile
        span = slice(tiles, tiles + used)
        f["tile_row"][span] = order[i]
        f["tile_start"][span] = offset + starts
        f["tile_len"][span] = np.minimum(layout.tile, count - starts)
        f["tile_position"][span] = row.start + starts
        first = tiles * layout.tile
        f["token_tile"][offset : offset + count] = np.arange(first, first + count, dtype=np.int32)
        f["logits_index"][order[i]] = layout.shape.rows + offset + count - 1
        offset += count
        tiles += used
    f["num_tiles"][0] = tiles


def _pack_sample(
    ints: IntArray, floats: FloatArray, row: ScheduledRow, request: RowRequest
) -> None:
    fields = request.fields
    position = row.start + row.num_tokens
    prompt_len = row.request.num_prompt_tokens
    ints[:] = (  # in the order of INT_FIELDS
        row.request.slot,
        position,
        prompt_len,
        fields.flags_after(position - prompt_len),
        fields.num_logprobs,
        fields.top_k,
        request.sample_index,
        fields.seed_lo,
        fields.seed_hi,
    )
    floats[:] = (  # in the order of FLOAT_FIELDS
        fields.temperature,
        fields.top_p,
        fields.min_p,
        fields.repetition,
        fields.frequency,
        fields.presence,
    )

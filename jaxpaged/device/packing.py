"""One step's host data as two flat arrays, and back into fields inside the program.

One int32 and one float32 array cross to the device each step. They are made afresh every time and
never written after launch: JAX may alias host memory, and a reused buffer would change under a step
that is still queued.

Legend: `R` rows, `P` prompt tokens, `NT` tiles, `M` block-table width, `L` groups of layers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxpaged.core.plan import ScheduledRow
from jaxpaged.core.request import Request
from jaxpaged.device.buckets import StepShape, round_up
from jaxpaged.device.sampling_state import (
    BEAM,
    FLOAT_FIELDS,
    INT_FIELDS,
    MASK_STOPS,
    RowFields,
    SampleRows,
    rows_from_packed,
)
from pallas_kernels.reference import TILES_PER_GROUP

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

_INT_INDEX = {name: i for i, name in enumerate(INT_FIELDS)}
_FLOAT_INDEX = {name: i for i, name in enumerate(FLOAT_FIELDS)}
_CONSTANT_INTS = ("flags", "num_logprobs", "top_k", "sample_index", "seed_lo", "seed_hi")
"""Fields of a sample row that stay the same as long as its request lives, if not for min_tokens."""
_CONSTANT_ROWS = slice(_INT_INDEX["flags"], _INT_INDEX["seed_hi"] + 1)
assert ("slot", "position", "prompt_len", *_CONSTANT_INTS) == INT_FIELDS
FROM_HISTORY = -1
"""A decode token the host does not know yet; the step reads it from the slot's history."""
NO_TARGET = -1


@dataclass(frozen=True)
class Layout:
    """Sizes of a step's fields. Field order in the int array is the order of `fields`."""

    shape: StepShape
    table_width: int
    tile: int
    num_groups: int = 1
    """Groups of layers, each with a block table."""

    @cached_property
    def num_tiles(self) -> int:
        """Every sequence may waste one partial tile."""
        if self.shape.tokens == 0:
            return 0
        return round_up(self.shape.tokens // self.tile + self.shape.rows, TILES_PER_GROUP)

    @cached_property
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

    @cached_property
    def spans(self) -> dict[str, slice]:
        """Where each field lies in the int array."""
        spans, start = {}, 0
        for name, shape in self.fields.items():
            end = start + math.prod(shape)
            spans[name] = slice(start, end)
            start = end
        return spans

    @cached_property
    def num_ints(self) -> int:
        stops: list[int] = [span.stop for span in self.spans.values()]
        return max(stops)

    @property
    def num_floats(self) -> int:
        return len(FLOAT_FIELDS) * self.shape.rows

    def split(self, ints: Any) -> dict[str, Any]:
        """Views of the fields, of a numpy array on the host or a traced one in the program."""
        fields = self.fields
        return {name: ints[span].reshape(fields[name]) for name, span in self.spans.items()}

    def sample_rows(self, ints: jax.Array, floats: jax.Array) -> SampleRows:
        rows = floats.reshape(len(FLOAT_FIELDS), self.shape.rows)
        return rows_from_packed(ints, rows)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What packing needs of a row's request beside the scheduler's view: its sampling fields."""

    fields: RowFields
    sample_index: int
    wants_prompt_logprobs: bool
    constants: bytes = field(init=False, repr=False, compare=False)
    """The fields as they go to the device, so that a step joins bytes and looks at no numbers:
    int32 for `_CONSTANT_INTS` and min_tokens, then float32 for FLOAT_FIELDS."""

    def __post_init__(self) -> None:
        fields = self.fields
        ints = [
            self.sample_index if name == "sample_index" else getattr(fields, name)
            for name in _CONSTANT_INTS
        ]
        floats = [getattr(fields, name) for name in FLOAT_FIELDS]
        packed = np.array([*ints, fields.min_tokens], np.int32).tobytes()
        packed += np.array(floats, np.float32).tobytes()
        object.__setattr__(self, "constants", packed)


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


def count_prompt_tokens(rows: Sequence[ScheduledRow], requests: Sequence[RowRequest]) -> int:
    """Tokens of a step that are not those of decode rows."""
    return sum(
        [
            row.num_tokens
            for row, request in zip(rows, requests, strict=True)
            if row.num_tokens != 1
            or (request.wants_prompt_logprobs and not is_decode(row, request))
        ]
    )


def pack(
    rows: Sequence[ScheduledRow], requests: Sequence[RowRequest], layout: Layout, num_slots: int
) -> PackedStep:
    """Fill the arrays of one step. Decode rows come first, longest context first (rows of a group
    cost what its longest does), then the rows of prompt chunks, then samples that draw from the
    logits of one of these; everything else is padding that computes and never writes.

    What is the same for all rows is done by columns: a few list comprehensions a row, and no call.
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

    decode, others = _decode_first(rows, requests)
    prompts = [i for i in others if rows[i].num_tokens]
    forked = [i for i in others if not rows[i].num_tokens]
    places = [*decode, *prompts, *forked]
    order, prompt_start = [0] * len(rows), [-1] * len(rows)
    for place, i in enumerate(places):
        order[i] = place
    ordered = [rows[i] for i in places]
    cores = [row.request for row in ordered]
    count, num_decode = len(places), len(decode)
    _pack_tables(ints, cores, layout)
    slots = np.array([core.slot for core in cores], np.int32)
    starts = [row.start for row in ordered]
    positions = np.array(starts, np.int32)
    f["row_slot"][:count] = slots
    f["decode_position"][:num_decode] = positions[:num_decode]
    f["logits_index"][:num_decode] = np.arange(num_decode, dtype=np.int32)
    lengths = [core.rope_length for core in cores]
    if any(lengths):
        f["rope_length"][:count] = lengths
    f["decode_token"][:num_decode] = [
        core.token_ids[start] if start < len(core.token_ids) else FROM_HISTORY
        for core, start in zip(cores[:num_decode], starts, strict=False)
    ]
    _pack_prompts(f, rows, requests, prompts, order, prompt_start, layout)
    for i in forked:
        f["logits_index"][order[i]] = f["logits_index"][order[rows[i].source]]
    positions[:num_decode] += 1
    if num_decode < count:
        counts = [row.num_tokens for row in ordered[num_decode:]]
        positions[num_decode:] += np.array(counts, np.int32)
    constants = _constants(requests, places)
    has_beams = bool((constants[:, 0] & BEAM).any())
    drawing: slice | list[int] = slice(count)
    samples = [row.samples for row in ordered]
    if not all(samples):
        drawing = [place for place, draws in enumerate(samples) if draws]
    lengths = [core.num_prompt_tokens for core in cores]
    heads = np.array([slots, positions, np.array(lengths, np.int32)])
    _pack_samples(sample, values, drawing, heads[:, drawing], constants[drawing])
    return PackedStep(layout, ints, floats, order, prompt_start, has_beams)


def _decode_first(
    rows: Sequence[ScheduledRow], requests: Sequence[RowRequest]
) -> tuple[list[int], list[int]]:
    """Indices of decode rows, longest context first, and those of all others in their order."""
    kinds = [
        row.num_tokens == 1 and (not request.wants_prompt_logprobs or is_decode(row, request))
        for row, request in zip(rows, requests, strict=True)
    ]
    starts = [row.start for row in rows]
    decode = [i for i, kind in enumerate(kinds) if kind]
    decode.sort(key=starts.__getitem__, reverse=True)  # stable: reverse keeps the order of equals
    if len(decode) == len(rows):
        return decode, []
    return decode, [i for i, kind in enumerate(kinds) if not kind]


def _pack_tables(ints: IntArray, cores: Sequence[Request], layout: Layout) -> None:
    # Through a memoryview a table is copied in an eighth of the time that numpy takes.
    buffer: Any = ints
    view, width = memoryview(buffer), layout.table_width
    first = layout.spans["block_tables"].start
    for group in range(layout.num_groups):
        at = first + group * layout.shape.rows * width
        for core in cores:
            table = core.tables[group]
            view[at : at + len(table)] = table
            at += width


def _constants(requests: Sequence[RowRequest], places: Sequence[int]) -> IntArray:
    """[rows, fields], in the order of `RowRequest.constants`."""
    joined = b"".join([requests[i].constants for i in places])
    width = len(_CONSTANT_INTS) + 1 + len(FLOAT_FIELDS)
    return np.frombuffer(joined, np.int32).reshape(-1, width)


def _pack_samples(
    sample: IntArray,
    values: FloatArray,
    places: slice | list[int],
    heads: IntArray,
    constants: IntArray,
) -> None:
    """Fill in the rows that draw. `heads` are their slots, positions and lengths of prompts."""
    num_constant = len(_CONSTANT_INTS)
    _, positions, prompts = heads
    sample[: _CONSTANT_ROWS.start, places] = heads
    sample[_CONSTANT_ROWS, places] = constants[:, :num_constant].T
    waits = positions - prompts < constants[:, num_constant]  # for min_tokens
    if waits.any():
        sample[_INT_INDEX["flags"], places] |= np.where(waits, MASK_STOPS, 0).astype(np.int32)
    values[:, places] = constants[:, num_constant + 1 :].view(np.float32).T


def _pack_prompts(
    f: dict[str, IntArray],
    rows: Sequence[ScheduledRow],
    requests: Sequence[RowRequest],
    prompts: list[int],
    order: list[int],
    prompt_start: list[int],
    layout: Layout,
) -> None:
    """Prompt tokens one chunk after the other, each cut into tiles of its own."""
    if not prompts:
        return
    chunks = [rows[i] for i in prompts]
    counts = np.array([row.num_tokens for row in chunks], np.int32)
    offsets, used = counts.cumsum(dtype=np.int32) - counts, -(-counts // layout.tile)
    first_tiles = used.cumsum(dtype=np.int32) - used
    places = np.array([order[i] for i in prompts], np.int32)
    tokens: list[int] = []
    for i, row, offset in zip(prompts, chunks, offsets.tolist(), strict=True):
        prompt_start[i] = offset
        known, end = row.request.token_ids, row.start + row.num_tokens
        tokens += known[row.start : end]
        if requests[i].wants_prompt_logprobs:
            targets = known[row.start + 1 : min(end + 1, row.request.num_prompt_tokens)]
            f["prompt_target"][offset : offset + len(targets)] = targets
    packed = struct.pack(f"{len(tokens)}i", *tokens)  # in half the time that numpy takes
    f["prompt_token"][: len(tokens)] = np.frombuffer(packed, np.int32)
    shift = np.repeat(first_tiles * layout.tile - offsets, counts)
    f["token_tile"][: len(tokens)] = np.arange(len(tokens), dtype=np.int32) + shift
    f["logits_index"][places] = layout.shape.rows + offsets + counts - 1
    owner = np.repeat(np.arange(len(prompts)), used)
    num_tiles = len(owner)
    starts = (np.arange(num_tiles, dtype=np.int32) - first_tiles[owner]) * layout.tile
    f["tile_row"][:num_tiles] = places[owner]
    f["tile_start"][:num_tiles] = offsets[owner] + starts
    f["tile_len"][:num_tiles] = np.minimum(layout.tile, counts[owner] - starts)
    positions = np.array([row.start for row in chunks], np.int32)
    f["tile_position"][:num_tiles] = positions[owner] + starts
    f["num_tiles"][0] = num_tiles

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.plan import ScheduledRow
from jaxpaged.core.request import Request
from jaxpaged.device.buckets import StepShape
from jaxpaged.device.packing import (
    FROM_HISTORY,
    NO_TARGET,
    Layout,
    PackedStep,
    RowRequest,
    is_decode,
    pack,
)
from jaxpaged.device.sampling_state import FLOAT_FIELDS, INT_FIELDS, MASK_STOPS, row_fields
from jaxpaged.sampling_params import SamplingParams
from pallas_kernels.reference import TILES_PER_GROUP

NUM_SLOTS = 10
BLOCK_SIZE = 4
TABLE_WIDTH = 16
DECODE = Layout(StepShape(16, 0), TABLE_WIDTH, 6)
PREFILL = Layout(StepShape(16, 64), TABLE_WIDTH, 6)


def scheduled(
    name: str,
    prompt_len: int,
    start: int,
    count: int,
    slot: int,
    *,
    num_outputs: int = 0,
    params: SamplingParams | None = None,
    sample_index: int = 0,
) -> tuple[ScheduledRow, RowRequest]:
    """A row with as many blocks as its tokens need; all ids differ from those of other rows."""
    params = params or SamplingParams()
    first = 1 + 1000 * slot
    request = Request(
        name,
        list(range(first, first + prompt_len)),
        max_tokens=params.max_tokens or 0,
        arrival_time=0.0,
    )
    request.token_ids += range(first + prompt_len, first + prompt_len + num_outputs)
    request.slot = slot
    blocks = -(-(start + count) // BLOCK_SIZE)
    request.block_ids.extend(1 + TABLE_WIDTH * slot + i for i in range(blocks))
    samples = start + count >= prompt_len + num_outputs
    row = ScheduledRow(request, request.epoch, start, count, samples, start == 0)
    fields = row_fields(params, 1000 + slot, vocab_size=512)
    return row, RowRequest(fields, sample_index, params.prompt_logprobs is not None)


def packed_of(pairs: Sequence[tuple[ScheduledRow, RowRequest]], layout: Layout) -> PackedStep:
    return pack([row for row, _ in pairs], [request for _, request in pairs], layout, NUM_SLOTS)


# ---------------------------------------------------------------- decode or prompt


@pytest.mark.parametrize(
    ("prompt_len", "start", "count", "scored", "expected"),
    [
        (5, 7, 1, False, True),  # the usual: an output token
        (5, 7, 1, True, True),
        (5, 4, 1, False, True),  # a prompt's last token alone, after a cache hit
        (5, 4, 1, True, True),  # has no next prompt token to score
        (5, 2, 1, False, True),  # a chunk of one token in the middle
        (5, 2, 1, True, False),  # its next prompt token must be scored
        (5, 0, 2, False, False),
        (1, 0, 1, True, True),
        (5, 0, 5, False, False),
    ],
)
def test_is_decode(prompt_len: int, start: int, count: int, scored: bool, expected: bool) -> None:
    params = SamplingParams(prompt_logprobs=0 if scored else None)
    outputs = max(0, start + count - prompt_len)
    row, request = scheduled("r", prompt_len, start, count, 0, num_outputs=outputs, params=params)
    assert is_decode(row, request) is expected


# ---------------------------------------------------------------- any step, token by token


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[ScheduledRow, RowRequest]]:
    slots = draw(st.permutations(range(NUM_SLOTS)))
    pairs, room = [], PREFILL.shape.tokens
    for slot in slots[: draw(st.integers(1, NUM_SLOTS))]:
        scored = draw(st.booleans())
        prompt_len = draw(st.integers(1, 40))
        outputs = draw(st.integers(0, 8))
        known = prompt_len + outputs
        params = SamplingParams(
            prompt_logprobs=0 if scored else None,
            temperature=draw(st.sampled_from([0.0, 0.7])),
            min_tokens=draw(st.integers(0, 4)),
            top_p=0.9,
        )
        if outputs and draw(st.booleans()):
            # The token in flight: one position further than the host knows.
            start, count = known - draw(st.integers(0, 1)), 1
        else:
            start = draw(st.integers(0, known - 1))
            count = draw(st.integers(1, min(known - start, 20)))
        if count > room:
            continue
        room -= count
        pairs.append(
            scheduled(
                f"r{slot}",
                prompt_len,
                start,
                count,
                slot,
                num_outputs=outputs,
                params=params,
                sample_index=draw(st.integers(0, 3)),
            )
        )
    return pairs


def run_of_tokens(packed: PackedStep) -> dict[str, Any]:
    """What the program makes of the arrays, one token at a time: (slot, position) -> facts."""
    layout = packed.layout
    f = layout.split(packed.ints)
    tokens: dict[tuple[int, int], dict[str, Any]] = {}

    def add(place: int, position: int, token: int, index: int, target: int) -> None:
        block = int(f["block_tables"][0, place, position // BLOCK_SIZE])
        key = int(f["row_slot"][place]), position
        assert key not in tokens, "a token twice"
        tokens[key] = {
            "token": token,
            "kv_slot": block * BLOCK_SIZE + position % BLOCK_SIZE,
            "index": index,
            "target": target,
        }

    for place in range(layout.shape.rows):
        position = int(f["decode_position"][place])
        if position >= 0:
            add(place, position, int(f["decode_token"][place]), place, NO_TARGET)
    for offset in range(layout.shape.tokens):
        where = int(f["token_tile"][offset])
        if where < 0:
            assert f["prompt_target"][offset] == NO_TARGET
            continue
        tile, inside = divmod(where, layout.tile)
        assert tile < f["num_tiles"][0]
        assert inside < f["tile_len"][tile]
        assert f["tile_start"][tile] + inside == offset
        add(
            int(f["tile_row"][tile]),
            int(f["tile_position"][tile]) + inside,
            int(f["prompt_token"][offset]),
            layout.shape.rows + offset,
            int(f["prompt_target"][offset]),
        )
    return tokens


@given(pairs=steps())
def test_every_token_once_in_its_place(pairs: list[tuple[ScheduledRow, RowRequest]]) -> None:
    packed = packed_of(pairs, PREFILL)
    f = PREFILL.split(packed.ints)
    tokens = run_of_tokens(packed)
    assert len(packed.order) == len(packed.prompt_start) == len(pairs)
    assert len(set(packed.order)) == len(pairs)
    expected = 0
    for (row, request), place, prompt_start in zip(
        pairs, packed.order, packed.prompt_start, strict=True
    ):
        core = row.request
        assert (prompt_start < 0) == is_decode(row, request)
        for position in range(row.start, row.start + row.num_tokens):
            expected += 1
            got = tokens[core.slot, position]
            known = position < len(core.token_ids)
            assert got["token"] == (core.token_ids[position] if known else FROM_HISTORY)
            block = core.block_ids[position // BLOCK_SIZE]
            assert got["kv_slot"] == block * BLOCK_SIZE + position % BLOCK_SIZE
            scored = request.wants_prompt_logprobs and position + 1 < core.num_prompt_tokens
            assert got["target"] == (core.token_ids[position + 1] if scored else NO_TARGET)
            if prompt_start >= 0:
                offset = prompt_start + position - row.start
                assert got["index"] == PREFILL.shape.rows + offset
        last = tokens[core.slot, row.start + row.num_tokens - 1]
        assert f["logits_index"][place] == last["index"]
    assert len(tokens) == expected, "padding wrote nothing"

    # What attention counts on: live decode rows first, longest first; whole groups of tiles.
    positions = f["decode_position"].tolist()
    live = [p for p in positions if p >= 0]
    assert positions == sorted(live, reverse=True) + [-1] * (len(positions) - len(live))
    used = int(f["num_tiles"][0])
    assert (f["tile_len"][:used] >= 1).all() and (f["tile_len"][:used] <= PREFILL.tile).all()
    assert (f["tile_len"][used:] == 0).all()
    assert int(f["tile_len"].sum()) + len(live) == expected


@given(pairs=steps())
def test_sampling_fields_of_every_row(pairs: list[tuple[ScheduledRow, RowRequest]]) -> None:
    packed = packed_of(pairs, PREFILL)
    ints = PREFILL.split(packed.ints)["sample"]
    floats = packed.floats.reshape(len(FLOAT_FIELDS), PREFILL.shape.rows)
    seen = set()
    for (row, request), place in zip(pairs, packed.order, strict=True):
        got = dict(zip(INT_FIELDS, ints[:, place].tolist(), strict=True))
        if not row.samples:
            assert got["slot"] == NUM_SLOTS, "a row that draws nothing is padding"
            continue
        seen.add(place)
        fields, prompt_len = request.fields, row.request.num_prompt_tokens
        position = row.start + row.num_tokens
        assert got == {
            "slot": row.request.slot,
            "position": position,
            "prompt_len": prompt_len,
            "flags": fields.flags_after(position - prompt_len),
            "num_logprobs": fields.num_logprobs,
            "top_k": fields.top_k,
            "sample_index": request.sample_index,
            "seed_lo": fields.seed_lo,
            "seed_hi": fields.seed_hi,
        }
        masks = fields.min_tokens > position - prompt_len
        assert bool(got["flags"] & MASK_STOPS) == masks
        for name, value in zip(FLOAT_FIELDS, floats[:, place], strict=True):
            assert value == np.float32(getattr(fields, name))
    for place in set(range(PREFILL.shape.rows)) - seen:
        assert ints[INT_FIELDS.index("slot"), place] == NUM_SLOTS
        assert ints[INT_FIELDS.index("num_logprobs"), place] == -1
        # Values that are harmless to divide by and to take a logarithm of.
        assert floats[:, place].tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]


@given(pairs=steps())
def test_arrays_are_new_every_time(pairs: list[tuple[ScheduledRow, RowRequest]]) -> None:
    first, second = packed_of(pairs, PREFILL), packed_of(pairs, PREFILL)
    for one, two in ((first.ints, second.ints), (first.floats, second.floats)):
        assert one.tobytes() == two.tobytes()
        assert not np.shares_memory(one, two)
        assert one.base is None and one.flags.c_contiguous, "not a view of something older"
    for row, _ in pairs:
        assert not np.shares_memory(first.ints, np.asarray(row.request.block_ids))


def test_an_empty_step_is_all_padding() -> None:
    for layout in (DECODE, PREFILL):
        packed = packed_of([], layout)
        assert run_of_tokens(packed) == {}
        f = layout.split(packed.ints)
        assert f["num_tiles"].tolist() == [0]
        assert (f["row_slot"] == NUM_SLOTS).all()


def test_rows_of_one_token_need_no_prompt_tokens() -> None:
    pairs = [scheduled(f"r{i}", 1 + i, i, 1, i) for i in range(NUM_SLOTS)]
    packed = packed_of(pairs, DECODE)
    assert packed.order == list(reversed(range(NUM_SLOTS))), "the longest context first"
    assert packed.prompt_start == [-1] * NUM_SLOTS
    assert len(run_of_tokens(packed)) == NUM_SLOTS


# ---------------------------------------------------------------- layouts


@given(
    rows=st.integers(1, 40),
    tokens=st.integers(1, 300),
    tile=st.integers(1, 32),
    data=st.data(),
)
def test_there_are_tiles_for_every_split(
    rows: int, tokens: int, tile: int, data: st.DataObject
) -> None:
    """However a budget is cut among the rows, the tiles suffice."""
    layout = Layout(StepShape(rows, tokens), 4, tile)
    assert layout.num_tiles % TILES_PER_GROUP == 0
    needed = room = 0
    room = tokens
    for _ in range(rows):
        count = data.draw(st.integers(0, room))
        room -= count
        needed += -(-count // tile)
    assert needed <= layout.num_tiles


@pytest.mark.parametrize("layout", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_fields_fill_the_array_without_overlap(layout: Layout) -> None:
    ints = np.arange(layout.num_ints, dtype=np.int32)
    views = layout.split(ints)
    assert {name: view.shape for name, view in views.items()} == layout.fields
    joined = np.concatenate([view.ravel() for view in views.values()])
    assert (joined == ints).all()
    for view in views.values():
        assert view.size == 0 or np.shares_memory(view, ints), "filled in place"


def test_layouts_are_keys_of_programs() -> None:
    same = Layout(StepShape(16, 64), TABLE_WIDTH, 6)
    assert hash(same) == hash(PREFILL) and same == PREFILL
    assert dataclasses.replace(PREFILL, table_width=17) != PREFILL

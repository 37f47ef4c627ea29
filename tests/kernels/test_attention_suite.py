"""What paged attention promises, tried on every backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels import triton_decode, triton_prefill
from pallas_kernels.paged_kv import PagedKV
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.tuning import DecodeConfig, PrefillConfig
from tests.kernels import sharded
from tests.kernels.attention_oracle import POISONS, PagedCase, Tiles, tiles_for
from tests.kernels.backends import BF16, F8, SETUPS, Backend, Setup, backend
from tests.kernels.lowering import A100, H200, TRITON_CALL, export_for_cuda

LENGTHS = [1, 15, 16, 17, 33, 64, 65, 80]
"""At the edges of tiles and pages, and around them."""
CHUNKS = [(0, 0, 1), (1, 0, 15), (3, 5, 12), (6, 60, 5), (7, 16, 33), (2, 15, 1)]
"""Whole prompts and parts of them: (row, first position, tokens)."""
DECODE_ROWS, PROMPT_TOKENS, TILES = 12, 72, 40
NAMES = ["reference", "native", "triton", "mosaic"]
ONE_LAYOUT = ["reference", "native"]
COMPLETE = ["reference", "native", "triton"]
"""Those that decode, prefill and write every setup."""


PAIRS = [
    (name, setup)
    for name in NAMES
    for setup in SETUPS
    if name not in ONE_LAYOUT or setup.layout is PoolLayout.NHD
]
pairs = pytest.mark.parametrize(("name", "setup"), PAIRS, ids=[f"{n}-{s}" for n, s in PAIRS])


def available(name: str) -> Backend:
    found = backend(name)
    if found is None:
        pytest.skip(f"the backend {name!r} does not run here")
    return found


def decode(
    found: Backend,
    setup: Setup,
    case: PagedCase,
    jobs: list[tuple[int, int]],
    kv: PagedKV | None = None,
) -> tuple[Any, Any]:
    """Queries and results of (row, position) jobs and, behind them, of padding rows."""
    rows, positions = np.zeros(DECODE_ROWS, np.int32), np.full(DECODE_ROWS, -1, np.int32)
    for place, (row, position) in enumerate(jobs):
        rows[place], positions[place] = row, position
    q = case.queries(DECODE_ROWS, np.random.default_rng(1))
    q[len(jobs) :] = np.nan  # nobody promises what padding holds
    kv = case.kv(setup.layout) if kv is None else kv
    return q, found.decode(setup, q, kv, case.tables[rows], positions)


def prefill(
    found: Backend, setup: Setup, case: PagedCase, chunks: list[tuple[int, int, int]] = CHUNKS
) -> tuple[Any, Any, Tiles]:
    tile = found.tile_size(setup.group)
    num_tiles = TILES if chunks is not CHUNKS else _with_padding(chunks, tile)
    tiles = tiles_for(chunks, tile=tile, num_tokens=PROMPT_TOKENS, num_tiles=num_tiles)
    q = case.queries(PROMPT_TOKENS, np.random.default_rng(2))
    q[len(tiles.tokens) :] = np.nan
    return q, found.prefill(setup, q, case.kv(setup.layout), case.tables, tiles), tiles


def _with_padding(chunks: list[tuple[int, int, int]], tile: int) -> int:
    """Tiles: a multiple of eight, and some of them not used."""
    used = sum(-(-count // tile) for _, _, count in chunks)
    return (used + 8) // 8 * 8


def last_tokens(case: PagedCase) -> list[tuple[int, int]]:
    return [(row, length - 1) for row, length in enumerate(case.lengths)]


def check(setup: Setup, case: PagedCase, q: Any, out: Any, tokens: list[tuple[int, int]]) -> None:
    """Every token's result is what float64 attention over the same cache gives."""
    kind = {"scale": setup.scale, "window": setup.window, "soft_cap": setup.soft_cap}
    assert out.dtype == setup.dtype
    assert out.shape == (*q.shape[:2], case.value_dim)
    largest = max(float(np.abs(v.astype(np.float64)).max()) for v in case.values)
    for place, (row, position) in enumerate(tokens):
        expected = case.expected(q[place], row, position, **kind)
        np.testing.assert_allclose(
            out[place].astype(np.float64),
            expected,
            atol=setup.error * max(1.0, largest),
            rtol=setup.error,
            err_msg=f"row {row}, position {position}",
        )


@pairs
def test_against_float64(name: str, setup: Setup) -> None:
    """In 8-bit caches against attention over what was stored; poison stands in all other slots."""
    found = available(name)
    case = setup.case(LENGTHS)
    refusal = found.refuses(setup)
    if refusal is not None:
        with pytest.raises(NotImplementedError, match=refusal):
            decode(found, setup, case, [])
        with pytest.raises(NotImplementedError, match=refusal):
            prefill(found, setup, case)
        return
    jobs = [*last_tokens(case), (7, 40), (5, 0)]
    q, out = decode(found, setup, case, jobs)
    check(setup, case, q, out, jobs)
    assert (out[len(jobs) :] == 0).all()
    q, out, tiles = prefill(found, setup, case)
    check(setup, case, q, out, tiles.tokens)
    if name != "reference":  # which leaves the rows of no token undefined
        assert (out[len(tiles.tokens) :] == 0).all()


def runnable() -> list[tuple[str, Setup]]:
    """The pairs that compute something; of the slow interpreter of `mosaic` one is enough."""
    found = [(name, s) for name, s in PAIRS if (b := backend(name)) and b.refuses(s) is None]
    slow = [pair for pair in found if pair[0] == "mosaic"]
    return [pair for pair in found if pair not in slow[1:]]


EVERY = runnable()
WRITERS = [pair for pair in EVERY if pair[0] != "mosaic"]  # which has no writer of its own


# numpy's, in the interpreter of `mosaic`, of products with what is masked afterwards
@pytest.mark.filterwarnings("ignore:.* encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize(("name", "setup"), EVERY, ids=[f"{n}-{s}" for n, s in EVERY])
def test_poison_and_places_change_no_bit(name: str, setup: Setup) -> None:
    """Whatever stands in slots that nobody owns, and wherever the pages lie."""
    found = available(name)
    results = []
    for page_seed, poison in enumerate(POISONS[:2] if name == "mosaic" else POISONS):
        case = setup.case(LENGTHS, poison=poison, page_seed=page_seed)
        jobs = last_tokens(case)
        _, decoded = decode(found, setup, case, jobs)
        _, prompt, tiles = prefill(found, setup, case)
        results.append((decoded[: len(jobs)], prompt[: len(tiles.tokens)]))
    for decoded, prompt in results:
        assert np.isfinite(decoded).all() and np.isfinite(prompt).all()
        assert decoded.tobytes() == results[0][0].tobytes()
        assert prompt.tobytes() == results[0][1].tobytes()


@pytest.mark.parametrize(("name", "setup"), WRITERS, ids=[f"{n}-{s}" for n, s in WRITERS])
def test_what_is_written_is_what_is_read(name: str, setup: Setup) -> None:
    """All tokens into an empty cache, in no order and with some that go nowhere. Then attention is
    that over the values before they were quantised, but for the error of that.
    """
    found = available(name)
    exact = dataclasses.replace(setup, cache_dtype=None).case(LENGTHS)
    case = setup.case(LENGTHS)
    k, v = np.concatenate(exact.keys), np.concatenate(exact.values)
    slots = np.concatenate([case.slots(row) for row in range(len(LENGTHS))]).astype(np.int32)
    order = np.random.default_rng(3).permutation(len(slots) + 3)
    slots = np.append(slots, [-1, len(case.k_pool), 2**31 - 1]).astype(np.int32)[order]
    k, v = (np.append(x, np.full_like(x[:3], np.nan), axis=0)[order] for x in (k, v))
    written = found.write(
        setup, case.empty().kv(setup.layout), k, None if case.latent else v, slots
    )
    jobs = last_tokens(case)
    q, out = decode(found, setup, case, jobs, written)
    kind = {"scale": setup.scale, "window": setup.window, "soft_cap": setup.soft_cap}
    for place, (row, position) in enumerate(jobs):
        expected = exact.expected(q[place], row, position, **kind)
        np.testing.assert_allclose(
            out[place].astype(np.float64), expected, atol=4 * setup.error + setup.quantization_error
        )


# ---------------------------------------------------------------- random lengths, random shapes

RAGGED = Setup(32, 2, 2, 16, window=40, soft_cap=3.0)


@st.composite
def ragged(draw: st.DrawFn) -> tuple[list[int], list[Any], list[Any]]:
    """Lengths of eight sequences, decode jobs and prompt chunks."""
    lengths = draw(st.lists(st.integers(1, 80), min_size=8, max_size=8))
    where = st.tuples(st.integers(0, 7), st.floats(0, 1))
    jobs = [
        (row, round(x * (lengths[row] - 1)))
        for row, x in draw(st.lists(where, max_size=DECODE_ROWS))
    ]
    chunks, room = [], PROMPT_TOKENS
    for (row, x), count in draw(st.lists(st.tuples(where, st.integers(1, 40)), max_size=8)):
        first = round(x * (lengths[row] - 1))
        count = min(count, lengths[row] - first, room)
        if count:
            chunks.append((row, first, count))
            room -= count
    return lengths, jobs, chunks


@pytest.mark.parametrize("name", COMPLETE)
@settings(max_examples=20)
@given(work=ragged())
def test_any_lengths(name: str, work: tuple[list[int], list[Any], list[Any]]) -> None:
    lengths, jobs, chunks = work
    found = available(name)
    case = RAGGED.case(lengths, num_blocks=8 * 5 + 2, table_width=7)
    q, out = decode(found, RAGGED, case, jobs)
    check(RAGGED, case, q, out, jobs)
    assert (out[len(jobs) :] == 0).all()
    q, out, tiles = prefill(found, RAGGED, case, chunks)
    check(RAGGED, case, q, out, tiles.tokens)


setups = st.builds(
    Setup,
    head_dim=st.integers(2, 32).map(lambda eighth: 8 * eighth),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 16),
    block_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    dtype=st.sampled_from([np.float32, np.float16, BF16]),
    cache_dtype=st.sampled_from([None, np.int8, F8]),
    window=st.none() | st.integers(1, 90),
    soft_cap=st.none() | st.floats(0.5, 30.0),
    layout=st.sampled_from(PoolLayout),
)


@settings(max_examples=4, phases=[Phase.generate])  # shrinking would compile for many minutes
@given(setup=setups)
def test_any_shape(setup: Setup) -> None:
    found = available("triton")
    case = setup.case(LENGTHS)
    jobs = last_tokens(case)
    q, out = decode(found, setup, case, jobs)
    check(setup, case, q, out, jobs)
    q, out, tiles = prefill(found, setup, case)
    check(setup, case, q, out, tiles.tokens)


@pytest.mark.parametrize("device", [H200, A100])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_lowers_for_a_gpu(setup: Setup, device: str) -> None:
    if device == A100 and setup.cache_dtype is F8:
        pytest.skip("no 8-bit floats before compute capability 8.9")
    case = setup.case(LENGTHS)
    tables, positions = np.zeros((8, case.tables.shape[1]), np.int32), np.zeros(8, np.int32)
    kv, q = case.kv(setup.layout), case.queries(PROMPT_TOKENS, np.random.default_rng(0))
    tile = triton_prefill.tile_size(setup.group, PrefillConfig())
    tiles = tiles_for(CHUNKS, tile=tile, num_tokens=PROMPT_TOKENS, num_tiles=TILES)
    kind: Any = {"block_size": setup.block_size, "scale": setup.scale, "window": setup.window}
    kind |= {"soft_cap": setup.soft_cap, "value_dim": setup.value_dim, "layout": setup.layout}

    def decode(q: Any, kv: PagedKV, tables: Any, positions: Any) -> Any:
        return triton_decode.paged_decode(q, kv, tables, positions, config=DecodeConfig(), **kind)

    def prefill(q: Any, kv: PagedKV, tables: Any, tiles: Any) -> Any:
        return triton_prefill.paged_prefill(
            q, kv, tables, tiles, tile=tile, config=PrefillConfig(), **kind
        )

    for function, arguments in (
        (decode, (q[:8], kv, tables, positions)),
        (prefill, (q, kv, tables, tiles.arrays)),
    ):
        assert TRITON_CALL in export_for_cuda(function, *arguments, device=device)


def test_over_kv_heads_on_four_devices() -> None:
    """In a process of its own: the number of devices is chosen before JAX starts."""
    names = [name for name in COMPLETE if backend(name) is not None]
    kinds = [f"{name} {kind}" for name in names for kind in ("float32", "int8")]
    assert sharded.run() == kinds

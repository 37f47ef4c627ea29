from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_kernels import reference
from pallas_kernels.paged_kv import PagedKV, PrefillTiles
from pallas_kernels.quantize import quantize
from tests.kernels.attention_oracle import PagedCase, paged_case, tiles_for

CHUNK = reference.CHUNK
GROUP = reference.TILES_PER_GROUP


@functools.partial(jax.jit, static_argnames=("block_size", "scale", "window", "soft_cap"))
def decode(*args: Any, **settings: Any) -> jax.Array:
    return reference.paged_decode(*args, **settings)


@functools.partial(jax.jit, static_argnames=("tile", "block_size", "scale", "window", "soft_cap"))
def prefill(*args: Any, **settings: Any) -> jax.Array:
    return reference.paged_prefill(*args, **settings)


def decode_rows(case: PagedCase, q: Any, jobs: list[tuple[int, int]], **settings: Any) -> Any:
    """Decode (row, position) jobs; q has at least as many rows, the others are padding."""
    rows = np.full(len(q), 0, np.int32)
    positions = np.full(len(q), -1, np.int32)
    for place, (row, position) in enumerate(jobs):
        rows[place], positions[place] = row, position
    return np.asarray(decode(q, case.kv(), case.tables[rows], positions, **settings))


def prefill_chunks(case: PagedCase, q: Any, tiles: Any, **settings: Any) -> Any:
    return np.asarray(prefill(q, case.kv(), case.tables, tiles.arrays, **settings))


# Every head_dim, group size and block size at least once; the third has all the extras.
CONFIGS = [
    # head_dim, kv_heads, group, block_size, window, soft_cap
    (16, 2, 1, 1, None, None),
    (32, 1, 2, 4, None, None),
    (64, 3, 3, 16, 65, 20.0),
    (80, 2, 4, 17, None, None),
    (96, 1, 8, 64, 63, 30.0),
    (128, 2, 2, 16, 1, None),
    (256, 1, 4, 17, 40, None),
    (64, 2, 7, 4, None, None),
    (128, 1, 8, 1, 64, None),
    (32, 1, 16, 16, None, None),
]
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 17, 150]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_against_dense_float64(config: tuple[Any, ...]) -> None:
    head_dim, kv_heads, group, block_size, window, soft_cap = config
    case = paged_case(
        LENGTHS, block_size=block_size, kv_heads=kv_heads, group=group, head_dim=head_dim
    )
    rng = np.random.default_rng(1)
    extras = {"scale": 1 / math.sqrt(head_dim), "window": window, "soft_cap": soft_cap}

    jobs = [(row, length - 1) for row, length in enumerate(LENGTHS)]
    q = case.queries(16, rng)
    q[len(jobs) :] = np.nan  # nobody promises what padding holds
    out = decode_rows(case, q, jobs, block_size=block_size, **extras)
    for place, (row, position) in enumerate(jobs):
        expected = case.expected(q[place], row, position, **extras)
        np.testing.assert_allclose(out[place], expected, atol=3e-6, rtol=2e-5)
    assert (out[len(jobs) :] == 0.0).all()

    tile = reference.query_tile(group)
    # Whole prompts, a chunk with context before it, and one that starts at a chunk's edge.
    chunks = [(0, 0, 1), (2, 0, 63), (4, 40, 25), (9, 64, 70), (7, 128, 1), (1, 0, 2)]
    total = sum(count for _, _, count in chunks)
    tiles = tiles_for(chunks, tile=tile, num_tokens=total, num_tiles=-(-(total + 48) // 8) * 8)
    q = case.queries(total, rng)
    out = prefill_chunks(case, q, tiles, tile=tile, block_size=block_size, **extras)
    for place, (row, position) in enumerate(tiles.tokens):
        expected = case.expected(q[place], row, position, **extras)
        np.testing.assert_allclose(out[place], expected, atol=3e-6, rtol=2e-5)


def test_nothing_before_the_window_leaks() -> None:
    """Slots that lie before it, in a chunk of which others are seen."""
    case = paged_case([60, 130], block_size=16, kv_heads=2, group=2, head_dim=32)
    jobs, window = [(0, 59), (1, 129)], 20
    for row, position in jobs:
        gone = case.slots(row)[: position - window + 1]
        case.k_pool[gone] = np.nan
        assert case.v_pool is not None
        case.v_pool[gone] = np.nan
    extras: dict[str, Any] = {"scale": 0.2, "window": window}
    rng = np.random.default_rng(1)
    q = case.queries(8, rng)
    out = decode_rows(case, q, jobs, block_size=16, **extras)
    for place, (row, position) in enumerate(jobs):
        expected = case.expected(q[place], row, position, **extras)
        np.testing.assert_allclose(out[place], expected, atol=3e-6, rtol=2e-5)
    tile = reference.query_tile(2)
    tiles = tiles_for([(0, 59, 1), (1, 129, 1)], tile=tile, num_tokens=2, num_tiles=8)
    prompt = prefill_chunks(case, q[:2], tiles, tile=tile, block_size=16, **extras)
    assert prompt.tobytes() == out[:2].tobytes()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "f16"])
def test_16_bit_pools_stored_as_integers(dtype: Any) -> None:
    case = paged_case([1, 65, 130], block_size=16, kv_heads=2, group=2, head_dim=32, dtype=dtype)
    q = case.queries(8, np.random.default_rng(1))
    jobs = [(0, 0), (1, 64), (2, 129), (2, 3)]
    tables = case.tables[[row for row, _ in jobs] + [0] * 4]
    positions = np.array([position for _, position in jobs] + [-1] * 4, np.int32)
    out = decode(q, case.kv(as_integers=True), tables, positions, block_size=16, scale=0.2)
    assert out.dtype == dtype
    for place, (row, position) in enumerate(jobs):
        expected = case.expected(q[place], row, position, scale=0.2)
        np.testing.assert_allclose(
            np.asarray(out[place], np.float64), expected, atol=2e-2, rtol=2e-2
        )


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("cache_dtype", [np.int8, ml_dtypes.float8_e4m3fn], ids=["int8", "f8"])
def test_8_bit_caches_add_no_error_of_their_own(cache_dtype: Any, dtype: Any) -> None:
    """Against float64 attention over what is stored: float32 throughout, until the result is
    rounded to q's type. float8 may be stored as uint8, as 16-bit floats are as uint16.
    """
    case = paged_case(
        [1, 65, 130],
        block_size=16,
        kv_heads=2,
        group=2,
        head_dim=32,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    q = case.queries(8, np.random.default_rng(1))
    jobs = [(0, 0), (1, 64), (2, 129), (2, 3)]
    tables = case.tables[[row for row, _ in jobs] + [0] * 4]
    positions = np.array([position for _, position in jobs] + [-1] * 4, np.int32)
    outs = [
        np.asarray(decode(q, kv, tables, positions, block_size=16, scale=0.2))
        for kv in (case.kv(), case.kv(as_integers=True))
    ]
    assert outs[0].tobytes() == outs[1].tobytes()
    rounding = {} if dtype == np.float32 else {"rtol": 2.0**-8}
    for place, (row, position) in enumerate(jobs):
        expected = case.expected(q[place], row, position, scale=0.2)
        np.testing.assert_allclose(
            outs[0][place].astype(np.float64), expected, **{"atol": 3e-5, "rtol": 2e-5} | rounding
        )


def test_scores_of_any_size_stay_finite() -> None:
    """Softmax weights of exp(+-1e4) neither overflow nor lose the largest."""
    case = paged_case([130], block_size=16, kv_heads=1, group=1, head_dim=16)
    q = case.queries(8, np.random.default_rng(1)) * 1e4
    jobs = [(0, 129), (0, 70), (0, 0)]
    out = decode_rows(case, q, jobs, block_size=16, scale=1.0)
    for place, (row, position) in enumerate(jobs):
        expected = case.expected(q[place], row, position, scale=1.0)
        np.testing.assert_allclose(out[place], expected, atol=1e-2)


# ---------------------------------------------------------------- the same bits, however scheduled

SAMENESS = [
    # kv_heads, group, head_dim, block_size, window, type of the cache where it is not that of q
    (2, 2, 16, 4, None),
    (1, 3, 64, 17, 70),
    (1, 1, 80, 16, None),
    (1, 8, 32, 1, None),
    # and 8-bit caches
    (2, 2, 32, 4, None, np.int8),
    (1, 3, 64, 16, 70, ml_dtypes.float8_e4m3fn),
]
SEQUENCES = [150, 65, 64, 1, 100]
PREFILL_TOKENS, DECODE_ROWS = 64, 24


@functools.cache
def _canonical(config: tuple[Any, ...]) -> tuple[PagedCase, list[Any], list[Any]]:
    """A case, a query for each token of each sequence, and the results of decoding one by one."""
    kv_heads, group, head_dim, block_size, window = config[:5]
    case = paged_case(
        SEQUENCES,
        block_size=block_size,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        seed=3,
        cache_dtype=config[5] if len(config) > 5 else None,
    )
    queries = [case.queries(length, np.random.default_rng(length)) for length in SEQUENCES]
    results = [np.zeros_like(q) for q in queries]
    for row, q in enumerate(queries):
        for position in range(len(q)):
            alone = np.concatenate([q[position : position + 1], np.zeros((7, *q.shape[1:]), "f")])
            results[row][position] = decode_rows(
                case, alone, [(row, position)], block_size=block_size, scale=0.3, window=window
            )[0]
    return case, queries, results


chunk_lists = st.lists(
    st.tuples(st.integers(0, 4), st.floats(0, 1), st.integers(1, 40)), min_size=1, max_size=8
)
decode_lists = st.lists(
    st.tuples(st.integers(0, 4), st.floats(0, 1)), min_size=1, max_size=DECODE_ROWS
)


@pytest.mark.parametrize("config", SAMENESS, ids=str)
@settings(max_examples=40)
@given(jobs=decode_lists)
def test_a_decoded_token_does_not_depend_on_its_neighbours(
    config: tuple[Any, ...], jobs: list[tuple[int, float]]
) -> None:
    case, queries, results = _canonical(config)
    placed = [(row, int(where * (SEQUENCES[row] - 1))) for row, where in jobs]
    q = np.zeros((DECODE_ROWS, *queries[0].shape[1:]), np.float32)
    for place, (row, position) in enumerate(placed):
        q[place] = queries[row][position]
    out = decode_rows(case, q, placed, block_size=config[3], scale=0.3, window=config[4])
    for place, (row, position) in enumerate(placed):
        assert out[place].tobytes() == results[row][position].tobytes(), (row, position)
    assert (out[len(placed) :] == 0.0).all()


@pytest.mark.parametrize("config", SAMENESS, ids=str)
@settings(max_examples=40)
@given(wanted=chunk_lists)
def test_prefill_in_any_chunks_equals_decoding(
    config: tuple[Any, ...], wanted: list[tuple[int, float, int]]
) -> None:
    case, queries, results = _canonical(config)
    chunks, room = [], PREFILL_TOKENS
    for row, where, count in wanted:
        first = int(where * (SEQUENCES[row] - 1))
        count = min(count, SEQUENCES[row] - first, room)
        if count > 0:
            chunks.append((row, first, count))
            room -= count
    tile = reference.query_tile(config[1])
    num_tiles = -(-(PREFILL_TOKENS // tile + 8) // GROUP) * GROUP
    tiles = tiles_for(chunks, tile=tile, num_tokens=PREFILL_TOKENS, num_tiles=num_tiles)
    q = np.zeros((PREFILL_TOKENS, *queries[0].shape[1:]), np.float32)
    for place, (row, position) in enumerate(tiles.tokens):
        q[place] = queries[row][position]
    out = prefill_chunks(
        case, q, tiles, tile=tile, block_size=config[3], scale=0.3, window=config[4]
    )
    for place, (row, position) in enumerate(tiles.tokens):
        assert out[place].tobytes() == results[row][position].tobytes(), (row, position)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_pages_and_block_size_change_no_bit(block_size: int) -> None:
    """One sequence, cut into pages of any size anywhere in the pool."""
    outs = []
    for size, seed in ((16, 0), (block_size, 5)):
        case = paged_case([140], block_size=size, kv_heads=2, group=2, head_dim=16, seed=seed)
        content = paged_case([140], block_size=1, kv_heads=2, group=2, head_dim=16, seed=9)
        slots = [case.tables[0, p // size] * size + p % size for p in range(140)]
        case.k_pool[slots], case.v_pool[slots] = content.keys[0], content.values[0]
        q = content.queries(8, np.random.default_rng(2))
        outs.append(decode_rows(case, q, [(0, 139), (0, 64), (0, 5)], block_size=size, scale=0.3))
    assert outs[0].tobytes() == outs[1].tobytes()


# ---------------------------------------------------------------- what it costs


def _count_chunks(monkeypatch: pytest.MonkeyPatch, call: Any) -> int:
    """Chunks of context that really get computed: run the loops in Python and count."""
    seen = 0
    original = reference._power_of_two

    def counting(exponent: jax.Array) -> jax.Array:
        nonlocal seen
        seen += 1
        return original(exponent)

    monkeypatch.setattr(reference, "_power_of_two", counting)
    with jax.disable_jit():
        call()
    return seen


@pytest.mark.parametrize(
    ("last_positions", "chunks"),
    [
        ([], 0),
        ([0], 1),
        ([63] * 8, 1),
        ([200, 63, 0, 0, 0, 0, 0, 0, 63, 1], 4 + 1),
        ([64] * 8 + [5] * 8, 2 + 1),
    ],
)
def test_decode_reads_no_more_chunks_than_there_are(
    monkeypatch: pytest.MonkeyPatch, last_positions: list[int], chunks: int
) -> None:
    case = paged_case([201], block_size=16, kv_heads=1, group=1, head_dim=8, table_width=500)
    tables = np.repeat(case.tables, 16, axis=0)
    positions = np.array(last_positions + [-1] * (16 - len(last_positions)), np.int32)
    q = jnp.asarray(case.queries(16, np.random.default_rng(0)))

    def call() -> None:
        reference.paged_decode(
            q, case.kv(), jnp.asarray(tables), jnp.asarray(positions), block_size=16, scale=1.0
        )

    assert _count_chunks(monkeypatch, call) == chunks


@pytest.mark.parametrize(
    ("chunk_list", "chunks"),
    [([], 0), ([(0, 0, 64)], 1), ([(0, 60, 5)], 2), ([(0, 128, 70)], 4)],
)
def test_prefill_reads_no_more_chunks_than_there_are(
    monkeypatch: pytest.MonkeyPatch, chunk_list: list[tuple[int, int, int]], chunks: int
) -> None:
    case = paged_case([201], block_size=16, kv_heads=1, group=1, head_dim=8, table_width=500)
    tiles = tiles_for(chunk_list, tile=32, num_tokens=80, num_tiles=16)
    args = case.kv(), jnp.asarray(case.tables), tiles.arrays
    q = jnp.asarray(case.queries(80, np.random.default_rng(0)))

    def call() -> None:
        reference.paged_prefill(q, *args, tile=32, block_size=16, scale=1.0)

    assert _count_chunks(monkeypatch, call) == chunks


def test_nothing_in_the_program_has_the_length_of_the_table() -> None:
    width = 20011  # prime, so that it shows wherever it goes
    table = jax.ShapeDtypeStruct((8, width), jnp.int32)
    pool = jax.ShapeDtypeStruct((64, 1, 16), jnp.float32)
    ints = jax.ShapeDtypeStruct((8,), jnp.int32)
    one = jax.ShapeDtypeStruct((), jnp.int32)
    tokens = jax.ShapeDtypeStruct((64,), jnp.int32)
    kv = PagedKV(pool, pool)
    programs = [
        decode.lower(
            jax.ShapeDtypeStruct((8, 2, 16), jnp.float32),
            *(kv, table, ints),
            block_size=16,
            scale=1.0,
        ),
        prefill.lower(
            jax.ShapeDtypeStruct((64, 2, 16), jnp.float32),
            *(kv, table, PrefillTiles(ints, ints, ints, ints, tokens, one)),
            tile=16,
            block_size=16,
            scale=1.0,
        ),
    ]
    for program in programs:
        text = program.compile().as_text()
        shapes = set(re.findall(r"(\w+)\[([\d,]+)\]", text))
        assert ("s32", f"8,{width}") in shapes, "the search finds shapes"
        for kind, dims in shapes:
            # Block ids of eight tiles may be gathered; anything made of them is chunk by chunk.
            limit = 8 * width if kind == "s32" else width - 1
            assert math.prod(map(int, dims.split(","))) <= limit, (kind, dims)


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("outside", [-1, -8, -9, 8, 2**31 - 1, -(2**31)])
def test_slots_outside_the_pool_write_nothing(outside: int, jitted: bool) -> None:
    pool = jnp.arange(8 * 2 * 4, dtype=jnp.float32).reshape(8, 2, 4)
    values = -1.0 - jnp.arange(3 * 2 * 4, dtype=jnp.float32).reshape(3, 2, 4)
    write = jax.jit(reference.write_kv) if jitted else reference.write_kv
    slots = jnp.array([0, 1, outside], jnp.int32)
    written = write(PagedKV(pool, pool + 100), values, values - 100, slots)
    for out, new, old in ((written.k, 0, 0), (written.v, -100, 100)):
        assert (np.asarray(out)[:2] == np.asarray(values)[:2] + new).all()
        assert (np.asarray(out)[2:] == np.asarray(pool)[2:] + old).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
def test_writes_keep_every_bit(dtype: Any) -> None:
    """NaN payloads, signed zeros, infinities and denormals come back as they went in."""
    stored = jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else dtype
    unsigned = np.uint16 if jnp.dtype(dtype).itemsize == 2 else np.uint32
    rng = np.random.default_rng(0)
    top = np.iinfo(unsigned).max
    before = rng.integers(0, top, (512, 2, 8), unsigned, endpoint=True)
    new = rng.integers(0, top, (512, 2, 8), unsigned, endpoint=True)
    if stored is not jnp.uint16:  # arithmetic types may quieten a signalling NaN
        before, new = (np.where(np.isnan(x.view(dtype)), unsigned(0), x) for x in (before, new))
    slots = rng.permutation(512)[:300].astype(np.int32)
    values = jnp.asarray(new.view(jnp.dtype(dtype))[:300])
    pool = jnp.asarray(before.view(jnp.dtype(stored)))
    written = jax.jit(reference.write_kv)(PagedKV(pool, None), values, None, slots)
    out = np.asarray(written.k).view(unsigned)
    expected = before.copy()
    expected[slots] = new[:300]
    assert (out == expected).all()
    raw = jnp.asarray(new.view(jnp.dtype(stored)))
    loaded = reference.load_pool(raw, jnp.dtype(dtype))
    assert loaded.dtype == dtype
    assert (np.asarray(loaded).view(unsigned) == new).all()


@pytest.mark.parametrize("cache_dtype", [jnp.int8, jnp.float8_e4m3fn], ids=str)
def test_8_bit_caches_are_written_quantised(cache_dtype: Any) -> None:
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((5, 2, 16), np.float32) for _ in range(2))
    v[1, 1, 3] = np.nan
    pool = jnp.asarray(rng.integers(0, 100, (9, 2, 16), np.int8)).astype(cache_dtype)
    scales = jnp.full((9, 2), 7.0)
    slots = np.array([4, 2, -1, 0, 9], np.int32)
    kv = jax.jit(reference.write_kv)(PagedKV(pool, pool, scales, scales), k, v, slots)
    for written, scale, new in ((kv.k, kv.k_scale, k), (kv.v, kv.v_scale, v)):
        expected, factors = np.array(pool), np.array(scales)
        stored, factor = quantize(jnp.asarray(new), cache_dtype)
        for token, slot in ((0, 4), (1, 2), (3, 0)):
            expected[slot], factors[slot] = stored[token], factor[token, :, 0]
        assert np.asarray(written).tobytes() == expected.tobytes()
        np.testing.assert_array_equal(scale, factors)
    assert np.isnan(np.asarray(kv.v_scale)[2]).tolist() == [False, True]
    if cache_dtype == jnp.float8_e4m3fn:
        as_integers = PagedKV(*(lax.bitcast_convert_type(pool, jnp.uint8),) * 2, scales, scales)
        raw = jax.jit(reference.write_kv)(as_integers, k, v, slots)
        assert raw.k.dtype == jnp.uint8
        assert np.asarray(raw.k).tobytes() == np.asarray(kv.k).tobytes()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tile"), [(4, 4, 32), (8, 4, 16), (9, 3, 10), (32, 1, 1), (64, 1, 1)]
)
def test_a_tile_fills_a_matmul_of_at_most_32_rows(heads: int, kv_heads: int, tile: int) -> None:
    assert reference.query_tile(heads // kv_heads) == tile

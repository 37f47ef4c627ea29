"""What the native kernels promise beyond the suite of all backends: the same bits for a token in
any company, any shape, and calls from wherever JAX makes them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_kernels.native import ops
from pallas_kernels.paged_kv import PagedKV
from tests.kernels import test_attention_suite as suite
from tests.kernels.attention_oracle import PagedCase, tiles_for
from tests.kernels.backends import BF16, F8, Setup, backend

pytestmark = pytest.mark.skipif(backend("native") is None, reason="native kernels do not run here")

SEQUENCES = [600, 257, 256, 1, 100]
"""Two and three parts, and the edges of one."""
PROMPT_TOKENS, DECODE_ROWS = 96, 24
SAME = [
    Setup(16, 2, 2, 4),
    Setup(64, 3, 3, 16, BF16),
    Setup(64, 1, 3, 16, BF16, window=70, soft_cap=4.0),
    Setup(33, 1, 5, 8, BF16, window=301),
    Setup(80, 1, 1, 16, np.float16),
    Setup(32, 2, 7, 1),
    Setup(32, 2, 2, 4, np.float32, np.int8),
    Setup(64, 1, 3, 16, BF16, F8, window=270),
    Setup(48, 1, 16, 16, BF16, value_dim=32),
]
same = pytest.mark.parametrize("setup", SAME, ids=str)


@functools.cache
def canonical(setup: Setup) -> tuple[PagedCase, list[Any], list[Any]]:
    """A case, a query for every token of each sequence, and what it gives in one long prompt."""
    found, case = suite.available("native"), setup.case(SEQUENCES, seed=3)
    queries = [case.queries(length, np.random.default_rng(length)) for length in SEQUENCES]
    results = []
    for row, q in enumerate(queries):
        tiles = tiles_for([(row, 0, len(q))], tile=ops.TILE, num_tokens=len(q), num_tiles=16)
        results.append(found.prefill(setup, q, case.kv(), case.tables, tiles))
    return case, queries, results


def placed(jobs: list[tuple[int, float]]) -> list[tuple[int, int]]:
    return [(row, int(where * (SEQUENCES[row] - 1))) for row, where in jobs]


some_tokens = st.lists(
    st.tuples(st.integers(0, 4), st.floats(0, 1)), min_size=1, max_size=DECODE_ROWS
)
some_chunks = st.lists(
    st.tuples(st.integers(0, 4), st.floats(0, 1), st.integers(1, 80)), min_size=1, max_size=8
)


@same
@settings(max_examples=25)
@given(jobs=some_tokens)
def test_decoded_in_any_company(setup: Setup, jobs: list[tuple[int, float]]) -> None:
    case, queries, results = canonical(setup)
    found, tokens = suite.available("native"), placed(jobs)
    rows, positions = np.zeros(DECODE_ROWS, np.int32), np.full(DECODE_ROWS, -1, np.int32)
    q = np.full((DECODE_ROWS, *queries[0].shape[1:]), np.nan, queries[0].dtype)
    for place, (row, position) in enumerate(tokens):
        rows[place], positions[place], q[place] = row, position, queries[row][position]
    out = found.decode(setup, q, case.kv(), case.tables[rows], positions)
    for place, (row, position) in enumerate(tokens):
        assert out[place].tobytes() == results[row][position].tobytes(), (row, position)
    assert (out[len(tokens) :] == 0).all()


@same
@settings(max_examples=25)
@given(wanted=some_chunks, tile=st.sampled_from([1, 5, 10, 64, 200]))
def test_prompts_in_any_chunks(
    setup: Setup, wanted: list[tuple[int, float, int]], tile: int
) -> None:
    case, queries, results = canonical(setup)
    chunks, room = [], PROMPT_TOKENS
    for row, where, count in wanted:
        first = int(where * (SEQUENCES[row] - 1))
        count = min(count, SEQUENCES[row] - first, room)
        if count > 0:
            chunks.append((row, first, count))
            room -= count
    tiles = tiles_for(chunks, tile=tile, num_tokens=PROMPT_TOKENS, num_tiles=PROMPT_TOKENS)
    q = np.full((PROMPT_TOKENS, *queries[0].shape[1:]), np.nan, queries[0].dtype)
    for place, (row, position) in enumerate(tiles.tokens):
        q[place] = queries[row][position]
    out = suite.available("native").prefill(setup, q, case.kv(), case.tables, tiles)
    for place, (row, position) in enumerate(tiles.tokens):
        assert out[place].tobytes() == results[row][position].tobytes(), (row, position)
    assert (out[len(tiles.tokens) :] == 0).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("setup", [Setup(32, 1, 2, 8), Setup(32, 1, 2, 8, BF16)], ids=str)
def test_later_tokens_of_the_same_tile_do_not_leak(setup: Setup, poison: float) -> None:
    """A row that went wrong stays alone even among the tokens of its own sequence, if they do not
    see it: before it, and where the window has passed it.
    """
    setup = Setup(*(32, 1, 2, 8, setup.dtype), window=20)
    found, case, bad = suite.available("native"), setup.case([90]), 41
    tiles = tiles_for([(0, 0, 90)], tile=64, num_tokens=90, num_tiles=8)
    q = case.queries(90, np.random.default_rng(0))
    good = found.prefill(setup, q, case.kv(), case.tables, tiles)
    case.k_pool[case.slots(0)[bad]] = poison
    case.v_pool[case.slots(0)[bad]] = poison  # type: ignore[index]
    out = found.prefill(setup, q, case.kv(), case.tables, tiles)
    sees = np.arange(90)
    sees = (sees >= bad) & (sees < bad + 20)
    assert out[~sees].tobytes() == good[~sees].tobytes()
    assert not np.isfinite(out[sees].astype(np.float32)).any()


# ---------------------------------------------------------------- shapes and kinds


setups = st.builds(
    Setup,
    head_dim=st.integers(1, 140),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 20),
    block_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    dtype=st.sampled_from([np.float32, np.float16, BF16]),
    cache_dtype=st.sampled_from([None, np.int8, F8]),
    window=st.none() | st.integers(1, 90),
    soft_cap=st.none() | st.floats(0.5, 50.0),
)


@settings(max_examples=40, phases=[Phase.generate])
@given(setup=setups)
def test_any_shape(setup: Setup) -> None:
    found, case = suite.available("native"), setup.case(suite.LENGTHS)
    jobs = suite.last_tokens(case)
    q, out = suite.decode(found, setup, case, jobs)
    suite.check(setup, case, q, out, jobs)
    q, out, tiles = suite.prefill(found, setup, case)
    suite.check(setup, case, q, out, tiles.tokens)


@pytest.mark.parametrize(
    "setup",
    [Setup(32, 2, 2, 4, BF16), Setup(32, 2, 2, 4, np.float16), Setup(32, 1, 2, 8, BF16, F8)],
)
def test_pools_of_integers(setup: Setup) -> None:
    """As the engine has them on CPU."""
    found, case = suite.available("native"), setup.case(suite.LENGTHS)
    jobs = suite.last_tokens(case)
    _, typed = suite.decode(found, setup, case, jobs)
    _, out = suite.decode(found, setup, case, jobs, case.kv(as_integers=True))
    assert out.tobytes() == typed.tobytes()


def test_scores_of_any_size_stay_finite() -> None:
    setup = Setup(16, 1, 1, 16)
    case = setup.case([130])
    q = case.queries(4, np.random.default_rng(1)) * np.float32(1e4)
    tables, positions = case.tables[[0] * 4], np.array([129, 70, 0, -1], np.int32)
    out = ops.paged_decode(q, case.kv(), tables, positions, block_size=16, scale=1.0)
    for place in range(3):
        expected = case.expected(q[place], 0, int(positions[place]), scale=1.0)
        np.testing.assert_allclose(np.asarray(out[place]), expected, atol=1e-2)


# ---------------------------------------------------------------- where it is called from


def test_in_loops_and_nested_programs() -> None:
    setup = Setup(16, 2, 2, 4)
    found, case = suite.available("native"), setup.case([30, 9])
    q = case.queries(2, np.random.default_rng(0))
    positions = np.array([29, 8], np.int32)
    once = found.decode(setup, q, case.kv(), case.tables, positions)

    @jax.jit
    def decode(q: jax.Array, kv: PagedKV) -> jax.Array:
        return ops.paged_decode(q, kv, case.tables, positions, block_size=4, scale=setup.scale)

    def again(_: int, q: jax.Array) -> jax.Array:
        return decode(q, kv)

    kv = case.kv()
    looped = jax.jit(lambda q: lax.fori_loop(0, 2, again, q))(jnp.asarray(q))
    twice = found.decode(setup, once, kv, case.tables, positions)
    assert np.asarray(looped).tobytes() == twice.tobytes()


def test_many_at_once() -> None:
    """Programs that run side by side share the pool's threads, and none waits for another."""
    setup = Setup(64, 2, 2, 16, BF16)
    found, case = suite.available("native"), setup.case([1300])
    q = case.queries(1, np.random.default_rng(0))
    tables, positions = case.tables, np.array([1299], np.int32)
    kv = case.kv()
    alone = found.decode(setup, q, kv, tables, positions)
    settings_ = found._settings(setup)

    from concurrent.futures import ThreadPoolExecutor

    def one(_: int) -> bytes:
        return np.asarray(found.decode_kernel(q, kv, tables, positions, **settings_)).tobytes()

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(one, range(200))) == {alone.tobytes()}


# ---------------------------------------------------------------- one call for a layer


@pytest.mark.parametrize(
    "setup",
    [Setup(32, 2, 3, 8, BF16, window=40), Setup(32, 2, 2, 4, np.float32, np.int8)],
    ids=str,
)
@pytest.mark.parametrize("prompts", [True, False])
def test_attend_is_write_decode_prefill(setup: Setup, *, prompts: bool) -> None:
    case = setup.case([70, 33, 12])
    rng = np.random.default_rng(0)
    tiles = tiles_for([(1, 3, 30), (2, 0, 2)], tile=64, num_tokens=40, num_tiles=4).arrays
    count = 4 + (40 if prompts else 0)
    q = case.queries(count, rng)
    k, v = (rng.standard_normal((count, 2, 32), np.float32).astype(setup.dtype) for _ in "kv")
    slots = rng.permutation(np.append(case.slots(0), case.slots(1))).astype(np.int32)[:count]
    slots[3] = -1
    positions = np.array([69, -1, 11, -1], np.int32)
    kind: Any = {"block_size": setup.block_size, "scale": setup.scale, "window": setup.window}
    tables = np.append(case.tables, case.tables[:1], axis=0)
    out, kv = ops.attend(
        *(q, k, v, case.kv(), slots, tables, positions, tiles if prompts else None), **kind
    )
    written = ops.write_kv(case.kv(), k, v, slots)
    parts = [ops.paged_decode(q[:4], written, tables, positions, **kind)]
    if prompts:
        parts.append(ops.paged_prefill(q[4:], written, tables, tiles, tile=64, **kind))
    assert np.asarray(out).tobytes() == np.concatenate([np.asarray(x) for x in parts]).tobytes()
    for one, other in zip(jax.tree.leaves(kv), jax.tree.leaves(written), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()

"""Attention over a latent cache: one KV head whose values are the first elements of its keys."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import reference
from tests.kernels.attention_oracle import PagedCase, Tiles, latent_case, tiles_for

_STATIC = ("block_size", "scale", "value_dim")


@functools.partial(jax.jit, static_argnames=_STATIC)
def decode(*args: Any, **fixed: Any) -> jax.Array:
    return reference.paged_decode(*args, **fixed)


@functools.partial(jax.jit, static_argnames=("tile", *_STATIC))
def prefill(*args: Any, **fixed: Any) -> jax.Array:
    return reference.paged_prefill(*args, **fixed)


def decode_rows(
    case: PagedCase, q: Any, jobs: list[tuple[int, int]], *, block_size: int, scale: float = 0.1
) -> Any:
    """Decode (row, position) jobs; q has at least as many rows, the others are padding."""
    rows, positions = np.zeros(len(q), np.int32), np.full(len(q), -1, np.int32)
    for place, (row, position) in enumerate(jobs):
        rows[place], positions[place] = row, position
    out = decode(
        q,
        case.kv(as_integers=True),
        case.tables[rows],
        positions,
        block_size=block_size,
        scale=scale,
        value_dim=case.value_dim,
    )
    return np.asarray(out)


def prefill_chunks(
    case: PagedCase, q: Any, tiles: Tiles, *, tile: int, block_size: int, scale: float = 0.1
) -> Any:
    out = prefill(
        q,
        case.kv(as_integers=True),
        case.tables,
        tiles.arrays,
        tile=tile,
        block_size=block_size,
        scale=scale,
        value_dim=case.value_dim,
    )
    return np.asarray(out)


# Groups of fewer, as many and more heads than a matmul has rows; V3's sizes last.
CONFIGS = [
    # group, key_dim, value_dim, block_size, dtype
    (1, 48, 32, 4, np.float32),
    (3, 40, 40, 17, np.float32),
    (16, 80, 64, 1, np.float32),
    (48, 24, 16, 16, np.float32),
    (128, 576, 512, 64, np.float32),
    (16, 576, 512, 16, ml_dtypes.bfloat16),
]
LENGTHS = [1, 2, 63, 64, 65, 129, 150]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_against_dense_float64(config: tuple[Any, ...]) -> None:
    """NaN stands in every slot that no token owns, and so in keys and values alike."""
    group, key_dim, value_dim, block_size, dtype = config
    wide = np.dtype(dtype).itemsize == 4
    close = {"atol": 2e-5, "rtol": 5e-5} if wide else {"atol": 3e-2, "rtol": 3e-2}
    case = latent_case(
        LENGTHS,
        block_size=block_size,
        group=group,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
    )
    rng = np.random.default_rng(1)
    jobs = [(row, length - 1) for row, length in enumerate(LENGTHS)]
    q = case.queries(8, rng)
    q[len(jobs) :] = np.nan
    out = decode_rows(case, q, jobs, block_size=block_size)
    assert out.shape == (8, group, value_dim) and out.dtype == dtype
    for place, (row, position) in enumerate(jobs):
        expected = case.expected(q[place], row, position, scale=0.1)
        np.testing.assert_allclose(out[place].astype(np.float64), expected, **close)
    assert (out[len(jobs) :] == 0.0).all()

    tile = reference.query_tile(group)
    chunks = [(0, 0, 1), (4, 40, 25), (6, 64, 20), (5, 128, 1), (1, 0, 2)]
    total = sum(count for _, _, count in chunks)
    tiles = tiles_for(chunks, tile=tile, num_tokens=total, num_tiles=-(-(total + 8) // 8) * 8)
    q = case.queries(total, rng)
    out = prefill_chunks(case, q, tiles, tile=tile, block_size=block_size)
    for place, (row, position) in enumerate(tiles.tokens):
        expected = case.expected(q[place], row, position, scale=0.1)
        np.testing.assert_allclose(out[place].astype(np.float64), expected, **close)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38], ids=str)
def test_nothing_past_the_context_leaks(poison: float) -> None:
    """Slots of the row's own blocks, as a block has them that another request left."""
    clean = latent_case([100, 30], block_size=16, group=4, key_dim=24, value_dim=16)
    dirty_pool = clean.k_pool.copy()
    past = np.arange(50, 100)
    dirty_pool[clean.tables[0, past // 16] * 16 + past % 16] = poison
    dirty = dataclasses.replace(clean, k_pool=dirty_pool)
    q = clean.queries(50, np.random.default_rng(0))
    jobs = [(0, 49), (1, 29), (0, 3)]  # the second row goes along through the first one's chunks
    results = [decode_rows(case, q[:8], jobs, block_size=16) for case in (clean, dirty)]
    assert results[0][:3].tobytes() == results[1][:3].tobytes()
    assert np.isfinite(results[0][:3]).all()
    tiles = tiles_for([(0, 20, 30), (1, 10, 20)], tile=8, num_tokens=50, num_tiles=8)
    results = [prefill_chunks(c, q, tiles, tile=8, block_size=16) for c in (clean, dirty)]
    assert results[0].tobytes() == results[1].tobytes()
    assert np.isfinite(results[0]).all()


SEQUENCES = [150, 65, 64, 1]
SAMENESS = [(1, 48, 32), (3, 40, 24), (16, 80, 64), (40, 48, 32)]
"""group, key_dim, value_dim"""


@functools.cache
def _canonical(config: tuple[int, int, int]) -> tuple[PagedCase, list[Any], list[Any]]:
    """A case, queries for each token, and the results of decoding them one by one."""
    group, key_dim, value_dim = config
    case = latent_case(SEQUENCES, block_size=16, group=group, key_dim=key_dim, value_dim=value_dim)
    queries = [case.queries(length, np.random.default_rng(length)) for length in SEQUENCES]
    results = []
    for row, q in enumerate(queries):
        rows = [
            np.concatenate([q[p : p + 1], np.zeros((7, *q.shape[1:]), "f")]) for p in range(len(q))
        ]
        results.append(
            [decode_rows(case, rows[p], [(row, p)], block_size=16)[0] for p in range(len(q))]
        )
    return case, queries, results


@pytest.mark.parametrize("config", SAMENESS, ids=str)
@settings(max_examples=25)
@given(
    wanted=st.lists(
        st.tuples(st.integers(0, 3), st.floats(0, 1), st.integers(1, 30)), min_size=1, max_size=8
    )
)
def test_a_token_has_the_same_bits_however_it_is_scheduled(
    config: tuple[int, int, int], wanted: list[tuple[int, float, int]]
) -> None:
    """Decoded among others, or in any chunk of a prompt."""
    case, queries, results = _canonical(config)
    tile = reference.query_tile(config[0])
    jobs, chunks, room = [], [], 48
    for row, where, count in wanted:
        first = int(where * (SEQUENCES[row] - 1))
        jobs.append((row, first))
        count = min(count, SEQUENCES[row] - first, room)
        if count > 0:
            chunks.append((row, first, count))
            room -= count
    tiles = tiles_for(chunks, tile=tile, num_tokens=48, num_tiles=56)
    for tokens, run in (
        (jobs, lambda q: decode_rows(case, q, jobs, block_size=16)),
        (tiles.tokens, lambda q: prefill_chunks(case, q, tiles, tile=tile, block_size=16)),
    ):
        q = np.zeros((8 if tokens is jobs else 48, *queries[0].shape[1:]), np.float32)
        for place, (row, position) in enumerate(tokens):
            q[place] = queries[row][position]
        out = run(q)
        for place, (row, position) in enumerate(tokens):
            assert out[place].tobytes() == results[row][position].tobytes(), (row, position)

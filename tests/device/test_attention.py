from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.device.attention import AttentionMeta, AttentionSizes
from jaxpaged.device.attention_choice import choose_backend
from pallas_kernels.paged_kv import PagedKV
from tests.device.model_shapes import TINY
from tests.kernels.attention_oracle import GARBAGE_BLOCKS, PagedCase, normal, paged_case, tiles_for

BLOCK = 4
BACKENDS = ("reference", "pallas_interpret")


def attend(
    case: PagedCase,
    new: list[tuple[int, int]],
    decode_rows: int,
    *,
    window: int | None = None,
    name: str = "reference",
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Take `new` tokens (row, position) out of the pool and let the backend write them again.

    The first `decode_rows` of them are decode rows, the rest one chunk per run of positions.
    """
    model = dataclasses.replace(TINY, num_heads=2 * case.group)
    float32 = jnp.dtype(jnp.float32)
    sizes = AttentionSizes.of(model, block_size=BLOCK, dtype=float32, cache_dtype=float32)
    backend, _ = choose_backend(name, sizes, jax.devices()[0])
    rng = np.random.default_rng(4)
    q = normal(rng, (8 + 40, 2 * case.group, 16))
    k = np.full((8 + 40, 2, 16), np.nan, np.float32)
    v = k.copy()
    num_slots = len(case.k_pool)
    kv_slots = num_slots + np.arange(len(q), dtype=np.int32)
    tables = np.full((8, case.tables.shape[1]), GARBAGE_BLOCKS[1], np.int32)
    positions = np.full(8, -1, np.int32)
    k_pool, v_pool = case.k_pool.copy(), case.v_pool.copy()
    chunks: list[list[int]] = []
    for index, (row, position) in enumerate(new):
        place = index if index < decode_rows else 8 + index - decode_rows
        slot = case.tables[row, position // BLOCK] * BLOCK + position % BLOCK
        kv_slots[place] = slot
        k[place], v[place] = k_pool[slot], v_pool[slot]
        k_pool[slot] = v_pool[slot] = np.nan
        if index < decode_rows:
            tables[index], positions[index] = case.tables[row], position
        elif chunks and chunks[-1][0] == row and sum(chunks[-1][1:]) == position:
            chunks[-1][2] += 1
        else:
            chunks.append([row, position, 1])
    table_row = {}
    for offset, chunk in enumerate(chunks):
        table_row[chunk[0]] = decode_rows + offset
        tables[decode_rows + offset] = case.tables[chunk[0]]
    tiles = tiles_for(
        [(table_row[row], first, count) for row, first, count in chunks],
        tile=backend.tile(40, BLOCK * tables.shape[1]),
        num_tokens=40,
        num_tiles=16,
    )
    meta = AttentionMeta(
        jnp.asarray(kv_slots),
        jnp.asarray(tables),
        jnp.asarray(positions),
        jax.tree.map(jnp.asarray, tiles.arrays),
    )
    out, pools = backend.attend(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(v),
        PagedKV(jnp.asarray(k_pool), jnp.asarray(v_pool)),
        meta,
        scale=1 / math.sqrt(16),
        window=window,
        soft_cap=None,
    )
    return q, np.asarray(out), np.asarray(pools.k), np.asarray(pools.v)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", BACKENDS)
def test_decode_rows_and_prompt_chunks_in_one_step(name: str, window: int | None) -> None:
    case = paged_case([30, 9, 70, 12], block_size=BLOCK, kv_heads=2, group=2, head_dim=16)
    new = [(2, 69), (1, 8)]
    new += [(0, position) for position in range(10, 30)] + [(3, position) for position in range(12)]
    q, out, k_pool, v_pool = attend(case, new, 2, window=window, name=name)
    assert k_pool.tobytes() == case.k_pool.tobytes(), "every new token in its slot, padding nowhere"
    assert v_pool.tobytes() == case.v_pool.tobytes()
    for index, (row, position) in enumerate(new):
        place = index if index < 2 else 8 + index - 2
        expected = case.expected(q[place], row, position, scale=0.25, window=window)
        np.testing.assert_allclose(out[place], expected, atol=3e-6, rtol=2e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_sees_what_another_row_writes_in_the_same_step(name: str) -> None:
    """Two requests share a prefix block that one of them computes right now."""
    case = paged_case([16, 16], block_size=BLOCK, kv_heads=2, group=2, head_dim=16)
    case.tables[1, :3] = case.tables[0, :3]
    case.keys[1][:12], case.values[1][:12] = case.keys[0][:12], case.values[0][:12]
    new = [(1, 12)] + [(0, position) for position in range(12)]
    q, out, _, _ = attend(case, new, 1, name=name)
    expected = case.expected(q[0], 1, 12, scale=0.25)
    np.testing.assert_allclose(out[0], expected, atol=3e-6, rtol=2e-5)

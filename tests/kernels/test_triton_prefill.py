"""The Pallas Triton prefill kernel, interpreted, against dense attention in float64.

Everything that a case does not own is NaN: slots, pages and what lies behind the end of a context;
block tables hold garbage there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels.paged_kv import PagedKV, PrefillTiles
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.triton_prefill import paged_prefill, tile_size
from pallas_kernels.tuning import PrefillConfig
from tests.kernels.attention_oracle import (
    Floats,
    PagedCase,
    Tiles,
    latent_case,
    paged_case,
    sink_case,
    sink_query,
    tiles_for,
)
from tests.kernels.lowering import TRITON_CALL, export_for_cuda

SMALL = PrefillConfig(block_rows=16, block_kv=16, num_warps=4, num_stages=2)
CLOSE = {4: {"atol": 1e-5, "rtol": 2e-5}, 2: {"atol": 3e-2, "rtol": 3e-2}}
"""By bytes of q's type."""
Chunk = tuple[int, int, int]
"""Row, first position, tokens."""


@functools.partial(
    jax.jit,
    static_argnames=(
        *("tile", "block_size", "scale", "window", "soft_cap", "value_dim", "config", "layout"),
    ),
    # Compiling costs far more here than running.
    compiler_options={"xla_backend_optimization_level": 0},
)
def interpreted(*args: Any, **settings: Any) -> jax.Array:
    return paged_prefill(*args, **settings, interpret=True)


def run(
    case: PagedCase,
    q: Floats,
    tiles: PrefillTiles,
    *,
    config: PrefillConfig = SMALL,
    layout: PoolLayout = PoolLayout.NHD,
    scale: float = 0.2,
    **settings: Any,
) -> Any:
    out = interpreted(
        jnp.asarray(q),
        case.kv(layout),
        jnp.asarray(case.tables),
        tiles,
        tile=tile_size(case.group, config),
        block_size=case.block_size,
        scale=scale,
        value_dim=case.value_dim if case.latent else None,
        config=config,
        layout=layout,
        **settings,
    )
    assert out.dtype == q.dtype and out.shape == (*q.shape[:2], case.value_dim)
    return np.asarray(out)


def cut(
    case: PagedCase,
    chunks: list[Chunk],
    *,
    config: PrefillConfig = SMALL,
    padding: int = 3,
    padding_tiles: int = 2,
) -> Tiles:
    """The chunks' tiles, with padding behind the tokens and behind the tiles."""
    tile = tile_size(case.group, config)
    used = sum(-(-count // tile) for _, _, count in chunks)
    total = sum(count for _, _, count in chunks)
    return tiles_for(chunks, tile=tile, num_tokens=total + padding, num_tiles=used + padding_tiles)


def check(
    case: PagedCase,
    chunks: list[Chunk],
    *,
    config: PrefillConfig = SMALL,
    scale: float = 0.2,
    window: int | None = None,
    soft_cap: float | None = None,
    layout: PoolLayout = PoolLayout.NHD,
    seed: int = 1,
    **padding: int,
) -> Any:
    """Every token's result is right and padding is zero. Returns the result."""
    tiles = cut(case, chunks, config=config, **padding)
    count = tiles.arrays.token_tile.shape[0]
    q = case.queries(count, np.random.default_rng(seed))
    q[len(tiles.tokens) :] = np.nan
    settings: Any = {"scale": scale, "window": window, "soft_cap": soft_cap}
    out = run(case, q, tiles.arrays, config=config, layout=layout, **settings)
    for place, (row, position) in enumerate(tiles.tokens):
        expected = case.expected(q[place], row, position, **settings)
        found = out[place].astype(np.float64)
        np.testing.assert_allclose(found, expected, **CLOSE[case.dtype.itemsize])
    assert (out[len(tiles.tokens) :].astype(np.float32) == 0.0).all()
    return out


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize("window", [None, 9])
def test_chunks_begin_and_end_anywhere(window: int | None) -> None:
    """At the start, inside a page, and at the edges of tiles of context and one beside them."""
    pasts = [0, 1, 7, 15, 16, 17, 31, 32, 33]
    chunks = [(0, past, count) for past in pasts for count in (1, 15, 17)]
    chunks = [(row, past, count) for row, (_, past, count) in enumerate(chunks)]
    lengths = [past + count for _, past, count in chunks]
    case = paged_case(lengths, block_size=8, kv_heads=1, group=2, head_dim=16)
    check(case, chunks, window=window)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_rows_of_all_lengths_together(block_size: int) -> None:
    """Pages smaller than a tile of context, as large, and larger; several tiles in a row."""
    case = paged_case([1, 40, 70, 33, 5], block_size=block_size, kv_heads=2, group=2, head_dim=32)
    check(case, [(4, 0, 5), (1, 17, 23), (0, 0, 1), (2, 0, 70), (3, 32, 1)])


def test_a_prompt_in_chunks_is_the_prompt_whole() -> None:
    case = paged_case([50], block_size=8, kv_heads=1, group=2, head_dim=16)
    q = case.queries(50, np.random.default_rng(1))
    whole = run(case, q, cut(case, [(0, 0, 50)], padding=0).arrays)
    size = 11
    for first in range(0, 50, size):
        count = min(size, 50 - first)
        tiles = cut(case, [(0, first, count)], padding=size - count).arrays
        tokens = np.zeros((size, *q.shape[1:]), np.float32)
        tokens[:count] = q[first : first + count]
        part = run(case, tokens, tiles)[:count]
        np.testing.assert_allclose(part, whole[first : first + count], atol=1e-6)


# ---------------------------------------------------------------- padding


PADDING = [
    # group, padding tokens, padding tiles
    (3, 0, 0),
    (3, 0, 5),
    (3, 1, 0),
    (3, 150, 0),
    (3, 7, 40),
    (20, 150, 3),
]


@pytest.mark.parametrize(("group", "padding", "padding_tiles"), PADDING)
def test_padding_is_zero_whoever_has_to_write_it(
    group: int, padding: int, padding_tiles: int
) -> None:
    """Also where many tokens are left to one idle program, and where programs have none."""
    case = paged_case([20, 3], block_size=4, kv_heads=2, group=group, head_dim=16)
    chunks = [(0, 3, 17), (1, 0, 3)]
    check(case, chunks, padding=padding, padding_tiles=padding_tiles)


@pytest.mark.parametrize(("tokens", "num_tiles"), [(1, 1), (8, 8), (100, 1)])
def test_nothing_but_padding(tokens: int, num_tiles: int) -> None:
    """The tile list is garbage then, but for its count."""
    case = paged_case([9], block_size=4, kv_heads=3, group=3, head_dim=24)
    garbage = jnp.full((num_tiles,), -(2**31), jnp.int32)
    fields = {"row": garbage, "start": garbage, "length": garbage, "position": garbage}
    tiles = PrefillTiles(**fields, token_tile=jnp.zeros(tokens, jnp.int32), count=jnp.int32(0))
    q = np.full((tokens, 9, 24), np.nan, np.float32)
    assert (run(case, q, tiles) == 0.0).all()


def test_neither_tokens_nor_tiles() -> None:
    case = paged_case([9], block_size=4, kv_heads=1, group=2, head_dim=16)
    for tokens, num_tiles in [(0, 0), (0, 8), (5, 0)]:
        tiles = tiles_for([], tile=8, num_tokens=tokens, num_tiles=num_tiles)
        out = run(case, np.full((tokens, 2, 16), np.nan, np.float32), tiles.arrays)
        assert (out == 0.0).all()


# ---------------------------------------------------------------- masks and scores


@pytest.mark.parametrize(
    ("window", "block_size"),
    [(1, 4), (2, 1), (8, 16), (15, 4), (16, 1), (17, 4), (40, 64), (200, 4)],
)
def test_windows(window: int, block_size: int) -> None:
    """Shorter than a tile of context or of tokens, at its edges, longer than the context."""
    case = paged_case([90, 35], block_size=block_size, kv_heads=2, group=1, head_dim=16)
    check(case, [(0, 40, 50), (1, 0, 35)], window=window)


@pytest.mark.parametrize(("soft_cap", "window"), [(0.3, None), (5.0, 20), (50.0, None)])
def test_soft_caps(soft_cap: float, window: int | None) -> None:
    """Of scores that are all much larger, about as large, and much smaller."""
    case = paged_case([60, 35], block_size=4, kv_heads=2, group=2, head_dim=16)
    check(case, [(0, 40, 20), (1, 0, 35)], scale=1.0, window=window, soft_cap=soft_cap)


def test_pages_before_the_window_may_be_gone() -> None:
    """Their slots hold NaN, and their entries in the table garbage."""
    case = paged_case([90], block_size=8, kv_heads=2, group=2, head_dim=16)
    window, first = 13, 70
    tiles = cut(case, [(0, first, 20)])
    q = case.queries(23, np.random.default_rng(1))
    before = run(case, q, tiles.arrays, window=window)
    seen = first - window + 1
    k, v, tables = case.k_pool.copy(), np.array(case.v_pool), case.tables.copy()
    for pool in (k, v):
        pool[case.slots(0)[:seen]] = np.nan
    tables[0, : seen // 8] = -7
    gone = dataclasses.replace(case, k_pool=k, v_pool=v, tables=tables)
    after = run(gone, q, tiles.arrays, window=window)
    assert before.tobytes() == after.tobytes() and np.isfinite(after).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_scores_of_any_size_stay_finite(scale: float) -> None:
    """Softmax weights of exp(+-1e5) neither overflow nor lose the largest."""
    case = paged_case([40], block_size=8, kv_heads=1, group=2, head_dim=16)
    tiles = cut(case, [(0, 3, 37)])
    q = case.queries(40, np.random.default_rng(1))
    out = run(case, q, tiles.arrays, scale=scale)
    for place, (row, position) in enumerate(tiles.tokens):
        expected = case.expected(q[place], row, position, scale=scale)
        np.testing.assert_allclose(out[place], expected, atol=2e-2 if scale > 1.0 else 1e-5)


# ---------------------------------------------------------------- sizes and types

HEADS = [
    # head_dim, group, block_rows, dtype: every head_dim and group once, also blocks of heads
    (64, 1, 16, np.float32),
    (80, 3, 16, np.float32),
    (96, 4, 32, np.float32),
    (128, 7, 32, ml_dtypes.bfloat16),
    (192, 8, 16, np.float32),
    (256, 16, 16, ml_dtypes.bfloat16),
    (40, 20, 16, np.float32),
    (112, 17, 64, ml_dtypes.bfloat16),
    (16, 128, 16, np.float32),
    (24, 5, 64, np.float16),
]


@pytest.mark.parametrize(("head_dim", "group", "block_rows", "dtype"), HEADS, ids=str)
def test_heads(head_dim: int, group: int, block_rows: int, dtype: npt.DTypeLike) -> None:
    case = paged_case(
        [40, 19], block_size=16, kv_heads=2, group=group, head_dim=head_dim, dtype=dtype
    )
    config = PrefillConfig(block_rows=block_rows, block_kv=32, num_warps=4, num_stages=2)
    scale = 1 / math.sqrt(head_dim)
    check(case, [(0, 33, 7), (1, 0, 19)], config=config, scale=scale)


def test_half_precision_and_values_of_another_width() -> None:
    case = paged_case(
        *([40],), block_size=16, kv_heads=2, group=2, head_dim=48, value_dim=32, dtype=np.float16
    )
    check(case, [(0, 21, 19)])


@pytest.mark.parametrize("cache_dtype", [np.int8, ml_dtypes.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("layout", list(PoolLayout), ids=str)
def test_8_bit_caches(cache_dtype: npt.DTypeLike, layout: PoolLayout) -> None:
    """NaN stands in the scales of slots that nobody owns, too."""
    case = paged_case(
        [40, 19], block_size=8, kv_heads=2, group=2, head_dim=32, cache_dtype=cache_dtype
    )
    soft_cap = 3.0 if layout is PoolLayout.HND else None
    check(case, [(0, 33, 7), (1, 0, 19)], layout=layout, soft_cap=soft_cap, window=18)


@pytest.mark.parametrize("cache_dtype", [np.int8, ml_dtypes.float8_e4m3fn], ids=["int8", "fp8"])
def test_small_weights_of_a_float16_model_keep_their_values(cache_dtype: npt.DTypeLike) -> None:
    """Weights times the scales of the values are too small for float16 where one token takes
    nearly all of the weight.
    """
    case = sink_case(cache_dtype)
    q, last = sink_query(case), case.lengths[0] - 1
    tiles = cut(case, [(0, last, 1)], padding=0)
    expected = case.expected(q[0], 0, last, scale=1.0)
    error = np.abs(run(case, q, tiles.arrays, scale=1.0)[0].astype(np.float64) - expected).max()
    assert error < 4e-3 * np.abs(expected).max()


def test_8_bit_cache_of_a_16_bit_model() -> None:
    for cache_dtype in (np.int8, ml_dtypes.float8_e4m3fn):
        case = paged_case(
            *([20],),
            block_size=8,
            kv_heads=1,
            group=2,
            head_dim=32,
            dtype=ml_dtypes.bfloat16,
            cache_dtype=cache_dtype,
        )
        check(case, [(0, 3, 17)])


LATENT = [
    # group, key_dim, value_dim, cache_dtype
    (16, 576, 512, None),
    (128, 576, 512, None),
    (2, 48, 32, None),
    (3, 40, 24, np.int8),
    (4, 40, 40, ml_dtypes.float8_e4m3fn),
]


@pytest.mark.parametrize(("group", "key_dim", "value_dim", "cache_dtype"), LATENT, ids=str)
def test_latent_caches(group: int, key_dim: int, value_dim: int, cache_dtype: Any) -> None:
    case = latent_case(
        [40, 19],
        block_size=16,
        group=group,
        key_dim=key_dim,
        value_dim=value_dim,
        cache_dtype=cache_dtype,
    )
    config = PrefillConfig(block_rows=32, block_kv=16, num_warps=8, num_stages=2)
    check(case, [(0, 33, 7), (1, 0, 3)], config=config, scale=0.05)


# ---------------------------------------------------------------- the pool


def test_layouts_give_the_same_bits() -> None:
    case = paged_case([40, 19], block_size=8, kv_heads=3, group=2, head_dim=16)
    tiles = cut(case, [(0, 33, 7), (1, 0, 19)])
    q = case.queries(29, np.random.default_rng(1))
    results = {run(case, q, tiles.arrays, layout=layout).tobytes() for layout in PoolLayout}
    assert len(results) == 1


def test_where_pages_lie_changes_no_bit() -> None:
    case = paged_case([40, 19], block_size=8, kv_heads=2, group=2, head_dim=16)
    tiles = cut(case, [(0, 33, 7), (1, 0, 19)])
    q = case.queries(29, np.random.default_rng(1))
    before = run(case, q, tiles.arrays)
    blocks = len(case.k_pool) // 8
    order = np.random.default_rng(2).permutation(blocks)  # block b goes to order[b]
    moved = np.empty_like(order)
    moved[order] = np.arange(blocks)
    pools = [
        pool.reshape(blocks, 8, 2, 16)[moved].reshape(pool.shape)
        for pool in (case.k_pool, np.array(case.v_pool))
    ]
    real = (case.tables >= 0) & (case.tables < blocks)
    tables = np.where(real, order[np.where(real, case.tables, 0)], case.tables).astype(np.int32)
    assert (tables != case.tables).any()
    after = run(
        dataclasses.replace(case, k_pool=pools[0], v_pool=pools[1], tables=tables),
        *(q, tiles.arrays),
    )
    assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("poison", [np.inf, -np.inf, 3e38], ids=str)
def test_nothing_that_nobody_owns_leaks(poison: float) -> None:
    cases = [
        paged_case([45, 19], block_size=16, kv_heads=1, group=2, head_dim=16, poison=p)
        for p in (0.0, poison)
    ]
    tiles = cut(cases[0], [(0, 20, 25), (1, 0, 19)])
    q = cases[0].queries(47, np.random.default_rng(1))
    results = [run(case, q, tiles.arrays) for case in cases]
    assert results[0].tobytes() == results[1].tobytes() and np.isfinite(results[0]).all()


# ---------------------------------------------------------------- what is refused


def test_a_tile_of_another_size_is_refused() -> None:
    case = paged_case([9], block_size=4, kv_heads=1, group=2, head_dim=16)
    tiles = cut(case, [(0, 0, 9)]).arrays
    q = jnp.zeros((12, 2, 16), jnp.float32)
    with pytest.raises(ValueError, match=r"tile is 4, but .* takes tiles of 8 tokens"):
        paged_prefill(
            *(q, case.kv(), jnp.asarray(case.tables), tiles),
            tile=4,
            block_size=4,
            scale=0.2,
            config=SMALL,
        )


@pytest.mark.parametrize(
    ("block_size", "scale", "message"),
    [(12, 0.2, "block_size 12"), (4, 0.0, "scale 0.0"), (4, -1.0, "scale -1.0")],
)
def test_what_the_kernel_cannot_do(block_size: int, scale: float, message: str) -> None:
    case = paged_case([9], block_size=4, kv_heads=1, group=2, head_dim=16)
    case = dataclasses.replace(case, block_size=block_size)
    tiles = cut(case, [(0, 0, 9)]).arrays
    with pytest.raises(NotImplementedError, match=message):
        run(case, np.zeros((12, 2, 16), np.float32), tiles, scale=scale)


@pytest.mark.parametrize(
    ("group", "rows", "tile"),
    [(1, 64, 64), (3, 64, 21), (7, 64, 9), (8, 128, 16), (16, 64, 4), (20, 64, 6), (128, 64, 4)],
)
def test_a_tile_has_as_many_tokens_as_its_rows_hold(group: int, rows: int, tile: int) -> None:
    """Where there are many heads, equal parts of them make the rows."""
    assert tile_size(group, PrefillConfig(block_rows=rows)) == tile


# ---------------------------------------------------------------- lowering for a GPU

GPU = PrefillConfig(block_rows=64, block_kv=64, num_warps=4, num_stages=3)
LATENT_GPU = PrefillConfig(block_rows=64, block_kv=32, num_warps=8, num_stages=2)
LOWERED = [
    # name, head_dim, group, dtype, cache_dtype, layout, config, settings
    ("llama", 128, 4, "bfloat16", "bfloat16", PoolLayout.NHD, GPU, {}),
    ("hnd", 128, 4, "float16", "float16", PoolLayout.HND, GPU, {}),
    ("combined", 64, 7, "bfloat16", "bfloat16", PoolLayout.COMBINED, GPU, {}),
    ("gemma", 256, 2, "bfloat16", "bfloat16", PoolLayout.NHD, GPU, {"window": 9, "soft_cap": 50.0}),
    ("padded", 72, 3, "float32", "float32", PoolLayout.NHD, GPU, {}),
    ("int8", 96, 1, "bfloat16", "int8", PoolLayout.NHD, GPU, {"soft_cap": 30.0}),
    ("fp8", 80, 20, "bfloat16", "float8_e4m3fn", PoolLayout.HND, GPU, {}),
    ("latent", 576, 128, "bfloat16", "bfloat16", PoolLayout.NHD, LATENT_GPU, {"value_dim": 512}),
    ("latent_int8", 576, 16, "bfloat16", "int8", PoolLayout.NHD, LATENT_GPU, {"value_dim": 512}),
]


@pytest.mark.parametrize("case", LOWERED, ids=[case[0] for case in LOWERED])
def test_lowering(case: tuple[Any, ...]) -> None:
    """At production sizes, which costs nothing here."""
    _, dim, group, dtype, cache_dtype, layout, config, settings = case
    latent = "value_dim" in settings
    kv_heads, block_size, blocks, rows, tokens = 1 if latent else 8, 16, 8192, 64, 2048
    shape = jax.ShapeDtypeStruct
    pool_shape = layout.shape(blocks, block_size, kv_heads, dim)
    pool = shape(pool_shape, jnp.dtype(cache_dtype))
    scale = None if dtype == cache_dtype else shape(pool_shape[:-1], jnp.float32)
    apart = not latent and layout is not PoolLayout.COMBINED
    kv = PagedKV(pool, pool if apart else None, scale, scale if apart else None)
    tile = tile_size(group, config)
    ints = shape((tokens // tile + rows,), jnp.int32)
    token_tile = shape((tokens,), jnp.int32)
    tiles = PrefillTiles(ints, ints, ints, ints, token_tile, shape((), jnp.int32))

    def prefill(*args: Any) -> jax.Array:
        return paged_prefill(
            *args,
            tile=tile,
            block_size=block_size,
            scale=0.1,
            config=config,
            layout=layout,
            **settings,
        )

    q = shape((tokens, kv_heads * group, dim), jnp.dtype(dtype))
    module = export_for_cuda(prefill, q, kv, shape((rows, 512), jnp.int32), tiles)
    assert module.count(TRITON_CALL) == 1
    assert "paged_prefill" in module

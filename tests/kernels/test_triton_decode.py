"""What is special to the decode kernel in Pallas Triton; `test_attention_suite` has the rest."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import split_k, triton_decode
from pallas_kernels.paged_kv import PagedKV
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.tuning import DecodeConfig
from tests.kernels.attention_oracle import (
    PagedCase,
    latent_case,
    paged_case,
    sink_case,
    sink_query,
)
from tests.kernels.lowering import TRITON_CALL, export_for_cuda

BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
CONFIG = DecodeConfig(block_kv=16, splits=4, min_split_tokens=32)
EDGES = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192]
"""Around the edges of tiles, and where 4 splits of at least 32 tokens begin: 64, 96 and 128."""


@functools.partial(
    jax.jit,
    static_argnames=(
        *("block_size", "scale", "window", "soft_cap"),
        *("value_dim", "config", "layout", "interpret"),
    ),
    compiler_options={"xla_backend_optimization_level": 0},
)
def decode_jit(*args: Any, **fixed: Any) -> jax.Array:
    return triton_decode.paged_decode(*args, **fixed)


def decode(
    case: PagedCase, config: DecodeConfig = CONFIG, *, kv: PagedKV | None = None, **settings: Any
) -> tuple[Any, Any]:
    """Queries, and the results of each sequence's last token with a padding row among them."""
    lengths = [*case.lengths, 0]
    q = case.queries(len(lengths), np.random.default_rng(1))
    tables = np.append(case.tables, case.tables[:1] * 0 - 1, axis=0)
    kv = case.kv(settings.get("layout", PoolLayout.NHD)) if kv is None else kv
    if case.latent:
        settings["value_dim"] = case.value_dim
    out = decode_jit(
        q,
        kv,
        jnp.asarray(tables),
        jnp.asarray([length - 1 for length in lengths], jnp.int32),
        block_size=case.block_size,
        **{"scale": case.keys[0].shape[-1] ** -0.5, **settings},
        config=config,
        interpret=True,
    )
    assert out.dtype == q.dtype and out.shape == (*q.shape[:2], case.value_dim)
    assert (out[-1] == 0).all()
    return q, np.asarray(out[:-1])


def check(case: PagedCase, q: Any, out: Any, *, error: float = 3e-6, **settings: Any) -> None:
    scale = case.keys[0].shape[-1] ** -0.5
    largest = max(float(np.abs(v.astype(np.float64)).max()) for v in case.values)
    for row, length in enumerate(case.lengths):
        expected = case.expected(q[row], row, length - 1, scale=scale, **settings)
        np.testing.assert_allclose(
            out[row].astype(np.float64), expected, atol=error * max(1.0, largest), err_msg=str(row)
        )


# ---------------------------------------------------------------- splits


@pytest.mark.parametrize(
    ("splits", "window", "soft_cap"),
    [(1, None, None), (2, None, None), (4, 50, 3.0), (8, None, None), (32, 50, None)],
)
def test_every_split_count_gives_the_same_answer(
    splits: int, window: int | None, soft_cap: float | None
) -> None:
    case = paged_case(EDGES, block_size=16, kv_heads=2, group=2, head_dim=32)
    config = dataclasses.replace(CONFIG, splits=splits, min_split_tokens=32)
    q, out = decode(case, config, window=window, soft_cap=soft_cap)
    check(case, q, out, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("splits", "fewest"), [(1, 256), (4, 32), (8, 16), (32, 1), (4, 40)])
def test_shares_cover_the_context_once_and_are_long_enough(
    splits: int, fewest: int, window: int | None
) -> None:
    config = DecodeConfig(block_kv=16, splits=splits, min_split_tokens=fewest)
    shape = _shape(config, window=window)
    for position in [-1, 0, 15, 16, 31, 63, 64, 99, 100, 127, 128, 511, 5000]:
        shares = [
            [int(x) for x in triton_decode._share(jnp.int32(position), split, shape)]
            for split in range(splits)
        ]
        first_token = 0 if window is None else max(0, position - window + 1)
        used = [(first, end) for first, end, has_work in shares if has_work]
        assert all(first == end for first, end, has_work in shares if not has_work)
        assert shares[: len(used)] == [[*share, 1] for share in used]  # the idle ones stand last
        tiles = [tile for first, end in used for tile in range(first, end)]
        assert tiles == list(range(first_token // 16, position // 16 + 1))
        if len(used) > 1:
            assert min(end - first for first, end in used) * 16 >= fewest
        if len(used) < splits and position >= 0:
            assert len(tiles) < (len(used) + 1) * -(-fewest // 16)  # no more were possible


def _shape(config: DecodeConfig, **changes: Any) -> Any:
    blank = {f.name: None for f in dataclasses.fields(triton_decode._Shape)}
    return triton_decode._Shape(**{**blank, "config": config, **changes})


def test_combining_ignores_what_empty_shares_hold() -> None:
    rng = np.random.default_rng(0)
    partial = rng.standard_normal((3, 4, 2, 8)).astype(np.float32)
    lse = rng.uniform(-90, 90, (3, 4, 2)).astype(np.float32)
    lse[0, 1:], lse[1], lse[2, 0, 0] = -1e30, -1e30, -1e30
    poisoned = partial.copy()
    poisoned[lse == np.float32(-1e30)] = np.nan
    out = np.asarray(split_k.combine_splits(jnp.asarray(poisoned), jnp.asarray(lse)))
    np.testing.assert_array_equal(out[0], partial[0, 0])
    np.testing.assert_array_equal(out[1], 0.0)
    weights = np.exp2(lse[2].astype(np.float64) - lse[2].max(axis=0))
    expected = (weights[..., None] * partial[2]).sum(axis=0) / weights.sum(axis=0)[:, None]
    np.testing.assert_allclose(out[2], expected, rtol=1e-5)


@pytest.mark.parametrize("length", [5, 100])  # of one share, and of four
@pytest.mark.parametrize("splits", [1, 4])
def test_what_is_no_number_stays_none(splits: int, length: int) -> None:
    """A share of NaN is not taken for one without tokens, which would give zeros."""
    case = paged_case([length, 20], block_size=16, kv_heads=1, group=2, head_dim=32)
    q = case.queries(2, np.random.default_rng(1))
    q[0, 0] = np.nan
    config = DecodeConfig(block_kv=16, splits=splits, min_split_tokens=16)
    tables, positions = jnp.asarray(case.tables), jnp.asarray([length - 1, 19], jnp.int32)
    settings: dict[str, Any] = {"block_size": 16, "scale": 32**-0.5, "config": config}
    out = np.asarray(decode_jit(q, case.kv(), tables, positions, **settings, interpret=True))
    assert np.isnan(out[0, 0]).all()
    assert np.isfinite(out[0, 1]).all() and np.isfinite(out[1]).all()


@pytest.mark.parametrize("cache_dtype", [np.int8, F8], ids=["int8", "fp8"])
def test_small_weights_of_a_float16_model_keep_their_values(cache_dtype: npt.DTypeLike) -> None:
    """Weights times the scales of the values are too small for float16 where one token takes
    nearly all of the weight.
    """
    case = sink_case(cache_dtype)
    q = sink_query(case)
    tables, positions = jnp.asarray(case.tables), jnp.asarray([case.lengths[0] - 1], jnp.int32)
    settings: dict[str, Any] = {"block_size": 16, "scale": 1.0, "config": CONFIG}
    out = np.asarray(decode_jit(q, case.kv(), tables, positions, **settings, interpret=True))
    expected = case.expected(q[0], 0, case.lengths[0] - 1, scale=1.0)
    error = np.abs(out[0].astype(np.float64) - expected).max()
    assert error < 4e-3 * np.abs(expected).max()


def test_64_bit_integers_by_default_change_no_bit() -> None:
    case = paged_case([40, 19], block_size=16, kv_heads=2, group=2, head_dim=48)
    _, expected = decode(case, window=30)
    with jax.enable_x64(True):
        _, out = decode(case, window=30)
    assert out.tobytes() == expected.tobytes()


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("dim", "group"),
    [
        *((16, 1), (40, 3), (64, 4), (80, 7), (96, 8)),
        *((112, 16), (128, 71), (192, 128), (256, 3)),
    ],
)
def test_head_dims_and_groups(dim: int, group: int) -> None:
    case = paged_case([1, 17, 70], block_size=8, kv_heads=2, group=group, head_dim=dim)
    check(case, *decode(case))


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 64, 80, 96, 112, 128, 192, 200, 256, 512])
@pytest.mark.parametrize("widest", [128, 512])
def test_parts_cover_a_head_once(dim: int, widest: int) -> None:
    parts = triton_decode._parts(7, dim, widest)
    covered = [column for p in parts for column in range(p.start, p.start + p.used)]
    assert covered == list(range(7, 7 + dim))
    for p in parts:
        assert 32 <= p.width <= widest and p.width.bit_count() == 1
    assert sum(p.width for p in parts) < 2 * max(dim, 32)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "group", "num_warps", "cache_dtype"),
    [
        (576, 512, 16, 4, None),
        (576, 512, 40, 4, np.int8),
        (576, 512, 128, 8, None),
        (48, 32, 4, 4, None),
        (52, 40, 128, 4, F8),
    ],
)
def test_latent_caches(
    key_dim: int, value_dim: int, group: int, num_warps: int, cache_dtype: npt.DTypeLike | None
) -> None:
    case = latent_case(
        [1, 33, 70],
        block_size=16,
        group=group,
        key_dim=key_dim,
        value_dim=value_dim,
        cache_dtype=cache_dtype,
    )
    check(case, *decode(case, dataclasses.replace(CONFIG, num_warps=num_warps)))


@pytest.mark.parametrize(
    ("block_size", "block_kv"), [(1, 16), (4, 64), (16, 64), (32, 16), (64, 64), (128, 16)]
)
def test_pages_larger_and_smaller_than_a_tile(block_size: int, block_kv: int) -> None:
    case = paged_case([1, 63, 64, 65, 200], block_size=block_size, kv_heads=1, group=2, head_dim=16)
    check(case, *decode(case, dataclasses.replace(CONFIG, block_kv=block_kv)))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(BF16, None), (np.float16, None), (BF16, np.int8), (np.float16, F8), (np.float32, F8)],
)
def test_types(dtype: npt.DTypeLike, cache_dtype: npt.DTypeLike | None) -> None:
    case = paged_case(
        [1, 17, 64, 130],
        block_size=16,
        kv_heads=2,
        group=4,
        head_dim=80,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    bf16_weights = dtype is BF16 or (dtype is np.float16 and cache_dtype is not None)
    error = 3e-6 if dtype is np.float32 else 4e-3 if bf16_weights else 5e-4
    check(case, *decode(case), error=error)


# ---------------------------------------------------------------- the same bits


def _kinds() -> list[tuple[PagedCase, dict[str, Any]]]:
    shape: dict[str, Any] = {"block_size": 16, "kv_heads": 2, "group": 3}
    return [
        (paged_case([1, 40, 100], head_dim=80, dtype=BF16, **shape), {"window": 60}),
        (paged_case([1, 40, 100], head_dim=64, cache_dtype=np.int8, **shape), {}),
    ]


@pytest.mark.parametrize("kind", [0, 1], ids=["bfloat16", "int8"])
def test_layouts_and_carried_pages_change_no_bit(kind: int) -> None:
    case, settings = _kinds()[kind]
    expected = None
    for layout, carry in [*((layout, True) for layout in PoolLayout), (PoolLayout.NHD, False)]:
        config = dataclasses.replace(CONFIG, carry_pages=carry)
        _, out = decode(case, config, layout=layout, **settings)
        expected = out.tobytes() if expected is None else expected
        assert out.tobytes() == expected, (layout, carry)


@pytest.mark.parametrize("kind", [0, 1], ids=["bfloat16", "int8"])
def test_a_permutation_of_pages_changes_no_bit(kind: int) -> None:
    case, settings = _kinds()[kind]
    _, expected = decode(case, **settings)
    blocks = len(case.k_pool) // case.block_size
    place = np.random.default_rng(5).permutation(blocks).astype(np.int32)
    kv = case.kv()

    def moved(pool: jax.Array | None) -> jax.Array | None:
        if pool is None:
            return None
        paged = np.asarray(pool).reshape(blocks, case.block_size, *pool.shape[1:])
        new = np.empty_like(paged)
        new[place] = paged
        return jnp.asarray(new.reshape(pool.shape))

    tables = case.tables.copy()
    valid = (tables >= 0) & (tables < blocks)
    tables[valid] = place[tables[valid]]
    pools = PagedKV(*(moved(p) for p in (kv.k, kv.v, kv.k_scale, kv.v_scale)))  # type: ignore[arg-type]
    _, out = decode(dataclasses.replace(case, tables=tables), kv=pools, **settings)
    assert out.tobytes() == expected.tobytes()


# ---------------------------------------------------------------- refusals


def _refused(kv: PagedKV, *, heads: int = 4, dim: int = 64, **changes: Any) -> None:
    settings: dict[str, Any] = {"block_size": 16, "scale": 1.0, "config": CONFIG}
    dtype = changes.pop("dtype", jnp.bfloat16)
    integers = jax.ShapeDtypeStruct((1, 4), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    q = jax.ShapeDtypeStruct((1, heads, dim), dtype)
    call = functools.partial(triton_decode.paged_decode, **{**settings, **changes})
    jax.eval_shape(call, q, kv, *integers)


def _pools(
    dtype: Any = jnp.bfloat16, slots: int = 64, dim: int = 64, *, scales: bool = False
) -> PagedKV:
    pool = jax.ShapeDtypeStruct((slots, 1, dim), dtype)
    scale = jax.ShapeDtypeStruct((slots, 1), jnp.float32) if scales else None
    return PagedKV(pool, pool, scale, scale)  # type: ignore[arg-type]


def _mixed_pools() -> PagedKV:
    quantized = _pools(jnp.int8, scales=True)
    return PagedKV(quantized.k, _pools().v, quantized.k_scale)


@pytest.mark.parametrize(
    ("kv", "changes", "text"),
    [
        (_pools(), {"block_size": 24}, "block_size 24: .* powers of two; choose 16, 32"),
        (_pools(dim=320), {"dim": 320}, "head_dim 320: .* 1 to 256; use the attention backend"),
        (_pools(), {"heads": 129}, "129 query heads per KV head: .* 1 to 128; use"),
        (_pools(jnp.float16), {}, "K pool of float16 with queries of bfloat16: .* choose"),
        (_pools(jnp.int8), {}, "K pool of int8 without scales: .* give PagedKV its k_scale"),
        (_pools(scales=True), {}, "K pool of bfloat16 with scales: .* leave k_scale"),
        (_pools(jnp.float8_e5m2, scales=True), {}, "K pool of float8_e5m2: .* choose one of them"),
        (_mixed_pools(), {}, "K pool of int8 and a V pool of bfloat16: .* choose one type"),
        (_pools(), {"dtype": jnp.int32}, "queries of int32: .* choose one of"),
        (_pools(slots=2**25), {}, "a K pool of 2147483648 elements: .* 2147483648 .* fewer blocks"),
        (
            PagedKV(_pools(dim=700).k, None),
            {"dim": 700, "value_dim": 640},
            "latent cache of head_dim 700 with value_dim 640: .* 1 to 512 .* use the attention",
        ),
    ],
)
def test_refusals_name_the_value_the_limit_and_the_way_out(
    kv: PagedKV, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(NotImplementedError, match=text):
        _refused(kv, **changes)


def test_the_largest_pool_is_not_refused() -> None:
    _refused(_pools(slots=2**25 - 16))


# ---------------------------------------------------------------- lowering for a GPU


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize(
    ("dim", "group", "dtype", "cache_dtype", "layout", "value_dim"),
    [
        (128, 4, jnp.bfloat16, None, PoolLayout.NHD, None),
        (96, 8, jnp.float16, None, PoolLayout.HND, None),
        (80, 1, jnp.float32, None, PoolLayout.COMBINED, None),
        (256, 3, jnp.bfloat16, jnp.int8, PoolLayout.NHD, None),
        (64, 8, jnp.bfloat16, jnp.float8_e4m3fn, PoolLayout.COMBINED, None),
        (576, 128, jnp.bfloat16, None, PoolLayout.NHD, 512),
        (576, 16, jnp.bfloat16, jnp.float8_e4m3fn, PoolLayout.NHD, 512),
        (56, 4, jnp.float32, None, PoolLayout.NHD, 40),
    ],
)
def test_lowers_for_an_h200(
    dim: int,
    group: int,
    dtype: Any,
    cache_dtype: Any,
    layout: PoolLayout,
    value_dim: int | None,
    splits: int,
) -> None:
    heads = 1 if value_dim else 8
    shape = layout.shape(4096, 16, heads, dim)
    pool = jax.ShapeDtypeStruct(shape, cache_dtype or dtype)
    scale = jax.ShapeDtypeStruct(shape[:-1], jnp.float32) if cache_dtype else None
    one = value_dim is not None or layout is PoolLayout.COMBINED
    kv = PagedKV(pool, None if one else pool, scale, None if one else scale)  # type: ignore[arg-type]
    call = functools.partial(
        triton_decode.paged_decode,
        block_size=16,
        scale=0.1,
        window=None if value_dim else 1024,
        soft_cap=None if value_dim else 50.0,
        value_dim=value_dim,
        layout=layout,
        config=DecodeConfig(splits=splits),
    )
    text = export_for_cuda(
        call,
        jax.ShapeDtypeStruct((64, heads * group, dim), dtype),
        kv,
        jax.ShapeDtypeStruct((64, 128), jnp.int32),
        jax.ShapeDtypeStruct((64,), jnp.int32),
    )
    assert text.count(TRITON_CALL) == 1
    assert ("exponential" in text) == (splits > 1)  # of the combination

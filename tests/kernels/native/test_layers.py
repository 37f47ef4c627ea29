"""Products and norms of the native library against float64, and the sameness of their rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.models.rope import apply_rope
from jaxpaged.models.routines import LiveRows
from pallas_kernels.native import build

ROWS = (1, 2, 7, 8, 9, 12, 13, 24, 47, 100, 211)


@pytest.fixture(scope="module")
def routines() -> Any:
    try:
        build.load()
    except build.NativeUnavailable as error:
        pytest.skip(str(error))
    from pallas_kernels.native.layers import NativeRoutines

    return NativeRoutines()


@pytest.fixture(scope="module")
def product(routines: Any) -> Any:
    if not build.multiplies():
        pytest.skip("this processor does not multiply bfloat16: XLA does it")
    return jax.jit(routines.product)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    ("columns", "depth"), [(1, 1), (7, 5), (16, 32), (31, 33), (32, 31), (100, 577), (960, 576)]
)
def test_products_and_their_rows(product: Any, columns: int, depth: int) -> None:
    x = normal(1, max(ROWS), depth)
    weight = normal(2, columns, depth).astype(jnp.bfloat16)
    exact = np.asarray(x.astype(jnp.bfloat16), np.float64) @ np.asarray(weight, np.float64).T
    whole = np.asarray(product(x, weight))
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(weight, np.float64)).T
    assert (np.abs(whole - exact) <= 2e-6 * size + 1e-30).all()
    for rows in ROWS:
        some = np.asarray(product(x[:rows], weight))
        np.testing.assert_array_equal(some.view(np.uint32), whole[:rows].view(np.uint32))
    # Rounded before, by XLA, or on the way: the same.
    rounded = np.asarray(product(x.astype(jnp.bfloat16), weight))
    np.testing.assert_array_equal(rounded.view(np.uint32), whole.view(np.uint32))
    other = np.asarray(product(jnp.roll(x, 5, axis=0), weight))
    np.testing.assert_array_equal(other, np.roll(whole, 5, axis=0))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 90),
    depth=st.integers(1, 90),
    seed=st.integers(0, 99),
)
def test_products_of_any_shape(
    product: Any, rows: int, columns: int, depth: int, seed: int
) -> None:
    x, weight = normal(seed, rows, depth), normal(seed + 1, columns, depth).astype(jnp.bfloat16)
    exact = np.asarray(x.astype(jnp.bfloat16), np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(np.asarray(product(x, weight)), exact, rtol=0, atol=1e-4)


def test_products_that_are_added(routines: Any, product: Any) -> None:
    """To what stays as it is, or in its place: the same."""
    x, weight = normal(17, 40, 96), normal(18, 50, 96).astype(jnp.bfloat16)
    before = normal(19, 40, 50)
    exact = np.asarray(before) + np.asarray(product(x, weight))

    def added(onto: jax.Array) -> jax.Array:
        out: jax.Array = routines.product(x, weight, onto=onto)
        return out

    np.testing.assert_array_equal(np.asarray(jax.jit(added)(before)), exact)
    live = LiveRows(jnp.asarray([3, 7], jnp.int32), 8, 40)
    some = np.asarray(routines.product(x, weight, live, onto=before))
    np.testing.assert_array_equal(some[:3], exact[:3])
    np.testing.assert_array_equal(some[8:15], exact[8:15])
    np.testing.assert_array_equal(np.asarray(jax.jit(added, donate_argnums=0)(before)), exact)
    assert routines.product(x, weight, onto=jnp.ones((40, 50), jnp.bfloat16)) is None


def gated(x: jax.Array, weight: jax.Array) -> np.ndarray:
    """In float64, before it is rounded."""
    wide = np.asarray(x.astype(jnp.bfloat16), np.float64)
    both = np.einsum("te,ike->tik", wide, np.asarray(weight, np.float64))
    with np.errstate(over="ignore"):
        return np.asarray(both[..., 0] / (1 + np.exp(-both[..., 0])) * both[..., 1])


@pytest.mark.parametrize(("width", "depth"), [(1, 3), (8, 32), (15, 31), (16, 64), (100, 576)])
def test_gates(routines: Any, product: Any, width: int, depth: int) -> None:
    run = jax.jit(functools.partial(routines.gated_product, activation="silu"))
    x, weight = normal(7, max(ROWS), depth), normal(8, width, 2, depth).astype(jnp.bfloat16)
    whole = run(x, weight)
    assert whole.dtype == jnp.bfloat16
    # A half of the last place, and what the float32 sums are off.
    np.testing.assert_allclose(
        np.asarray(whole, np.float64), gated(x, weight), rtol=2**-8 * 1.01, atol=1e-3
    )
    for rows in ROWS:
        some = np.asarray(run(x[:rows], weight).view(jnp.uint16))
        np.testing.assert_array_equal(some, np.asarray(whole.view(jnp.uint16))[:rows])
    assert routines.gated_product(x, weight, "gelu") is None
    assert routines.gated_product(x, weight.astype(jnp.float32), "silu") is None


def test_gates_at_their_ends(routines: Any, product: Any) -> None:
    """Of gates that are far off, and not finite."""
    gates = [0.0, -0.0, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4, 3e38, -3e38, np.inf, np.nan]
    x = jnp.asarray([[gate, 1.0] for gate in gates], jnp.float32)
    weight = jnp.asarray([[[1.0, 0.0], [0.0, 1.0]]], jnp.bfloat16)
    found = np.asarray(routines.gated_product(x, weight, "silu"), np.float64)[:, 0]
    # The other product is 0 * inf for the last two.
    np.testing.assert_allclose(found[:10], gated(x, weight)[:10, 0], rtol=2**-7, atol=1e-12)
    assert np.isnan(found[10:]).all()


Counts = tuple[int, int, int, int]
LIVE: list[Counts] = [
    (40, 8, 8, 32), (40, 8, 3, 17), (40, 8, 0, 1), (40, 8, 5, 0), (40, 8, 0, 0), (300, 32, 31, 207),
    (8, 8, 3, 0), (40, 0, 0, 21),
]  # fmt: skip
"""Rows, the place of the first prompt token, and how many of each kind are live."""


@pytest.mark.parametrize(("total", "first", "head", "tail"), LIVE)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_only_live_rows_are_computed(
    routines: Any, total: int, first: int, head: int, tail: int, dtype: Any
) -> None:
    """They have the bits that they have alone, whatever the others hold."""
    live = LiveRows(jnp.asarray([head, tail], jnp.int32), first, total)
    matters = np.zeros(total, bool)
    matters[:head] = matters[first : first + tail] = True
    x = jnp.where(matters[:, None], normal(9, total, 96), jnp.nan).astype(dtype)
    heads = jnp.where(matters[:, None, None, None], normal(10, total, 2, 5, 16), jnp.nan)
    table = normal(11, 2, total, 6)
    weight = normal(12, 50, 96).astype(jnp.bfloat16)
    runs: list[tuple[Callable[..., Any], list[jax.Array]]] = [
        (lambda t, h, live: routines.rotate(h, t, dtype, live), [jnp.swapaxes(table, 0, 1), heads]),
    ]
    if dtype == jnp.float32:
        norm = functools.partial(routines.rms_norm, eps=1e-5, offset=0.0)
        runs.append((lambda x, live: norm(x, weight[0], live=live), [x]))
    if build.multiplies():
        pairs = weight.reshape(25, 2, 96)
        runs += [
            (lambda x, live: routines.product(x, weight, live), [x]),
            (lambda x, live: routines.gated_product(x, pairs, "silu", live), [x]),
        ]
    for run, rows in runs:

        def called(rows: list[jax.Array], live: LiveRows | None, run: Any = run) -> list[Any]:
            if len(rows) == 2:  # the table's tokens are its second axis
                rows = [jnp.swapaxes(rows[0], 0, 1), rows[1]]
            return [np.asarray(out, np.float32) for out in jax.tree.leaves(run(*rows, live))]

        found = [whole[matters] for whole in called(rows, live)]
        assert np.isfinite(np.concatenate([of.reshape(-1) for of in found])).all()
        if matters.any():
            for ours, alone in zip(found, called([of[matters] for of in rows], None), strict=True):
                np.testing.assert_array_equal(ours, alone)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (16, 8), (80, 20), (7, 3), (128, 64)])
def test_rotations(routines: Any, dtype: Any, dim: int, half: int) -> None:
    qkv, table = normal(13, 30, 2, 5, dim), normal(14, 2, 30, half)
    q, k, v = jax.jit(lambda qkv, table: routines.rotate(qkv, table, dtype, None))(qkv, table)
    turned = np.asarray(apply_rope(qkv[:, :, :4], table), np.float64)
    bound = {"float32": 1e-6, "bfloat16": 2**-8 * 1.01, "float16": 2**-11 * 1.01}
    close = functools.partial(
        np.testing.assert_allclose, rtol=bound[jnp.dtype(dtype).name], atol=2e-6
    )
    close(np.asarray(q, np.float64), turned[:, :, :3].reshape(30, 6, dim))
    close(np.asarray(k, np.float64), turned[:, :, 3])
    np.testing.assert_array_equal(np.asarray(v), np.asarray(qkv[:, :, 4].astype(dtype)))
    assert {q.dtype, k.dtype, v.dtype} == {jnp.dtype(dtype)}


def test_wrong_numbers_of_live_rows(product: Any, routines: Any) -> None:
    """More than there are: all are."""
    x, weight = normal(15, 24, 32), normal(16, 16, 32).astype(jnp.bfloat16)
    whole = np.asarray(product(x, weight))
    live = LiveRows(jnp.asarray([99, 99], jnp.int32), 8, 24)
    np.testing.assert_array_equal(np.asarray(routines.product(x, weight, live)), whole)
    live = LiveRows(jnp.asarray([-1, -1], jnp.int32), 8, 24)
    assert routines.product(x, weight, live).shape == (24, 16)
    with pytest.raises(Exception, match="first is 25, expected 0 to 24"):
        routines.product(x, weight, LiveRows(live.counts, 25, 24)).block_until_ready()


def test_what_is_not_finite_stays_in_its_row(product: Any) -> None:
    x, weight = normal(3, 20, 64), normal(4, 40, 64).astype(jnp.bfloat16)
    clean = np.asarray(product(x, weight))
    for bad in (np.nan, np.inf, -np.inf, 3e38):
        found = np.asarray(product(x.at[13, 5].set(bad), weight))
        assert not np.isfinite(found[13]).any() or bad == 3e38
        np.testing.assert_array_equal(np.delete(found, 13, 0), np.delete(clean, 13, 0))


def test_the_types_that_are_left_to_xla(routines: Any) -> None:
    x = jnp.ones((8, 16))
    assert routines.product(x, jnp.ones((4, 16), jnp.float32)) is None
    assert routines.product(x, jnp.ones((4, 16), jnp.float16)) is None
    assert routines.rms_norm(x.astype(jnp.bfloat16), jnp.ones(16), eps=1e-5, offset=0.0) is None


def test_wrong_shapes_are_named(product: Any) -> None:
    told = r"argument weight has the shape \[4, 15\], expected \[any, 16\]"
    with pytest.raises(Exception, match=told):
        product(jnp.ones((8, 16)), jnp.ones((4, 15), jnp.bfloat16)).block_until_ready()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("width", [1, 5, 16, 64, 576, 577])
def test_norms_and_their_rows(routines: Any, dtype: Any, width: int) -> None:
    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        out: jax.Array = routines.rms_norm(x, weight, eps=1e-5, offset=1.0)
        return out

    x, weight = 3 * normal(5, max(ROWS), width), normal(6, width).astype(dtype)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    exact *= np.asarray(weight, np.float64) + 1.0
    whole = np.asarray(jax.jit(norm)(x, weight))
    np.testing.assert_allclose(whole, exact, rtol=2e-6, atol=2e-6)
    for rows in ROWS:
        some = np.asarray(jax.jit(norm)(x[:rows], weight))
        np.testing.assert_array_equal(some.view(np.uint32), whole[:rows].view(np.uint32))

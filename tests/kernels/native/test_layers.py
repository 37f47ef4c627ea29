"""Products and norms of the native library against float64, and the sameness of their rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

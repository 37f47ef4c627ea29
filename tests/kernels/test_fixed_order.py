"""Products and sums with a fixed order: right, and the same bits in any company."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fixed_order
from pallas_kernels.fixed_order import product_config

SHAPES: dict[str, tuple[int, int, int, int]] = {
    "one tile": (5, 1, 40, 24),
    "edges on every axis": (131, 1, 200, 100),
    "several matrices": (9, 3, 33, 64),
    "shares of the contracted axis": (7, 1, 70, 4200),
}
"""T, B, O, K."""

product = jax.jit(functools.partial(fixed_order.product, interpret=True))
row_sums = jax.jit(functools.partial(fixed_order.row_sums, interpret=True))


def case(shape: tuple[int, int, int, int], dtype: str) -> tuple[jax.Array, jax.Array]:
    tokens, matrices, columns, depth = shape
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, matrices, depth), np.float32)
    weight = rng.standard_normal((matrices, columns, depth), np.float32)
    return jnp.asarray(x).astype(dtype), jnp.asarray(weight).astype(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, dtype) for shape in SHAPES.values() for dtype in ("float32", "bfloat16")),
        (SHAPES["several matrices"], "float16"),
    ],
)
def test_products_are_right(shape: tuple[int, int, int, int], dtype: str) -> None:
    x, weight = case(shape, dtype)
    expected = np.einsum("tbk,bok->tbo", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    found = product(x, weight)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=2e-6 * shape[3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(160, 1, 70, 4200), (160, 2, 130, 96)])
def test_a_row_of_a_product_has_its_bits_in_any_company(
    shape: tuple[int, int, int, int], dtype: str
) -> None:
    """Beside any number of rows, at any place of a tile, and beside rows that are not finite."""
    x, weight = case(shape, dtype)
    whole = np.asarray(product(x, weight))
    for first, count in ((0, 1), (0, 8), (3, 17), (100, 60), (127, 2)):
        found = np.asarray(product(x[first : first + count], weight))
        np.testing.assert_array_equal(found, whole[first : first + count])
    broken = np.asarray(product(x.at[::2].set(jnp.nan), weight))
    np.testing.assert_array_equal(broken[1::2], whole[1::2])


@pytest.mark.parametrize("width", [16, 100, 5000])
def test_row_sums(width: int) -> None:
    x = jnp.asarray(np.random.default_rng(1).standard_normal((67, width), np.float32))
    whole = row_sums(x)
    assert whole.shape == (67, 1)
    np.testing.assert_allclose(whole[:, 0], np.asarray(x, np.float64).sum(1), atol=1e-6 * width)
    for first, count in ((0, 1), (5, 8), (33, 34), (66, 1)):
        found = row_sums(x[first : first + count])
        np.testing.assert_array_equal(found, whole[first : first + count])


def test_sizes_follow_from_the_weight_alone() -> None:
    assert list(inspect.signature(product_config).parameters) == [
        *("matrices", "columns", "depth", "dtype")
    ]
    splits = [
        product_config(matrices, columns, depth, jnp.dtype(jnp.bfloat16)).splits
        for matrices, columns, depth in (
            (1, 28672, 4096),  # as many programs as multiprocessors without any split
            (1, 4096, 14336),
            (1, 4096, 4096),
            (1, 64, 8192),
            (1, 64, 1024),
            (128, 128, 8192),
        )
    ]
    assert splits == [1, 4, 4, 8, 1, 1]


def test_arrays_that_32_bits_cannot_address_are_refused() -> None:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    small = shape(8, 1, 4096), shape(1, 128_256, 4096)
    assert jax.eval_shape(fixed_order.product, *small).shape == (8, 1, 128_256)
    with pytest.raises(NotImplementedError, match="result of 2189.* deterministic"):
        jax.eval_shape(fixed_order.product, shape(17_072, 1, 4096), shape(1, 128_256, 4096))

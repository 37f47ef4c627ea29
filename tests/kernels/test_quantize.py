from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pallas_kernels.quantize import SMALLEST_SCALE, dequantize, quantize

INT8, F8 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
both = pytest.mark.parametrize("dtype", [INT8, F8], ids=str)
run = jax.jit(quantize, static_argnames="dtype")


@both
@given(
    arrays.arrays(
        np.float32, (3, 16), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_nan=False)
    )
)
def test_errors_are_bounded(dtype: np.dtype, values: np.ndarray) -> None:
    """By half a step of int8 (here of the row's largest element), or of float8 at the element."""
    stored, scale = run(values, dtype=dtype)
    assert stored.dtype == dtype and scale.shape == (3, 1)
    assert (np.asarray(scale) >= SMALLEST_SCALE).all()
    read = np.asarray(dequantize(stored, scale[..., 0]), np.float64)
    step = np.asarray(scale, np.float64)
    if dtype == INT8:
        limit = 0.5 * step
    else:
        limit = np.maximum(np.abs(values) / 16, 2.0**-10 * step)
    assert (np.abs(read - values) <= limit * (1 + 1e-5)).all()


@both
@pytest.mark.parametrize("size", [1e-25, 0.3, 1.0, 12345.0, 3.4e38])
def test_the_largest_element_gets_the_largest_number(dtype: np.dtype, size: float) -> None:
    """Also where the scale was rounded: none overflows (in float8 to NaN) and none falls short."""
    rows = size * np.random.default_rng(0).uniform(0.5, 1.0, (4096, 1)).astype(np.float32)
    stored, scale = run(np.concatenate([rows, -rows], axis=1), dtype=dtype)
    top = 127.0 if dtype == INT8 else 448.0
    assert (np.asarray(stored, np.float32) == [top, -top]).all()
    np.testing.assert_allclose(np.asarray(scale), rows / top, rtol=1e-6)


@both
@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-38])
def test_rows_next_to_zero(dtype: np.dtype, value: float) -> None:
    stored, scale = run(np.full((1, 4), value, np.float32), dtype=dtype)
    assert (np.asarray(stored, np.float32) == 0).all()
    assert (np.asarray(scale) == SMALLEST_SCALE).all()


@both
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_reads_as_nan(dtype: np.dtype, bad: float) -> None:
    values = np.ones((3, 8), np.float32)
    values[1, 5] = bad
    stored, scale = run(values, dtype=dtype)
    read = np.asarray(dequantize(stored, scale[..., 0]))
    assert np.isnan(read[1]).all()
    np.testing.assert_allclose(read[[0, 2]], 1.0, rtol=1e-6)
    assert (np.asarray(stored, np.float32)[1] == 0).all(), "no bits that depend on the processor"


@both
@pytest.mark.parametrize("kind", [jnp.float16, jnp.bfloat16], ids=str)
def test_16_bit_floats_are_quantised_as_float32(dtype: np.dtype, kind: jnp.dtype) -> None:
    values = jnp.asarray(np.random.default_rng(0).standard_normal((64, 32)), kind)
    one, other = run(values, dtype=dtype), run(values.astype(jnp.float32), dtype=dtype)
    for a, b in zip(one, other, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

"""The kernel that writes new K and V, interpreted, against the reference, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import reference
from pallas_kernels.paged_kv import PagedKV
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.triton_write import write_kv
from pallas_kernels.tuning import WriteConfig
from tests.kernels.attention_oracle import PagedCase, normal
from tests.kernels.backends import BF16, F8, SETUPS, Setup
from tests.kernels.lowering import A100, H200, TRITON_CALL, export_for_cuda

LENGTHS = [1, 15, 17, 40]
CONFIG = WriteConfig(block_tokens=8)


@functools.partial(
    jax.jit,
    static_argnames="layout",
    compiler_options={"xla_backend_optimization_level": 0},
    donate_argnums=0,
)
def interpreted(kv: PagedKV, k: Any, v: Any, slots: Any, *, layout: PoolLayout) -> PagedKV:
    return write_kv(kv, k, v, slots, config=CONFIG, layout=layout, interpret=True)


def new_rows(case: PagedCase, tokens: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    heads, dim = case.k_pool.shape[1:]
    k = normal(rng, (tokens, heads, dim)) * np.exp2(rng.integers(-9, 9, (tokens, heads, 1)))
    v = None if case.latent else normal(rng, (tokens, heads, case.value_dim)).astype(case.dtype)
    return k.astype(case.dtype), v


def check(setup: Setup, case: PagedCase, k: Any, v: Any, slots: Any) -> None:
    wanted = jax.jit(reference.write_kv)(case.kv(), k, v, slots)
    fields = {"k_pool": wanted.k, "v_pool": wanted.v}
    fields |= {"k_scale": wanted.k_scale, "v_scale": wanted.v_scale}
    arrays = {n: None if x is None else np.asarray(x) for n, x in fields.items()}
    expected = dataclasses.replace(case, **arrays).kv(setup.layout)
    got = interpreted(case.kv(setup.layout), k, v, slots, layout=setup.layout)
    names = [field.name for field in dataclasses.fields(PagedKV)]
    for name, one, other in [(n, getattr(expected, n), getattr(got, n)) for n in names]:
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), name


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_bits_of_the_reference(setup: Setup) -> None:
    """Tokens that fill no whole program; slots before, behind and far outside the cache."""
    case = setup.case(LENGTHS)
    k, v = new_rows(case, 21)
    end = len(case.k_pool)
    slots = np.random.default_rng(1).permutation(end)[:21].astype(np.int32)
    slots[[3, 7, 11, 20]] = [-1, end, 2**31 - 1, -(2**31)]
    check(setup, case, k, v, slots)


def test_64_bit_integers_by_default_change_no_bit() -> None:
    setup = Setup(48, 2, 1, 16, cache_dtype=np.int8)
    case = setup.case(LENGTHS)
    k, v = new_rows(case, 5)
    with jax.enable_x64(True):
        check(setup, case, k, v, np.array([3, -1, 20, 2**31 - 1, 17], np.int32))


@pytest.mark.parametrize("cache_dtype", [None, np.int8, F8], ids=["f32", "int8", "f8"])
def test_odd_rows(cache_dtype: Any) -> None:
    """NaN, infinities, zeros of both signs, the largest numbers and next to nothing."""
    setup = Setup(48, 2, 1, 16, cache_dtype=cache_dtype)
    case = setup.case(LENGTHS)
    k, v = new_rows(case, 21)
    odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1e-40, 1e-30]
    for token, value in enumerate(odd):
        k[token, 0, 5], v[token, 1] = value, value
    check(setup, case, k, v, np.arange(21, dtype=np.int32))


@pytest.mark.parametrize("cache_dtype", [None, np.int8, F8], ids=["bf16", "int8", "f8"])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**16), where=st.permutations(range(-8, 152)))
def test_any_slots(cache_dtype: Any, seed: int, where: list[int]) -> None:
    """Some of them out of range; the rest of the cache keeps its bits, poison included."""
    setup = Setup(80, 1, 1, 16, BF16, cache_dtype, layout=PoolLayout.HND)
    case = setup.case(LENGTHS, num_blocks=9)
    k, v = new_rows(case, 21, seed)
    check(setup, case, k, v, np.array(where[:21], np.int32))


def test_nothing_to_write() -> None:
    setup = Setup(64, 2, 1, 16)
    case = setup.case(LENGTHS)
    k, v = new_rows(case, 0)
    check(setup, case, k, v, np.zeros(0, np.int32))


@pytest.mark.parametrize("device", [H200, A100])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_lowers_for_a_gpu_as_one_kernel_in_place(setup: Setup, device: str) -> None:
    if device == A100 and setup.cache_dtype is F8:
        pytest.skip("no 8-bit floats before compute capability 8.9")
    case = setup.case(LENGTHS)
    k, v = new_rows(case, 21)
    kv = case.kv(setup.layout)

    def write(kv: PagedKV, k: Any, v: Any, slots: Any) -> PagedKV:
        return write_kv(kv, k, v, slots, config=CONFIG, layout=setup.layout)

    text = export_for_cuda(write, kv, k, v, np.zeros(21, np.int32), device=device)
    assert text.count(TRITON_CALL) == 1
    assert text.count("output_operand_alias<") == len(jax.tree.leaves(kv))


def test_refuses_pools_beyond_32_bits() -> None:
    pool = jax.ShapeDtypeStruct((2**20, 8, 256), jnp.int8)
    scales = jax.ShapeDtypeStruct((2**20, 8), jnp.float32)
    new = jax.ShapeDtypeStruct((4, 8, 256), jnp.bfloat16)
    write = functools.partial(write_kv, config=CONFIG)
    kv = PagedKV(pool, pool, scales, scales)
    with pytest.raises(NotImplementedError, match="2147483648 elements"):
        jax.eval_shape(write, kv, new, new, jax.ShapeDtypeStruct((4,), jnp.int32))

"""Writing into the pools: in place, with the bits that `quantize` gives."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pallas_kernels import reference
from pallas_kernels.native import ops
from pallas_kernels.paged_kv import PagedKV
from tests.kernels.backends import BF16, F8, backend

pytestmark = pytest.mark.skipif(backend("native") is None, reason="native kernels do not run here")

KINDS = [(np.float32, None), (BF16, None), (np.float16, None)]
KINDS += [(d, c) for d in (np.float32, BF16, np.float16) for c in (np.int8, F8)]
kinds = pytest.mark.parametrize(("dtype", "cache"), KINDS, ids=lambda x: str(x and np.dtype(x)))
ALIASES = "output_to_operand_aliasing="
SLOTS, HEADS, DIM, VALUE_DIM = 40, 3, 21, 16


def empty(dtype: Any, cache: Any, *, latent: bool = False, slots: int = SLOTS) -> PagedKV:
    """As the engine has it on CPU."""
    stored = np.dtype(dtype if cache is None else cache)
    if stored != np.float32 and stored != np.int8:
        stored = np.dtype(f"u{stored.itemsize}")
    dims = [DIM] if latent else [DIM, VALUE_DIM]
    pools: list[Any] = [jnp.full((slots, HEADS, dim), 7, stored) for dim in dims]
    scales: list[Any] = [jnp.full((slots, HEADS), 7, jnp.float32) for _ in dims if cache]
    pools, scales = (x + [None] * (2 - len(x)) for x in (pools, scales))
    return PagedKV(*pools, *scales)


def equal(one: PagedKV, other: PagedKV) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype == np.float32:  # there is more than one NaN
            a, b = np.where(np.isnan(a), np.nan, a), np.where(np.isnan(b), np.nan, b)
        assert a.tobytes() == b.tobytes()


@kinds
@pytest.mark.parametrize("latent", [False, True])
def test_as_the_reference_writes(dtype: Any, cache: Any, *, latent: bool) -> None:
    rng = np.random.default_rng(0)
    slots = rng.permutation(SLOTS + 2)[:30].astype(np.int32)
    slots[[3, 9]] = -1, 2**31 - 1
    lowest, highest = (-18, 12) if dtype is np.float16 else (-130, 120)
    sizes = np.exp2(rng.integers(lowest, highest, (30, HEADS, 1))).astype(np.float32)
    k, v = (
        (rng.standard_normal((30, HEADS, d), np.float32) * sizes).astype(dtype)
        for d in (DIM, VALUE_DIM)
    )
    k[0], k[1, :, 3], k[2, 1, 0], v[5, 2] = 0, np.nan, np.inf, -0.0
    new = None if latent else v
    kv = empty(dtype, cache, latent=latent)
    written = jax.jit(ops.write_kv)(kv, k, new, slots)
    equal(written, jax.jit(reference.write_kv)(kv, jnp.asarray(k), new, slots))


@pytest.mark.parametrize("cache", [np.int8, F8], ids=["int8", "f8"])
@settings(max_examples=60)
@given(row=arrays.arrays(np.float32, 21, elements=st.floats(width=32)))
def test_any_row_has_the_bits_of_quantize(cache: Any, row: Any) -> None:
    k = np.broadcast_to(row, (1, HEADS, DIM)).copy()
    kv = empty(np.float32, cache, latent=True)
    equal(
        _write(kv, k, None, np.zeros(1, np.int32)), _reference(kv, k, None, np.zeros(1, np.int32))
    )


_write, _reference = jax.jit(ops.write_kv), jax.jit(reference.write_kv)


@pytest.mark.parametrize("cache", [np.int8, F8], ids=["int8", "f8"])
def test_halves_between_two_steps(cache: Any) -> None:
    """Rows whose scale is a power of two, and elements that lie just between two neighbours."""
    top = np.float32(127 if cache is np.int8 else 448)
    lattice = np.arange(-127, 128).astype(np.float32)
    if cache is not np.int8:
        every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        lattice = np.unique(every[np.isfinite(every)])
    between = (lattice[1:] + lattice[:-1]) / 2
    for values in (lattice, between, -between, np.nextafter(between, np.float32(0))):
        padded = np.append(values, [0] * (-len(values) % (DIM - 1))).reshape(-1, DIM - 1)
        rows = np.append(padded, np.full((len(padded), 1), top), axis=1).astype(np.float32)
        k = np.repeat(rows[:, None], HEADS, axis=1)
        kv = empty(np.float32, cache, latent=True)
        slots = np.arange(len(k), dtype=np.int32)
        equal(_write(kv, k, None, slots), _reference(kv, k, None, slots))


@kinds
def test_in_place(dtype: Any, cache: Any) -> None:
    """The pools keep their memory, through several layers and beside attention that reads them, and
    no part of the program makes another one of their size.
    """
    slots = 512
    pools = [empty(dtype, cache, slots=slots) for _ in range(2)]
    rng = np.random.default_rng(0)
    k = rng.standard_normal((4, HEADS, DIM), np.float32).astype(dtype)
    v = rng.standard_normal((4, HEADS, VALUE_DIM), np.float32).astype(dtype)
    to, tables = np.arange(4, dtype=np.int32), np.zeros((4, 1), np.int32)
    positions = np.arange(4, dtype=np.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(pools: list[PagedKV], q: Any) -> tuple[list[PagedKV], Any]:
        new = []
        for i, kv in enumerate(pools):
            if i == 0:
                kv = ops.write_kv(kv, k, v, to)
                out = ops.paged_decode(q, kv, tables, positions, block_size=16, scale=1.0)
            else:
                out, kv = ops.attend(
                    *(q, k, v, kv, to, tables, positions, None), block_size=16, scale=1.0
                )
            q = jnp.pad(out, ((0, 0), (0, 0), (0, DIM - VALUE_DIM)))
            new.append(kv)
        return new, q

    q = jnp.zeros((4, HEADS, DIM), dtype)
    compiled = step.lower(pools, q).compile()
    for line in compiled.as_text().splitlines():
        made = re.match(rf"\s*(ROOT )?%?\S+ = .*?\[{slots},.*?[\]}})] ([a-z-]+)\(", line)
        ours = made is not None and made[2] == "custom-call"
        passes_on = ("parameter", "get-tuple-element", "tuple", "bitcast")
        assert made is None or made[2] in passes_on or (ours and ALIASES in line), line
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pools)]
    new, _ = compiled(pools, q)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)] == before


def test_old_pools_stay_as_they_were() -> None:
    """Where they are not given away, XLA copies them, and writes into the copy."""
    kv = empty(np.float32, None)
    old = np.asarray(kv.k).copy()
    k, v = np.ones((1, HEADS, DIM), np.float32), np.ones((1, HEADS, VALUE_DIM), np.float32)
    written = _write(kv, k, v, np.zeros(1, np.int32))
    assert np.asarray(kv.k).tobytes() == old.tobytes()
    assert (np.asarray(written.k)[0] == 1).all()


def test_many_tokens() -> None:
    """So many that threads share them."""
    rng = np.random.default_rng(0)
    slots = rng.permutation(6000).astype(np.int32)[:5000]
    k = rng.standard_normal((5000, HEADS, DIM), np.float32)
    v = rng.standard_normal((5000, HEADS, VALUE_DIM), np.float32)
    for cache in (None, np.int8):
        kv = empty(np.float32, cache, slots=6000)
        equal(_write(kv, k, v, slots), _reference(kv, k, v, slots))

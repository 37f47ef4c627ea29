"""Who promises what, and the attention of a deterministic engine with a GPU's kernels, interpreted:
a token has its bits whatever the step that computes it looks like.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from jaxpaged.device import determinism
from jaxpaged.device.attention import AttentionMeta, AttentionSizes, Kernel, KernelAttention
from jaxpaged.device.attention_choice import choose_backend
from jaxpaged.device.buckets import choose_buckets
from jaxpaged.device.determinism import COMPILER_OPTIONS, KernelOrder, decide, tell
from jaxpaged.errors import ConfigError
from jaxpaged.models.order import fixed_order, order_in_force
from pallas_kernels import triton_decode, triton_prefill
from pallas_kernels.paged_kv import PagedKV
from tests.e2e.support import small_llm
from tests.kernels.attention_oracle import PagedCase, paged_case, tiles_for

CPU = jax.devices()[0]


def device(platform: str, kind: str, capability: str | None = None) -> Any:
    made = SimpleNamespace(platform=platform, device_kind=kind)
    if capability is not None:
        made.compute_capability = capability
    return made


H200 = device("gpu", "NVIDIA H200", "9.0")
MI300 = device("gpu", "AMD Instinct MI300X", "gfx942")
TPU = device("tpu", "TPU v5e")

# ---------------------------------------------------------------- who promises what


@pytest.mark.parametrize("setting", [None, True, False])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_on_cpu_it_is_free_and_always_on(setting: bool | None, backend: str) -> None:
    chosen = decide(setting, backend, CPU)
    assert chosen.promised and not chosen.fixed_sizes
    assert chosen.compiler_options is None
    assert ("changes nothing" in chosen.reason) == (setting is False)
    assert "does not depend" in tell(chosen)


@pytest.mark.parametrize("setting", [None, False])
@pytest.mark.parametrize("where", [H200, TPU, MI300])
def test_elsewhere_it_is_off_unless_asked_for(setting: bool | None, where: Any) -> None:
    chosen = decide(setting, "auto", where)
    assert not chosen.promised and not chosen.fixed_sizes
    assert "may depend" in tell(chosen)


def test_on_a_cuda_device_it_is_there_if_asked_for() -> None:
    chosen = decide(True, "auto", H200)
    assert chosen.promised
    assert chosen.order == KernelOrder(interpret=False)
    assert chosen.compiler_options == COMPILER_OPTIONS


@pytest.mark.parametrize("where", [TPU, MI300])
def test_where_there_are_no_kernels_it_is_refused(where: Any) -> None:
    with pytest.raises(ConfigError, match=f"deterministic=True.*{where.device_kind}. Leave it out"):
        decide(True, "auto", where)


def test_jaxlib_has_the_compiler_options() -> None:
    """An option that it does not have is an error, on any platform."""
    add = jax.jit(lambda x: x + 1.0, compiler_options=COMPILER_OPTIONS)
    assert float(add(jnp.float32(1.0))) == 2.0
    unknown = jax.jit(lambda x: x + 1.0, compiler_options={"xla_gpu_no_such_thing": True})
    with pytest.raises(Exception, match="No such compile option"):
        unknown(jnp.float32(1.0))


def test_all_steps_of_a_deterministic_engine_have_the_same_rows() -> None:
    assert choose_buckets(64, 256, decode=(8, 64), one_decode=True).decode == (64,)
    assert choose_buckets(20, 256, one_decode=True).decode == (24,)
    with pytest.raises(ConfigError, match="must end at max_num_seqs"):
        choose_buckets(64, 256, decode=(8, 32), one_decode=True)


def test_an_order_is_in_force_inside_its_block_alone() -> None:
    order = KernelOrder(interpret=True)
    with fixed_order(order):
        assert order_in_force() is order
        with fixed_order(None):
            assert order_in_force() is None
        with pytest.raises(RuntimeError), fixed_order(None):
            raise RuntimeError
        assert order_in_force() is order
    assert order_in_force() is None


def test_the_engine_says_what_it_promises(
    tiny_llama_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="jaxpaged")
    for settings, promised in (
        ({}, True),
        ({"deterministic": False}, True),
        ({"attention_backend": "pallas_interpret"}, False),
    ):
        caplog.clear()
        with small_llm(tiny_llama_path, enforce_eager=True, **settings) as llm:
            assert llm.engine.runner.deterministic is promised
        (line,) = (r.getMessage() for r in caplog.records if "Deterministic" in r.getMessage())
        assert ("does not depend" in line) is promised


@pytest.fixture
def tiny_llama_path(tmp_path: Path) -> Path:
    from tests.tiny_models import tiny_llama

    return tiny_llama(tmp_path / "llama")


# ---------------------------------------------------------------- attention

BLOCK, LENGTH = 16, 150
Chunk = tuple[int, int]
"""First position, tokens."""


def backend_for(case: PagedCase, *, fixed: bool, window: int | None) -> KernelAttention:
    latent = case.latent
    sizes = AttentionSizes(
        group=case.group,
        kv_heads=case.k_pool.shape[1],
        head_dim=case.k_pool.shape[2],
        value_dim=case.value_dim,
        latent=latent,
        block_size=BLOCK,
        dtype=np.dtype(case.dtype),
        cache_dtype=np.dtype(case.k_pool.dtype),
        windows=frozenset({window}),
        soft_cap=None,
        fixed=fixed,
    )
    return KernelAttention(
        "pallas_interpret",
        sizes,
        "NVIDIA H200",
        decode=Kernel("pallas_triton", triton_decode),
        prefill=Kernel("pallas_triton", triton_prefill),
        interpret=True,
    )


def step(
    backend: KernelAttention,
    case: PagedCase,
    queries: npt.NDArray[Any],
    *,
    decode: list[int],
    chunks: list[Chunk],
    rows: int,
    tokens: int,
    window: int | None,
) -> dict[int, npt.NDArray[Any]]:
    """Attention of one step over the only sequence of `case`, whose KV is all there: position of a
    token -> its output. `rows` and `tokens` are those of the program.
    """
    q = np.full((rows + tokens, *queries.shape[1:]), 7.0, queries.dtype)
    positions = np.full(rows, -1, np.int32)
    positions[: len(decode)] = decode
    listed = [*decode, *(first + i for first, count in chunks for i in range(count))]
    places = [*range(len(decode)), *range(rows, rows + len(listed) - len(decode))]
    q[places] = queries[listed]
    tables = np.repeat(case.tables[:1], rows, axis=0)
    tile = backend.tile(tokens, BLOCK * tables.shape[1])
    num_tiles = tokens // tile + rows if tokens else 0
    tiles = tiles_for(
        [(len(decode) + n, first, count) for n, (first, count) in enumerate(chunks)],
        tile=tile,
        num_tokens=tokens,
        num_tiles=num_tiles,
    )
    nothing = len(case.k_pool) + np.arange(len(q), dtype=np.int32)  # slots beyond the pool
    meta = AttentionMeta(
        *map(jnp.asarray, (nothing, tables, positions)), jax.tree.map(jnp.asarray, tiles.arrays)
    )
    kv_heads, dim = case.k_pool.shape[1:]
    new = jnp.zeros((len(q), kv_heads, dim), q.dtype)
    out, _ = attend(backend, jnp.asarray(q), new, case.kv(), meta, window)
    found = np.asarray(out)
    return dict(zip(listed, found[places], strict=True))


@functools.partial(jax.jit, static_argnums=(0, 5))
def attend(
    backend: KernelAttention,
    q: jax.Array,
    new: jax.Array,
    kv: PagedKV,
    meta: AttentionMeta,
    window: int | None,
) -> tuple[jax.Array, PagedKV]:
    latent = backend.sizes.latent
    return backend.attend(
        *(q, new, None if latent else new, kv, meta),
        scale=0.25,
        window=window,
        soft_cap=None,
        value_dim=backend.sizes.value_dim if latent else None,
    )


CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "float32": ({}, None),
    "float32, window": ({}, 40),
    "bfloat16": ({"dtype": ml_dtypes.bfloat16}, None),
    "int8": ({"dtype": ml_dtypes.bfloat16, "cache_dtype": np.int8}, None),
    "latent": ({"latent": True, "kv_heads": 1, "head_dim": 80, "value_dim": 64}, None),
}


def answers(
    name: str, *, fixed: bool
) -> tuple[dict[int, npt.NDArray[Any]], list[dict[int, npt.NDArray[Any]]]]:
    """Outputs of all tokens as one chunk, and in other ways."""
    settings, window = CASES[name]
    case = paged_case(
        [LENGTH], **{"block_size": BLOCK, "kv_heads": 2, "group": 3, "head_dim": 16, **settings}
    )
    backend = backend_for(case, fixed=fixed, window=window)
    queries = case.queries(LENGTH, np.random.default_rng(3))
    run = functools.partial(step, backend, case, queries, window=window)
    whole = run(decode=[], chunks=[(0, LENGTH)], rows=8, tokens=160)
    others = []
    for first in (0, 31, 63, 64, LENGTH - 5):  # alone, and with others in another program
        others.append(run(decode=[first], chunks=[], rows=8, tokens=0))
        decode = list(range(first, first + 5))
        others.append(run(decode=decode, chunks=[(90, 7), (3, 40)], rows=16, tokens=64))
    for size, most in ((7, 9), (33, 1)):
        starts = range(0, LENGTH, size)
        pieces = [(first, min(size, LENGTH - first)) for first in starts]
        for first in range(0, len(pieces), most):
            chunks = pieces[first : first + most]
            others.append(run(decode=[], chunks=chunks, rows=16, tokens=64))
    return whole, others


@pytest.mark.parametrize(
    "name",
    [
        *("float32", "bfloat16"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("float32, window", "int8", "latent")),
    ],
)
def test_a_token_has_its_bits_in_any_step(name: str) -> None:
    whole, others = answers(name, fixed=True)
    assert np.isfinite(np.stack(list(whole.values())).astype(np.float32)).all()
    compared = 0
    for found in others:
        for position, out in found.items():
            np.testing.assert_array_equal(out, whole[position], err_msg=f"{name}: {position}")
            compared += 1
    assert compared > 3 * LENGTH


def test_without_it_they_differ_and_are_close() -> None:
    """Or the test above would prove nothing."""
    whole, others = answers("float32", fixed=False)
    pairs = [(out, whole[position]) for found in others for position, out in found.items()]
    assert any((a != b).any() for a, b in pairs)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_sizes_do_not_follow_the_step() -> None:
    case = paged_case([20], block_size=BLOCK, kv_heads=2, group=3, head_dim=16)
    fixed, free = (backend_for(case, fixed=f, window=None) for f in (True, False))
    shapes = [(8, 16), (128, 2048), (8192, 131_072)]
    configs = {fixed._prefill_config(*shape) for shape in shapes}
    assert configs == {free._prefill_config(determinism.CONFIG_TOKENS, determinism.CONFIG_CONTEXT)}


def test_mosaic_gpu_has_no_such_kernel() -> None:
    case = paged_case([20], block_size=BLOCK, kv_heads=2, group=3, head_dim=16)
    sizes = backend_for(case, fixed=True, window=None).sizes
    with pytest.raises(ConfigError, match=r"deterministic=True.*Pallas Triton's"):
        choose_backend("pallas_mosaic", sizes, H200)

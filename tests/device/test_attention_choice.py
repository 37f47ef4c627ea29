"""Which backend an engine gets on which device; the devices here are made up."""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from jaxpaged.device.attention import AttentionSizes, KernelAttention
from jaxpaged.device.attention_choice import choose_backend, read_tuning_table
from jaxpaged.device.compile_ledger import known_deprecations
from jaxpaged.device.kv_cache import CACHE_DTYPES
from jaxpaged.errors import ConfigError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.registry import find_model
from pallas_kernels import mosaic_compat, mosaic_decode, mosaic_prefill
from pallas_kernels.native import ops, toolchain, trial
from pallas_kernels.tuning import Entry, PrefillConfig, write_table
from tests.device.model_shapes import LLAMA_3_8B, TINY
from tests.device.tiny_runner import parts_of, runner_of
from tests.kernels.lowering import TRITON_CALL, export_for_cuda
from tests.tiny_models import tiny_llama
from tests.zoo.case import all_cases, stored

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
HAS_MOSAIC = mosaic_compat.plgpu is not None
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, toolchain.COMPILERS)), reason="there is no C++ compiler"
)
needs_mosaic = pytest.mark.skipif(not HAS_MOSAIC, reason="this JAX does not import Mosaic GPU")


def device(platform: str, kind: str, capability: str | None = None) -> Any:
    made = SimpleNamespace(platform=platform, device_kind=kind)
    if capability is not None:
        made.compute_capability = capability
    return made


CPU = jax.devices()[0]
H200 = device("gpu", "NVIDIA H200", "9.0")
A100 = device("gpu", "NVIDIA A100-SXM4-80GB", "8.0")
V100 = device("gpu", "Tesla V100", "7.0")
B200 = device("gpu", "NVIDIA B200", "10.0")
MI300 = device("gpu", "AMD Instinct MI300X", "gfx942")
TPU = device("tpu", "TPU v5e")


def sizes_of(
    model: ModelConfig = LLAMA_3_8B, *, block_size: int = 16, cache: jnp.dtype = BF16
) -> AttentionSizes:
    return AttentionSizes.of(model, block_size=block_size, dtype=BF16, cache_dtype=cache)


def choose(name: str, where: Any, sizes: AttentionSizes | None = None) -> tuple[str, str]:
    backend, why = choose_backend(name, sizes or sizes_of(), where)
    return backend.name, why


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ---------------------------------------------------------------- auto


@pytest.mark.parametrize("where", [MI300, TPU], ids=lambda d: d.platform)
def test_elsewhere_the_reference_is_what_one_expects(
    where: Any, caplog: pytest.LogCaptureFixture
) -> None:
    name, why = choose("auto", where)
    assert name == "reference"
    assert "no kernels for" in why and where.device_kind in why
    assert warned(caplog) == []


@needs_compiler
@pytest.mark.parametrize("cache", ["auto", *CACHE_DTYPES])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_architecture_has_native_kernels_on_cpu(
    dtype: jnp.dtype, cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored_as = jnp.dtype(CACHE_DTYPES.get(cache, dtype))
    models = [find_model(stored(case)["config"], case.name)[1] for case in all_cases()]
    for one in {sizes_of(model, block_size=24, cache=stored_as) for model in models}:
        name, why = choose("auto", CPU, dataclasses.replace(one, dtype=dtype))
        assert name == "native" and "CPU" in why, one
    assert warned(caplog) == []


@needs_compiler
def test_native_kernels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name, why = choose("native", CPU)
    assert name == "native" and why.startswith("asked for")
    for where in (H200, TPU):
        with pytest.raises(ConfigError, match=f"'native'.*for CPUs.*{where.device_kind}"):
            choose("native", where)

    def refuse(*_: Any, **__: Any) -> None:
        raise ops.Unsupported("a cache of a colour that they do not know")

    monkeypatch.setattr(ops, "attend", refuse)
    with pytest.raises(ConfigError, match="'native'.*of a colour that they do not know"):
        choose("native", CPU)


@needs_compiler
@pytest.mark.parametrize("dtype", [F32, BF16, jnp.dtype(jnp.float16)])
def test_native_kernels_that_compute_nonsense_are_not_taken(
    dtype: jnp.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = dataclasses.replace(sizes_of(TINY, cache=dtype), dtype=dtype)
    assert choose("auto", CPU, sizes)[0] == "native"
    attend = trial._attend
    for wrong in (0.9, math.nan):
        caplog.clear()
        monkeypatch.setattr(trial, "_attend", lambda *args, by=wrong: attend(*args) * by)
        assert choose("auto", CPU, sizes)[0] == "reference"
        (text,) = warned(caplog)
        assert "wrong results" in text and dtype.name in text
        with pytest.raises(ConfigError, match="'native'.*wrong results"):
            choose("native", CPU, sizes)


@pytest.mark.parametrize("where", [H200, A100, B200], ids=lambda d: d.device_kind)
def test_kernels_on_cuda(where: Any, caplog: pytest.LogCaptureFixture) -> None:
    name, why = choose("auto", where)
    assert name == "pallas_triton"
    assert where.device_kind in why and where.compute_capability in why
    assert warned(caplog) == []


@pytest.mark.parametrize(
    ("where", "sizes", "parts"),
    [
        (V100, sizes_of(), ["Tesla V100", "7.0", "8.0"]),
        (H200, sizes_of(block_size=24), ["block_size 24", "powers of two"]),
        (H200, sizes_of(dataclasses.replace(LLAMA_3_8B, head_dim=512)), ["head_dim 512", "256"]),
        (H200, sizes_of(dataclasses.replace(TINY, num_heads=258)), ["129 query heads", "128"]),
        (A100, sizes_of(cache=jnp.dtype(jnp.float8_e4m3fn)), ["fp8", "8.9", "has 8.0", "int8"]),
    ],
)
def test_one_warning_names_what_the_kernels_cannot_do(
    where: Any, sizes: AttentionSizes, parts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert choose("auto", where, sizes)[0] == "reference"
    (text,) = warned(caplog)
    for part in ["falls back", *parts]:
        assert part in text, text
    with pytest.raises(ConfigError) as error:
        choose("pallas_triton", where, sizes)
    for part in ["attention_backend='pallas_triton'", "'auto'", "'reference'", *parts]:
        assert part in str(error.value), str(error.value)


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As with a JAX that no longer has what these modules import."""
    for name in modules:
        monkeypatch.setitem(sys.modules, f"pallas_kernels.{name}", None)
        monkeypatch.delattr(pallas_kernels, name, raising=False)


def test_a_jax_without_pallas_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, "triton_decode")
    assert choose("auto", H200)[0] == "reference"
    assert len(warned(caplog)) == 1 and "triton_decode" in warned(caplog)[0]
    with pytest.raises(ConfigError, match="pallas_triton.*triton_decode"):
        choose("pallas_triton", H200)


@pytest.mark.parametrize("cache", ["auto", *CACHE_DTYPES])
def test_every_architecture_has_its_kernels_on_cuda(
    cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = jnp.dtype(CACHE_DTYPES.get(cache, BF16))
    models = [find_model(stored(case)["config"], case.name)[1] for case in all_cases()]
    sizes = {sizes_of(model, cache=dtype) for model in models}
    assert any(s.latent for s in sizes) and any(s.soft_cap for s in sizes)
    assert any(s.windows != {None} for s in sizes) and any(s.group == 1 for s in sizes)
    for one in sizes:
        assert choose("auto", H200, one)[0] == "pallas_triton", one
    assert warned(caplog) == []


# ---------------------------------------------------------------- by name


def test_the_reference_runs_everywhere() -> None:
    for where in (CPU, H200, V100, MI300, TPU):
        assert choose("reference", where) == ("reference", "asked for")


@pytest.mark.parametrize("name", ["pallas_triton", "pallas_mosaic"])
@pytest.mark.parametrize("where", [CPU, MI300, TPU], ids=lambda d: d.platform)
def test_kernels_asked_for_where_there_are_none(name: str, where: Any) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend='{name}'.*needs a CUDA device"):
        choose(name, where)


def test_the_interpreter_runs_on_cpu_and_only_if_asked_for() -> None:
    assert choose("pallas_interpret", CPU) == ("pallas_interpret", "asked for")
    with pytest.raises(ConfigError, match="pallas_interpret.*block_size 24"):
        choose("pallas_interpret", CPU, sizes_of(block_size=24))


@pytest.mark.parametrize("where", [A100, B200], ids=lambda d: d.device_kind)
def test_mosaic_is_for_hopper(where: Any) -> None:
    with pytest.raises(ConfigError) as error:
        choose("pallas_mosaic", where)
    for part in ("pallas_mosaic", "Hopper", "9.0", where.device_kind, where.compute_capability):
        assert part in str(error.value), str(error.value)


@needs_mosaic
def test_mosaic(caplog: pytest.LogCaptureFixture) -> None:
    assert choose("pallas_mosaic", H200) == ("pallas_mosaic", "asked for")
    assert warned(caplog) == []


@needs_mosaic
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_triton_stands_in_for_one_kernel_and_a_warning_says_so(
    kernel: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = {"decode": mosaic_decode, "prefill": mosaic_prefill}[kernel]
    monkeypatch.setattr(module, f"paged_{kernel}", refuse)
    backend, _ = choose_backend("pallas_mosaic", sizes_of(), H200)
    assert isinstance(backend, KernelAttention) and backend.name == "pallas_mosaic"
    made_by = {"decode": backend.decode_kernel.backend, "prefill": backend.prefill_kernel.backend}
    assert made_by.pop(kernel) == "pallas_triton"
    assert [*made_by.values()] == ["pallas_mosaic"]
    (text,) = warned(caplog)
    for part in (f"no {kernel} kernel", "Pallas Triton", "of a colour that it does not know"):
        assert part in text


def refuse(*_: Any, **__: Any) -> None:
    raise NotImplementedError("a cache of a colour that it does not know")


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        (dataclasses.replace(sizes_of(), dtype=F32, cache_dtype=F32), "float32"),
        (sizes_of(cache=jnp.dtype(jnp.int8)), "int8"),
        (dataclasses.replace(sizes_of(), head_dim=80, value_dim=80), "head_dim 80"),
    ],
)
def test_without_any_kernel_of_its_own_mosaic_is_refused(sizes: AttentionSizes, part: str) -> None:
    """So it is where Mosaic GPU itself is missing: then that is the reason."""
    with pytest.raises(ConfigError) as error:
        choose("pallas_mosaic", H200, sizes)
    assert (part if HAS_MOSAIC else "does not import here") in str(error.value)
    assert "attention_backend='pallas_mosaic'" in str(error.value)


# ---------------------------------------------------------------- in a program


def test_the_step_is_lowered_for_a_gpu_without_a_word(tmp_path: Path) -> None:
    """JAX says with every lowering that Pallas Triton is deprecated; users need not hear it."""
    parts = parts_of(tiny_llama(tmp_path / "m"))
    runner = runner_of(parts)
    backend, _ = choose_backend("pallas_triton", runner._backend.sizes, H200)
    runner = runner_of(parts, backend=backend)
    for shape in runner.buckets.shapes:
        layout = runner.layout(shape)
        ints = jax.ShapeDtypeStruct((layout.num_ints,), jnp.int32)
        floats = jax.ShapeDtypeStruct((layout.num_floats,), jnp.float32)

        def step(weights: Any, state: Any, ints: Any, floats: Any, layout: Any = layout) -> Any:
            return runner.programs.step(weights, state, ints, floats, layout)

        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (runner._weights, runner._state)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with known_deprecations():
                module = export_for_cuda(step, *arguments, ints, floats)
        assert module.count(TRITON_CALL) == (1 if shape.tokens == 0 else 2), "layers share a call"
    runner.close()


def test_the_tiles_of_the_host_follow_from_the_kernel() -> None:
    backend, _ = choose_backend("pallas_triton", sizes_of(), H200)
    tiles = {backend.tile(tokens, 4096) for tokens in (64, 512, 8192)}
    reference, _ = choose_backend("reference", sizes_of(), H200)
    assert reference.tile(8192, 4096) == 8, "32 matmul rows of four query heads a KV head"
    assert min(tiles) > 8, "more rows for tensor cores"


def test_a_tuning_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    config = PrefillConfig(block_rows=32, block_kv=32, num_warps=4, num_stages=2)
    write_table(
        [
            Entry(
                kernel="prefill",
                device=H200.device_kind,
                head_dim=128,
                kv_dtype="bfloat16",
                config=config,
            )
        ],
        path,
    )
    sizes = dataclasses.replace(sizes_of(), table=read_tuning_table(str(path)))
    mine, _ = choose_backend("pallas_triton", sizes, H200)
    assert mine.tile(8192, 4096) == 32 // 4
    usual, _ = choose_backend("pallas_triton", sizes_of(), H200)
    assert usual.tile(8192, 4096) > 8
    assert read_tuning_table(None) is None

    with pytest.raises(ConfigError, match=r"kernel_tuning_table='.*none.json': No such file"):
        read_tuning_table(str(tmp_path / "none.json"))
    path.write_text(path.read_text().replace('"num_warps": 4', '"num_warps": 3'))
    with pytest.raises(ConfigError, match=r"(?s)mine.json'?, entry 0: .*num_warps is 3"):
        read_tuning_table(str(path))

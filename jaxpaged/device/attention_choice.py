"""Which attention backend an engine has, and why."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp

from jaxpaged.config import cache_root, cxx
from jaxpaged.device.attention import (
    AttentionMeta,
    AttentionSizes,
    Kernel,
    KernelAttention,
    NativeAttention,
    PagedAttention,
    ReferenceAttention,
)
from jaxpaged.device.kv_cache import storage_dtype
from jaxpaged.errors import ConfigError
from pallas_kernels.native import build, trial
from pallas_kernels.paged_kv import PagedKV, PrefillTiles, is_8_bit
from pallas_kernels.tuning import TuningTable, load_table

_log = logging.getLogger(__name__)
LEAST_CAPABILITY = (8, 0)
"""Of a CUDA device: bfloat16 and asynchronous copies."""
LEAST_CAPABILITY_FLOAT8 = (8, 9)
HOPPER = (9, 0)
_COST_ON_CPU = "about 5 times as long"
"""Measured on decode steps: docs/kernels.md."""
_TRIED_ROWS, _TRIED_TOKENS = 8, 16
"""Sizes of the step that kernels are tried on."""


class _Unsuitable(Exception):
    """The device cannot run a backend."""


_REFUSALS = (_Unsuitable, NotImplementedError, ImportError, build.NativeUnavailable)


def choose_backend(
    name: str, sizes: AttentionSizes, device: jax.Device
) -> tuple[PagedAttention, str]:
    """The backend for the setting `attention_backend=name` on `device`, and the reason, to be
    logged once. No weights are needed: kernels are tried by tracing them on shapes.

    "auto" takes Pallas Triton on CUDA devices and the native kernels on CPUs, or warns and takes
    the reference if it cannot; and the reference elsewhere. Raises `ConfigError` if a backend asked
    for by name cannot serve.
    """
    if name == "reference":
        return ReferenceAttention(sizes), "asked for"
    if name == "auto":
        return _automatic(sizes, device)
    make = {
        "native": _native,
        "pallas_triton": _triton,
        "pallas_mosaic": _mosaic,
        "pallas_interpret": _interpreted,
    }
    try:
        backend = make[name](sizes, device)
        return backend, "asked for" if backend.variant is None else f"asked for, {backend.variant}"
    except _REFUSALS as error:
        raise ConfigError(
            f"attention_backend={name!r} cannot serve this model here: {_told(error)}. Take "
            "'auto', or 'reference', which runs everywhere."
        ) from error


def read_tuning_table(path: str | None) -> TuningTable | None:
    """The file of the setting `kernel_tuning_table`. Raises `ConfigError` for a bad one."""
    if path is None:
        return None
    try:
        return load_table(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(f"kernel_tuning_table={path!r}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"kernel_tuning_table: {error}") from error


def _automatic(sizes: AttentionSizes, device: jax.Device) -> tuple[PagedAttention, str]:
    if device.platform == "cpu":
        return _automatic_on_cpu(sizes, device)
    capability = _capability(device)
    if capability is None:
        return ReferenceAttention(sizes), f"there are no kernels for {_kind(device)}"
    try:
        backend = _triton(sizes, device)
    except _REFUSALS as error:
        _log.warning(
            "Attention falls back from Pallas kernels to plain XLA, which is slower: %s.",
            _told(error),
        )
        return ReferenceAttention(sizes), "the kernels cannot serve"
    return backend, f"{device.device_kind}, compute capability {_dotted(capability)}"


def _automatic_on_cpu(sizes: AttentionSizes, device: jax.Device) -> tuple[PagedAttention, str]:
    try:
        backend = _native(sizes, device)
    except _REFUSALS as error:
        _log.warning(
            "Attention falls back from native kernels to plain XLA, which takes %s: %s.",
            _COST_ON_CPU,
            _told(error),
        )
        return ReferenceAttention(sizes), "the native kernels cannot serve"
    return backend, f"kernels for CPUs, {backend.variant}"


def _native(sizes: AttentionSizes, device: jax.Device) -> PagedAttention:
    if device.platform != "cpu":
        raise _Unsuitable(f"it is for CPUs, and the model runs on {device.device_kind}")
    build.load(folder=cache_root() / "native", compiler=cxx(), announce=_log.info)
    backend = NativeAttention(sizes)
    _try(backend)
    trial.check(sizes.dtype)
    return backend


def _triton(sizes: AttentionSizes, device: jax.Device) -> PagedAttention:
    capability = _cuda_capability(device)
    if capability < LEAST_CAPABILITY:
        raise _Unsuitable(
            f"it needs compute capability {_dotted(LEAST_CAPABILITY)}, and {device.device_kind} "
            f"has {_dotted(capability)}"
        )
    if sizes.cache_dtype == jnp.float8_e4m3fn and capability < LEAST_CAPABILITY_FLOAT8:
        raise _Unsuitable(
            f"an fp8 cache needs compute capability {_dotted(LEAST_CAPABILITY_FLOAT8)}, and "
            f"{device.device_kind} has {_dotted(capability)}; kv_cache_dtype='int8' does not"
        )
    return _triton_kernels("pallas_triton", sizes, device, interpret=False)


def _interpreted(sizes: AttentionSizes, device: jax.Device) -> PagedAttention:
    backend = _triton_kernels("pallas_interpret", sizes, device, interpret=True)
    # When JAX first lowers an interpreted kernel, it imports more of Pallas, and with it an option
    # that is part of every tracing cache's key: what was traced before would be compiled again.
    window = next(iter(sizes.windows))
    jax.jit(functools.partial(_small_step, backend, 0, window)).lower()
    return backend


def _triton_kernels(
    name: str, sizes: AttentionSizes, device: jax.Device, *, interpret: bool
) -> PagedAttention:
    backend = KernelAttention(
        name, sizes, device.device_kind, **_triton_modules(), interpret=interpret
    )
    _try(backend)
    return backend


def _triton_modules() -> dict[str, Kernel]:
    from pallas_kernels import triton_decode, triton_prefill

    modules = {"decode": triton_decode, "prefill": triton_prefill}
    return {kernel: Kernel("pallas_triton", module) for kernel, module in modules.items()}


def _mosaic(sizes: AttentionSizes, device: jax.Device) -> PagedAttention:
    """Where Mosaic GPU has only one of the two kernels for a model, Triton's stands in, with a
    warning.
    """
    capability = _cuda_capability(device)
    if capability != HOPPER:
        raise _Unsuitable(
            f"it is for Hopper GPUs, compute capability {_dotted(HOPPER)}, and "
            f"{device.device_kind} has {_dotted(capability)}"
        )
    if sizes.fixed:
        raise _Unsuitable(
            "with deterministic=True all tokens go through one kernel, Pallas Triton's for prompts"
        )
    from pallas_kernels import mosaic_decode, mosaic_prefill

    modules: dict[str, ModuleType] = {"decode": mosaic_decode, "prefill": mosaic_prefill}
    chosen = _triton_modules()
    refused: dict[str, NotImplementedError] = {}
    for kernel, module in modules.items():
        trial = chosen | {kernel: Kernel("pallas_mosaic", module)}
        try:
            _try(
                _mosaic_with(sizes, device, trial),
                tokens=0 if kernel == "decode" else _TRIED_TOKENS,
            )
        except NotImplementedError as error:
            refused[kernel] = error
        else:
            chosen = trial
    if len(refused) == len(modules):
        raise refused["decode"]
    for kernel, why in refused.items():
        _log.warning(
            "Mosaic GPU has no %s kernel for this model, and Pallas Triton's takes its place: %s.",
            kernel,
            _told(why),
        )
    backend = _mosaic_with(sizes, device, chosen)
    _try(backend)
    return backend


def _mosaic_with(
    sizes: AttentionSizes, device: jax.Device, kernels: dict[str, Kernel]
) -> KernelAttention:
    return KernelAttention("pallas_mosaic", sizes, device.device_kind, **kernels, interpret=False)


# ------------------------------------------------------------------ trying


def _try(backend: PagedAttention, *, tokens: int = _TRIED_TOKENS) -> None:
    """Trace the backend on a small step, with every window of the model. Nothing is compiled or
    allocated. Raises `NotImplementedError` for what its kernels do not do.
    """
    for window in backend.sizes.windows:
        jax.eval_shape(functools.partial(_small_step, backend, tokens, window))


def _small_step(backend: PagedAttention, tokens: int, window: int | None) -> jax.Array:
    sizes, rows = backend.sizes, _TRIED_ROWS
    count, tiles = rows + tokens, 0
    if tokens:
        tiles = tokens // backend.tile(tokens, sizes.block_size) + rows

    def ints(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    def new(heads: int, dim: int) -> jax.Array:
        return jnp.zeros((count, heads, dim), sizes.dtype)

    platform = "cpu" if isinstance(backend, NativeAttention) else "gpu"
    stored = storage_dtype(sizes.cache_dtype, platform)

    def pool(dim: int) -> jax.Array:
        return jnp.zeros((2 * sizes.block_size, sizes.kv_heads, dim), stored)

    scales = jnp.zeros((2 * sizes.block_size, sizes.kv_heads), jnp.float32)
    k_scale = scales if is_8_bit(sizes.cache_dtype) else None
    if sizes.latent:
        v, kv = None, PagedKV(pool(sizes.head_dim), None, k_scale)
    else:
        v = new(sizes.kv_heads, sizes.value_dim)
        kv = PagedKV(pool(sizes.head_dim), pool(sizes.value_dim), k_scale, k_scale)
    listed = PrefillTiles(
        row=ints(tiles),
        start=ints(tiles),
        length=ints(tiles),
        position=ints(tiles),
        token_tile=ints(tokens),
        count=ints(),
    )
    out, _ = backend.attend(
        new(sizes.kv_heads * sizes.group, sizes.head_dim),
        new(sizes.kv_heads, sizes.head_dim),
        v,
        kv,
        AttentionMeta(ints(count), ints(rows, 1), ints(rows), listed),
        scale=1.0,
        window=window,
        soft_cap=sizes.soft_cap,
        value_dim=sizes.value_dim if sizes.latent else None,
    )
    return out


# ------------------------------------------------------------------ devices


def _kind(device: jax.Device) -> str:
    if device.platform == "cpu":
        return "CPUs"
    return f"{device.platform} devices such as {device.device_kind}"


def _capability(device: jax.Device) -> tuple[int, int] | None:
    """(major, minor) of a CUDA device; None for all others, ROCm's among them ("gfx90a")."""
    if device.platform not in ("gpu", "cuda"):
        return None
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return None if found is None else (int(found[1]), int(found[2]))


def _cuda_capability(device: jax.Device) -> tuple[int, int]:
    capability = _capability(device)
    if capability is None:
        raise _Unsuitable(f"it needs a CUDA device, and there are no kernels for {_kind(device)}")
    return capability


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _told(error: BaseException) -> str:
    return str(error).rstrip(".")

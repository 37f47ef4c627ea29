"""All that an executable depends on, by name, in plain values: two engines with the same manifest
have the same programs.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import platform
from collections.abc import Mapping
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jaxpaged
import pallas_kernels
from jaxpaged.config import compiler_environment
from jaxpaged.device.attention import PagedAttention
from jaxpaged.device.buckets import Buckets
from jaxpaged.device.model_loader import LoadedModel, cpu_features
from jaxpaged.device.step import StepSettings

Manifest = Mapping[str, Any]
"""Name -> a value that survives JSON."""
_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
    "jax_debug_nans",
    "jax_enable_checks",
)
"""Settings of the process from which other programs follow."""
NUM_BLOCKS = "num_gpu_blocks_override"


def describe(
    model: LoadedModel,
    backend: PagedAttention,
    buckets: Buckets,
    settings: StepSettings,
    *,
    num_blocks: int,
    max_num_seqs: int,
    max_model_len: int,
) -> dict[str, Any]:
    """Settings have the names of `EngineConfig`, with the values that the engine came to. What
    differs most often stands first.
    """
    determinism = settings.determinism
    sizes = {field.name: getattr(backend.sizes, field.name) for field in fields(backend.sizes)}
    sizes["windows"] = sorted(map(str, backend.sizes.windows))  # a set has no order to rely on
    return {
        "jaxpaged": jaxpaged.__version__,
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        "python": ".".join(platform.python_version_tuple()[:2]),
        "source": source_hash(),
        **_device(model),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(model.cache_dtype),
        "tensor_parallel_size": model.mesh.size,
        "block_size": settings.block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "decode_buckets": list(buckets.decode),
        "prefill_buckets": list(buckets.prefill),
        "max_logprobs": settings.max_logprobs,
        "attention_backend": backend.name,
        "attention_variant": backend.variant,
        "deterministic": determinism.promised,
        "vocabulary": [settings.valid_vocab, settings.drawable, settings.num_candidates],
        "model": _digest(type_and_source(model.model_class), model.config),
        "weights": _digest(jax.tree.leaves(jax.tree.map(_shape, model.weights))),
        "attention": _digest(sizes, type_and_source(type(backend))),
        "order": _digest(determinism.order, determinism.compiler_options, settings.kv_layout),
        "environment": compiler_environment(),
        "jax_settings": {name: str(getattr(jax.config, name, None)) for name in _JAX_SETTINGS},
        NUM_BLOCKS: num_blocks,
    }


def digest(manifest: Manifest) -> str:
    return _digest(sorted(manifest.items()))


def first_difference(ours: Manifest, theirs: Manifest) -> tuple[str, Any, Any] | None:
    """Name and both values, ours first; None if the manifests are equal."""
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            return name, ours.get(name), theirs.get(name)
    return None


def type_and_source(kind: type) -> str:
    """The type's name, and the text of the file that defines it: of models that are not ours."""
    try:
        return f"{kind.__module__}.{kind.__qualname__} {Path(inspect.getfile(kind)).read_text()}"
    except (OSError, TypeError):  # made at a prompt: never the same again
        return f"{kind.__module__}.{kind.__qualname__} {id(kind)}"


@functools.cache
def source_hash() -> str:
    """Of every source file that programs are traced from."""
    root = Path(jaxpaged.__file__).parent
    kernels = Path(pallas_kernels.__file__).parent
    total = hashlib.sha256()
    for start in (root / "device", root / "models", root / "sharding.py", kernels):
        for path in sorted(start.rglob("*")) if start.is_dir() else [start]:
            if path.suffix in (".py", ".json", ".cc", ".h"):
                data = path.read_bytes()
                total.update(f"{path.name} {len(data)} ".encode() + data)
    return total.hexdigest()


def _device(model: LoadedModel) -> dict[str, Any]:
    devices = list(model.mesh.devices.flat)
    first = devices[0]
    found = {
        "platform": first.platform,
        "device": first.device_kind,
        "device_ids": [device.id for device in devices],
        "processes": jax.process_count(),
    }
    if first.platform == "cpu":
        found["cpu_features"] = " ".join(cpu_features())
    else:
        found["platform_version"] = first.client.platform_version
        found["compute_capability"] = str(getattr(first, "compute_capability", ""))
    return found


def _shape(leaf: Any) -> str:
    return f"{leaf.shape} {leaf.dtype} {getattr(leaf.sharding, 'spec', None)}"


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()

"""From a resolved source to a model on its mesh."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpaged.config import EngineConfig
from jaxpaged.device.cluster import choose_devices
from jaxpaged.device.kv_cache import cache_dtype
from jaxpaged.device.step import ModelParts, Weights, take_apart
from jaxpaged.models.base import CausalLM
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.loading import (
    DummyReader,
    checked_sources,
    load_parameters,
    settle_tying,
    sharding_of,
)
from jaxpaged.models.registry import find_model
from jaxpaged.progress import progress_bar
from jaxpaged.sharding import make_mesh
from jaxpaged.weights.reader import TensorReader, open_reader
from jaxpaged.weights.source import ModelSource

_log = logging.getLogger(__name__)
_CPU_BF16_FLAGS = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Placement:
    """What will run, where and in which types; known before a weight is read."""

    model_class: type[CausalLM]
    config: ModelConfig
    """Cut over the mesh."""
    mesh: Mesh
    dtype: jnp.dtype
    cache_dtype: jnp.dtype


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model_class: type[CausalLM]
    config: ModelConfig
    parts: ModelParts
    weights: Weights
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    """Of the KV cache."""
    mesh: Mesh
    weight_bytes: int
    """On one device."""


def choose_dtype(config: EngineConfig, source: ModelSource, platform: str) -> jnp.dtype:
    """`dtype`, or for "auto": the checkpoint's 16-bit type on accelerators; on CPU bfloat16 where
    the processor multiplies it in hardware, else float32. A checkpoint in float32 becomes bfloat16
    on accelerators, as in vLLM. float16 for a bfloat16 checkpoint is warned of.
    """
    if config.dtype != "auto":
        if config.dtype == "float16" and source.dtype_name == "bfloat16":
            _log.warning(
                "dtype='float16', but %s is in bfloat16, whose values may exceed float16's largest "
                "(65504) and end as inf or NaN; bfloat16 and float32 are safe.",
                source.path,
            )
        chosen: jnp.dtype = np.dtype(getattr(jnp, config.dtype))
        return chosen
    name = source.dtype_name  # refuses what no weights are stored in
    if platform == "cpu":
        native: jnp.dtype = np.dtype(jnp.bfloat16 if _cpu_multiplies_bf16() else np.float32)
        return native
    checkpoint: jnp.dtype = np.dtype(np.float16 if name == "float16" else jnp.bfloat16)
    return checkpoint


def _cpu_multiplies_bf16() -> bool:
    flags = cpu_features()
    return any(flag in flags for flag in _CPU_BF16_FLAGS)


def cpu_features() -> list[str]:
    """What the processor can do, in the kernel's words; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    lines = text.splitlines()
    told = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return sorted(told.partition(":")[2].split())


def place_model(config: EngineConfig, source: ModelSource) -> Placement:
    """Raises `UnsupportedModelError`, `ModelLoadError`, or `ConfigError` for what the devices or
    the model do not allow.
    """
    model_class, model_config = find_model(source.hf_config, str(source.path))
    devices = choose_devices(config)
    dtype = choose_dtype(config, source, devices[0].platform)
    return Placement(
        model_class,
        model_config.over(len(devices)),
        make_mesh(devices),
        dtype,
        cache_dtype(config.kv_cache_dtype, dtype),
    )


def load_model(
    config: EngineConfig, source: ModelSource, placement: Placement | None = None
) -> LoadedModel:
    """Read (or, for load_format "dummy", make up) all weights and put them on the mesh.

    Raises `UnsupportedModelError` or `ModelLoadError`; nothing is left on the device then.
    """
    return open_model(config, source, placement).load()


def open_model(
    config: EngineConfig, source: ModelSource, placement: Placement | None = None
) -> OpenedModel:
    """All that can be said of a model, and against its files, before its weights are read.

    Raises as `load_model`, except for what is wrong with the values.
    """
    placement = placement or place_model(config, source)
    model_class, model_config = placement.model_class, placement.config
    reader: TensorReader
    if source.kind == "dummy":
        reader = DummyReader(model_class.sources(model_config), config.seed)
    else:
        reader = open_reader(source)
        model_config = settle_tying(reader, model_class, model_config)
    sources = checked_sources(reader, model_class, model_config)
    parts = take_apart(model_class, model_config, placement.dtype)
    shapes = {
        path: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding_of(placement.mesh, sources[path])
        )
        for path, leaf in parts.shapes.items()
    }
    abstract: Any = shapes
    described = LoadedModel(
        model_class,
        model_config,
        parts,
        parts.weights(abstract),
        placement.dtype,
        placement.cache_dtype,
        placement.mesh,
        sum(
            math.prod(sharding_of(placement.mesh, sources[path]).shard_shape(leaf.shape))
            * leaf.dtype.itemsize
            for path, leaf in shapes.items()
        ),
    )
    return OpenedModel(described, reader, source.name, config.disable_progress)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose files were checked. `described` has shapes with shardings for weights: all that
    programs are compiled from.
    """

    described: LoadedModel
    reader: TensorReader
    name: str
    quiet: bool
    """No progress bar."""

    def load(self) -> LoadedModel:
        """Read the weights and put them on the mesh, once. From any thread.

        Raises `ModelLoadError`; nothing is left on the device then.
        """
        model = self.described
        shapes = model.parts.shapes
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes.values())
        start = time.perf_counter()
        with progress_bar(
            total=total, desc="Loading weights", unit="B", unit_scale=True, disable=self.quiet
        ) as bar:
            params = load_parameters(
                self.reader,
                model.model_class,
                model.config,
                shapes,
                model.mesh,
                lambda n: bar.update(n) and None,
            )
        self.reader.close()
        jax.block_until_ready(list(params.values()))
        seconds = time.perf_counter() - start
        _log.info(
            "Loaded %s (%s, %s, %d device%s) in %.1f s, %.2f GB/s.",
            self.name,
            model.config.architecture,
            model.dtype.name,
            model.mesh.size,
            "" if model.mesh.size == 1 else "s",
            seconds,
            total / seconds / 1e9,
        )
        return dataclasses.replace(model, weights=model.parts.weights(params))

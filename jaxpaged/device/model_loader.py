"""From a resolved source to a model on its mesh."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jaxpaged.config import EngineConfig
from jaxpaged.device.step import ModelParts, Weights, take_apart
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.loading import dummy_parameters, load_parameters
from jaxpaged.models.registry import find_model
from jaxpaged.sharding import make_mesh
from jaxpaged.weights.reader import open_reader
from jaxpaged.weights.source import ModelSource

_log = logging.getLogger(__name__)
_CPU_BF16_FLAGS = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    config: ModelConfig
    parts: ModelParts
    weights: Weights
    dtype: jnp.dtype
    mesh: Mesh
    weight_bytes: int


def choose_dtype(config: EngineConfig, source: ModelSource, platform: str) -> jnp.dtype:
    """`dtype`, or for "auto": the checkpoint's 16-bit type on accelerators; on CPU bfloat16 where
    the processor multiplies it in hardware, else float32. A checkpoint in float32 becomes bfloat16
    on accelerators, as in vLLM.
    """
    if config.dtype != "auto":
        chosen: jnp.dtype = np.dtype(getattr(jnp, config.dtype))
        return chosen
    name = source.dtype_name  # refuses what no weights are stored in
    if platform == "cpu":
        native: jnp.dtype = np.dtype(jnp.bfloat16 if _cpu_multiplies_bf16() else np.float32)
        return native
    checkpoint: jnp.dtype = np.dtype(np.float16 if name == "float16" else jnp.bfloat16)
    return checkpoint


def _cpu_multiplies_bf16() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return any(flag in flags for flag in _CPU_BF16_FLAGS)


def load_model(config: EngineConfig, source: ModelSource) -> LoadedModel:
    """Read (or, for load_format "dummy", make up) all weights and put them on the mesh.

    Raises `UnsupportedModelError` or `ModelLoadError`; nothing is left on the device then.
    """
    where = str(source.path)
    model_class, model_config = find_model(source.hf_config, where)
    mesh = make_mesh()
    dtype = choose_dtype(config, source, mesh.devices.flat[0].platform)
    parts = take_apart(model_class, model_config, dtype)
    shapes = parts.shapes
    total = sum(leaf.size * dtype.itemsize for leaf in shapes.values())
    start = time.perf_counter()
    if source.kind == "dummy":
        params = dummy_parameters(model_class, model_config, shapes, mesh, config.seed)
    else:
        reader = open_reader(source)
        bar = tqdm(
            total=total,
            desc="Loading weights",
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            disable=config.disable_progress,
        )
        with bar:
            params = load_parameters(
                reader, model_class, model_config, shapes, mesh, lambda n: bar.update(n) and None
            )
        reader.close()
    jax.block_until_ready(list(params.values()))
    seconds = time.perf_counter() - start
    _log.info(
        "Loaded %s (%s, %s) in %.1f s, %.2f GB/s.",
        source.name,
        model_config.architecture,
        dtype.name,
        seconds,
        total / seconds / 1e9,
    )
    return LoadedModel(model_config, parts, parts.weights(params), dtype, mesh, total)

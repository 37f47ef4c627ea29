"""Checkpoint tensors -> parameters on the mesh, one parameter at a time, strictly."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.errors import ModelLoadError
from jaxpaged.models.base import CausalLM, ParamSource
from jaxpaged.models.config import ModelConfig
from jaxpaged.sharding import partition_spec
from jaxpaged.weights.reader import TensorReader

Progress = Callable[[int], None]
"""Called with the bytes of each parameter once it is on its device."""

DUMMY_STD = 0.02
_FLOATS = ("float32", "float16", "bfloat16", "float64")


def load_parameters(
    reader: TensorReader,
    model: type[CausalLM],
    config: ModelConfig,
    shapes: dict[str, jax.ShapeDtypeStruct],
    mesh: Mesh,
    progress: Progress,
) -> dict[str, jax.Array]:
    """Read every parameter of `shapes` (path -> shape and dtype). Host memory peaks at one
    parameter's tensors.

    Raises `ModelLoadError` naming the tensors that are missing, left over, of another shape, or not
    floats.
    """
    sources = model.sources(config)
    _check_names(reader, model, config, sources)
    params: dict[str, jax.Array] = {}
    for path, abstract in shapes.items():
        source = sources[path]
        tensors = []
        for name, shape in zip(source.names, source.tensor_shapes(abstract.shape), strict=True):
            _check_tensor(reader, name, shape)
            tensors.append(reader.read(name))
        value = source.assemble(tensors, abstract.shape).astype(abstract.dtype)
        params[path] = jax.device_put(value, _sharding(mesh, source))
        progress(value.nbytes)
    return params


def dummy_parameters(
    model: type[CausalLM],
    config: ModelConfig,
    shapes: dict[str, jax.ShapeDtypeStruct],
    mesh: Mesh,
    seed: int,
) -> dict[str, jax.Array]:
    """Random weights: norms are 1, the rest normal with standard deviation 0.02, the same for one
    seed.
    """
    sources = model.sources(config)
    params: dict[str, jax.Array] = {}
    for path, abstract in shapes.items():
        value: Any
        if len(abstract.shape) == 1:
            value = np.ones(abstract.shape, abstract.dtype)
        else:
            rng = np.random.default_rng((seed, zlib.crc32(path.encode())))
            value = rng.standard_normal(abstract.shape, np.float32) * np.float32(DUMMY_STD)
        params[path] = jax.device_put(
            jnp.asarray(value, abstract.dtype), _sharding(mesh, sources[path])
        )
    return params


def _sharding(mesh: Mesh, source: ParamSource) -> NamedSharding:
    spec = PartitionSpec() if source.axes is None else partition_spec(source.axes)
    return NamedSharding(mesh, spec)


def _check_names(
    reader: TensorReader,
    model: type[CausalLM],
    config: ModelConfig,
    sources: dict[str, ParamSource],
) -> None:
    wanted = {name for source in sources.values() for name in source.names}
    present = set(reader.names())
    missing = sorted(wanted - present)
    if missing:
        raise ModelLoadError(
            f"The checkpoint lacks {len(missing)} tensors of {config.architecture}: "
            f"{_some(missing)}."
        )
    extra = sorted(n for n in present - wanted if not model.ignorable(config, n))
    if extra:
        raise ModelLoadError(
            f"The checkpoint has {len(extra)} tensors that {config.architecture} does not use, so "
            f"its results would be wrong: {_some(extra)}."
        )


def _check_tensor(reader: TensorReader, name: str, shape: tuple[int, ...]) -> None:
    if reader.shape(name) != shape:
        raise ModelLoadError(
            f"Tensor {name!r} has shape {reader.shape(name)}, the config asks for {shape}."
        )
    kind = reader.dtype_name(name)
    if kind.startswith(("int", "uint", "bool", "float8")):
        raise ModelLoadError(
            f"Tensor {name!r} is stored as {kind}; weights must be one of "
            f"{', '.join(_FLOATS)}, or a supported GGUF quantisation."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

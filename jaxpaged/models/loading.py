"""Checkpoint tensors -> parameters on the mesh, one device's slice at a time, strictly."""

from __future__ import annotations

import dataclasses
import logging
import re
import zlib
from collections.abc import Callable, Mapping

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.errors import ModelLoadError
from jaxpaged.models.base import CausalLM
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.sources import Index, ParamSource
from jaxpaged.sharding import partition_spec
from jaxpaged.weights.reader import TensorReader, some

Progress = Callable[[int], None]
"""Called with the bytes of each parameter once it is on its devices."""

DUMMY_STD = 0.02
_ROWS_COMPARED = 4096
_log = logging.getLogger(__name__)
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_NOT_FLOAT = re.compile(r"u?int|bool|float8|[iu]\d|f8")


def load_parameters(
    reader: TensorReader,
    model: type[CausalLM],
    config: ModelConfig,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    mesh: Mesh,
    progress: Progress,
) -> dict[str, jax.Array]:
    """Read every parameter of `shapes` (path -> shape and dtype). Host memory peaks at one device's
    slice of one parameter.

    Raises `ModelLoadError` naming the tensors that are missing, left over, of another shape, or not
    floats.
    """
    sources = checked_sources(reader, model, config)
    params: dict[str, jax.Array] = {}
    for path, abstract in shapes.items():
        params[path] = load_parameter(reader, sources[path], abstract, mesh)
        progress(params[path].nbytes)
    return params


def checked_sources(
    reader: TensorReader, model: type[CausalLM], config: ModelConfig
) -> dict[str, ParamSource]:
    """Parameter path -> its source in this checkpoint. Raises `ModelLoadError` as
    `load_parameters`; only what cannot be read is found later.
    """
    names = set(reader.names())
    sources = {path: source.among(names) for path, source in model.sources(config).items()}
    check_tensors(reader, model, config, sources)
    return sources


def settle_tying(reader: TensorReader, model: type[CausalLM], config: ModelConfig) -> ModelConfig:
    """The config with the head untied where the checkpoint brings a head of its own, with other
    values than the embedding: as transformers does, whatever `tie_word_embeddings` says.
    """
    untied = dataclasses.replace(config, tie_embeddings=False)
    names = set(reader.names())
    sources = model.outer_sources(untied)
    if "head" not in sources:
        return config
    head = sources["head"].among(names).tensors[0]
    embedding = sources["embedding"].among(names).tensors[0]
    if not config.tie_embeddings or not {head.name, embedding.name} <= names:
        return config
    if reader.shape(head.name) == reader.shape(embedding.name):
        rows = range(0, reader.shape(head.name)[0], _ROWS_COMPARED)
        parts = [(slice(start, start + _ROWS_COMPARED),) for start in rows]
        if all(
            np.array_equal(reader.read_slice(head.name, p), reader.read_slice(embedding.name, p))
            for p in parts
        ):
            return config
    _log.warning(
        "The config ties the head to the embedding, but %s is there with values of its own: used "
        "as it is.",
        head.name,
    )
    return untied


def load_parameter(
    reader: TensorReader, source: ParamSource, abstract: jax.ShapeDtypeStruct, mesh: Mesh
) -> jax.Array:
    """Each device's slice of one parameter, read from the checkpoint."""

    def slice_of(index: Index | None) -> npt.NDArray[np.generic]:
        return source.read(reader.read_slice, abstract.shape, index or (), abstract.dtype)

    return jax.make_array_from_callback(abstract.shape, sharding_of(mesh, source), slice_of)


def sharding_of(mesh: Mesh, source: ParamSource) -> NamedSharding:
    spec = PartitionSpec() if source.axes is None else partition_spec(source.axes)
    return NamedSharding(mesh, spec)


class DummyReader:
    """A `TensorReader` of random weights: vectors are 1 (norms) or 0 (biases), the rest is normal
    with standard deviation 0.02, and the same for one seed whatever the mesh.
    """

    def __init__(self, sources: Mapping[str, ParamSource], seed: int) -> None:
        tensors = [tensor for source in sources.values() for tensor in source.tensors]
        self._shapes = {tensor.name: tensor.stored_shape for tensor in tensors}
        self._seed = seed

    def names(self) -> list[str]:
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype_name(self, name: str) -> str:
        return "float32"

    def read(self, name: str) -> npt.NDArray[np.generic]:
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32)
        rng = np.random.default_rng((self._seed, zlib.crc32(name.encode())))
        return rng.standard_normal(shape, np.float32) * np.float32(DUMMY_STD)

    def read_slice(self, name: str, index: tuple[slice, ...]) -> npt.NDArray[np.generic]:
        return self.read(name)[index]

    def close(self) -> None: ...


def check_tensors(
    reader: TensorReader,
    model: type[CausalLM],
    config: ModelConfig,
    sources: Mapping[str, ParamSource],
) -> None:
    """Raises `ModelLoadError` unless the checkpoint has exactly the tensors that `sources` need."""
    wanted = {t.name: t.stored_shape for source in sources.values() for t in source.tensors}
    present = set(reader.names())
    missing = sorted(wanted.keys() - present)
    if missing:
        raise ModelLoadError(
            f"The checkpoint lacks {len(missing)} tensors of {config.architecture}: "
            f"{some(missing)}."
        )
    extra = sorted(n for n in present - wanted.keys() if not model.ignorable(config, n))
    if extra:
        raise ModelLoadError(
            f"The checkpoint has {len(extra)} tensors that {config.architecture} does not use, so "
            f"its results would be wrong: {some(extra)}."
        )
    for name, shape in wanted.items():
        _check_tensor(reader, name, shape)


def _check_tensor(reader: TensorReader, name: str, shape: tuple[int, ...]) -> None:
    if reader.shape(name) != shape:
        raise ModelLoadError(
            f"Tensor {name!r} has shape {reader.shape(name)}, the config asks for {shape}."
        )
    check_is_float(reader, name)


def check_is_float(reader: TensorReader, name: str) -> None:
    """Raises `ModelLoadError` for integers, and for floats of 8 bits, whose scales are missing."""
    kind = reader.dtype_name(name)
    if _NOT_FLOAT.match(kind.lower()):
        raise ModelLoadError(
            f"Tensor {name!r} is stored as {kind}; weights must be one of "
            f"{', '.join(_FLOATS)}, or a supported GGUF quantisation."
        )

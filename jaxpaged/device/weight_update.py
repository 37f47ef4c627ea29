"""New weights for a model that runs: from a trainer's arrays, or from a checkpoint.

Everything that can be found wrong is found while a `WeightUpdate` is made; the old weights are
still whole then. After that each parameter is freed before its successor is made, so the device
holds one model and one parameter at most, beside what the trainer keeps there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxpaged.device.step import ModelParts, Weights, take_apart
from jaxpaged.errors import ModelLoadError
from jaxpaged.models.base import CausalLM
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.exchange import parameters, recut
from jaxpaged.models.loading import (
    check_is_float,
    checked_sources,
    load_parameter,
    settle_tying,
    sharding_of,
)
from jaxpaged.models.sources import ParamSource, whole
from jaxpaged.weights.reader import TensorReader, open_reader, some
from jaxpaged.weights.source import weights_at

HostArray = npt.NDArray[np.generic]
Make = Callable[[], jax.Array]


@dataclass(frozen=True, slots=True)
class Target:
    """The model that the weights are for, as it is cut over its mesh."""

    model: type[CausalLM]
    config: ModelConfig
    parts: ModelParts
    mesh: Mesh

    @property
    def trainer_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Parameter path -> shape without padding and copies: the model on one device."""
        if self.config.tensor_parallel == 1:
            return self.parts.shapes
        dtype = next(iter(self.parts.shapes.values())).dtype
        return take_apart(self.model, self.config.over(1), dtype).shapes


class WeightUpdate:
    """Where the new value of each parameter comes from.

    `source` is a path (a .safetensors or .gguf file, a folder of them, an Orbax checkpoint), a Flax
    module, an `nnx.State`, or a flat or nested mapping to arrays. Names are the paths of the Flax
    model's parameters, all of them, or the tensors of a Hugging Face checkpoint. Floats of any type
    become the engine's.

    Raises `ModelLoadError` naming what is missing, left over, of another shape, no float, deleted,
    or cannot be read.
    """

    def __init__(self, source: Any, target: Target) -> None:
        self._target = target
        self._reader, from_path = _open(source)
        names = set(self._reader.names())
        own, sources = set(target.parts.shapes), target.model.sources(target.config)
        theirs = {tensor.name for s in sources.values() for tensor in s.tensors}
        if not names & (own | theirs):
            raise ModelLoadError(
                f"Of the new weights' {len(names)} names ({some(sorted(names))}) the engine knows "
                f"none. Use those of its Flax model ({some(sorted(own), 3)}) or those of a Hugging "
                f"Face checkpoint ({some(sorted(theirs), 3)})."
            )
        if len(names & own) >= len(names & theirs):
            self.make = self._from_parameters(sources)
        else:
            self.make = self._from_tensors()
        if from_path:
            _read_through(self._reader)

    def close(self) -> None:
        self._reader.close()

    # ------------------------------------------------------------------ by the engine's own names

    def _from_parameters(self, sources: Mapping[str, ParamSource]) -> dict[str, Make]:
        reader, target = self._reader, self._target
        shapes = target.trainer_shapes
        names = set(reader.names())
        _check_names(names, set(shapes))
        for path, abstract in shapes.items():
            if reader.shape(path) != abstract.shape:
                raise ModelLoadError(
                    f"Parameter {path!r} has shape {reader.shape(path)}, the engine's is "
                    f"{abstract.shape}; train the module that LLM.flax_model() gives, or one of "
                    "the same config."
                )
            check_is_float(reader, path)
        before = target.model.sources(target.config.over(1))
        return {
            path: self._maker(path, before[path], sources[path], abstract)
            for path, abstract in target.parts.shapes.items()
        }

    def _maker(
        self,
        path: str,
        before: ParamSource,
        source: ParamSource,
        abstract: jax.ShapeDtypeStruct,
    ) -> Make:
        reader, mesh = self._reader, self._target.mesh
        sharding = sharding_of(mesh, source)

        def as_it_is() -> jax.Array:
            if isinstance(reader, ArrayReader) and reader.on_device(path):
                return _copied(reader.array(path), abstract, sharding)
            plain = whole(path, abstract.shape, source.axes)
            return load_parameter(reader, plain, abstract, mesh)

        def cut_anew() -> jax.Array:
            value = recut(reader.read(path), before, source, abstract.shape).astype(abstract.dtype)
            return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

        return as_it_is if reader.shape(path) == abstract.shape else cut_anew

    # ------------------------------------------------------------------ by Hugging Face's names

    def _from_tensors(self) -> dict[str, Make]:
        reader, target = self._reader, self._target
        config = target.config
        if settle_tying(reader, target.model, config).tie_embeddings != config.tie_embeddings:
            raise ModelLoadError(
                "The engine's head is its embedding, but the new weights have a head (lm_head) "
                "with other values. Load them as a model of their own, with "
                "tie_word_embeddings=false in config.json."
            )
        sources = checked_sources(reader, target.model, config)

        def maker(path: str, abstract: jax.ShapeDtypeStruct) -> Make:
            return lambda: load_parameter(reader, sources[path], abstract, target.mesh)

        return {path: maker(path, shape) for path, shape in target.parts.shapes.items()}


def replaced(parts: ModelParts, weights: Weights | None, update: WeightUpdate) -> Weights:
    """The new weights, in the places of the old ones, which must not be used any more."""
    kept: dict[str, jax.Array | None] = {} if weights is None else dict(by_path(parts, weights))
    if weights is not None:
        weights.rest.clear()
        weights.layers.clear()
    made: dict[str, jax.Array] = {}
    for path in parts.shapes:
        kept.pop(path, None)  # freed before its successor comes
        made[path] = jax.block_until_ready(update.make[path]())
    return parts.weights(made)


HostWeights = dict[str, tuple[HostArray, jax.sharding.Sharding]]
"""Parameter path -> value and where it belongs."""


def to_host(parts: ModelParts, weights: Weights) -> HostWeights:
    """A copy in host memory; on CPUs, where this is the device's memory, the same arrays."""
    return {
        path: (np.asarray(leaf), leaf.sharding) for path, leaf in by_path(parts, weights).items()
    }


def to_devices(parts: ModelParts, stored: HostWeights) -> Weights:
    """What `to_host` was given."""
    return parts.weights(
        {
            path: jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
            for path, (value, sharding) in stored.items()
        }
    )


def by_path(parts: ModelParts, weights: Weights) -> dict[str, jax.Array]:
    """Parameter path -> the array in use."""
    return {
        path: leaf
        for part, leaves in zip(
            [parts.rest, *parts.layers], [weights.rest, *weights.layers], strict=True
        )
        for path, leaf in zip(part.paths, leaves, strict=True)
    }


def trainer_parameters(
    target: Target, params: Mapping[str, jax.Array]
) -> dict[str, jax.Array | HostArray]:
    """The engine's parameters in the shapes of the model on one device."""
    shapes = target.trainer_shapes
    before = target.model.sources(target.config)
    after = target.model.sources(target.config.over(1))
    found: dict[str, jax.Array | HostArray] = {}
    for path, value in params.items():
        shape = shapes[path].shape
        same = value.shape == shape
        spread = target.mesh.size > 1  # a copy on the host belongs to no mesh
        host = np.asarray(value) if spread else value
        found[path] = host if same else recut(np.asarray(host), before[path], after[path], shape)
    return found


class ArrayReader:
    """A `TensorReader` over arrays in memory."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        for name, array in arrays.items():
            if not hasattr(array, "shape") or not hasattr(array, "dtype"):
                raise ModelLoadError(
                    f"{name!r} of the new weights is {type(array).__name__}, not an array."
                )
            if isinstance(array, jax.core.Tracer):
                raise ModelLoadError(
                    f"{name!r} of the new weights is being traced; call update_weights outside of "
                    "jit and grad, with their results."
                )
            if isinstance(array, jax.Array) and array.is_deleted():
                raise ModelLoadError(
                    f"{name!r} of the new weights was deleted, perhaps donated to a jitted "
                    "function; pass what that function returned."
                )
        self._arrays = dict(arrays)
        self._host: tuple[str, HostArray] | None = None

    def on_device(self, name: str) -> bool:
        return isinstance(self._arrays[name], jax.Array)

    def array(self, name: str) -> jax.Array:
        array: jax.Array = self._arrays[name]
        return array

    def names(self) -> list[str]:
        return sorted(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def dtype_name(self, name: str) -> str:
        return str(np.dtype(self._arrays[name].dtype).name)

    def read(self, name: str) -> HostArray:
        if self._host is None or self._host[0] != name:  # it comes in slices, one a device
            self._host = name, np.asarray(self._arrays[name])
        return self._host[1]

    def read_slice(self, name: str, index: tuple[slice, ...]) -> HostArray:
        return self.read(name)[index]

    def close(self) -> None:
        self._arrays, self._host = {}, None


class _Renamed:
    """A `TensorReader` whose tensors go by other names."""

    def __init__(self, reader: TensorReader, names: Mapping[str, str]) -> None:
        self._reader, self._names = reader, names

    def names(self) -> list[str]:
        return sorted(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(self._names[name])

    def dtype_name(self, name: str) -> str:
        return self._reader.dtype_name(self._names[name])

    def read(self, name: str) -> HostArray:
        return self._reader.read(self._names[name])

    def read_slice(self, name: str, index: tuple[slice, ...]) -> HostArray:
        return self._reader.read_slice(self._names[name], index)

    def close(self) -> None:
        self._reader.close()


def _open(source: Any) -> tuple[TensorReader, bool]:
    """The tensors of a source, and whether they come from files that may turn out damaged."""
    if not isinstance(source, (str, os.PathLike)):
        return ArrayReader(parameters(source)), False
    found = weights_at(Path(source).expanduser())
    reader = open_reader(found)
    # Of an nnx.State Orbax keeps each variable as a node with its value below.
    names = {name.removesuffix(".value"): name for name in reader.names()}
    return _Renamed(reader, names), found.kind == "orbax"


def _read_through(reader: TensorReader) -> None:
    """Orbax tells of a damaged chunk only when it is read, which must not be too late."""
    for name in reader.names():
        reader.read(name)


def _check_names(given: set[str], wanted: set[str]) -> None:
    missing, extra = sorted(wanted - given), sorted(given - wanted)
    if missing:
        raise ModelLoadError(
            f"The new weights lack {len(missing)} parameters of the model: {some(missing)}. Pass "
            "all of them; those that did not change, too."
        )
    if extra:
        raise ModelLoadError(
            f"The new weights have {len(extra)} parameters that the model does not: {some(extra)}."
        )


def _copied(
    value: jax.Array, abstract: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
) -> jax.Array:
    """The array as the engine's own: the trainer may donate or delete its one afterwards.

    (`device_put(may_alias=False)` will not do: on the way to several devices it still shares the
    part that stays where it is.)
    """
    own: jax.Array = jax.device_put(jnp.array(value, abstract.dtype, copy=True), sharding)
    return own

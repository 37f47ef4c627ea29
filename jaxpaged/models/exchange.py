"""Parameters of one cut of a model as those of another, and back as tensors of a checkpoint.

A `ParamSource` only ever copies elements: it permutes, repeats and pads them. Read from tensors
whose elements are their own numbers it therefore tells where each element of a parameter belongs,
which is all that its inverse needs, whatever the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx

from jaxpaged.models.base import CausalLM
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.sources import HostArray, Index, ParamSource, ReadSlice


def parameters(model: nnx.Module | Any) -> dict[str, jax.Array]:
    """Parameter path -> array, of a module, an `nnx.State`, or any tree of dictionaries and lists.

    Paths are the keys on the way to a leaf, joined by dots: layers.0.attention.qkv.
    """
    if isinstance(model, nnx.Module):
        model = nnx.state(model, nnx.Param)
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(model)}


def path_of(keys: tuple[Any, ...]) -> str:
    """The path of a leaf. Attributes, such as a variable's value, do not count."""
    parts = [getattr(key, "key", getattr(key, "idx", None)) for key in keys]
    return ".".join(str(part) for part in parts if part is not None)


def recut(
    value: HostArray, source: ParamSource, to_source: ParamSource, to_shape: tuple[int, ...]
) -> HostArray:
    """A parameter that `source` describes as the one that `to_source` makes of the same tensors:
    for another number of devices, with other padding and other copies of KV heads.
    """
    tensors = _empty(source, value.dtype)
    _scatter(value, source, tensors)
    return to_source.read(_reader(tensors), to_shape, (), value.dtype)


def as_tensors(
    model: type[CausalLM], config: ModelConfig, params: Mapping[str, HostArray | jax.Array]
) -> dict[str, HostArray]:
    """The tensors of a Hugging Face checkpoint, by name, for all parameters of a model.

    `params` are by path, in the cut of `config`; the types stay. Tensors that several experts or
    projections share are whole again.
    """
    tensors: dict[str, HostArray] = {}
    for path, source in model.sources(config).items():
        value = np.asarray(params[path])
        for name, array in _empty(source, value.dtype).items():
            tensors.setdefault(name, array)
        _scatter(value, source, tensors)
    return tensors


def _empty(source: ParamSource, dtype: npt.DTypeLike) -> dict[str, HostArray]:
    return {t.name: np.zeros(t.stored_shape, dtype) for t in source.tensors}


def _scatter(value: HostArray, source: ParamSource, tensors: Mapping[str, HostArray]) -> None:
    """Write the parameter's elements to their places. Padding, which has number 0, goes nowhere."""
    names = list(dict.fromkeys(t.name for t in source.tensors))
    numbers: dict[str, HostArray] = {}
    first = 1
    for name in names:
        array = tensors[name]
        numbers[name] = np.arange(first, first + array.size).reshape(array.shape)
        first += array.size
    places = source.read(_reader(numbers), value.shape, (), np.int64).astype(np.int64, copy=False)
    for name in names:
        array, start = tensors[name], int(numbers[name].flat[0])
        here = (places >= start) & (places < start + array.size)
        array.reshape(-1)[places[here] - start] = value[here]


def _reader(tensors: Mapping[str, HostArray]) -> ReadSlice:
    def read(name: str, index: Index) -> HostArray:
        return tensors[name][index]

    return read

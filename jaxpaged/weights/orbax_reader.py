"""Tensors of an Orbax checkpoint whose leaves are called as Hugging Face calls them.

TensorStore reads the arrays where they lie; Orbax itself, and with it JAX, is not needed. On disk
`_METADATA` is JSON that lists the tree's leaves, each an array in the Zarr format, all inside one
OCDBT database (the default) or each in a folder of its own.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.source import check_inside, read_json

Array = npt.NDArray[np.generic]

TREE_FILE = "_METADATA"
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_ARRAYS = ("np.ndarray", "jax.Array", "scalar")
_EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple")
"""Kinds of leaves, as `_METADATA` calls them: branches of the tree with nothing in them."""


class OrbaxReader:
    """A `TensorReader` over one checkpoint folder. Float types only are read.

    A slice costs the chunks it touches; checkpoints that `jaxpaged convert` writes have chunks of
    2 MiB, those of a plain `StandardCheckpointer` one a tensor (or one a shard of it).
    """

    def __init__(self, folder: Path) -> None:
        """Raises `ModelLoadError`, by name, for missing pieces and leaves that are no arrays."""
        self._folder = folder
        for path in folder.rglob("*"):
            check_inside(folder, path)
        tree = read_json(folder / TREE_FILE)
        leaves = _leaf_names(folder, tree)
        self._driver = "zarr3" if tree.get("use_zarr3") else "zarr"
        self._store: dict[str, Any] = {"driver": "file", "path": f"{folder.absolute()}/"}
        if tree.get("use_ocdbt", True):
            self._store = {"driver": "ocdbt", "base": self._store}
        # Without this mark zeros may not have been stored, so a missing chunk means zeros.
        self._whole = bool(tree.get("store_array_data_equal_to_fill_value"))
        self._check_stored(leaves)
        self._arrays: dict[str, ts.TensorStore | None] = dict.fromkeys(sorted(leaves))

    def names(self) -> list[str]:
        return list(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._array(name).shape)

    def dtype_name(self, name: str) -> str:
        return str(self._array(name).dtype.name)

    def read(self, name: str) -> Array:
        return self.read_slice(name, ())

    def read_slice(self, name: str, index: tuple[slice, ...]) -> Array:
        array = self._array(name)
        if array.dtype.name not in _FLOATS:
            raise ModelLoadError(
                f"{self._folder}: tensor {name!r} has dtype {array.dtype.name}, which is not "
                f"supported for weights; supported: {', '.join(_FLOATS)}."
            )
        # TensorStore refuses bounds beyond the shape, which slices allow.
        clipped = tuple(slice(*s.indices(n)) for s, n in zip(index, array.shape, strict=False))
        try:
            value: Array = np.asarray(
                array[clipped].read().result() if clipped else array.read().result()
            )
        except ValueError as error:
            raise self._damaged(name, error) from error
        return value

    def close(self) -> None:
        """Forget the open arrays; reading opens them again."""
        self._arrays = dict.fromkeys(self._arrays)

    def _array(self, name: str) -> ts.TensorStore:
        if name not in self._arrays:
            raise ModelLoadError(f"{self._folder} has no tensor {name!r}.")
        array = self._arrays[name]
        if array is None:
            spec = {
                "driver": self._driver,
                "kvstore": {**self._store, "path": f"{self._store.get('path', '')}{name}/"},
                "fill_missing_data_reads": not self._whole,
            }
            try:
                array = ts.open(spec, open=True, read=True).result()
            except ValueError as error:
                raise self._damaged(name, error) from error
            self._arrays[name] = array
        return array

    def _check_stored(self, leaves: list[str]) -> None:
        """Every leaf has an array. Whether its chunks are whole is seen when they are read."""
        try:
            keys = ts.KvStore.open(self._store).result().list().result()
        except ValueError as error:
            raise ModelLoadError(
                f"{self._folder} is damaged or incomplete; fetch or save it again: {_first(error)}"
            ) from error
        stored: defaultdict[str, int] = defaultdict(int)
        for key in keys:
            stored[key.decode("utf-8", "replace").partition("/")[0]] += 1
        missing = sorted(name for name in leaves if not stored[name])
        if missing:
            more = " and more" if len(missing) > 5 else ""
            raise ModelLoadError(
                f"{self._folder} lacks {len(missing)} arrays that its {TREE_FILE} names: "
                f"{', '.join(missing[:5])}{more}. Fetch or save it again."
            )

    def _damaged(self, name: str, error: ValueError) -> ModelLoadError:
        return ModelLoadError(
            f"{self._folder}: tensor {name!r} cannot be read; the checkpoint is damaged or "
            f"incomplete, fetch or save it again: {_first(error)}"
        )


def _leaf_names(folder: Path, tree: dict[str, Any]) -> list[str]:
    """The leaves' names: the keys on the way to each, joined by dots as Orbax stores them."""
    entries = tree.get("tree_metadata")
    if not isinstance(entries, dict) or not entries:
        raise ModelLoadError(f"{folder / TREE_FILE} lists no arrays ('tree_metadata').")
    names = []
    for entry in entries.values():
        try:
            keys = [str(part["key"]) for part in entry["key_metadata"]]
            kind = entry["value_metadata"]["value_type"]
        except (TypeError, KeyError) as error:
            raise ModelLoadError(
                f"{folder / TREE_FILE} is damaged: entry {entry!r:.200}."
            ) from error
        name = ".".join(keys)
        if kind in _EMPTY:
            continue
        if kind not in _ARRAYS:
            raise ModelLoadError(f"{folder}: leaf {name!r} is a {kind}, not an array.")
        if not name or "/" in name or "\\" in name or name.strip(".") == "":
            raise ModelLoadError(f"{folder}: leaf {name!r} is not the name of a tensor.")
        names.append(name)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelLoadError(f"{folder} has two leaves called {twice!r}.")
    return names


def _first(error: ValueError, limit: int = 300) -> str:
    """TensorStore's message without the specification that it appends."""
    return str(error).partition(" [")[0][:limit]

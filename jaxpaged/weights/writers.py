"""Writes tensors under their Hugging Face names: a safetensors folder or an Orbax checkpoint.

Both take their tensors lazily and hold few of them at a time in host memory.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.orbax_reader import TREE_FILE
from jaxpaged.weights.reader import TensorReader
from jaxpaged.weights.safetensors_reader import INDEX_NAME

Array = npt.NDArray[np.generic]
T = TypeVar("T")
Progress = Callable[[int], None]
"""Called with bytes as they are written."""

ORBAX_FOLDER = "orbax"
_SAFETENSORS_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_PART_BYTES = 1 << 26
"""Of one tensor: how much is read at a time."""
_GROUP_BYTES = 1 << 27
"""How much an Orbax checkpoint takes at a time."""
_CHUNK_BYTES = 1 << 21
"""Of an Orbax array: small enough that a device's slice costs little more than its own bytes."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read, and cast to `dtype`, when it is written."""

    reader: TensorReader
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, rows: slice | None = None) -> Array:
        """All values, or some rows. Raises `ModelLoadError` if the cast overflows."""
        if rows is None:
            value = self.reader.read(self.name)
        else:
            value = self.reader.read_slice(self.name, (rows,))
        if value.dtype == self.dtype:
            return value
        with np.errstate(over="ignore"):
            cast = value.astype(self.dtype)
        if np.isfinite(value).all() and not np.isfinite(cast).all():
            raise ModelLoadError(
                f"Tensor {self.name!r} has values that {self.dtype.name} cannot hold "
                f"(up to {np.abs(value).max()}); choose bfloat16 or float32."
            )
        return cast

    def parts(self, chunk: Sequence[int] = (1,)) -> Iterator[tuple[int, Array]]:
        """(first row, values) in order, in pieces of bounded size where the leading axis allows it:
        some multiple of a chunk's rows.
        """
        # Quantised sources unpack to float32, whatever comes out of the cast.
        row_bytes = math.prod(self.shape[1:]) * max(4, self.dtype.itemsize)
        rows = chunk[0] if chunk else 1
        step = max(1, _PART_BYTES // max(1, row_bytes * rows)) * rows
        if not self.shape or self.shape[0] <= step:
            yield 0, self.read()
            return
        for start in range(0, self.shape[0], step):
            yield start, self.read(slice(start, min(start + step, self.shape[0])))


def write_safetensors(
    folder: Path, tensors: Sequence[LazyTensor], *, max_shard_bytes: int, progress: Progress
) -> None:
    """One file, or several of at most `max_shard_bytes` of data (more only for a single tensor that
    is larger) with an index.
    """
    shards = list(_grouped(tensors, lambda tensor: tensor.nbytes, max_shard_bytes))
    count = len(shards)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, progress)
    if count > 1:
        pairs = zip(names, shards, strict=True)
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors)},
            "weight_map": {t.name: name for name, shard in pairs for t in shard},
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, tensors: Sequence[LazyTensor], progress: Progress) -> None:
    # Wide types first: then every tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            for _, part in tensor.parts():
                stream.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
                progress(part.nbytes)


def write_orbax(folder: Path, tensors: Sequence[LazyTensor], *, progress: Progress) -> None:
    """An Orbax checkpoint of {name: array} in `folder`, which must not exist.

    Written with TensorStore in the layout that Orbax restores (as NumPy arrays, or as JAX arrays
    on any mesh). Orbax's own writer would copy all leaves into memory first, and open the
    accelerator. Not compressed: weights hardly shrink, and reading is then as fast as the disk.
    """
    began = time.time_ns()
    folder.mkdir()
    context = ts.Context()  # one, or each array would open, and rewrite, the database for itself
    pieces = ((t, *part) for t in tensors for part in t.parts(_chunk_shape(t)))
    for batch in _grouped(pieces, lambda piece: piece[2].nbytes, _GROUP_BYTES):
        # Together, because each commit to the database rewrites the nodes above what is new.
        transaction = ts.Transaction()
        for tensor, start, part in batch:
            array = _open(folder, tensor, context, transaction)
            where = array if part.shape == tensor.shape else array[start : start + len(part)]
            where.write(part, can_reference_source_data_indefinitely=True).copy.result()
        _commit(transaction)
        progress(sum(part.nbytes for _, _, part in batch))
        batch.clear()  # before the next is read
    made: dict[str, Any] = {"init_timestamp_nsecs": began, "commit_timestamp_nsecs": time.time_ns()}
    made |= {"item_handlers": None, "metrics": {}, "performance_metrics": {}, "custom_metadata": {}}
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(made), encoding="utf-8")
    (folder / TREE_FILE).write_text(json.dumps(_tree(tensors)), encoding="utf-8")


def _open(
    folder: Path, tensor: LazyTensor, context: ts.Context, transaction: ts.Transaction
) -> ts.TensorStore:
    base = {"driver": "file", "path": f"{folder.absolute()}/"}
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{tensor.name}/"},
        "metadata": {"compressor": None, "chunks": _chunk_shape(tensor)},
        "store_data_equal_to_fill_value": True,  # so that a chunk which is not there is missing
    }
    return ts.open(
        spec,
        open=True,
        create=True,
        shape=tensor.shape,
        dtype=tensor.dtype.name,
        context=context,
        transaction=transaction,
    ).result()


def _commit(transaction: ts.Transaction) -> None:
    done = transaction.commit_async()
    try:
        done.result()
    except BaseException:  # Ctrl-C: nothing may go on in a folder that is about to be removed
        with suppress(Exception):
            done.result()
        raise


def _chunk_shape(tensor: LazyTensor) -> list[int]:
    """Halve the longest axis until a chunk is small enough."""
    chunk = list(tensor.shape)
    while math.prod(chunk) * tensor.dtype.itemsize > _CHUNK_BYTES:
        longest = chunk.index(max(chunk))
        chunk[longest] = -(-chunk[longest] // 2)
    return [max(1, n) for n in chunk]


def _tree(tensors: Sequence[LazyTensor]) -> dict[str, Any]:
    """What Orbax writes for a flat dictionary of NumPy arrays; 2 is its code of a dictionary."""
    leaf = {"value_type": "np.ndarray", "skip_deserialize": False}
    entries = {
        str((t.name,)): {"key_metadata": [{"key": t.name, "key_type": 2}], "value_metadata": leaf}
        for t in tensors
    }
    return {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _grouped(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Neighbours of at most `limit` bytes together; a larger item is alone."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + size(item) > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group

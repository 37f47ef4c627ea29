"""Tensors of a GGUF file under their Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.gguf_architectures import GLOBAL_NAMES, Architecture
from jaxpaged.weights.gguf_blocks import Rows, unpack
from jaxpaged.weights.gguf_config import architecture_of
from jaxpaged.weights.gguf_file import GGUFFile, GGUFTensor
from jaxpaged.weights.mapped_file import MappedFile

Array = npt.NDArray[np.generic]

_PLAIN: dict[str, type] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one Hugging Face tensor lies, and what was done to it on the way into the file."""

    tensor: GGUFTensor
    shape: tuple[int, ...]
    expert: int = 0
    """Its number in a tensor of all experts."""
    order: npt.NDArray[np.intp] | None = None
    """The stored row of each row."""
    offset: float = 0.0
    """What the stored values are larger by."""
    values: GGUFTensor | None = None
    """Projections of values, where `tensor` has those of keys: see `Architecture.joined`."""


class GGUFTensorReader:
    """A `TensorReader` over one GGUF file.

    A slice reads only the rows, and within quantised rows only the blocks, that it covers. Tensors
    of all experts are given out as one matrix per expert.
    """

    def __init__(self, file: GGUFFile) -> None:
        """Raises `ModelLoadError` for tensors that have no place in the file's architecture."""
        self._file = file
        self._entries: dict[str, _Entry] = {}
        architecture = architecture_of(file)
        unknown = []
        for tensor in file.tensors.values():
            entries = dict(self._entries_of(tensor, architecture))
            if not entries and tensor.name not in architecture.config_tensors:
                unknown.append(tensor.name)
            self._entries |= entries
        if unknown:
            raise ModelLoadError(
                f"{file.path} has {len(unknown)} tensors that the architecture "
                f"{file.get('general.architecture')!r} does not use: "
                f"{', '.join(sorted(unknown)[:5])}."
            )
        self._data: MappedFile | None = MappedFile(file.path)

    def names(self) -> list[str]:
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype_name(self, name: str) -> str:
        kind = self._entry(name).tensor.type_name
        return np.dtype(_PLAIN[kind]).name if kind in _PLAIN else kind

    def read(self, name: str) -> Array:
        return self.read_slice(name, ())

    def read_slice(self, name: str, index: tuple[slice, ...]) -> Array:
        entry = self._entry(name)
        whole = slice(None)
        rows, columns = (*index, whole, whole)[:2]
        values: Array
        if entry.values is not None:
            values = self._join(entry.tensor, entry.values, rows, columns)
        elif len(entry.shape) == 1:
            vector = self._cut(entry.tensor, 0, whole, whole)[0]  # small: cut once it is in order
            values = (vector if entry.order is None else vector[entry.order])[index]
        else:
            picked = rows if entry.order is None else entry.order[rows]
            values = self._cut(entry.tensor, entry.expert, picked, columns)
        if entry.offset:
            values = values.astype(np.float32) - np.float32(entry.offset)
        return values

    def close(self) -> None:
        self._data = None

    def _cut(self, tensor: GGUFTensor, number: int, rows: Rows, columns: slice) -> Array:
        """A part of one of the tensor's matrices, as stored (a vector is one row)."""
        assert self._data is not None, "the reader is closed"
        count = tensor.shape[-2] if len(tensor.shape) > 1 else 1
        start = tensor.offset + number * count * tensor.row_bytes
        packed = self._data.cut(start, start + count * tensor.row_bytes).reshape(count, -1)
        plain = _PLAIN.get(tensor.type_name)
        if plain is None:
            return unpack(packed, tensor.type_name, rows, columns)
        # 32-byte alignment is the format's rule but not its guarantee; jax wants aligned data.
        cut: Array = np.require(packed.view(plain)[rows][:, columns], requirements="A")
        return cut

    def _join(self, keys: GGUFTensor, values: GGUFTensor, rows: slice, columns: slice) -> Array:
        """Rows of the matrix that has each head's projection of keys above that of values."""
        heads, width, key_rows = keys.shape
        each = key_rows + values.shape[1]
        start, stop, _ = rows.indices(heads * each)
        out = np.empty((max(0, stop - start), len(range(*columns.indices(width)))), np.float32)
        for head in range(start // each, -(-stop // each) if len(out) else 0):
            joined = np.concatenate(
                [
                    self._cut(keys, head, columns, slice(None)).T,
                    self._cut(values, head, slice(None), columns),
                ]
            )
            first, last = max(start, head * each), min(stop, (head + 1) * each)
            out[first - start : last - start] = joined[first - head * each : last - head * each]
        return out

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ModelLoadError(f"{self._file.path} has no tensor {name!r}.")
        return self._entries[name]

    def _entries_of(
        self, tensor: GGUFTensor, architecture: Architecture
    ) -> Iterator[tuple[str, _Entry]]:
        """The Hugging Face tensors that one GGUF tensor holds; none where it is not known."""
        offset = architecture.norm_offset if tensor.name.endswith("norm.weight") else 0.0
        if tensor.name in GLOBAL_NAMES:
            yield GLOBAL_NAMES[tensor.name], self._single(tensor, offset=offset)
            return
        match = _LAYER.fullmatch(tensor.name)
        if match is None:
            return
        layer, part = match.groups()
        prefix = f"model.layers.{layer}."
        if part in architecture.layer:
            order = self._row_order(tensor, part) if architecture.interleaved else None
            entry = self._single(tensor, order=order, offset=offset)
            yield prefix + architecture.layer[part], entry
        elif part in architecture.experts:
            if len(tensor.shape) != 3:
                raise self._wrong_shape(tensor)
            for expert in range(tensor.shape[0]):
                name = architecture.experts[part].format(expert)
                yield prefix + name, _Entry(tensor, tensor.shape[1:], expert=expert)
        for keys, (values, name) in architecture.joined.items():
            if part in (keys, values):  # both lead to the same entry
                yield prefix + name, self._joined(f"blk.{layer}.{keys}", f"blk.{layer}.{values}")

    def _joined(self, keys_name: str, values_name: str) -> _Entry:
        for name in (keys_name, values_name):
            if name not in self._file.tensors:
                raise ModelLoadError(f"{self._file.path} has no tensor {name!r}.")
        keys, values = self._file.tensors[keys_name], self._file.tensors[values_name]
        if len(keys.shape) != 3 or values.shape[::2] != keys.shape[:2]:
            raise ModelLoadError(
                f"{self._file.path}: tensors {keys_name!r} {keys.shape} and {values_name!r} "
                f"{values.shape} do not fit together."
            )
        heads, width, key_rows = keys.shape
        return _Entry(keys, (heads * (key_rows + values.shape[1]), width), values=values)

    def _single(
        self,
        tensor: GGUFTensor,
        *,
        order: npt.NDArray[np.intp] | None = None,
        offset: float = 0.0,
    ) -> _Entry:
        if len(tensor.shape) > 2:
            raise self._wrong_shape(tensor)
        return _Entry(tensor, tensor.shape, order=order, offset=offset)

    def _wrong_shape(self, tensor: GGUFTensor) -> ModelLoadError:
        return ModelLoadError(
            f"{self._file.path}: tensor {tensor.name!r} has the shape {tensor.shape}, with an "
            "unexpected number of dimensions."
        )

    def _row_order(self, tensor: GGUFTensor, part: str) -> npt.NDArray[np.intp] | None:
        """For q and k: the stored row of each row that Hugging Face's layout wants.

        llama.cpp stores the rows of each head so that the two halves of the rotation interleave
        (row 2i+j holds Hugging Face's row j*D/2+i). Undoing that moves whole quantised rows.
        """
        part = part.partition(".")[0]
        if part not in _HEADS:
            return None
        prefix = self._file.get("general.architecture")
        heads = self._file.get(f"{prefix}.attention.head_count")
        heads = self._file.get(f"{prefix}.{_HEADS[part]}", heads)
        rows = tensor.shape[0]
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
            raise ModelLoadError(
                f"{self._file.path}: tensor {tensor.name!r} has {rows} rows, not {heads} "
                "heads of even size."
            )
        # [heads, D/2, 2] as stored -> [heads, 2, D/2] as wanted
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

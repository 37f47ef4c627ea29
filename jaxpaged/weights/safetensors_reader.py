"""Tensors of a folder with one or several .safetensors files, checked before anything is mapped.

The header is parsed here (8 bytes of length, JSON, data) rather than by the `safetensors` package,
which maps files that are shorter than their header says and hides which file was at fault.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.mapped_file import MappedFile
from jaxpaged.weights.reader import some
from jaxpaged.weights.source import check_inside, read_json

Array = npt.NDArray[np.generic]
logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_MAX_RANK = 64  # NumPy's
_FLOATS: dict[str, type] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_OTHER_WIDTHS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    """Bytes from the start of the file."""


class SafetensorsReader:
    """A `TensorReader` over a folder, or over one file of it. Float types only are read; others are
    refused by name.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `ModelLoadError` for missing, truncated, contradictory or escaping files."""
        self._folder = folder
        index = folder / INDEX_NAME
        if folder.is_file():
            self._entries = _merge(folder.parent, [folder])
        elif index.exists():
            self._entries = _indexed(folder, index)
        else:
            self._entries = _unindexed(folder)
        self._maps: dict[Path, MappedFile] = {}

    def names(self) -> list[str]:
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype_name(self, name: str) -> str:
        dtype = self._entry(name).dtype
        return np.dtype(_FLOATS[dtype]).name if dtype in _FLOATS else dtype

    def read(self, name: str) -> Array:
        return self.read_slice(name, ())

    def read_slice(self, name: str, index: tuple[slice, ...]) -> Array:
        entry = self._entry(name)
        if entry.dtype not in _FLOATS:
            raise ModelLoadError(
                f"{entry.file}: tensor {name!r} has dtype {entry.dtype}, which is not "
                f"supported for weights; supported: {', '.join(_FLOATS)}."
            )
        if entry.file not in self._maps:
            self._maps[entry.file] = MappedFile(entry.file)
        raw = self._maps[entry.file].cut(entry.start, entry.stop)
        array: Array = raw.view(_FLOATS[entry.dtype]).reshape(entry.shape)
        # The data section starts wherever the header ends: a copy where that is not aligned.
        return np.require(array[index], requirements="A")

    def close(self) -> None:
        self._maps.clear()

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ModelLoadError(f"{self._folder} has no tensor {name!r}.")
        return self._entries[name]


def _indexed(folder: Path, index: Path) -> dict[str, _Entry]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no 'weight_map'.")
    files: dict[str, Path] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or re.fullmatch(r"[^/\\]+\.safetensors", shard) is None:
            raise ModelLoadError(
                f"{index} places tensor {name!r} in {shard!r}; only files beside it are allowed."
            )
        files.setdefault(shard, folder / shard)
    missing = sorted(shard for shard, path in files.items() if not path.exists())
    if missing:
        lost = sorted(name for name, shard in weight_map.items() if shard in missing)
        raise ModelLoadError(
            f"{folder} lacks {', '.join(missing)}, named by {INDEX_NAME}; without it "
            f"{len(lost)} tensors are missing: {some(lost)}."
        )
    stale = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in files)
    if stale:
        logger.warning("%s: ignoring files that the index does not name: %s", folder, some(stale))
    entries = _merge(folder, files.values())
    absent = sorted(
        f"{name} (in {shard})"
        for name, shard in weight_map.items()
        if name not in entries or entries[name].file.name != shard
    )
    if absent:
        raise ModelLoadError(f"{index} names tensors that are not in their file: {some(absent)}.")
    unlisted = sorted(entries.keys() - weight_map.keys())
    if unlisted:
        raise ModelLoadError(
            f"{folder} holds tensors that {INDEX_NAME} does not list: {some(unlisted)}."
        )
    return entries


def _unindexed(folder: Path) -> dict[str, _Entry]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = sorted(p.name for p in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.pth")
        )
        hint = f" {other[0]} is a pickle: convert it to safetensors first." if other else ""
        raise ModelLoadError(
            f"{folder} has no weights: looked for {INDEX_NAME}, *.safetensors and an Orbax "
            f"checkpoint.{hint}"
        )
    return _merge(folder, files)


def _merge(folder: Path, files: Iterable[Path]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for path in files:
        check_inside(folder, path)
        for name, entry in _read_header(path).items():
            if name in entries:
                raise ModelLoadError(
                    f"Tensor {name!r} is in both {entries[name].file.name} and {path.name} of "
                    f"{folder}; remove the stale file."
                )
            entries[name] = entry
    return entries


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            first = stream.read(8)
            length = int.from_bytes(first, "little")
            raw = stream.read(length) if length <= min(size, _MAX_HEADER) else b""
    except OSError as error:
        raise ModelLoadError(f"Cannot read {path}: {error.strerror}.") from error
    if size == 0:
        raise ModelLoadError(f"{path} is empty (0 bytes); fetch it again.")
    if first == b"version ":
        raise ModelLoadError(
            f"{path} looks like a git-LFS pointer, not the weights; fetch them with `git lfs pull`."
        )
    if len(first) < 8 or not 2 <= length <= _MAX_HEADER:
        raise ModelLoadError(f"{path} is not a safetensors file (header length {length}).")
    if 8 + length > size:
        raise _truncated(path, 8 + length, size)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise ModelLoadError(f"{path} has a damaged header: {error}.") from error
    except RecursionError:
        raise ModelLoadError(f"{path} has a damaged header: it nests too deeply.") from None
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path} has a damaged header: not a JSON object.")
    header.pop("__metadata__", None)
    entries = {name: _parse(path, name, info, 8 + length) for name, info in header.items()}
    _check_extent(path, entries, 8 + length, size)
    return entries


def _parse(path: Path, name: str, info: Any, data_start: int) -> _Entry:
    try:
        dtype, shape = info["dtype"], tuple(info["shape"])
        start, stop = info["data_offsets"]
        whole = isinstance(dtype, str) and len(shape) <= _MAX_RANK
        whole &= all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise ModelLoadError(f"{path} has a damaged header: tensor {name!r} is {info!r:.200}.")
    width = np.dtype(_FLOATS[dtype]).itemsize if dtype in _FLOATS else _OTHER_WIDTHS.get(dtype)
    if width is None:
        raise ModelLoadError(
            f"{path}: tensor {name!r} has dtype {dtype!r}, which is not supported."
        )
    if stop - start != math.prod(shape) * width:
        raise ModelLoadError(
            f"{path}: tensor {name!r} of shape {shape} and dtype {dtype} needs "
            f"{math.prod(shape) * width} bytes, but the header gives it {stop - start}."
        )
    return _Entry(path, dtype, shape, data_start + start, data_start + stop)


def _check_extent(path: Path, entries: dict[str, _Entry], data_start: int, size: int) -> None:
    """The tensors must tile the data section exactly: no gap, overlap, shortage or rest."""
    at = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            raise ModelLoadError(
                f"{path} has a damaged header: tensor {name!r} starts at {entry.start}, not {at}."
            )
        at = entry.stop
    if at > size:
        raise _truncated(path, at, size)
    if at < size:
        raise ModelLoadError(f"{path} has {size - at} bytes more than its header describes.")


def _truncated(path: Path, needed: int, size: int) -> ModelLoadError:
    return ModelLoadError(
        f"{path} is truncated: it has {size} bytes of {needed} ({needed - size} missing). "
        "Fetch it again."
    )

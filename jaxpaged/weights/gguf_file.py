"""The header of a GGUF file: metadata and the table of tensors, checked against the file's size.

Own parser because the `gguf` package's reader needs seconds for a real vocabulary (one numpy view
a string) and maps past the end of a truncated file. Format: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpaged.errors import ModelLoadError

# Value types 0..12 of the format; 8 is a string, 9 an array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4

# ggml type id -> (name, elements in a block, bytes of a block); what this engine can read.
READABLE_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
}
PLAIN_TYPES = ("F32", "F16", "BF16")
BLOCKS = {name: (elements, size) for name, elements, size in READABLE_TYPES.values()}
"""Type name -> (elements, bytes) of one block."""
_OTHER_TYPE_NAMES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in numpy order (the file stores it reversed)."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    row_bytes: int
    """Bytes of one row: the last axis, packed."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Metadata (plain Python values) and tensors of one file; holds no open file."""

    path: Path
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GGUFTensor] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Parse and check `path`.

        Raises `ModelLoadError` for anything that is not a whole, readable GGUF file, and for tensor
        types that are not supported, by name.
        """
        try:
            size = path.stat().st_size
            with path.open("rb") as stream:
                if size < 24:
                    raise ModelLoadError(f"{path} is not a GGUF file: it has only {size} bytes.")
                with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    return _Parser(path, data).file()
        except OSError as error:
            raise ModelLoadError(f"Cannot read {path}: {error}.") from error

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    @property
    def quantized(self) -> bool:
        return any(t.type_name not in PLAIN_TYPES for t in self.tensors.values())


class _Parser:
    """A cursor over the mapped file; every read is bounds-checked."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def file(self) -> GGUFFile:
        if self._bytes(4) != b"GGUF":
            start = bytes(self.data[:64])
            lfs = " It is a git-LFS pointer: fetch the real file." if b"git-lfs" in start else ""
            raise ModelLoadError(f"{self.path} is not a GGUF file (wrong magic bytes).{lfs}")
        version = self._one("I")
        if version not in (2, 3):
            raise ModelLoadError(
                f"{self.path} is GGUF version {version}; 2 and 3 (little-endian) are supported."
            )
        num_tensors = self._count("tensors", 24)
        num_keys = self._count("metadata keys", 12)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise self._broken(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._one("I"), depth=0)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {alignment!r}, not a power of two")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        data_start = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in infos:
            if name in tensors:
                raise self._broken(f"tensor {name!r} appears twice")
            tensors[name] = self._tensor(name, shape, type_id, data_start + offset)
        return GGUFFile(self.path, metadata, tensors)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._one("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._broken(f"tensor {name!r} has {num_dims} dimensions")
        dims = struct.unpack(f"<{num_dims}Q", self._bytes(8 * num_dims))
        return name, tuple(reversed(dims)), self._one("I"), self._one("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
        if type_id not in READABLE_TYPES:
            kind = _OTHER_TYPE_NAMES.get(type_id, f"number {type_id}")
            readable = ", ".join(sorted(t[0] for t in READABLE_TYPES.values()))
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has type {kind}, which is not supported. "
                f"Supported types: {readable}. Use a file quantised to one of them."
            )
        type_name, block, block_bytes = READABLE_TYPES[type_id]
        if shape[-1] % block:
            raise self._broken(f"tensor {name!r} has rows of {shape[-1]}, not whole blocks")
        row_bytes = shape[-1] // block * block_bytes
        end = offset + math.prod(shape[:-1]) * row_bytes
        if end > self.size:
            raise ModelLoadError(
                f"{self.path} is truncated: tensor {name!r} ends at byte {end}, the file has "
                f"{self.size} ({end - self.size} missing). Fetch it again."
            )
        return GGUFTensor(name, type_name, shape, offset, row_bytes)

    def _value(self, kind: int, *, depth: int) -> Any:
        if kind in _SCALARS:
            return self._one(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 2:
            raise self._broken(f"value type {kind} is unknown or nested too deeply")
        item = self._one("I")
        if item in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[item])
            count = self._count("array items", width)
            return list(struct.unpack(f"<{count}{_SCALARS[item]}", self._bytes(count * width)))
        count = self._count("array items", 8)
        return [self._value(item, depth=depth + 1) for _ in range(count)]

    def _string(self) -> str:
        raw = self._bytes(self._count("characters", 1))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._broken(f"a string is not UTF-8 ({error})") from error

    def _count(self, what: str, least_bytes: int) -> int:
        """A 64-bit count, refused when that many items cannot fit into the rest of the file."""
        count = self._one("Q")
        if count * least_bytes > self.size - self.at:
            raise self._broken(f"it announces {count} {what}, more than fit into the file")
        return int(count)

    def _one(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))[0]

    def _bytes(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise self._broken(f"it ends inside its header, at byte {self.size}")
        self.at += count
        return self.data[self.at - count : self.at]

    def _broken(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is a damaged GGUF file: {why} (near byte {self.at}).")

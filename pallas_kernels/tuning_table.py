"""Tables of kernel configurations in JSON: read, checked, searched, written.

A file is `{"schema": 1, "entries": [...]}`. Each entry names what it is for and ends with the
`config`, the fields of the kernel's configuration class:

    {"kernel": "decode", "device": "NVIDIA H200", "head_dim": 128, "kv_dtype": "bfloat16",
     "group": 16, "batch": 64, "config": {"block_kv": 64, "num_warps": 4, ...}}

See `Entry` for the keys, and `TuningTable.find` for which entry serves a call.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.kernel_configs import DecodeConfig, KernelConfig, PrefillConfig, WriteConfig

SCHEMA = 1
CONFIG_CLASSES: dict[str, type[KernelConfig]] = {
    "decode": DecodeConfig,
    "prefill": PrefillConfig,
    "write": WriteConfig,
}
BACKENDS = ("pallas_triton", "pallas_mosaic")
KV_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")
"""float16 caches use the entries of bfloat16: same sizes, same instructions."""
_EXACT = ("value_dim", "kv_heads", "block_size")
_BUCKETS = ("group", "batch", "context")
_KEY = ("backend", "kernel", "device", "head_dim", "kv_dtype", *_EXACT, *_BUCKETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A configuration and what it is for. None stands for any value."""

    kernel: str
    """decode, prefill or write."""
    device: str
    """What JAX calls the device (`device_kind`)."""
    head_dim: int
    kv_dtype: str
    config: KernelConfig
    backend: str = "pallas_triton"
    value_dim: int | None = None
    """Only a latent cache needs it: there it is less than head_dim."""
    kv_heads: int | None = None
    """Of one device."""
    block_size: int | None = None
    group: int | None = None
    """Query heads of a KV head, at most."""
    batch: int | None = None
    """Rows of the program (decode) or tokens (prefill, write), at most."""
    context: int | None = None
    """Longest context, in tokens, at most."""
    splits_from_rule: bool = False
    """The file's config has no `splits`: they follow from batch and context (see `tuning`)."""
    ctas_per_sm: int | None = None
    """Programs that fit a multiprocessor at once, from a compilation; the rule for splits needs
    it."""
    note: str = ""
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        _check_choice("kernel", self.kernel, tuple(CONFIG_CLASSES))
        _check_choice("backend", self.backend, BACKENDS)
        _check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        _check_text("device", self.device)
        if not isinstance(self.note, str):
            raise ValueError(f"note is {self.note!r}, but must be a text.")
        _check_positive("head_dim", self.head_dim)
        for name in (*_EXACT, *_BUCKETS, "ctas_per_sm"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size is {self.block_size}, but must be a power of two.")
        expected = CONFIG_CLASSES[self.kernel]
        if type(self.config) is not expected:
            raise ValueError(
                f"config is a {type(self.config).__name__}, but kernel {self.kernel!r} needs a "
                f"{expected.__name__}."
            )

    @property
    def key(self) -> tuple[object, ...]:
        """All that says what the entry is for."""
        return tuple(getattr(self, name) for name in _KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A call of a kernel: the same fields as `Entry`, each with its value."""

    backend: str
    kernel: str
    device: str
    head_dim: int
    kv_dtype: str
    value_dim: int
    kv_heads: int
    block_size: int
    group: int
    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class TuningTable:
    """Entries, no two of them for the same thing."""

    entries: tuple[Entry, ...]

    def find(self, query: Query) -> Entry | None:
        """The entry for a call: backend, kernel, device, head_dim and kv_dtype are equal;
        value_dim, kv_heads and block_size are equal or not named; group, batch and context are at
        or above the call's, or not named. Of several the first in the order: named before not
        named, then the nearest group, batch and context.
        """
        fitting = [entry for entry in self.entries if _fits(entry, query)]
        return min(fitting, key=_distance, default=None)


def _fits(entry: Entry, query: Query) -> bool:
    same = ("backend", "kernel", "device", "head_dim", "kv_dtype")
    if any(getattr(entry, name) != getattr(query, name) for name in same):
        return False
    if entry.value_dim is None and query.value_dim != query.head_dim:
        return False
    exact = all(getattr(entry, n) in (None, getattr(query, n)) for n in _EXACT)
    return exact and all(_bucket(entry, n) >= getattr(query, n) for n in _BUCKETS)


def _bucket(entry: Entry, name: str) -> float:
    value: int | None = getattr(entry, name)
    return math.inf if value is None else value


def _distance(entry: Entry) -> tuple[float, ...]:
    unnamed = [float(getattr(entry, name) is None) for name in _EXACT]
    return (*unnamed, *(_bucket(entry, name) for name in _BUCKETS))


# ---------------------------------------------------------------------------- files


def load_table(path: str | os.PathLike[str]) -> TuningTable:
    """Read and check a table. Raises `ValueError` that names the file, the entry (counted from 0)
    and the field for anything that is not as described above; `OSError` if it cannot be read.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # also bytes that are no UTF-8
        raise ValueError(f"The tuning table {os.fspath(path)!r} is no JSON: {error}") from error
    return parse_table(document, os.fspath(path))


def parse_table(document: Any, source: str) -> TuningTable:
    """The table in a JSON document; `source` names it in errors."""
    where = f"The tuning table {source!r}"
    if not isinstance(document, dict) or set(document) != {"schema", "entries"}:
        raise ValueError(f'{where} must be an object with "schema" and "entries" alone.')
    if document["schema"] != SCHEMA:
        raise ValueError(
            f"{where} has schema {document['schema']!r}, but this version reads {SCHEMA}. Write it "
            "anew with scripts/bench_kernels.py --tune."
        )
    if not isinstance(document["entries"], list):
        raise ValueError(f'{where}: "entries" must be a list.')
    entries: list[Entry] = []
    for index, raw in enumerate(document["entries"]):
        try:
            entries.append(_parse_entry(raw))
        except ValueError as error:
            raise ValueError(f"{where}, entry {index}: {error}") from error
    places: dict[tuple[object, ...], int] = {}
    for index, entry in enumerate(entries):
        if entry.key in places:
            raise ValueError(
                f"{where}, entry {index} is for the same as entry {places[entry.key]}."
            )
        places[entry.key] = index
    return TuningTable(tuple(entries))


def _parse_entry(raw: Any) -> Entry:
    if not isinstance(raw, dict):
        raise ValueError(f"it is {raw!r}, but must be an object.")
    fields = {field.name: field for field in dataclasses.fields(Entry)}
    del fields["splits_from_rule"]  # the file says it by leaving out config's splits
    _check_names(raw, "", set(fields), {"kernel", "device", "head_dim", "kv_dtype", "config"})
    _check_choice("kernel", raw["kernel"], tuple(CONFIG_CLASSES))
    config_class, config = CONFIG_CLASSES[raw["kernel"]], raw["config"]
    if not isinstance(config, dict):
        raise ValueError(f"config is {config!r}, but must be an object.")
    _check_names(config, "config.", {f.name for f in dataclasses.fields(config_class)}, set())
    try:
        made = config_class(**config)
    except ValueError as error:
        raise ValueError(f"config.{error}") from error
    return Entry(
        **{**raw, "config": made},
        splits_from_rule=raw["kernel"] == "decode" and "splits" not in config,
    )


def write_table(entries: Iterable[Entry], path: str | os.PathLike[str]) -> None:
    """Write a file that `load_table` reads back as the same entries. Raises `ValueError` if two of
    them are for the same thing.
    """
    listed = [_entry_json(entry) for entry in entries]
    parse_table({"schema": SCHEMA, "entries": listed}, os.fspath(path))
    lines = ",\n".join("    " + json.dumps(entry) for entry in listed)
    body = f"[\n{lines}\n  ]" if listed else "[]"
    text = f'{{\n  "schema": {SCHEMA},\n  "entries": {body}\n}}\n'
    Path(path).write_text(text, encoding="utf-8")


def _entry_json(entry: Entry) -> dict[str, Any]:
    config = dataclasses.asdict(entry.config)
    if entry.splits_from_rule:
        del config["splits"]
    named = {name: getattr(entry, name) for name in _KEY}
    named |= {"config": config, "ctas_per_sm": entry.ctas_per_sm, "note": entry.note or None}
    return {name: value for name, value in named.items() if value is not None}


def _check_names(raw: dict[str, Any], prefix: str, allowed: set[str], needed: set[str]) -> None:
    for name in raw:
        if name not in allowed:
            raise ValueError(f"{prefix}{name} is no field; there are {', '.join(sorted(allowed))}.")
    for name in sorted(needed - set(raw)):
        raise ValueError(f"{prefix}{name} is missing.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(choices)}.")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}, but must be a text that is not empty.")


def _check_positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}, but must be a whole number from 1.")

"""Damaged, contradictory and escaping safetensors folders are refused; good ones are exact."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.safetensors_reader import INDEX_NAME, SafetensorsReader

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(6, dtype=np.float16).reshape(2, 3)


def _index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B}, tmp_path / "two.safetensors")
    _index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def _raw(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_reads_all_and_slices(sharded: Path) -> None:
    reader = SafetensorsReader(sharded)
    assert reader.names() == ["a", "b"]
    assert reader.shape("a") == (3, 4)
    assert (reader.dtype_name("a"), reader.dtype_name("b")) == ("float32", "float16")
    np.testing.assert_array_equal(reader.read("a"), A)
    assert type(reader.read("a")) is np.ndarray, "not the memmap subclass"
    np.testing.assert_array_equal(
        reader.read_slice("a", (slice(1, 3), slice(0, 2))), A[1:3, 0:2], strict=True
    )
    kept = reader.read("b")
    reader.close()
    np.testing.assert_array_equal(kept, B, strict=True)


def test_bfloat16_and_unaligned_data(tmp_path: Path) -> None:
    values = np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16)
    header = {"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    padded = json.dumps(header).encode()
    padded += b" " * (1 - len(padded) % 2)  # an odd length puts the data on an odd address
    _raw(tmp_path / "m.safetensors", padded, values.tobytes())
    got = SafetensorsReader(tmp_path).read("x")
    assert got.dtype == ml_dtypes.bfloat16 and got.flags.aligned
    np.testing.assert_array_equal(got, values)


def _resident_bytes(path: Path) -> int | None:
    """Of the mappings of a file, how much is in memory; None where it is not mapped."""
    found: int | None = None
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found = (found or 0) + int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_a_slice_maps_only_its_pages_and_close_drops_them(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    value = np.arange(1 << 23, dtype=np.float32).reshape(1 << 13, 1 << 10)  # 32 MiB
    save_file({"w": value}, path)
    reader = SafetensorsReader(tmp_path)
    part = reader.read_slice("w", (slice(4096, 4100), slice(0, 512)))
    np.testing.assert_array_equal(part, value[4096:4100, :512])
    mapped = _resident_bytes(path)
    assert mapped is not None and mapped <= value.nbytes // 4  # pages come in large groups
    kept = part.copy()
    reader.close()
    assert _resident_bytes(path) is not None, "the part still needs it"
    del part
    assert _resident_bytes(path) is None
    np.testing.assert_array_equal(kept, value[4096:4100, :512])


def test_missing_shard_names_its_tensors(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks two.safetensors.*1 tensors are missing: b"):
        SafetensorsReader(sharded)


def test_stale_shard_is_ignored_with_one_warning(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"a": A + 1}, sharded / "old.safetensors")
    save_file({"a": A + 2}, sharded / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        reader = SafetensorsReader(sharded)
    np.testing.assert_array_equal(reader.read("a"), A)
    assert [
        r.getMessage().endswith("model.safetensors, old.safetensors") for r in caplog.records
    ] == [True]


def test_index_and_files_must_agree(sharded: Path) -> None:
    _index(sharded, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(ModelLoadError, match=r"not in their file: b \(in one.safetensors\)"):
        SafetensorsReader(sharded)
    _index(sharded, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    with pytest.raises(ModelLoadError, match=r"c \(in two.safetensors\)"):
        SafetensorsReader(sharded)
    save_file({"b": B, "extra": A}, sharded / "two.safetensors")
    _index(sharded, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(ModelLoadError, match="does not list: extra"):
        SafetensorsReader(sharded)
    save_file({"b": B, "a": A}, sharded / "two.safetensors")
    with pytest.raises(ModelLoadError, match="'a' is in both one.safetensors and two.safetensors"):
        SafetensorsReader(sharded)


def test_files_without_index(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    assert SafetensorsReader(sharded).names() == ["a", "b"]
    save_file({"b": B}, sharded / "three.safetensors")
    with pytest.raises(ModelLoadError, match="remove the stale file"):
        SafetensorsReader(sharded)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="looked for model.safetensors.index.json"):
        SafetensorsReader(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="pytorch_model.bin is a pickle"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "x/../../s", "..", 3])
def test_index_cannot_leave_the_folder(tmp_path: Path, shard: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": A}, tmp_path / "secret.safetensors")
    _index(folder, {"model.norm.weight": shard})
    with (
        _opened_below(Path("/")) as opened,
        pytest.raises(ModelLoadError, match="model.norm.weight"),
    ):
        SafetensorsReader(folder)
    assert opened == [folder / INDEX_NAME]


@pytest.mark.parametrize("indexed", [True, False])
def test_links_cannot_leave_the_folder(tmp_path: Path, indexed: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": A}, tmp_path / "secret.safetensors")
    (folder / "m.safetensors").symlink_to(tmp_path / "secret.safetensors")
    if indexed:
        _index(folder, {"a": "m.safetensors"})
    with (
        _opened_below(Path("/")) as opened,
        pytest.raises(ModelLoadError, match="is a link to .*secret.safetensors, outside"),
    ):
        SafetensorsReader(folder)
    assert opened == ([folder / INDEX_NAME] if indexed else [])


def test_the_watch_sees_what_is_opened(sharded: Path) -> None:
    with _opened_below(sharded) as opened:
        SafetensorsReader(sharded).read("a")
    assert {p.name for p in opened} == {INDEX_NAME, "one.safetensors", "two.safetensors"}


def test_hub_cache_links_are_followed(tmp_path: Path) -> None:
    repo = tmp_path / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots" / "abc").mkdir(parents=True)
    save_file({"a": A}, repo / "blobs" / "0123")
    (repo / "snapshots" / "abc" / "model.safetensors").symlink_to("../../blobs/0123")
    np.testing.assert_array_equal(SafetensorsReader(repo / "snapshots" / "abc").read("a"), A)


_watchers: list[list[Path]] = []


def _on_audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _watchers and isinstance(args[0], (str, bytes, os.PathLike)):
        _watchers[-1].append(Path(os.fsdecode(args[0])))


sys.addaudithook(_on_audit)  # sees whatever way a file is opened; hooks cannot be removed


@contextmanager
def _opened_below(folder: Path) -> Iterator[list[Path]]:
    """Collects the files below `folder` that are opened meanwhile."""
    found: list[Path] = []
    _watchers.append([])
    try:
        yield found
    finally:
        found += [path for path in _watchers.pop() if path.is_relative_to(folder)]


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": A, "b": B}, path)
    whole = path.read_bytes()
    for keep in range(len(whole)):
        path.write_bytes(whole[:keep])
        with pytest.raises(ModelLoadError, match="m.safetensors"):
            SafetensorsReader(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelLoadError, match=r"truncated.*\(1 missing\)"):
        SafetensorsReader(tmp_path)


_GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"\0" * 16, b"", "damaged header"),
        (b"[1]", b"", "not a JSON object"),
        (b"{", b"", "header length 1"),
        ({"x": _GOOD}, bytes(9), "1 bytes more than"),
        ({"x": {**_GOOD, "shape": [3]}}, bytes(8), "needs 12 bytes, but the header gives it 8"),
        ({"x": {**_GOOD, "shape": [-2]}}, bytes(8), "damaged header: tensor 'x'"),
        ({"x": {**_GOOD, "data_offsets": [0]}}, bytes(8), "damaged header: tensor 'x'"),
        ({"x": 5}, bytes(8), "damaged header: tensor 'x'"),
        ({"x": {**_GOOD, "dtype": ["F32"]}}, bytes(8), "damaged header: tensor 'x'"),
        ({"x": {**_GOOD, "shape": [10**4000] * 2}}, bytes(8), "damaged header: tensor 'x'"),
        ({"x": {**_GOOD, "shape": [2**62] * 1000}}, bytes(8), "damaged header: tensor 'x'"),
        (b'{"x":' * 50_000, b"", "damaged header: it nests too deeply"),
        ({"x": {**_GOOD, "dtype": "F4"}}, bytes(8), "tensor 'x' has dtype 'F4'"),
        ({"x": _GOOD, "y": _GOOD}, bytes(8), "starts at"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    _raw(tmp_path / "m.safetensors", header, data)
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsReader(tmp_path)


def test_empty_file_and_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelLoadError, match="is empty"):
        SafetensorsReader(tmp_path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 42\n")
    with pytest.raises(ModelLoadError, match="git-LFS pointer"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "I64", "BOOL"])
def test_other_dtypes_are_refused_when_read(tmp_path: Path, dtype: str) -> None:
    width = 8 if dtype == "I64" else 1
    header = {"x": {"dtype": dtype, "shape": [1], "data_offsets": [0, width]}}
    _raw(tmp_path / "m.safetensors", header, bytes(width))
    reader = SafetensorsReader(tmp_path)
    assert reader.dtype_name("x") == dtype
    with pytest.raises(ModelLoadError, match=f"'x' has dtype {dtype}, which is not supported"):
        reader.read("x")
    with pytest.raises(ModelLoadError, match="no tensor 'y'"):
        reader.read("y")

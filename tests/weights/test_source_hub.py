"""Hub ids: which files are fetched, and what a filled cache gives without a network."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from jaxpaged.config import EngineConfig
from jaxpaged.convert import convert
from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.reader import open_reader
from jaxpaged.weights.source import ModelSource, resolve_source
from tests.tiny_models import tiny_config, tiny_gguf, tiny_llama, tiny_weights

OLD, NEW = "a" * 40, "b" * 40
"""Commits: weights of seed 0 and of seed 1."""


def _snapshot(repository: Path, commit: str, files: Path) -> None:
    """Put `files` into the cache as huggingface_hub does: blobs, and links to them."""
    for path in files.rglob("*"):
        if path.is_file():
            blob = repository / "blobs" / f"{commit[0]}{abs(hash(path)):x}"
            blob.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, blob)
            link = repository / "snapshots" / commit / path.relative_to(files)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))


def _ref(repository: Path, name: str, commit: str) -> None:
    path = repository / "refs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """HF_HOME with one repository of two commits."""
    repository = tmp_path / "home" / "hub" / "models--org--tiny"
    _snapshot(repository, OLD, tiny_llama(tmp_path / "old", seed=0))
    _snapshot(repository, NEW, tiny_llama(tmp_path / "new", seed=1))
    _ref(repository, "main", NEW)
    _ref(repository, "v1", OLD)
    return tmp_path / "home"


@pytest.fixture
def cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same as this process's cache, with a network that fails the test when it is used."""

    def refuse(*args: Any, **_: Any) -> Any:
        raise AssertionError(f"the network was used: {args}")

    assert constants.is_offline_mode(), "tests/conftest.py sets HF_HUB_OFFLINE"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return home / "hub"


def _resolve(model: str, **settings: Any) -> ModelSource:
    return resolve_source(EngineConfig(model=model, **settings))


@pytest.mark.parametrize(
    ("revision", "commit", "seed"),
    [(None, NEW, 1), ("main", NEW, 1), ("v1", OLD, 0), (OLD, OLD, 0), (NEW, NEW, 1)],
)
def test_the_cache_by_branch_tag_and_commit(
    cache: Path, revision: str | None, commit: str, seed: int
) -> None:
    source = _resolve("org/tiny", revision=revision)
    assert source.path == cache / "models--org--tiny" / "snapshots" / commit
    reader = open_reader(source)
    for name, value in tiny_weights(tiny_config(), seed).items():
        np.testing.assert_array_equal(reader.read(name), value, strict=True)


def test_a_converted_snapshot_equals_it(cache: Path, tmp_path: Path) -> None:
    dst = convert("org/tiny", tmp_path / "dst", revision="v1", progress=False)
    reader = open_reader(_resolve(str(dst)))
    for name, value in tiny_weights(tiny_config(), 0).items():
        np.testing.assert_array_equal(reader.read(name), value, strict=True)


@pytest.mark.usefixtures("cache")
class TestNotThere:
    @pytest.mark.parametrize("revision", ["v2", "c" * 40])
    def test_revision(self, revision: str) -> None:
        with pytest.raises(ModelLoadError) as caught:
            _resolve("org/tiny", revision=revision)
        for part in ("'org/tiny' is in the hub cache", f"revision '{revision}'", OLD, "main", "v1"):
            assert part in str(caught.value)

    def test_repository(self) -> None:
        with pytest.raises(ModelLoadError, match="'org/other' .revision 'v1'.: it is neither a lo"):
            _resolve("org/other", revision="v1")

    def test_weights(self, cache: Path) -> None:
        (cache / "models--org--tiny" / "snapshots" / NEW / "model.safetensors").unlink()
        with pytest.raises(ModelLoadError, match=f"{NEW} has no weights: looked for model.safet"):
            open_reader(_resolve("org/tiny"))

    def test_config(self, cache: Path) -> None:
        (cache / "models--org--tiny" / "snapshots" / NEW / "config.json").unlink()
        with pytest.raises(ModelLoadError, match=f"{NEW} has no config.json: .*/FILE.gguf"):
            _resolve("org/tiny")

    def test_a_file_that_links_out_of_the_repository(self, cache: Path, tmp_path: Path) -> None:
        config = cache / "models--org--tiny" / "snapshots" / NEW / "config.json"
        config.unlink()
        config.symlink_to(tmp_path / "new" / "config.json")
        with pytest.raises(ModelLoadError, match=r"config.json is a link to .*, outside"):
            _resolve("org/tiny")


def test_an_adapter_is_not_a_model(cache: Path, tmp_path: Path) -> None:
    files = tmp_path / "adapter"
    files.mkdir()
    (files / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (files / "adapter_model.safetensors").write_bytes(b"")
    _snapshot(cache / "models--org--lora", OLD, files)
    _ref(cache / "models--org--lora", "main", OLD)
    with pytest.raises(
        ModelLoadError, match=r"adapter \(LoRA\) .* Load its base model, 'org/base'"
    ):
        _resolve("org/lora")


def test_one_gguf_file_of_a_repository(cache: Path, tmp_path: Path) -> None:
    files = tmp_path / "quants"
    (files / "more").mkdir(parents=True)
    tiny_gguf(files / "tiny-Q8_0.gguf", quant="Q8_0")
    tiny_gguf(files / "more" / "tiny-F32.gguf")
    _snapshot(cache / "models--org--quants", OLD, files)
    _ref(cache / "models--org--quants", "main", OLD)
    for name, quantized in (("tiny-Q8_0.gguf", True), ("more/tiny-F32.gguf", False)):
        source = _resolve(f"org/quants/{name}")
        assert (source.kind, source.quantized) == ("gguf", quantized)
    assert _resolve("org/quants", load_format="gguf").path.name == "tiny-Q8_0.gguf"
    with pytest.raises(ModelLoadError, match=r"'org/quants' has no file 'other.gguf'"):
        _resolve("org/quants/other.gguf")
    with pytest.raises(ModelLoadError, match="neither an existing path nor a hub id"):
        _resolve("org/quants/../../secret.gguf")


def test_a_fresh_process_with_hf_home(home: Path) -> None:
    script = """
import socket
def refuse(*args, **kwargs):
    raise SystemExit(f"the network was used: {args}")
socket.socket.connect = socket.getaddrinfo = refuse
from jaxpaged.config import EngineConfig
from jaxpaged.weights.source import resolve_source
print(resolve_source(EngineConfig(model="org/tiny")).path.name)
"""
    names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    env = {k: v for k, v in os.environ.items() if k not in names}
    env |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == NEW, run.stderr


REPOSITORY = [
    ".gitattributes", "LICENSE.txt", "README.md", "USE_POLICY.md", "config.json",
    "generation_config.json", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    "pytorch_model-00001-of-00001.bin", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.onnx", "onnx/model.onnx",
    "onnx/config.json", "consolidated.00.pth", "consolidated.safetensors",
    "original/consolidated.00.pth", "original/params.json", "original/tokenizer.model",
    "original/model.safetensors", "metal/model.safetensors", "training_args.bin",
    "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja", "model-Q4_K_M.gguf", "gguf/model-Q8_0.gguf",
    "openvino/config.json", "image.png", "orbax/_METADATA", "orbax/manifest.ocdbt",
    "orbax/d/0123", "checkpoint-100/model.safetensors",
]  # fmt: skip
TEXTS = {
    "LICENSE.txt", "config.json", "generation_config.json", "model.safetensors.index.json",
    "pytorch_model.bin.index.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
}  # fmt: skip
SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize(
    ("load_format", "weights"),
    [
        ("auto", SHARDS),
        ("safetensors", SHARDS),
        ("gguf", {"model-Q4_K_M.gguf"}),
        ("orbax", {"orbax/_METADATA", "orbax/manifest.ocdbt", "orbax/d/0123"}),
        ("dummy", set()),
    ],
)
def test_only_the_needed_files_are_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load_format: str, weights: set[str]
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tiny_llama(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    settings: dict[str, Any] = {"revision": "v1", "load_format": load_format}
    with suppress(ModelLoadError):  # the snapshot above has safetensors only
        _resolve("org/tiny", **settings)
    assert (asked["repo"], asked["revision"]) == ("org/tiny", "v1")
    kept = filter_repo_objects(
        REPOSITORY,
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert set(kept) == TEXTS | weights


def test_a_repository_of_many_gguf_files_is_not_fetched_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hub:
        def list_repo_files(self, repo: str, *, revision: str | None) -> list[str]:
            assert (repo, revision) == ("org/quants", "v1")
            return ["config.json", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "more/m-F16.gguf"]

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    with pytest.raises(ModelLoadError, match=r"several .*m-Q8_0.gguf.* org/quants/m-Q4_K_M.gguf"):
        _resolve("org/quants", load_format="gguf", revision="v1")


def _http(kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    error = kind.__new__(kind)  # they want the server's response, which says nothing here
    Exception.__init__(error, "server says no")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_http(GatedRepoError), "access to it is restricted; accept its terms and log in"),
        (_http(RepositoryNotFoundError), "no such repository on the hub"),
        (_http(RevisionNotFoundError), "'org/tiny' has no revision 'v9'"),
        (_http(EntryNotFoundError), "Downloading 'org/tiny' failed"),
        (OSError(28, "No space left on device"), "failed: .*No space left on device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_hub_may_answer(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=message):
        _resolve("org/tiny", revision="v9")


def test_a_snapshot_that_is_known_to_be_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("The cached snapshot for 'org/tiny' is incomplete: 1 file(s)")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ModelLoadError, match="'org/tiny' is only partly in the hub cache: .*1 file"
    ):
        _resolve("org/tiny")

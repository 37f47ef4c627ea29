"""Two models are told apart by their files, wherever they lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.record import fingerprint as module
from jaxpaged.record.fingerprint import Fingerprint, fingerprint
from jaxpaged.text.tokenizer import load_tokenizer
from jaxpaged.weights.source import resolve_source
from tests.tiny_models import tiny_gguf, tiny_llama


def of(path: Path, *, seed: int = 0, **settings: str) -> Fingerprint:
    config = EngineConfig(model=str(path), **settings)  # type: ignore[arg-type]
    source = resolve_source(config)
    return fingerprint(source, load_tokenizer(source, config), seed)


def test_a_copy_is_the_same_model(tmp_path: Path) -> None:
    first = tiny_llama(tmp_path / "first")
    second = shutil.copytree(first, tmp_path / "second")
    assert of(first) == of(second)
    assert None not in of(first).values()


def test_every_part_counts(tmp_path: Path) -> None:
    first, weights = tiny_llama(tmp_path / "first"), tiny_llama(tmp_path / "weights", seed=1)
    same = of(first)
    assert {k for k, v in of(weights).items() if v != same[k]} == {"weights"}
    for name, old, new, part in (
        ("config.json", "10000.0", "20000.0", "config"),
        ("tokenizer.json", '"<|user|>"', '"<|me|>"', "tokenizer"),
    ):
        other = shutil.copytree(first, tmp_path / part)
        text = (other / name).read_text()
        assert old in text
        (other / name).write_text(text.replace(old, new))
        assert {k for k, v in of(other).items() if v != same[k]} == {part}


def test_made_up_weights_are_their_seed(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "model")
    seeds = [of(path, seed=seed, load_format="dummy")["weights"] for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_a_gguf_file_is_one_part(tmp_path: Path) -> None:
    first = tiny_gguf(tmp_path / "a.gguf")
    second = Path(shutil.copy(first, tmp_path / "b.gguf"))
    assert of(first) == of(second)
    assert of(first)["config"] is None
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)
    assert {k for k, v in of(second).items() if v != of(first)[k]} == {"weights"}


def test_of_large_files_pieces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 64)
    monkeypatch.setattr(module, "PIECES", 5)
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 40)
    with path.open("rb") as file:
        pieces = list(module._pieces(file, 10_240))
    whole = path.read_bytes()
    assert [len(piece) for piece in pieces] == [64] * 5
    assert pieces[0] == whole[:64]
    assert pieces[-1] == whole[-64:]
    assert pieces[2] == whole[5088:5152]

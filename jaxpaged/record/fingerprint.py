"""Says cheaply whether two models are the same: checksums of samples of their files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxpaged.text.tokenizer import Tokenizer
from jaxpaged.weights.source import ModelSource

PIECE = 64 * 1024
PIECES = 256
"""Bytes of a piece, and how many of them, evenly spread, stand for a larger file."""

Fingerprint = dict[str, str | None]
"""Checksums by part: weights, config, tokenizer. None where there is no such part."""


def fingerprint(source: ModelSource, tokenizer: Tokenizer | None, seed: int) -> Fingerprint:
    """Of a resolved model. `seed` counts for made-up weights only.

    Of a file above 16 MiB the size and 16 MiB are read, so a small change inside a large file may
    go unseen. Names of files and folders do not count, except below an Orbax checkpoint.
    """
    config = None if source.gguf is not None else json.dumps(source.hf_config, sort_keys=True)
    backend = None if tokenizer is None else tokenizer.backend.to_str()
    return {
        "weights": f"made up from seed {seed}" if source.kind == "dummy" else _weights(source),
        "config": None if config is None else _digest(config.encode()),
        "tokenizer": None if backend is None else _digest(backend.encode()),
    }


def _weights(source: ModelSource) -> str:
    total = hashlib.sha256()
    for name, path in _files(source):
        size = path.stat().st_size
        total.update(f"{name} {size} ".encode())
        with path.open("rb") as file:
            for piece in _pieces(file, size):
                total.update(piece)
    return total.hexdigest()


def _files(source: ModelSource) -> Iterator[tuple[str, Path]]:
    if source.gguf is not None:
        yield "", source.path
    elif source.checkpoint is not None:
        for path in sorted(source.checkpoint.rglob("*")):
            if path.is_file():
                yield path.relative_to(source.checkpoint).as_posix(), path
    else:
        for path in sorted(source.path.glob("*.safetensors")):
            yield "", path


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    if size <= PIECE * PIECES:
        yield file.read()
        return
    for i in range(PIECES):
        file.seek((size - PIECE) * i // (PIECES - 1))
        yield file.read(PIECE)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

"""Turns a model of any format the engine loads into a folder of safetensors or Orbax weights.

The folder holds the weights under their Hugging Face names, so it does not depend on a mesh, with
config.json and the tokenizer beside them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpaged import checks
from jaxpaged.config import DTYPES, EngineConfig
from jaxpaged.errors import ConfigError, JaxpagedError, ModelLoadError, UnsupportedModelError
from jaxpaged.progress import progress_bar
from jaxpaged.text.gguf_tokenizer import build_gguf_tokenizer
from jaxpaged.text.tokenizer import TOKENIZER_FILES
from jaxpaged.weights.gguf_file import GGUFFile
from jaxpaged.weights.reader import TensorReader, open_reader
from jaxpaged.weights.source import ModelSource, check_inside, resolve_source
from jaxpaged.weights.writers import (
    ORBAX_FOLDER,
    LazyTensor,
    Progress,
    write_orbax,
    write_safetensors,
)

_log = logging.getLogger(__name__)

FORMATS = ("orbax", "safetensors")
_NUMPY_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_REMOVALS, _REMOVAL_SECONDS = 50, 0.1
_COPIED = (
    "*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


class ConvertError(JaxpagedError, OSError):
    """The converted model could not be written; nothing of it is left."""


def convert(
    src: str,
    dst: str | Path,
    *,
    dtype: str = "auto",
    to: str | None = None,
    max_shard_size: int | str = "5GB",
    revision: str | None = None,
    progress: bool = True,
) -> Path:
    """Convert the model `src` (a folder, .gguf file, hub id, alias or Orbax folder) into the new
    folder `dst`, and return that.

    `dtype` "auto" keeps each tensor's type; quantised ones become float32, which loses nothing, and
    so do those in float64.
    `to` is orbax, or safetensors in files of `max_shard_size` bytes; None takes orbax, or
    safetensors when `src` is Orbax already. The folder appears whole or not at all. Raises
    `ConfigError` for wrong arguments, `ModelLoadError` for what is wrong with `src` (also if its
    tensors are not those of its config, where the engine knows the architecture), and
    `ConvertError` when writing fails.
    """
    shard_bytes = _check_arguments(dtype, to, max_shard_size)
    target = _check_target(Path(dst))
    source = resolve_source(EngineConfig(model=src, revision=revision))
    _check_apart(target, Path(src).expanduser(), source)
    to = to or ("safetensors" if source.kind == "orbax" else "orbax")
    reader = open_reader(source)
    try:
        _check_fit(source, reader)
        tensors = [_lazy(reader, name, dtype) for name in reader.names()]
        total = sum(t.nbytes for t in tensors)
        if not total:
            raise ModelLoadError(f"{source.path} holds no weights.")
        start = time.perf_counter()
        bar = progress_bar(
            total=total,
            desc="Converting",
            unit="B",
            unit_scale=True,
            disable=not progress,
        )
        with bar:
            _write_whole(target, source, tensors, to, shard_bytes, lambda n: bar.update(n) and None)
    finally:
        reader.close()
    seconds = time.perf_counter() - start
    _log.info(
        "Converted %s to %s in %s: %d tensors, %.2f GB in %.1f s, %.2f GB/s.",
        source.name,
        to,
        target,
        len(tensors),
        total / 1e9,
        seconds,
        total / seconds / 1e9,
    )
    return target


def _check_arguments(dtype: str, to: str | None, max_shard_size: int | str) -> int:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if to is not None and to not in FORMATS:
        raise ConfigError(f"to must be one of {', '.join(FORMATS)}, got {to!r}.")
    size = max_shard_size
    if isinstance(size, str) and size.endswith("B") and not size.endswith("iB"):
        size = size[:-1].lower()  # GB, as everywhere beside memory, is 1000^3
    try:
        shard_bytes = checks.parse_size(size)
    except checks.Broken as broken:
        raise ConfigError(
            f"max_shard_size must be {broken.rule}, or such as 5GB, got {max_shard_size!r}."
        ) from None
    if shard_bytes < 1:
        raise ConfigError(f"max_shard_size must be positive, got {max_shard_size!r}.")
    return shard_bytes


def _check_target(dst: Path) -> Path:
    try:
        target = dst.expanduser().resolve()
        exists = target.exists()
        full = exists and target.is_dir() and any(target.iterdir())
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, no such user
        raise ConfigError(f"{str(dst)!r:.200} cannot be the new folder: {error}.") from error
    if exists and not target.is_dir():
        raise ConfigError(f"{dst} exists and is not a folder; give the path of a new one.")
    if full:
        raise ConfigError(f"{dst} exists and is not empty; give the path of a new folder.")
    return target


def _check_apart(target: Path, given: Path, source: ModelSource) -> None:
    """A model within a model's folder would be found, or copied, as a part of that."""
    folder = given if given.is_dir() else source.path  # a hub id's is in the cache
    if folder.is_dir() and target.is_relative_to(folder.resolve()):
        raise ConfigError(f"{target} is inside {folder}, the model to convert; choose another.")


def _check_fit(source: ModelSource, reader: TensorReader) -> None:
    """As when the model is loaded: a conversion of the wrong tensors would look whole."""
    from jaxpaged.models import loading, registry  # jax, which takes a second to import

    try:
        model, config = registry.find_model(source.hf_config, str(source.path))
    except UnsupportedModelError as error:
        _log.warning("Whether the tensors fit the config is not checked. %s", error)
        return
    config = loading.settle_tying(reader, model, config)
    names = set(reader.names())
    sources = {path: each.among(names) for path, each in model.sources(config).items()}
    loading.check_tensors(reader, model, config, sources)


def _lazy(reader: TensorReader, name: str, dtype: str) -> LazyTensor:
    # What is not in the table is quantised, float64 (which no engine setting keeps), or refused by
    # name when it is read.
    kept = reader.dtype_name(name) if dtype == "auto" else dtype
    chosen = _NUMPY_DTYPES.get(kept, _NUMPY_DTYPES["float32"])
    return LazyTensor(reader, name, reader.shape(name), chosen)


def _write_whole(
    target: Path,
    source: ModelSource,
    tensors: list[LazyTensor],
    to: str,
    shard_bytes: int,
    progress: Progress,
) -> None:
    """Write beside the target and rename at the end. config.json comes last: what a killed process
    leaves behind is no model.
    """
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        temporary.mkdir(parents=True)
        _check_room(target.parent, sum(t.nbytes for t in tensors))
        if to == "orbax":
            write_orbax(temporary / ORBAX_FOLDER, tensors, progress=progress)
        else:
            write_safetensors(temporary, tensors, max_shard_bytes=shard_bytes, progress=progress)
        _write_tokenizer(temporary, source)
        if source.generation_config:
            _write_json(temporary / "generation_config.json", source.generation_config)
        _write_json(temporary / "config.json", _config_for(source, tensors))
        os.rename(temporary, target)
    except (OSError, ValueError) as error:
        if isinstance(error, JaxpagedError):
            raise
        raise ConvertError(f"Cannot write {target}: {_reason(error, target)}") from error
    finally:
        if temporary.exists():
            _remove(temporary)


def _remove(folder: Path) -> None:
    """Whole, though TensorStore's threads may go on to write for a moment after an interruption."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_REMOVAL_SECONDS)
        if not folder.exists():
            return


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConvertError(
            f"There is not enough room in {folder}: the weights need {needed / 1e9:.2f} GB, "
            f"{free / 1e9:.2f} GB are free. Free some, choose another disk, or dtype=bfloat16."
        )


def _reason(error: OSError | ValueError, target: Path) -> str:
    # TensorStore reports errors of the system as ValueErrors with the system's text.
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if full or os.strerror(errno.ENOSPC) in str(error) or os.strerror(errno.EDQUOT) in str(error):
        free = shutil.disk_usage(target.parent).free
        return f"the disk is full ({free / 1e9:.2f} GB were left). Free some or choose another one."
    return str(error)


def _config_for(source: ModelSource, tensors: list[LazyTensor]) -> dict[str, Any]:
    """The source's config with the type that most of the weights' bytes are stored in now."""
    config = dict(source.hf_config)
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + tensor.nbytes
    config.pop("dtype", None)
    # The older of the two keys: every version of transformers reads it.
    config["torch_dtype"] = max(sizes, key=lambda name: sizes[name])
    return config


def _write_tokenizer(folder: Path, source: ModelSource) -> None:
    if source.gguf is not None:
        try:
            _write_gguf_tokenizer(folder, source.gguf)
        except ModelLoadError as error:
            _log.warning("Only the weights are converted, not the tokenizer. %s", error)
        return
    for pattern in _COPIED:
        for path in source.path.glob(pattern):
            if not path.is_file() or path.name.endswith(".index.json"):
                continue  # the index of the old weights
            check_inside(source.path, path)
            copy = folder / path.relative_to(source.path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        _log.warning("%s has no tokenizer, so neither has its conversion.", source.path)


def _write_gguf_tokenizer(folder: Path, file: GGUFFile) -> None:
    """What transformers, and so this engine, reads: tokenizer.json and tokenizer_config.json."""
    parts = build_gguf_tokenizer(file)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **parts.special_tokens,
    }
    templates = parts.chat_templates
    if set(templates) == {"default"}:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    parts.backend.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""Where a model comes from: turns the `model` setting into files and one config dictionary."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.weights import embedded
from jaxpaged.weights.gguf_config import generation_config_of, hf_config_of
from jaxpaged.weights.gguf_file import GGUFFile

_DTYPES = ("float32", "float16", "bfloat16")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIG_PATTERNS = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
_HUB_IGNORED = ["original/*", "consolidated*", "*.index.fp16.json", "onnx/*"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A resolved model. `hf_config` follows Hugging Face's config.json, also for GGUF files."""

    name: str
    """What the user wrote."""
    kind: str
    """hf (a folder with safetensors), gguf (a file), or dummy (only a config is read)."""
    path: Path
    hf_config: dict[str, Any] = field(repr=False)
    generation_config: dict[str, Any] = field(repr=False)
    """generation_config.json, or {}; whether its sampling defaults apply is the engine's choice."""
    quantized: bool = False
    gguf: GGUFFile | None = field(default=None, repr=False)
    """The parsed header when `path` is a .gguf file, with any kind."""

    @property
    def dtype_name(self) -> str | None:
        """The checkpoint's own type, or None: `dtype` (the newer key) wins over `torch_dtype`.

        Raises `ModelLoadError` for types no weights are stored in.
        """
        for key in ("dtype", "torch_dtype"):
            value = self.hf_config.get(key)
            if value in (None, "auto"):
                continue
            name = str(value).removeprefix("torch.")
            if name not in _DTYPES:
                raise ModelLoadError(
                    f"{self.path}: config {key!r} must be one of {', '.join(_DTYPES)}, "
                    f"got {value!r}."
                )
            return name
        return None


def resolve_source(
    config: EngineConfig, *, supported_architectures: Collection[str] | None = None
) -> ModelSource:
    """Find the model's files and read its configs; no weights are read.

    `config.model` is the alias of the embedded model, else an existing path, else a hub id. Raises
    `ModelLoadError` when files are missing or broken, `UnsupportedModelError` when config.json
    names no architecture, or one outside `supported_architectures` (where given), or weights
    quantised in a way that is not implemented.
    """
    path = _locate(config)
    if path.is_file() and path.suffix != ".gguf":
        raise ModelLoadError(
            f"model={config.model!r} is a file but not a .gguf file; give the folder that holds "
            "config.json and the .safetensors files."
        )
    if path.is_dir():
        path = _gguf_in(path, config) or path
    source = _gguf_source(path, config) if path.is_file() else _folder_source(path, config)
    _check_architecture(source, supported_architectures)
    return source


def download(repo: str, *, revision: str | None, patterns: list[str]) -> Path:
    """A hub snapshot's folder. Honours HF_HUB_OFFLINE; raises `ModelLoadError` with the reason."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=patterns, ignore_patterns=_HUB_IGNORED
        )
    except GatedRepoError as error:
        why = "access to it is restricted; accept its terms and log in with `hf auth login`"
        raise ModelLoadError(f"Cannot download {repo!r}: {why}.") from error
    except RepositoryNotFoundError as error:
        why = "there is no such folder here, and no such repository on the hub (or it is private)"
        raise ModelLoadError(f"Cannot find {repo!r}: {why}.") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{repo!r} has no revision {revision!r}.") from error
    except LocalEntryNotFoundError as error:
        why = "it is neither a local path nor in the hub cache, and the hub cannot be reached"
        hint = "Give a local folder, or go online (HF_HUB_OFFLINE=1 forbids that)."
        raise ModelLoadError(f"Cannot find {repo!r}: {why}. {hint}") from error
    except Exception as error:  # every network library below raises its own kinds
        raise ModelLoadError(f"Downloading {repo!r} failed: {error}") from error
    return Path(folder)


def locate(name: str, *, revision: str | None, patterns: list[str], setting: str) -> Path:
    """An existing path as it is, else a downloaded hub id; `setting` names the option in errors."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(name) or name.endswith((".gguf", ".safetensors")):
        raise ModelLoadError(f"{setting}={name!r} is neither an existing path nor a hub id.")
    return download(name, revision=revision, patterns=patterns)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ModelLoadError` that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:  # broken JSON, or not UTF-8
        raise ModelLoadError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def _locate(config: EngineConfig) -> Path:
    if config.model == embedded.ALIAS:
        return embedded.find_file()
    patterns = list(_CONFIG_PATTERNS)
    if config.load_format == "gguf":
        patterns.append("*.gguf")
    elif config.load_format != "dummy":
        patterns.append("*.safetensors")
    return locate(config.model, revision=config.revision, patterns=patterns, setting="model")


def _gguf_in(folder: Path, config: EngineConfig) -> Path | None:
    """The one .gguf file of a folder that has no config.json, or where GGUF was asked for."""
    if config.load_format == "safetensors":
        return None
    if config.load_format != "gguf" and (folder / "config.json").exists():
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(f.name for f in files)
        raise ModelLoadError(f"{folder} holds several GGUF files ({names}); give the path of one.")
    if not files and config.load_format == "gguf":
        raise ModelLoadError(f"load_format='gguf', but {folder} holds no .gguf file.")
    return files[0] if files else None


def _gguf_source(path: Path, config: EngineConfig) -> ModelSource:
    if config.load_format == "safetensors":
        raise ModelLoadError(f"load_format='safetensors', but model={config.model!r} is GGUF.")
    file = GGUFFile.open(path)
    return ModelSource(
        name=config.model,
        kind="dummy" if config.load_format == "dummy" else "gguf",
        path=path,
        hf_config=hf_config_of(file),
        generation_config=generation_config_of(file),
        quantized=file.quantized,
        gguf=file,
    )


def _folder_source(folder: Path, config: EngineConfig) -> ModelSource:
    if not (folder / "config.json").exists():
        raise ModelLoadError(f"{folder} has no config.json (and no .gguf file).")
    hf_config = read_json(folder / "config.json")
    if hf_config.get("quantization_config"):
        quant = hf_config["quantization_config"]
        method = quant.get("quant_method") if isinstance(quant, dict) else quant
        raise UnsupportedModelError(
            f"{folder}: weights quantised with {method!r} are not supported; load the original "
            "weights, or a GGUF file of type Q8_0, Q4_0 or Q4_1."
        )
    generation = folder / "generation_config.json"
    return ModelSource(
        name=config.model,
        kind="dummy" if config.load_format == "dummy" else "hf",
        path=folder,
        hf_config=hf_config,
        generation_config=read_json(generation) if generation.exists() else {},
    )


def _check_architecture(source: ModelSource, supported: Collection[str] | None) -> None:
    names = source.hf_config.get("architectures")
    model_type = source.hf_config.get("model_type")
    known = f" Supported: {', '.join(sorted(supported))}." if supported is not None else ""
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise UnsupportedModelError(
            f"{source.path}: config.json names no architecture (architectures={names!r}, "
            f"model_type={model_type!r}).{known}"
        )
    if supported is not None and names[0] not in supported:
        raise UnsupportedModelError(
            f"{source.path}: architecture {names[0]!r} (model_type {model_type!r}) is not "
            f"supported.{known}"
        )

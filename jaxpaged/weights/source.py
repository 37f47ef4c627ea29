"""Where a model comes from: turns the `model` setting into files and one config dictionary."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.weights import embedded, hub
from jaxpaged.weights.gguf_config import generation_config_of, hf_config_of
from jaxpaged.weights.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

_DTYPES = ("float32", "float16", "bfloat16")
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""Of config.json; the first that is set counts."""
_ORBAX_MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
_UNFINISHED = ".orbax-checkpoint-tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A resolved model. `hf_config` follows Hugging Face's config.json, also for GGUF files."""

    name: str
    """What the user wrote."""
    kind: str
    """hf (a folder with safetensors), orbax, gguf (a file), or dummy (only a config is read)."""
    path: Path
    hf_config: dict[str, Any] = field(repr=False)
    generation_config: dict[str, Any] = field(repr=False)
    """generation_config.json, or {}; whether its sampling defaults apply is the engine's choice."""
    quantized: bool = False
    gguf: GGUFFile | None = field(default=None, repr=False)
    """The parsed header when `path` is a .gguf file, with any kind."""
    checkpoint: Path | None = None
    """Folder of the Orbax checkpoint with kind orbax: in `path`, or `path` itself."""

    @property
    def dtype_name(self) -> str | None:
        """The checkpoint's own type, or None: `dtype` (the newer key) wins over `torch_dtype`.

        Raises `ModelLoadError` for types no weights are stored in.
        """
        for key in _DTYPE_KEYS:
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


def weights_at(path: Path) -> ModelSource:
    """Weights alone, as training leaves them: a .safetensors or .gguf file, a folder with such
    files, or an Orbax checkpoint. No config.json is needed, and none is read.

    Raises `ModelLoadError` if there is nothing of the kind.
    """
    gguf = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    checkpoint = _orbax_in(path, path, "auto") if path.is_dir() else None
    if checkpoint is not None:
        kind = "orbax"
    elif path.suffix == ".safetensors" or any(path.glob("*.safetensors*")):
        kind = "hf"
    elif len(gguf) == 1:
        kind = "gguf"
    else:
        state = "holds no weights" if path.is_dir() else "is no file or folder with weights"
        raise ModelLoadError(
            f"{path} {state}: give a .safetensors or .gguf file, a folder with .safetensors files, "
            "or an Orbax checkpoint."
        )
    return ModelSource(
        name=str(path),
        kind=kind,
        path=gguf[0] if kind == "gguf" else path,
        hf_config={},
        generation_config={},
        gguf=GGUFFile.open(gguf[0]) if kind == "gguf" else None,
        checkpoint=checkpoint,
    )


def locate(name: str, *, revision: str | None, patterns: list[str], setting: str) -> Path:
    """An existing path as it is, else a downloaded hub id; `setting` names the option in errors."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not hub.HUB_ID.fullmatch(name) or name.endswith((".gguf", ".safetensors")):
        raise ModelLoadError(f"{setting}={name!r} is neither an existing path nor a hub id.")
    return hub.download(name, revision=revision, patterns=patterns)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ModelLoadError` that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:  # broken JSON, or not UTF-8
        raise ModelLoadError(f"{path} is not valid JSON: {error}.") from error
    except RecursionError:
        raise ModelLoadError(f"{path} nests lists or objects too deeply.") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def check_inside(folder: Path, path: Path) -> None:
    """Refuse links that lead out, except within the hub cache, whose snapshots link to blobs."""
    root = folder.resolve()
    for parent in (root, *root.parents):
        repository = parent.parent.parent
        if parent.parent.name == "snapshots" and repository.name.startswith("models--"):
            root = repository
            break
    if not path.resolve().is_relative_to(root):
        raise ModelLoadError(
            f"{path} is a link to {path.resolve()}, outside {root}; put the file itself there."
        )


def _locate(config: EngineConfig) -> Path:
    name, revision = config.model, config.revision
    if name == embedded.ALIAS:
        return embedded.find_file()
    if not Path(name).expanduser().exists():
        file = hub.HUB_FILE.fullmatch(name)
        if file is not None and ".." not in Path(file[2]).parts:
            return hub.download_gguf(file[1], file[2], revision=revision)
        if config.load_format == "gguf" and hub.HUB_ID.fullmatch(name):
            hub.refuse_several_gguf(name, revision=revision)
    patterns = hub.patterns_for(config.load_format)
    return locate(name, revision=revision, patterns=patterns, setting="model")


def _gguf_in(folder: Path, config: EngineConfig) -> Path | None:
    """The one .gguf file of a folder that has no config.json, or where GGUF was asked for."""
    if config.load_format in ("safetensors", "orbax"):
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
    if config.load_format in ("safetensors", "orbax"):
        raise ModelLoadError(
            f"load_format={config.load_format!r}, but model={config.model!r} is GGUF."
        )
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
    given = folder
    if not (folder / "config.json").exists() and _is_orbax(folder):
        folder = folder.absolute().parent  # the checkpoint was given; its config is beside it
    if not (folder / "config.json").exists():
        raise ModelLoadError(_no_config(given))
    hf_config = _json_inside(folder, "config.json")
    if hf_config.get("quantization_config"):
        quant = hf_config["quantization_config"]
        method = quant.get("quant_method") if isinstance(quant, dict) else quant
        raise UnsupportedModelError(
            f"{folder}: weights quantised with {method!r} are not supported; load the original "
            "weights, or a GGUF file."
        )
    types = {key: str(hf_config[key]) for key in _DTYPE_KEYS if hf_config.get(key) is not None}
    if len({name.removeprefix("torch.") for name in types.values()}) > 1:
        logger.warning("%s: config.json contradicts itself: %s; dtype counts.", folder, types)
    checkpoint = None
    if config.load_format in ("auto", "orbax"):
        checkpoint = _orbax_in(given, folder, config.load_format)
    kind = "dummy" if config.load_format == "dummy" else "hf" if checkpoint is None else "orbax"
    has_generation = (folder / "generation_config.json").exists()
    return ModelSource(
        name=config.model,
        kind=kind,
        path=folder,
        hf_config=hf_config,
        generation_config=_json_inside(folder, "generation_config.json") if has_generation else {},
        checkpoint=checkpoint,
    )


def _json_inside(folder: Path, name: str) -> dict[str, Any]:
    check_inside(folder, folder / name)
    return read_json(folder / name)


def _no_config(folder: Path) -> str:
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        base = read_json(adapter).get("base_model_name_or_path")
        return (
            f"{folder} is an adapter (LoRA) without a model: it has adapter_config.json but no "
            f"config.json. Load its base model, {base!r}."
        )
    if any(folder.glob(f"*{_UNFINISHED}*")):
        return f"{folder} has no config.json, only an Orbax checkpoint that was not finished."
    return (
        f"{folder} has no config.json: looked for config.json with *.safetensors or an Orbax "
        "checkpoint, and for a single .gguf file. Of a hub repository only these are fetched; for "
        "one of GGUF files give owner/name/FILE.gguf."
    )


def _is_orbax(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in _ORBAX_MARKS)


def _orbax_in(given: Path, folder: Path, load_format: str) -> Path | None:
    """The one Orbax checkpoint of a model's folder, at most two levels down; safetensors win
    unless load_format says otherwise.

    Savers that put several items together make a level of their own: step/default, name/params.
    """
    wanted = load_format == "orbax"
    if not wanted and any(folder.glob("*.safetensors*")):
        return None
    if _is_orbax(given):
        found = [given]
    else:
        found = [p for p in sorted(given.glob("*")) if p.is_dir() and _is_orbax(p)]
    # A folder with marks but without a tree holds items, each a checkpoint of its own.
    found = [item for one in found for item in _items(one) or [one]]
    finished = [p for p in found if _UNFINISHED not in f"{p.parent.name}/{p.name}"]
    if found and not finished:
        raise ModelLoadError(f"{found[0]} is an Orbax checkpoint that was not finished.")
    found = finished
    if len(found) > 1:
        names = ", ".join(str(p.relative_to(given)) for p in found)
        raise ModelLoadError(
            f"{given} holds several Orbax checkpoints ({names}); give the path of one."
        )
    if wanted and not found:
        raise ModelLoadError(f"load_format='orbax', but {given} holds no Orbax checkpoint.")
    return found[0] if found else None


def _items(folder: Path) -> list[Path]:
    if (folder / "_METADATA").exists():
        return []
    return [p for p in sorted(folder.glob("*")) if p.is_dir() and (p / "_METADATA").exists()]


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

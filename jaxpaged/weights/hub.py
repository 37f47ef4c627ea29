"""Snapshots of the hub: which files a model needs, and what is said when they cannot be had."""

from __future__ import annotations

import re
from pathlib import Path

from jaxpaged.errors import ModelLoadError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/([^\\]+\.gguf)")
"""owner/name/path of a .gguf file in the repository."""

_CONFIG_PATTERNS = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
_WEIGHT_PATTERNS = {"gguf": ["*.gguf"], "orbax": ["orbax/*"], "dummy": []}
"""By load_format; all others mean safetensors."""
# A star also stands for slashes, so these keep other models and formats in subfolders out.
_IGNORED = ["original/*", "consolidated*", "*.index.fp16.json", "onnx/*"]
_IGNORED += [f"*/*.{end}" for end in ("safetensors", "json", "txt", "gguf")]


def patterns_for(load_format: str) -> list[str]:
    """Names of the files that a model needs: never pickles (*.bin, *.pth) or other formats."""
    return _CONFIG_PATTERNS + _WEIGHT_PATTERNS.get(load_format, ["*.safetensors"])


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
            repo, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED
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
        raise ModelLoadError(_not_cached(repo, revision, error)) from error
    except Exception as error:  # every network library below raises its own kinds
        raise ModelLoadError(f"Downloading {repo!r} failed: {error}") from error
    return Path(folder)


def download_gguf(repo: str, file: str, *, revision: str | None) -> Path:
    """One file of a repository that holds many."""
    path = download(repo, revision=revision, patterns=[file]) / file
    if not path.exists():
        raise ModelLoadError(
            f"{repo!r} has no file {file!r} at revision {revision or 'main'!r}, or it is not in "
            "the hub cache."
        )
    return path


def refuse_several_gguf(repo: str, *, revision: str | None) -> None:
    """Repositories of GGUF files hold a dozen quantisations: ask for one before fetching all."""
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(repo, revision=revision)
    except Exception:  # offline, or an error that the download explains better
        return
    found = sorted(name for name in names if name.endswith(".gguf") and "/" not in name)
    if len(found) > 1:
        raise ModelLoadError(
            f"{repo!r} holds several GGUF files ({', '.join(found)}); name one, as in "
            f"{repo}/{found[0]}."
        )


def _not_cached(repo: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants

    online = "Go online (HF_HUB_OFFLINE=1 forbids that)"
    if "is incomplete" in str(error):
        return f"{repo!r} is only partly in the hub cache: {error} {online}."
    stored = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    known = sorted(p.name for kind in ("refs", "snapshots") for p in stored.glob(f"{kind}/*"))
    if known:
        return (
            f"{repo!r} is in the hub cache, but not its revision {revision or 'main'!r}, and the "
            f"hub cannot be reached. There are: {', '.join(known)}. Choose one of them with "
            f"revision=..., or: {online.lower()}."
        )
    at = f" (revision {revision!r})" if revision else ""
    return (
        f"Cannot find {repo!r}{at}: it is neither a local path nor in the hub cache, and the hub "
        f"cannot be reached. Give a local folder. {online}."
    )

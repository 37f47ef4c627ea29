"""Executables that were compiled before this start: artefacts that the user names, and those that
earlier starts kept. Both are folders as in `device.executables`, and fit only the same manifest.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import jax
from jax.stages import Compiled

from jaxpaged.device import executables
from jaxpaged.device.executables import Executables, UnusableExecutables
from jaxpaged.device.manifest import Manifest, digest, first_difference
from jaxpaged.errors import ConfigError

_log = logging.getLogger(__name__)

MOST_KEPT = 16
"""Engines whose executables stay in the cache; those that were not used for longest go first."""
_OPAQUE = {
    "source": "source code of jaxpaged",
    "model": "model configuration",
    "weights": "shapes of weights",
    "attention": "attention kernels",
    "order": "compiler options",
}
"""Entries of a manifest that are checksums."""


def open_artefact(path: str) -> Executables:
    """The folder of the setting `compiled`. Raises `ConfigError` if it cannot be used at all."""
    if jax.process_count() > 1:
        raise ConfigError(f"compiled={path!r} works in one process only; leave it out.")
    try:
        return Executables.open(Path(path).expanduser())
    except UnusableExecutables as error:
        raise ConfigError(
            f"compiled={path!r} cannot be used: {error}. It must be a folder of your own that "
            "`jaxpaged compile MODEL --out DIR` wrote; or leave it out."
        ) from error


def check(artefact: Executables, manifest: Manifest, programs: Sequence[str]) -> None:
    """Raises `ConfigError` that names the first thing in which an artefact does not fit."""
    found = first_difference(_plain(manifest), artefact.manifest)
    missing = [name for name in programs if name not in artefact.files]
    if found is None and missing:
        found = ("programs", programs, sorted(artefact.files))
    if found is None:
        return
    name, ours, theirs = found
    what = f"{name}={theirs!r}, and here it is {ours!r}"
    if name in _OPAQUE:
        what = f"other {_OPAQUE[name]} ({name})"
    raise ConfigError(
        f"compiled={str(artefact.folder)!r} does not fit: it was made for {what}. Start with what "
        "it was made for, make it again with `jaxpaged compile MODEL --out DIR` and the settings "
        "of this start, or leave it out."
    )


def find(root: Path, manifest: Manifest) -> Executables | None:
    """What an earlier start kept for this manifest, if it can be used."""
    folder = root / digest(_plain(manifest))
    if not folder.exists():
        return None
    try:
        found = Executables.open(folder)
    except UnusableExecutables as error:
        _log.warning("Executables of an earlier start are not used: %s.", error)
        return None
    if first_difference(_plain(manifest), found.manifest) is not None:
        return None
    with suppress(OSError):
        os.utime(folder)
    return found


def keep(root: Path, manifest: Manifest, programs: Mapping[str, Compiled]) -> None:
    """Write executables where `find` looks, and drop old ones. Only logs what goes wrong."""
    if not programs:
        return
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        executables.write(root / digest(_plain(manifest)), manifest, programs)
        kept = sorted(
            (path for path in root.iterdir() if path.is_dir()),
            key=lambda path: path.stat().st_mtime,
        )
        for path in kept[:-MOST_KEPT]:
            shutil.rmtree(path, ignore_errors=True)
    except (OSError, ValueError, NotImplementedError, RuntimeError) as error:
        _log.warning("Executables are not kept for the next start: %s", error)


def remembered_bytes(root: Path | None, manifest: Manifest, measure: Callable[[], int]) -> int:
    """`measure()`, or what it said in an earlier start with this manifest."""
    if root is None:
        return measure()
    path = root / f"{digest(_plain(manifest))}.json"
    with suppress(OSError, ValueError):
        known = json.loads(path.read_text(encoding="utf-8"))
        if type(known) is int and known >= 0:
            return known
    measured = measure()
    with suppress(OSError):
        root.mkdir(mode=0o700, exist_ok=True)
        path.write_text(json.dumps(measured), encoding="utf-8")
    return measured


def _plain(manifest: Manifest) -> Manifest:
    """As it comes back from a file."""
    plain: Manifest = json.loads(json.dumps(manifest))
    return plain

"""A folder of executables: what XLA made of an engine's programs, to be run without compiling.

Loading one unpickles it and runs machine code: whoever can write here decides what the process
does. So the folder must belong to the user (or to root) and be writable by nobody else, and the
manifest, which is plain JSON, is read and checked before anything else is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

from jaxpaged.device.manifest import Manifest
from jaxpaged.errors import told

FORMAT = 1
_MANIFEST = "manifest.json"
_MOST_BYTES = 2**20
"""Of a manifest."""


class UnusableExecutables(Exception):
    """The folder is not there, damaged, or not safe to load from; says why in a sentence."""


@dataclass(frozen=True, slots=True)
class Executables:
    """An opened folder, of which only the manifest has been read."""

    folder: Path
    manifest: Manifest
    files: Mapping[str, str]
    """Program -> SHA-256 of its file."""

    @classmethod
    def open(cls, folder: Path) -> Executables:
        """Raises `UnusableExecutables`."""
        try:
            _check_owner(folder)
            _check_owner(folder / _MANIFEST)
            with (folder / _MANIFEST).open("rb") as file:
                text = file.read(_MOST_BYTES)
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise UnusableExecutables(f"it has the format {found['format']}, not {FORMAT}")
            return cls(folder, dict(found["manifest"]), dict(found["files"]))
        except OSError as error:
            raise UnusableExecutables(f"{error.filename}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UnusableExecutables(f"{_MANIFEST} is damaged ({error})") from error

    def load(
        self, name: str, in_tree: Any, out_tree: Any, devices: Sequence[jax.Device]
    ) -> Compiled:
        """The program of that name, for arguments and results of these structures.

        Raises `UnusableExecutables`.
        """
        path = self.folder / _file_name(name)
        try:
            _check_owner(path)
            payload = path.read_bytes()
        except OSError as error:
            raise UnusableExecutables(f"{path}: {error.strerror}") from error
        if hashlib.sha256(payload).hexdigest() != self.files.get(name):
            raise UnusableExecutables(f"{path} is not what {_MANIFEST} says")
        try:
            loaded: Compiled = serialize_executable.deserialize_and_load(
                payload,
                in_tree,
                out_tree,
                backend=devices[0].client,
                execution_devices=list(devices),
            )
        except Exception as error:  # unpickling and XLA raise all kinds
            raise UnusableExecutables(f"{path} cannot be loaded: {told(error)}") from error
        return loaded


def write(folder: Path, manifest: Manifest, programs: Mapping[str, Compiled]) -> int:
    """Write a folder (mode 0700), which appears whole or not at all; an older one is replaced.

    Returns its bytes. Raises `OSError`, or `ValueError` for programs that cannot be serialised.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # mode 0700
    try:
        files, total = {}, 0
        for name, compiled in programs.items():
            payload = serialize_executable.serialize(compiled)[0]
            (made / _file_name(name)).write_bytes(payload)
            files[name] = hashlib.sha256(payload).hexdigest()
            total += len(payload)
        content = {"format": FORMAT, "manifest": dict(manifest), "files": files}
        (made / _MANIFEST).write_text(json.dumps(content, indent=1), encoding="utf-8")
        for path in made.iterdir():
            path.chmod(0o600)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return total


def _file_name(program: str) -> str:
    return program.replace("[", "-").replace("]", "") + ".bin"


def _check_owner(path: Path) -> None:
    """Raises `UnusableExecutables` if another user could have written it."""
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise UnusableExecutables(f"{path} belongs to another user (uid {found.st_uid})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnusableExecutables(f"{path} can be written by other users; `chmod go-w` it")

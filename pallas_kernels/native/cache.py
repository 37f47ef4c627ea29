"""Folders that hold compiled libraries: what may be loaded from them, and how one comes in.

A library runs in this process, so it is loaded only if nobody else could have put it there, and
only if it is whole: its name ends with the digest of its contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels.native.toolchain import NativeUnavailable

LOCK_SECONDS = 120.0
"""How long to wait for another process that compiles the same."""
_POLL_SECONDS = 0.05
_LEFT_BEHIND_SECONDS = 3600.0
"""So old, the folder of a compilation belongs to nobody any more."""
_SCRATCH = "building-"


def find(folder: Path, stem: str) -> Path | None:
    """A whole library in `folder` whose name begins with `stem`, if there is one."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        with contextlib.suppress(OSError):
            if path.stem.rpartition("-")[2] == _digest(path):
                return path
    return None


def keep(built: Path, folder: Path, stem: str) -> Path:
    """Move a library that was just built on the same file system to its name in `folder`, where
    others see nothing or all of it.
    """
    built.chmod(0o700)
    path = folder / f"{stem}-{_digest(built)}.so"
    built.replace(path)
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def prepare(folder: Path) -> None:
    """Make `folder`. Raises `NativeUnavailable` if that cannot be done."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise unusable(folder, error) from error


def check_owner(folder: Path) -> None:
    """Raises `NativeUnavailable` if others than the user (and root) can change what is in `folder`,
    as they can where they own it, may write to it, or may rename one of the folders above it.
    """
    for place in (folder, *folder.resolve().parents):
        try:
            found = place.stat()
        except OSError as error:
            raise unusable(folder, error) from error
        writers = stat.S_IWOTH | (stat.S_IWGRP if place == folder else 0)
        if found.st_mode & writers and (place == folder or not found.st_mode & stat.S_ISVTX):
            raise _untrusted(folder, f"others may write to {place}")
        if place == folder and found.st_uid not in (os.geteuid(), 0):
            raise _untrusted(folder, "it belongs to another user")


def _untrusted(folder: Path, why: str) -> NativeUnavailable:
    return NativeUnavailable(
        f"compiled kernels are not loaded from {folder}, because {why}; change that, or set "
        "JAXPAGED_CACHE_DIR to a folder of your own"
    )


def unusable(folder: Path, error: OSError) -> NativeUnavailable:
    """That `error` came of using `folder`."""
    return NativeUnavailable(
        f"the folder for compiled kernels, {folder}, cannot be used ({error.strerror or error}); "
        "set JAXPAGED_CACHE_DIR to one that can be written to, and has room"
    )


@contextlib.contextmanager
def locked(folder: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Only one process at a time is inside. It saves the others the work, and nothing more: where
    there are no locks, or another one holds it for longer than `seconds`, one goes in all the same.
    """
    try:
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unusable(folder, error) from error
    try:
        _wait_for(file, time.monotonic() + seconds)
        yield
    finally:
        os.close(file)


def _wait_for(file: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)
        except OSError:  # a file system without locks
            return
        else:
            return


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder in `folder` to compile in, gone afterwards. What processes that were killed left
    behind is removed, too.
    """
    with contextlib.suppress(OSError):
        for left in folder.glob(f"{_SCRATCH}*"):
            if time.time() - left.stat().st_mtime > _LEFT_BEHIND_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    try:
        made = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
    except OSError as error:
        raise unusable(folder, error) from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)

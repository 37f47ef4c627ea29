"""Writes a recording: one JSON object a line, appended to a file."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
from contextlib import suppress
from typing import BinaryIO

from jaxpaged.core.plan import ScheduledStep
from jaxpaged.errors import ConfigError
from jaxpaged.record.format import HEADER_BEGINS, Record
from jaxpaged.record.journal import Journal

_log = logging.getLogger(__name__)

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Recording(Journal):
    """An observer that records to a file. Raises `ConfigError` if the file cannot be used.

    A file that is there already must hold recordings; ours is appended, so that a server that
    starts again keeps what it recorded before. Only the user may read it (mode 0600), as it holds
    what was asked and answered. When writing fails later, one warning tells so and recording ends.
    """

    def __init__(self, path: str) -> None:
        super().__init__(self._write)
        self._path = path
        try:
            self._file: BinaryIO | None = _open(path)
        except OSError as error:
            raise ConfigError(
                f"record={path!r} cannot be written: {error.strerror or error}."
            ) from error

    def begin(self, header: Record) -> None:
        """Write the first line."""
        self._write(header)
        self._flush()

    def planned(self, step: ScheduledStep) -> None:
        super().planned(step)
        self._flush()  # a crash of the device's code must not take this step with it

    def stepped(self, *, idle: bool) -> None:
        super().stepped(idle=idle)
        if idle:
            self._flush()

    def closed(self) -> None:
        super().closed()
        self._flush()
        self.stop()

    def stop(self) -> None:
        """Close the file. What happens from now on is not recorded."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _write(self, record: Record) -> None:
        if self._file is None:
            return
        try:
            self._file.write(_encode(record).encode("ascii") + b"\n")
        except (OSError, TypeError, ValueError) as error:  # also what JSON cannot hold
            self._give_up(error)

    def _flush(self) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        text = error.strerror if isinstance(error, OSError) else None
        _log.warning(
            "Recording to %s has ended: %s. The engine goes on.", self._path, text or error
        )
        self.stop()


def _open(path: str) -> BinaryIO:
    descriptor = os.open(
        os.path.expanduser(path), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _prepare(descriptor, path)
        return os.fdopen(descriptor, "ab", buffering=1 << 18)
    except BaseException:
        os.close(descriptor)
        raise


def _prepare(descriptor: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"record={path!r}: another engine is recording to this file; give each its own."
        ) from None
    except OSError:
        pass  # a file system without locks
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, len(HEADER_BEGINS), 0) != HEADER_BEGINS:
        raise ConfigError(
            f"record={path!r} is a file that holds something else than recordings; give a new name."
        )
    os.fchmod(descriptor, 0o600)
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")  # after a line that a crash has cut off

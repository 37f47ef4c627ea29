"""Reads recordings back, and says what is wrong with files that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.errors import JaxpagedError
from jaxpaged.record.format import FORMAT, HEADER_BEGINS, Record


class RecordingError(JaxpagedError, ValueError):
    """A recording cannot be replayed: it is damaged, or does not belong to this model or build."""


@dataclass(frozen=True, slots=True)
class Line:
    """A record and its place in the file, from 1."""

    number: int
    record: Record


@dataclass(slots=True)
class Session:
    """What one engine recorded, from its header on. A file may hold several, one after another."""

    path: Path
    header: Record
    first_line: int
    start: int
    """Bytes from the beginning of the file to the header, and to what follows the session."""
    end: int
    cut_off: bool = False
    """Known once all lines were read: the last one was not complete, and was left out."""

    def lines(self) -> Iterator[Line]:
        """All records but the header. Raises `RecordingError` for a line that is none."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            number, left = self.first_line, self.end - self.start
            while left > 0:
                raw = file.readline()
                left -= len(raw)
                record = _parse(raw)
                if record is None:
                    if left <= 0:
                        self.cut_off = True
                        return
                    raise RecordingError(
                        f"{self.path}, line {number}: not a record. The file was damaged or edited."
                    )
                if number > self.first_line:
                    _check(record, f"{self.path}, line {number}")
                    yield Line(number, record)
                number += 1


def read_sessions(path: str) -> list[Session]:
    """The sessions of a file, which is read through once. Raises `RecordingError`."""
    file_path = Path(path).expanduser()
    try:
        found = list(_find_headers(file_path))
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not found:
        raise RecordingError(f"{path} holds no recording: it does not begin with a header of ours.")
    sessions = []
    for (line, start, raw), following in zip(found, [*found[1:], None], strict=True):
        end = file_path.stat().st_size if following is None else following[1]
        header = _parse(raw)
        if header is None:
            if following is not None or raw.endswith(b"\n"):
                raise RecordingError(f"{path}, line {line}: the header is damaged.")
            raise RecordingError(f"{path}, line {line}: the header is cut off; nothing follows it.")
        _check_format(header, f"{path}, line {line}")
        sessions.append(Session(file_path, header, line, start, end))
    return sessions


def _find_headers(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(line number, offset, bytes) of each header."""
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.startswith(HEADER_BEGINS):
                yield number, offset, raw
            elif number == 1:
                return  # something else
            offset += len(raw)


def _parse(raw: bytes) -> Record | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):  # also for what is not UTF-8
        return None
    return record if isinstance(record, dict) else None


def _check_format(header: Record, where: str) -> None:
    version = header.get("format")
    if version != FORMAT:
        raise RecordingError(
            f"{where}: the recording has format {version!r}, and this build reads format {FORMAT}. "
            f"Replay it with the version that wrote it ({_writer(header)})."
        )
    for name in ("settings", "model", "device", "versions"):
        if not isinstance(header.get(name), dict):
            raise RecordingError(f"{where}: the header has no {name!r}.")


def _writer(header: Record) -> str:
    versions = header.get("versions")
    version = versions.get("jaxpaged") if isinstance(versions, dict) else None
    return f"jaxpaged {version}" if isinstance(version, str) else "not named in it"


_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "add": {
        "request": str,
        "prompt": list,
        "beam_search": bool,
        "params": dict,
        "seed": int,
        "priority": int,
        "cache_salt": (str, type(None)),
        "arrival": (int, float),
        "delta_interval": int,
    },
    "abort": {"requests": list},
    "discard": {"requests": list},
    "reset": {"done": bool},
    "event": {"name": str, "running": str},
    "plan": {"step": int, "rows": list},
    "read": {"step": int, "tokens": list},
    "beams": {"request": str, "next": list},
    "end": {"sequence": str, "reason": str},
    "failed": {"error": str},
    "stepped": {"number": int},
    "close": {},
}
"""Kind -> what its records must have, whatever they have besides."""


def _check(record: Record, where: str) -> None:
    kind: Any = record.get("kind")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise RecordingError(f"{where}: this build knows no record of kind {kind!r}.")
    for name, expected in fields.items():
        if not isinstance(record.get(name), expected):
            raise RecordingError(f"{where}: the {kind!r} record has no proper {name!r}.")

"""The file of rows that all processes of a run append to, and what is read back from it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

FILE = "results.jsonl"
STATUSES = ("ok", "wrong", "error", "unsupported", "skipped", "start", "end")
"""`wrong`: a kernel's numbers, and what makes the run fail. `unsupported`: refused with a reason.
`start` and `end` are of sections."""


class Results:
    """Appends rows, each written at once: a run that is cut off keeps what it measured."""

    def __init__(self, folder: Path, origin: float) -> None:
        self.path = folder / FILE
        self._origin = origin

    def row(self, section: str, name: str, status: str = "ok", **values: Any) -> None:
        """`values` are plain numbers, texts and lists; numbers that JSON lacks become null."""
        assert status in STATUSES, status
        row = {
            "at_s": round(time.monotonic() - self._origin, 2),
            "section": section,
            "name": name,
            "status": status,
            **values,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(row)) + "\n")

    def rows(self, section: str | None = None, status: str | None = "ok") -> list[dict[str, Any]]:
        """Of all processes so far, in order."""
        return [
            row
            for row in read_rows(self.path)
            if (section is None or row["section"] == section)
            and (status is None or row["status"] == status)
        ]

    def value(self, section: str, name: str, field: str) -> float | None:
        """The newest value of a measurement that went well."""
        found = [row for row in self.rows(section) if row["name"] == name and field in row]
        return float(found[-1][field]) if found else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """A line that a killed process left half written is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if hasattr(value, "item"):  # a numpy scalar
        return _plain(value.item())
    return str(value)

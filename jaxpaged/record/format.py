"""Names that writing, reading and replaying share. `docs/record_replay.md` describes the format."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
"""One line: what JSON holds unchanged."""
FORMAT = 1
"""Version of the format that is written and read."""
HEADER_BEGINS = b'{"kind":"header",'
"""How the first line of an engine's records begins."""
SAMPLES, ADMITTED = 1, 2
"""Bits of a row's flags."""

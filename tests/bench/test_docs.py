"""docs/bench.md names flags that exist, and every JSON key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxpaged.bench import report
from jaxpaged.bench.metrics import details, summarise
from jaxpaged.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")


def test_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("serve", "throughput", "latency"):
        with pytest.raises(SystemExit):
            main(["bench", name, "--help"])
    helped = capsys.readouterr().out
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert len(used) > 20
    for flag in used - {"--help"}:
        assert re.search(rf"{flag}(?![a-z-])", helped), flag


def test_every_json_key_is_there() -> None:
    summary = summarise([], 1.0)
    for key in (*report.as_json(summary, ()), *details([], 0.0)):
        parts = [f"{key.split('_')[0]}_", key.split("_")[1]] if key.endswith("_ms") else [key]
        assert all(f"`{part}`" in PAGE for part in parts), key

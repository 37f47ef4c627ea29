"""Progress bars where standard error cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BARS = """
from jaxpaged.progress import progress_bar
for _ in range(2):
    with progress_bar(total=3, desc="bar", mininterval=0) as bar:
        for _ in range(3):
            bar.update()
print(sum(progress_bar([1, 2], desc="items")))
"""


def run(end: str, source: str = BARS) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$0" -c "$1" {end}', sys.executable, source]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("end", ["2>/dev/full", "2>&-"])
def test_work_goes_on_when_standard_error_is_full_or_closed(end: str) -> None:
    result = run(end)
    assert (result.returncode, result.stdout) == (0, "3\n")


def test_bars_are_shown() -> None:
    result = run("")
    assert result.stdout == "3\n"
    assert "bar: 100%" in result.stderr and "3/3" in result.stderr and "items" in result.stderr

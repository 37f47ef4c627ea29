"""What every benchmark's JSON says of itself, and where it goes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def provenance(benchmark: str, script: str, argv: Sequence[str]) -> dict[str, object]:
    """How to get the same figures again: command, commit and machine."""
    return {
        "benchmark": benchmark,
        "command": " ".join([f"python scripts/{script}", *argv]),
        "commit": _commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
    }


def publish(report: Mapping[str, object], out: Path | None) -> None:
    """Print the report as the last line of the output, and write it to a file if one is given."""
    print(json.dumps(report), flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")


def _commit() -> str:
    """Of this checkout, marked if files differ from it; empty outside of one."""
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

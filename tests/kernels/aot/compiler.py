"""Compiles programs in worker processes, some side by side. Imports no jax."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.kernels.aot.assembly import KernelFacts
from tests.kernels.aot.facts import ProgramFacts
from tests.kernels.aot.toolchain import ROOT, worker_environment

SECONDS = 900
"""A worker may take, on a slow and busy machine."""


def compile_programs(
    names: Iterable[str], *, table: Path | None = None, workers: int | None = None
) -> dict[str, ProgramFacts | str]:
    """Program name -> facts, or why it could not be compiled."""
    listed = list(names)
    count = min(workers or os.cpu_count() or 1, 8, len(listed))
    shares = [listed[index::count] for index in range(count)]
    told: dict[str, ProgramFacts | str] = {}
    with ThreadPoolExecutor(count) as pool:
        for answers in pool.map(lambda share: _run(share, table), shares):
            told |= answers
    return {name: told[name] for name in listed}


def _run(names: list[str], table: Path | None) -> dict[str, ProgramFacts | str]:
    command = [sys.executable, "-m", "tests.kernels.aot.worker"]
    command += [] if table is None else ["--table", str(table)]
    with tempfile.TemporaryDirectory(prefix="jaxpaged-aot-") as dump:
        done = subprocess.run(
            [*command, dump, *names],
            env=worker_environment(Path(dump)),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    ended = f"the worker ended with code {done.returncode}: {done.stderr[-2000:]}"
    told: dict[str, ProgramFacts | str] = dict.fromkeys(names, ended)
    for line in done.stdout.splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a line that some library wrote
            answer = json.loads(line)
            told[answer["name"]] = (
                answer["error"] if "error" in answer else facts_from(answer["facts"])
            )
    return told


def facts_from(raw: dict[str, Any]) -> ProgramFacts:
    return ProgramFacts(**{**raw, "kernels": [KernelFacts(**one) for one in raw["kernels"]]})

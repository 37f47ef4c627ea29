"""One measurement of one engine: its process, its limits, and what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers.engines import engine_class
from peers.workload import Plan, Sizes, to_json

SCRIPTS = Path(__file__).resolve().parent.parent
BEGIN = "import sys; sys.path.append(sys.argv[1]); from peers.worker import main; main(sys.argv[2])"
"""The folder comes last in the path, so that no script of ours hides a module of an engine's."""
TAIL = 2000
"""Characters of a failed engine's output that are kept."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine, and how it is started."""

    name: str
    python: Path
    model: Path
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts every engine the same way."""

    sizes: Sizes
    hf_config: dict[str, Any]
    cpus: Sequence[int]
    cache: Path
    """A folder for what engines keep from one start to the next."""
    timeout: float
    """Seconds, from start to end."""

    def measure(
        self, candidate: Candidate, plan: Plan, groups: Sequence[str]
    ) -> tuple[list[dict[str, Any]], str]:
        """The lines that the worker wrote, and what went wrong, if anything did."""
        with tempfile.TemporaryDirectory(prefix="peers-") as name:
            folder = Path(name)
            results, log = folder / "results.jsonl", folder / "log.txt"
            results.touch()
            job = {
                "engine": candidate.name,
                "model": str(candidate.model),
                "hf_config": self.hf_config,
                "options": candidate.options,
                "sizes": asdict(self.sizes),
                "cpus": list(self.cpus),
                "plan": to_json(plan),
                "groups": list(groups),
                "results": str(results),
                "launched": time.monotonic(),
            }
            (folder / "job.json").write_text(json.dumps(job))
            error = self._run(candidate, folder / "job.json", log)
            lines = [json.loads(line) for line in results.read_text().splitlines()]
            if error:
                error += "\n" + log.read_text(errors="replace")[-TAIL:].strip()
            elif not lines or lines[-1]["kind"] != "end":
                error = "it ended early, without an error"
        return lines, error

    def _run(self, candidate: Candidate, job: Path, log: Path) -> str:
        command = [str(candidate.python), "-c", BEGIN, str(SCRIPTS), str(job)]
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    command,
                    cwd=job.parent,
                    env=self._environment(candidate),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                return f"its interpreter cannot be run: {error.strerror}"
            try:
                status = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                return f"stopped: it took more than {self.timeout:g} s"
            finally:
                # Also what it started itself, and also if we are interrupted.
                _kill_session(process.pid)
                process.wait()
        return f"its process ended with status {status}" if status else ""

    def _environment(self, candidate: Candidate) -> dict[str, str]:
        threads = str(len(self.cpus))
        cache = self.cache / candidate.name
        cache.mkdir(parents=True, exist_ok=True)
        return {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "XDG_CACHE_HOME": str(cache / "home"),
            **engine_class(candidate.name).environment(candidate.python, cache),
        }


def _kill_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return

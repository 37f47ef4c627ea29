"""Measures one engine once, in a process of its own that `launch` starts.

Runs in the engine's own environment, so it imports nothing but numpy and the engine. Writes JSON
lines to the file that the job names, each as soon as it is known: a later crash loses none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.engines import Engine, Setup, engine_class
from peers.workload import SAMPLE, START, WARM_UP, Pass, Sizes, from_json


class WrongAnswerError(RuntimeError):
    """An engine gave another number of tokens than it was asked for."""


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    if hasattr(os, "sched_setaffinity"):
        # Before anything is imported: thread pools are as large as what the process may use.
        os.sched_setaffinity(0, job["cpus"])
    plan = from_json(job["plan"])
    sizes = {k: _tuples(v) for k, v in job["sizes"].items()}
    setup = Setup(
        model=Path(job["model"]),
        hf_config=job["hf_config"],
        threads=len(job["cpus"]),
        sizes=Sizes(**sizes),
        options=job["options"],
    )
    with Path(job["results"]).open("a", encoding="utf-8") as results:

        def write(kind: str, **fields: Any) -> None:
            results.write(json.dumps({"kind": kind, **fields}) + "\n")
            results.flush()

        engine = engine_class(job["engine"])(setup)
        try:
            run(engine, plan[START][0])
            # Both clocks are the system's, so the start of the interpreter counts.
            write("start", seconds=time.monotonic() - job["launched"])
            write("versions", **engine.versions())
            measure(engine, plan, job["groups"], write)
            write("memory", peak_rss=peak_rss())
            write("facts", **engine.facts())
        finally:
            engine.close()
        write("end")


def measure(engine: Engine, plan: dict[str, list[Pass]], groups: Sequence[str], write: Any) -> None:
    if not groups:
        return
    (sample,) = run(engine, plan[SAMPLE][0])[1]
    write("sample", tokens=sample)
    for work in plan[WARM_UP]:
        run(engine, work)
    for group in groups:
        load = os.getloadavg()[0]
        seconds = [run(engine, work)[0] for work in plan[group]]
        write("times", group=group, seconds=seconds, load=round(load, 2))


def run(engine: Engine, work: Pass) -> tuple[float, list[list[int]]]:
    """Seconds and answers."""
    start = time.perf_counter()
    answers = engine.run(work.requests, work.concurrency)
    seconds = time.perf_counter() - start
    for request, answer in zip(work.requests, answers, strict=True):
        if len(answer) != request.output:
            raise WrongAnswerError(f"{len(answer)} tokens came for {request.output}")
    return seconds, answers


def peak_rss() -> int:
    """Bytes. Not from getrusage, where the parent's peak counts for its children, too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value

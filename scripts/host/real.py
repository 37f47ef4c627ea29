"""The host beside a real model: what a launch costs, and when the parts of its steps happen."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host.timeline import Span, draw
from jaxpaged import LLM, SamplingParams

_LIMITS: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 2049,
    "disable_progress": True,
}


def _started(llm: LLM, rows: int) -> None:
    """So many requests decode."""
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=900, ignore_eos=True, seed=1)
    for index in range(rows):
        prompt = rng.integers(300, 40_000, 64).tolist()
        llm.engine.add_request(str(index), prompt, params, delta_interval=1)
    while llm.engine.scheduler.stats.steps < 12:
        llm.engine.step()


def dispatch(model: str | None, calls: int = 30) -> dict[str, float]:
    """Microseconds of `Runner.launch` for a decode step, medians: of wall time with an idle device
    and while the step before runs, and of the calling thread's CPU time with an idle one.
    """
    with LLM(model, **_LIMITS) as llm:
        _started(llm, 8)
        engine = llm.engine
        while engine._in_flight:
            engine._finish_oldest()
        step = engine.scheduler.schedule()
        assert step is not None
        requests = [row.request.payload.row for row in step.rows]
        idle, busy, cpu = [], [], []
        for _ in range(calls):
            # The same step again and again: it writes the same KV to the same places.
            taken, used, launched = [], [], []
            for _ in range(2):
                packed = engine.runner.pack(step.rows, requests)
                start, began = time.perf_counter(), time.thread_time()
                launched.append(engine.runner.launch(packed, wants_prompt=False))
                taken.append(1e6 * (time.perf_counter() - start))
                used.append(1e6 * (time.thread_time() - began))
            for one in launched:
                engine.runner.read(one)
            idle.append(taken[0])
            busy.append(taken[1])
            cpu.append(used[0])
        weights = len(jax.tree.leaves(engine.runner._weights))
        pools = len(jax.tree.leaves(engine.runner._state))
        engine.scheduler.fail_steps([step], "measured")
    return {
        "idle": round(statistics.median(idle), 1),
        "busy": round(statistics.median(busy), 1),
        "idle, CPU": round(statistics.median(cpu), 1),
        "weights": weights,
        "state": pools,
    }


def trace(model: str | None, path: Path, rows: int = 8, steps: int = 24) -> dict[str, float]:
    """Draw some steps; returns milliseconds: medians of a step, of its parts on the host, and the
    share of time for which the device had nothing to do.
    """
    spans: list[Span] = []
    with LLM(model, **_LIMITS) as llm:
        _started(llm, rows)
        engine, runner = llm.engine, llm.engine.runner
        numbers = iter(range(10**9))
        launched_at: dict[int, tuple[int, float]] = {}
        finished: list[float] = []

        def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                result = function(*args, **kwargs)
                end = time.perf_counter()
                number = -1
                if name == "launch":
                    number = next(numbers)
                    launched_at[id(result)] = (number, start)
                elif name == "read":
                    number, began = launched_at.pop(id(args[0]), (-1, start))
                    # A device runs its steps one after the other.
                    busy = max(began, finished[-1]) if finished else began
                    finished.append(end)
                    if number >= 0:
                        spans.append(Span("device", number, busy, end))
                spans.append(Span(name, number, start, end))
                return result

            return run

        hooks: list[tuple[Any, str, str]] = [
            (engine.scheduler, "schedule", "plan"),
            (runner, "pack", "pack"),
            (runner, "launch", "launch"),
            (runner, "read", "read"),
            (engine, "_finish_step", "finish"),
            (engine, "_report", "tell"),
        ]
        for owner, attribute, name in hooks:
            setattr(owner, attribute, timed(name, getattr(owner, attribute)))
        for _ in range(steps):
            engine.step()
        for owner, attribute, _ in hooks:
            delattr(owner, attribute)
        llm.engine.discard([str(index) for index in range(rows)])
    spans = [dataclasses.replace(span) for span in spans]
    title = f"{rows} requests of SmolLM2-135M on a CPU" if model is None else f"{rows} requests"
    draw(path, spans, title, first=8, count=4)
    return _summary(spans)


def _summary(spans: list[Span]) -> dict[str, float]:
    found = {}
    for name in ("plan", "pack", "launch", "read", "finish", "tell", "device"):
        found[name] = 1e3 * statistics.median([s.end - s.start for s in spans if s.name == name])
    device = sorted((s for s in spans if s.name == "device"), key=lambda s: s.start)[2:]
    gaps = [after.start - before.end for before, after in itertools.pairwise(device)]
    found["device idle"] = 1e3 * sum(gaps) / len(gaps)
    return {name: round(value, 3) for name, value in found.items()}

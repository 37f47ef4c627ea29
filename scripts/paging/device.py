"""The systems on a real model: the same engine and the same programs, with another scheduler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from jaxpaged import LLM, SamplingParams
from paging.simulation import Work
from paging.systems import SYSTEMS, BenchScheduler, System


@dataclass
class Measured:
    """Of one system. Seconds of the clock and of the CPU over all threads while requests waited,
    one a round, and the output tokens of that time; the rest is the same in each round, and as in
    `simulation.Result`.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    whole_seconds: list[float] = field(default_factory=list)
    output_tokens: int = 0
    running: float = 0.0
    waste: float = 0.0
    preemptions: int = 0
    recomputed: float = 0.0
    steps: int = 0


def measure(llm: LLM, work: Work, rounds: int, seed: int) -> dict[str, dict[str, object]]:
    """All systems in turns, after one unmeasured request each. Raises `RuntimeError` if they do not
    generate the same tokens.
    """
    rng = np.random.default_rng(seed)
    vocabulary = llm.engine.intake.limits.vocab_size
    prompts = [rng.integers(0, vocabulary, prompt).tolist() for prompt, _ in work.shapes]
    limits = [output for _, output in work.shapes]
    found = {system.name: Measured() for system in SYSTEMS}
    expected = None
    for turn in range(rounds + 1):
        for system in SYSTEMS:
            few = slice(0, None if turn else 1)
            tokens = _run(llm, work, system, prompts[few], limits[few], found[system.name], turn)
            if turn:
                expected = expected or tokens
                if tokens != expected:
                    raise RuntimeError(f"{system.name} generates other tokens than the first one")
    return {
        name: asdict(measured)
        | {
            "output_per_second": measured.output_tokens / statistics.median(measured.seconds),
            "output_per_cpu_second": measured.output_tokens
            / statistics.median(measured.cpu_seconds),
        }
        for name, measured in found.items()
    }


def _run(
    llm: LLM,
    work: Work,
    system: System,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    found: Measured,
    turn: int,
) -> dict[str, list[int]]:
    engine = llm.engine
    size = engine.scheduler.config.block_size
    scheduler = BenchScheduler(work.config(size, 0.0 if system.reserve else 0.01), system)
    engine.scheduler = scheduler  # the engine is idle
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, detokenize=False)
        engine.add_request(str(index), prompt, params)
    stats, tokens = scheduler.stats, {}
    busy, waste, running, delivered = 0, 0.0, 0, 0
    start, cpu = time.perf_counter(), time.process_time()
    passed, used = 0.0, 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = output.outputs[0].token_ids
        if scheduler.num_waiting:
            busy, waste, running = stats.steps, stats.waste_sum, stats.running_sum
            delivered = stats.generation_tokens
            passed, used = time.perf_counter() - start, time.process_time() - cpu
    if turn:
        if not busy:
            raise RuntimeError(f"{system.name}: all requests ran at once; take fewer slots")
        found.seconds.append(round(passed, 3))
        found.cpu_seconds.append(round(used, 3))
        found.whole_seconds.append(round(time.perf_counter() - start, 3))
        found.output_tokens = delivered
        found.running, found.waste = running / busy, waste / busy
        found.preemptions, found.steps = stats.preemptions, stats.steps
        found.recomputed = stats.recomputed_tokens / stats.scheduled_tokens
    return tokens

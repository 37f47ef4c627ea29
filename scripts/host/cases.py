"""The cases of `bench_host.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from host.null_device import FIRST_WORD, VOCAB, Sizes, null_engine, null_tokenizer
from host.phases import PhaseClock
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.core.prefix_hash import extend_hashes
from jaxpaged.engine import Engine
from jaxpaged.metrics import EngineMetrics
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.text.tokenizer import Tokenizer

PROMPT = 200
"""Tokens of the prompts of decode cases."""
LONG = SamplingParams(max_tokens=3500, ignore_eos=True, seed=7, temperature=0.8)
_WARM = 40
"""Steps before the measured ones."""


def target(rows: int) -> float:
    """Microseconds."""
    return 150.0 + 4.0 * rows


class Bench:
    """Makes engines and prompts, the same ones each time."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.tokenizer: Tokenizer = null_tokenizer()
        self._rng = np.random.default_rng(0)

    def engine(self, rows: int, **limits: int) -> Engine:
        engine = null_engine(Sizes(max_num_seqs=max(8, rows), **limits), tokenizer=self.tokenizer)
        engine.metrics = EngineMetrics()
        return engine

    def prompt(self, length: int) -> list[int]:
        prompt: list[int] = self._rng.integers(FIRST_WORD, VOCAB, length).tolist()
        return prompt

    def measure(self, engine: Engine, rows: int) -> dict[str, float]:
        clock = PhaseClock(engine)
        for _ in range(self.steps):
            clock.step()
        return {**clock.medians(), "target": target(rows)}

    # ------------------------------------------------------------------ cases

    def decode(self, rows: int, waiting: int = 0, *, interval: int = 1) -> dict[str, float]:
        engine = self.engine(rows)
        for index in range(rows):
            engine.add_request(str(index), self.prompt(PROMPT), LONG, delta_interval=interval)
        _warm(engine, rows)
        for index in range(waiting):
            engine.add_request(f"w{index}", self.prompt(20), LONG, delta_interval=interval)
        return self.measure(engine, rows)

    def prefill(self, prompts: int) -> dict[str, float]:
        """Each step computes 2,048 tokens of so many prompts of that length together."""
        engine = self.engine(prompts)
        one = SamplingParams(max_tokens=1, ignore_eos=True)
        for index in range((self.steps + 4) * prompts):
            engine.add_request(str(index), self.prompt(2048 // prompts), one, delta_interval=1)
        return self.measure(engine, prompts)

    def samples(self, rows: int) -> dict[str, float]:
        engine = self.engine(rows)
        params = SamplingParams(n=8, max_tokens=3500, ignore_eos=True, seed=7, temperature=0.8)
        for index in range(rows // 8):
            engine.add_request(str(index), self.prompt(PROMPT), params, delta_interval=1)
        _warm(engine, rows)
        return self.measure(engine, rows)

    def beams(self, rows: int) -> dict[str, float]:
        engine = self.engine(rows)
        params = BeamSearchParams(beam_width=8, max_tokens=3500, ignore_eos=True)
        for index in range(rows // 8):
            engine.add_request(str(index), self.prompt(PROMPT), params, delta_interval=1)
        _warm(engine, rows)
        return self.measure(engine, rows)

    def waiting_beams(self, width: int = 64, length: int = 4000) -> dict[str, float]:
        """A search that was preempted is at the head of the queue; what runs besides leaves it too
        few blocks.
        """
        engine = self.engine(width + 8, num_blocks=2048, max_model_len=2 * length)
        scheduler = engine.scheduler
        search = BeamSearchParams(beam_width=width, max_tokens=length // 2, ignore_eos=True)
        engine.add_request("beams", self.prompt(length), search)
        engine.add_request("other", self.prompt(length), LONG, delta_interval=1)
        _warm(engine, width + 1)
        while engine._in_flight:
            engine._finish_oldest()
        engine._report()
        for request in reversed([request for request in scheduler.running if request.is_beam]):
            scheduler._preempt(request)
        pool = scheduler.kv.pool
        pool.get_new_blocks(pool.num_free - self.steps // 16 - 2)
        measured = self.measure(engine, 1)
        assert scheduler.num_waiting == width, "the search came back"
        return measured


def _warm(engine: Engine, rows: int) -> None:
    while engine.scheduler.num_running < rows or engine.scheduler.stats.steps < _WARM:
        engine.step()
    for _ in range(_WARM):
        engine.step()


def run_cases(
    rows: Sequence[int], steps: int, only: Sequence[str] | None
) -> Iterator[tuple[str, dict[str, float]]]:
    """(name, microseconds by phase, total and target) of each case."""
    bench = Bench(steps)
    middle = 32 if 32 in rows else rows[-1]
    cases: dict[str, Callable[[], dict[str, float]]] = {}
    for count in rows:
        cases[f"decode {count}"] = lambda count=count: bench.decode(count)  # type: ignore[misc]
    for waiting in (10, 10_000):
        cases[f"decode {middle}, {waiting} waiting"] = (  # type: ignore[misc]
            lambda waiting=waiting: bench.decode(middle, waiting)
        )
    cases["prefill 1 x 2048"] = lambda: bench.prefill(1)
    cases["prefill 16 x 128"] = lambda: bench.prefill(16)
    cases["samples 4 x 8"] = lambda: bench.samples(32)
    cases["beams 4 x 8"] = lambda: bench.beams(32)
    cases["waiting beams 64 x 4000"] = bench.waiting_beams
    cases[f"texts {middle}"] = lambda: bench.decode(middle, interval=0)
    for name, case in cases.items():
        if only is None or name.startswith(tuple(only)):
            yield name, case()


def hashing() -> dict[str, float]:
    """Microseconds a token, by block size."""
    tokens: list[int] = np.random.default_rng(0).integers(0, VOCAB, 100_000).tolist()
    found = {}
    for size in (8, 16, 32, 128):
        taken = []
        for _ in range(5):
            start = time.thread_time_ns()
            extend_hashes([], tokens, size)
            taken.append((time.thread_time_ns() - start) / 1e3 / len(tokens))
        found[f"block {size}"] = statistics.median(taken)
    return found

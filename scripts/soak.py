"""Whether memory stays flat: generates many tokens and looks at what is left of them.

    python scripts/soak.py [--tokens 1000000] [--model MODEL] [--seed 0] [--intervals 10]
                           [--rss-mib 24] [--heap-kib 512] [--out FILE]

Requests of all kinds come and go: prompts with common beginnings (the prefix cache turns over many
times), samples, beam searches, stop strings, logprobs, aborts, discards, and a pool so small that
requests are preempted. By default on a device that computes nothing (`host/null_device.py`); with
--model on a real one, whose steps take real time.

At each interval the engine is run until it is idle and checked for integrity; then these are noted:
resident memory, the Python heap (tracemalloc), and the length of every container that can be
reached from the engine. The first third is warm-up. Exits with 1 if after it resident memory has
grown by more than --rss-mib or the heap by more than --heap-kib, or any container keeps growing.
The last line of the output is JSON, which --out writes to a file as well.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_report import provenance, publish
from host.null_device import Sizes, null_engine, null_tokenizer

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.engine import Engine
from jaxpaged.metrics import EngineMetrics
from jaxpaged.sampling_params import SamplingParams

_PAGE = os.sysconf("SC_PAGE_SIZE")
_OURS = ("jaxpaged", "host", "pallas_kernels")
_SLACK = 16
"""Entries that a container may have more at the end than in the middle."""
_BOUNDED = {"engine.scheduler.stats.window._steps": 1000}
"""Containers that fill up slowly, and their limits."""


def containers(root: object) -> Iterator[tuple[str, int]]:
    """(path, length) of every container that can be reached through objects of ours."""
    seen: set[int] = set()
    todo: deque[tuple[str, object]] = deque([("engine", root)])
    while todo:
        path, item = todo.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (list, dict, set, frozenset, deque)):
            yield path, len(item)
            if isinstance(item, dict) and len(item) < 100:
                todo.extend((f"{path}[{key!r:.40}]", value) for key, value in item.items())
            continue
        if not type(item).__module__.startswith(_OURS):
            continue
        names = list(getattr(item, "__dict__", ()))
        for base in type(item).__mro__:
            slots = base.__dict__.get("__slots__", ())
            names += [slots] if isinstance(slots, str) else slots
        for name in names:
            if not name.startswith("__"):
                todo.append((f"{path}.{name}", getattr(item, name, None)))


class Traffic:
    """Requests at random, always the same ones for a seed."""

    def __init__(self, engine: Engine, seed: int, vocab: int, most: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._vocab = vocab
        self._most = most
        self._number = 0
        self.kinds: dict[str, int] = {}
        self._live: dict[str, None] = {}

    def step(self) -> None:
        """Add what is missing, now and then take something away, and go one step on."""
        engine, rng = self._engine, self._random
        while len(self._live) < self._most:
            self._add()
        self._go()
        if self._live and rng.random() < 0.02:
            leaving = rng.choice(list(self._live))
            if rng.random() < 0.5:
                engine.abort(leaving)
                self._count("aborted")
            else:
                engine.discard([leaving])
                del self._live[leaving]
                self._count("discarded")

    def drain(self) -> None:
        while self._engine.has_unfinished_requests():
            self._go()
        assert not self._live, f"never reported: {list(self._live)}"

    def _go(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._live.pop(output.request_id, None)

    def _count(self, kind: str) -> None:
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def _add(self) -> None:
        rng = self._random
        self._number += 1
        shared = random.Random(rng.randrange(40)).choices(range(2, self._vocab), k=96)
        own = rng.choices(range(2, self._vocab), k=rng.randrange(1, 64))
        prompt = shared[: rng.choice((0, 40, 96))] + own
        common: dict[str, Any] = {"max_tokens": rng.randrange(4, 160), "ignore_eos": True}
        kind = rng.choices(
            ("plain", "samples", "beams", "stops", "logprobs", "bias"), (60, 10, 4, 15, 6, 5)
        )[0]
        params: SamplingParams | BeamSearchParams = SamplingParams(**common, seed=self._number)
        if kind == "samples":
            params = SamplingParams(**common, n=rng.randrange(2, 6), seed=self._number)
        elif kind == "beams":
            params = BeamSearchParams(beam_width=rng.randrange(2, 5), **common)
        elif kind == "stops":
            params = SamplingParams(**common, stop=["en", "zz"], min_tokens=3)
        elif kind == "logprobs":
            scored = rng.choice((None, 1))
            params = SamplingParams(**common, logprobs=3, prompt_logprobs=scored)
        elif kind == "bias":
            params = SamplingParams(**common, logit_bias={5: 1.0}, frequency_penalty=0.5)
        self._count(kind)
        name = f"{kind}-{self._number}"
        self._live[name] = None
        interval = rng.choice((0, 1, 4))
        self._engine.add_request(name, prompt, params, delta_interval=interval)


def make_engine(args: argparse.Namespace) -> tuple[Engine, int]:
    """The engine, and the size of its vocabulary."""
    if args.model is None:
        tokenizer = null_tokenizer()
        for token in range(tokenizer.vocab_size):  # what it remembers is bounded by this
            tokenizer.whole_text(token)
        sizes = Sizes(32, 256, 512, 160, 16)
        engine = null_engine(sizes, tokenizer=tokenizer)
    else:
        from jaxpaged import LLM

        engine = LLM(
            args.model,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            max_model_len=512,
            num_gpu_blocks_override=150,
            disable_progress=True,
        ).engine
    engine.metrics = EngineMetrics()
    return engine, engine.intake.limits.vocab_size


def look(engine: Engine, start: float) -> dict[str, Any]:
    """What there is now; the engine is idle."""
    engine.scheduler.check_integrity()
    gc.collect()
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    stats = engine.scheduler.stats
    return {
        "tokens": stats.generation_tokens,
        "preemptions": stats.preemptions,
        "forks": stats.forks,
        "hits": stats.prefix_hit_tokens,
        "seconds": round(time.perf_counter() - start, 1),
        "rss_mib": round(rss / 2**20, 1),
        "heap_kib": round(tracemalloc.get_traced_memory()[0] / 1024, 1),
        "containers": dict(containers(engine)),
    }


def compared_looks(count: int) -> tuple[int, int, int]:
    """Of so many looks those after the warm-up, half-way from there, and at the end."""
    first = count // 3
    return first, (first + count) // 2, count - 1


def growth(looks: list[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """What has grown since the warm-up, in sentences."""
    first, middle, last = (looks[number] for number in compared_looks(len(looks)))
    found = []
    for key, limit in (("rss_mib", args.rss_mib), ("heap_kib", args.heap_kib)):
        if last[key] - first[key] > limit:
            found.append(f"{key} has grown from {first[key]} to {last[key]} (limit {limit}).")
    for path, size in last["containers"].items():
        if size <= _BOUNDED.get(path, 0):
            continue
        before = middle["containers"].get(path, 0)
        if size > before + _SLACK and before > first["containers"].get(path, 0) + _SLACK:
            found.append(f"{path} keeps growing: {before} entries, then {size}.")
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000, help="to generate")
    parser.add_argument("--model", help="a real one; default: a device that computes nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--intervals", type=int, default=10, help="looks at the memory")
    parser.add_argument("--rss-mib", type=float, default=24.0, help="that may be added")
    parser.add_argument("--heap-kib", type=float, default=512.0, help="that may be added")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    engine, vocab = make_engine(args)
    traffic = Traffic(engine, args.seed, vocab, most=24)
    tracemalloc.start()
    start = time.perf_counter()
    looks: list[dict[str, Any]] = []
    compared = [number + 1 for number in compared_looks(args.intervals)]
    columns = ("tokens", "seconds", "rss_mib", "heap_kib", "preemptions", "forks", "hits")
    print("".join(f"{name:>12}" for name in columns))
    for interval in range(1, args.intervals + 1):
        goal = args.tokens * interval / args.intervals
        while engine.scheduler.stats.generation_tokens < goal:
            traffic.step()
        traffic.drain()
        looks.append(look(engine, start))
        if len(looks) > 1 and interval - 1 not in compared:
            del looks[-2]["containers"]  # the notes are in the heap, too
        print("".join(f"{looks[-1][name]:>12}" for name in columns), flush=True)
    tracemalloc.stop()
    problems = growth(looks, args)
    largest = sorted(looks[-1]["containers"].items(), key=lambda entry: -entry[1])[:12]
    print("\nlargest containers: " + ", ".join(f"{path} {size}" for path, size in largest))
    print("requests: " + ", ".join(f"{n} {kind}" for kind, n in traffic.kinds.items()))
    for problem in problems:
        print(f"grows: {problem}")
    report = provenance("soak", "soak.py", argv)
    report["looks"] = [{name: entry[name] for name in columns} for entry in looks]
    report["kinds"] = traffic.kinds
    report["grows"] = problems
    print()
    publish(report, args.out)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What paging saves, measured on the real scheduler without any device.

    python scripts/bench_paging.py [--requests 1000] [--pool-tokens 16384] [--seed 0]

Two workloads with synthetic lengths (lognormal, sigma 1, clipped so that prompt and output fit
into --max-model-len): ShareGPT-like (means 161 prompt, 338 output tokens) and Alpaca-like (19, 58).
All requests wait from the start; tokens are made up, prompts share nothing, prefix caching is off.
Every system gets the same number of KV slots, --pool-tokens, and the same token budget a step.

Table 1 compares memory managers, over the steps in which requests still wait:
  contiguous max   a slot range of max_model_len tokens for each running sequence
  contiguous pow2  prompt plus the output's length rounded up to a power of two (an optimist: the
                   length is not known when a request starts)
  paged N          this engine's block pool with N tokens a block, no watermark
`waste` is the share of the reserved slots that hold no token, averaged over steps; `batch` the mean
number of running sequences; `steps` the length of the whole run. Contiguous ranges are counted
without fragmentation between them, in their favour.

Table 2 is paged 16 with watermarks: preemptions, and the recompute tax, the share of all computed
tokens that had been computed before. The last line of the output is JSON with all numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from jaxpaged.bench.lengths import MEANS, draw_lengths
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZES = (8, 16, 32, 64)
WATERMARKS = (0.0, 0.01, 0.02, 0.05, 0.10)


@dataclass(frozen=True)
class Work:
    """Lengths of the requests, and the limits that all systems share (tokens, sequences)."""

    shapes: list[tuple[int, int]]
    pool_tokens: int
    max_model_len: int
    max_num_seqs: int
    budget: int


@dataclass
class Range:
    """A running request of a contiguous manager: prompt, all tokens to compute, slots reserved,
    tokens computed."""

    prompt: int
    total: int
    reserved: int
    computed: int


@dataclass
class Result:
    """`waste` and `batch` are means over the steps in which requests waited."""

    waste: float
    batch: float
    steps: int
    preemptions: int = 0
    recompute_tax: float = 0.0


def run_paged(work: Work, block_size: int, watermark: float) -> Result:
    """The real scheduler, one step in flight."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=work.pool_tokens // block_size + 1,  # the null block is not usable
            block_size=block_size,
            max_num_seqs=work.max_num_seqs,
            max_num_batched_tokens=work.budget,
            max_model_len=work.max_model_len,
            watermark=watermark,
            enable_prefix_caching=False,
        )
    )
    for index, (prompt, output) in enumerate(work.shapes):
        request = Request(str(index), [0] * prompt, max_tokens=output, arrival_time=float(index))
        scheduler.add(request)
    stats = scheduler.stats
    busy_steps, waste, batch = 0, 0.0, 0
    while (step := scheduler.schedule()) is not None:
        scheduler.update(step, [1] * len(step.rows))
        if scheduler.num_waiting:
            busy_steps, waste, batch = stats.steps, stats.waste_sum, stats.running_sum
    done = stats.requests_finished.get("length", 0)
    if done != len(work.shapes):
        raise RuntimeError(f"{done} of {len(work.shapes)} requests were served")
    return Result(
        waste=waste / max(1, busy_steps),
        batch=batch / max(1, busy_steps),
        steps=stats.steps,
        preemptions=stats.preemptions,
        recompute_tax=stats.recomputed_tokens / stats.scheduled_tokens,
    )


def run_contiguous(work: Work, reserve: Callable[[int, int], int]) -> Result:
    """Continuous batching over slot ranges reserved for the whole life of a request."""
    waiting = deque(work.shapes)
    running: list[Range] = []
    free = work.pool_tokens
    steps = busy_steps = batch = 0
    waste = 0.0
    while waiting or running:
        budget = work.budget
        for row in running:
            count = min(budget, max(1, row.prompt - row.computed))
            row.computed += count
            budget -= count
        while waiting and budget and len(running) < work.max_num_seqs:
            prompt, output = waiting[0]
            size = min(reserve(prompt, output), work.max_model_len)
            if size > free:
                break
            waiting.popleft()
            free -= size
            count = min(budget, prompt)
            budget -= count
            running.append(Range(prompt, prompt + output - 1, size, count))
        if waiting:
            held = sum(row.computed for row in running)
            waste += 1 - held / (work.pool_tokens - free)
            batch += len(running)
            busy_steps += 1
        steps += 1
        free += sum(row.reserved for row in running if row.computed >= row.total)
        running = [row for row in running if row.computed < row.total]
    return Result(waste / max(1, busy_steps), batch / max(1, busy_steps), steps)


def run_workload(work: Work) -> dict[str, Result]:
    """All systems of table 1 and table 2 on one workload."""
    results = {
        "contiguous max": run_contiguous(work, lambda prompt, output: work.max_model_len),
        "contiguous pow2": run_contiguous(
            work, lambda prompt, output: prompt + 2 ** math.ceil(math.log2(output))
        ),
    }
    for block_size in BLOCK_SIZES:
        results[f"paged {block_size}"] = run_paged(work, block_size, 0.0)
    for watermark in WATERMARKS:
        results[f"watermark {watermark:.0%}"] = run_paged(work, 16, watermark)
    return results


def print_tables(name: str, results: dict[str, Result]) -> None:
    print(f"\n{name:<18}{'waste':>8}{'batch':>9}{'steps':>8}{'preempted':>11}{'recomputed':>12}")
    for system, result in results.items():
        if system == f"watermark {WATERMARKS[0]:.0%}":
            print()
        print(
            f"{system:<18}{result.waste:>8.1%}{result.batch:>9.1f}{result.steps:>8}"
            f"{result.preemptions:>11}{result.recompute_tax:>12.1%}"
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--pool-tokens", type=int, default=16384, help="KV slots")
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    report: dict[str, object] = {"benchmark": "paging", "settings": vars(args)}
    for name in MEANS:
        work = Work(
            shapes=draw_lengths(name, args.requests, args.max_model_len, args.seed),
            pool_tokens=args.pool_tokens,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            budget=args.max_num_batched_tokens,
        )
        results = run_workload(work)
        print_tables(name, results)
        report[name] = {system: asdict(result) for system, result in results.items()}
    print()
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

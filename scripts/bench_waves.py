"""Requests that come at once and begin alike: what a wave of them costs.

    python scripts/bench_waves.py [--requests 32] [--shared 384] [--tail 32] [--output 16]
                                  [--budget 1024] [--rounds 3] [--out FILE]

Four cases, each on an empty prefix cache, with new prompts of random token ids every round:
  wave      all prompts share --shared tokens and have --tail tokens of their own
  bound     the shared tokens as a request of one output token, and when it has ended the same wave
            with other tails: one prefill and the tails, the least that the wave could cost
  apart     prompts of the same lengths that share nothing
  equal     the same prompt for all, every request with a seed of its own
All on one engine, in turns (A B A B), after one round that is not measured. `prompt` and `all` are
the tokens computed: of prompts, and with the outputs; seconds are medians of the clock and of the
CPU over all threads. The ratios are medians of the rounds' own ratios. Exit status 1 if a wave
computes anything twice. The last line of the output is JSON, which --out writes to a file as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from bench_report import provenance, publish

from jaxpaged import LLM, SamplingParams

CASES = ("wave", "bound", "apart", "equal")
Prompts = Sequence[list[int]]


@dataclass
class Figures:
    """Of one case: tokens computed, and seconds a round."""

    prompt_tokens: int = 0
    all_tokens: int = 0
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def report(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "all_tokens": self.all_tokens,
            "seconds": [round(x, 4) for x in self.wall],
            "cpu_seconds": [round(x, 4) for x in self.cpu],
        }


class Bench:
    """Runs the cases on one engine."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self.llm, self.args = llm, args
        self.figures = {case: Figures() for case in CASES}
        self._rng = np.random.default_rng(args.seed)
        self._vocabulary = llm.engine.intake.limits.vocab_size

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(0, self._vocabulary, count).tolist()
        return ids

    def _waves(self, case: str) -> list[tuple[Prompts, int]]:
        """What runs one after the other: prompts and output tokens."""
        args = self.args
        shared = self._ids(args.shared)
        prompts = [shared + self._ids(args.tail) for _ in range(args.requests)]
        if case == "apart":
            prompts = [self._ids(args.shared + args.tail) for _ in range(args.requests)]
        elif case == "equal":
            prompts = prompts[:1] * args.requests
        elif case == "bound":
            return [([shared], 1), (prompts, args.output)]
        return [(prompts, args.output)]

    def run(self, case: str, *, measured: bool) -> None:
        stats, waves = self.llm.engine.scheduler.stats, self._waves(case)
        self.llm.reset_prefix_cache()
        prompts, everything = stats.prompt_tokens, stats.scheduled_tokens
        start, cpu = time.perf_counter(), time.process_time()
        for wave, output in waves:
            params = [
                SamplingParams(seed=i, max_tokens=output, ignore_eos=True, detokenize=False)
                for i in range(len(wave))
            ]
            self.llm.generate(wave, params, use_tqdm=False)
        found = self.figures[case]
        if measured:
            found.wall.append(time.perf_counter() - start)
            found.cpu.append(time.process_time() - cpu)
        found.prompt_tokens = stats.prompt_tokens - prompts
        found.all_tokens = stats.scheduled_tokens - everything

    def ratio(self, case: str, other: str, *, cpu: bool = False) -> float:
        """Time of one case by that of another, the median over the rounds."""
        a, b = self.figures[case], self.figures[other]
        pairs = zip(a.cpu, b.cpu, strict=True) if cpu else zip(a.wall, b.wall, strict=True)
        return statistics.median(x / y for x, y in pairs)


def fewest(args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """The least and the most prompt tokens that a case may compute. What stands in a block with
    the first token that is a request's own is its own, too.
    """
    full = (args.shared + args.tail - 1) // args.block_size * args.block_size
    common = min(args.shared // args.block_size * args.block_size, full)
    length = args.shared + args.tail
    wave = common + args.requests * (length - common)
    alone = args.requests * length
    return {
        "wave": (wave, wave),
        "bound": (args.shared + wave - common, args.shared + wave - common),
        "apart": (alone, alone),
        "equal": (length, length + args.requests - 1),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=384, help="tokens")
    parser.add_argument("--tail", type=int, default=32, help="tokens")
    parser.add_argument("--output", type=int, default=16, help="tokens")
    parser.add_argument("--budget", type=int, default=1024, help="max_num_batched_tokens")
    parser.add_argument("--block-size", type=int, default=16, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="no warm-up; compiling counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    longest = args.shared + args.tail + args.output
    blocks = args.requests * -(-longest // args.block_size) + args.shared // args.block_size
    llm = LLM(
        args.model,
        dtype=args.dtype,
        block_size=args.block_size,
        max_num_seqs=args.requests,
        max_num_batched_tokens=args.budget,
        max_model_len=longest,
        num_gpu_blocks_override=blocks + args.requests + 2,
        enforce_eager=args.eager,
        disable_progress=True,
    )
    bench = Bench(llm, args)
    for measured in [False] + [True] * args.rounds:
        for case in CASES:
            bench.run(case, measured=measured)
    report = provenance("waves", "bench_waves.py", argv)
    report["model"] = llm.config.model
    print(f"{'':<8}{'prompt':>10}{'all':>10}{'seconds':>10}{'CPU':>10}")
    expected, right = fewest(args), True
    for case, found in bench.figures.items():
        report[case] = found.report()
        times = [statistics.median(seconds) for seconds in (found.wall, found.cpu)]
        print(
            f"{case:<8}{found.prompt_tokens:>10}{found.all_tokens:>10}"
            f"{times[0]:>10.3f}{times[1]:>10.3f}"
        )
        least, most = expected[case]
        if not least <= found.prompt_tokens <= most:
            print(f"{case} computes {found.prompt_tokens} prompt tokens, not {least} to {most}")
            right = False
    ratios = {
        f"{case} / {other}": {
            "wall": bench.ratio(case, other),
            "cpu": bench.ratio(case, other, cpu=True),
        }
        for case, other in (("wave", "bound"), ("wave", "apart"), ("equal", "bound"))
    }
    report["ratios"] = ratios
    for name, ratio in ratios.items():
        print(f"{name}: {ratio['wall']:.2f} by the clock, {ratio['cpu']:.2f} by CPU time")
    llm.close()
    print()
    publish(report, args.out)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

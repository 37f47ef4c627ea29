"""Time to the first token of prompts that are cached.

    python scripts/bench_hits.py [--lengths 64 256 1000 2000 4000] [--repeats 5] [--out FILE]

Four cases for each length of prompt, one request at a time, of random token ids:
  cold     nothing is cached
  exact    the same prompt again: one token is computed, on a copy of the prompt's last block
  blocks   the prompt with another last token: its full blocks are cached, and the last one is
           computed again, up to block_size tokens; what engines without the copy do for exact hits
  decode   one more output token after the prompt: a step that attends to as many tokens
`computed` is the number of tokens that were computed. Times are medians in milliseconds: of
the clock, with the least and the most, and of the CPU over all threads (`cpu`), which says more on
a machine that does other work as well. `exact/decode` is how many decode steps an exact hit takes,
by CPU time: attention costs more the longer the prompt, in both.

`cold` is measured --cold times, with a new prompt each, and for each such prompt the other cases in
turns, --repeats times. Times include the hashing of the prompt and the scheduler, not tokenising,
and starting and compiling are not in them. The last line of the output is JSON, which --out writes
to a file as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from bench_report import provenance, publish

from jaxpaged import LLM, SamplingParams

CASES = ("cold", "exact", "blocks", "decode")
MORE = 4
"""Further tokens that `decode` is the mean of."""


@dataclass
class Figures:
    """Of one case: milliseconds of the clock and of the CPU, and tokens computed."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    computed: int = 0

    def report(self) -> dict[str, float]:
        return {
            "computed": self.computed,
            "median_ms": statistics.median(self.wall),
            "min_ms": min(self.wall),
            "max_ms": max(self.wall),
            "cpu_ms": statistics.median(self.cpu),
        }


def generate(llm: LLM, prompt: list[int], output: int) -> tuple[float, float, int]:
    """Milliseconds of the clock and of the CPU, and tokens computed."""
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    stats = llm.engine.scheduler.stats
    before, start, cpu = stats.scheduled_tokens, time.perf_counter(), time.process_time()
    llm.generate([prompt], params, use_tqdm=False)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return 1000 * wall, 1000 * cpu, stats.scheduled_tokens - before


def measure(llm: LLM, length: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng([args.seed, length])
    vocabulary = llm.engine.intake.limits.vocab_size
    figures = {case: Figures() for case in CASES}
    for _ in range(args.cold):
        prompt = rng.integers(0, vocabulary, length).tolist()
        llm.reset_prefix_cache()
        for turn, case in enumerate(["cold"] + ["exact", "blocks"] * args.repeats):
            # Another last token each time: the same one would be an exact hit.
            last = (prompt[-1] + turn) % vocabulary if case == "blocks" else prompt[-1]
            wall, cpu, tokens = generate(llm, [*prompt[:-1], last], 1)
            of_case = figures[case]
            of_case.wall.append(wall)
            of_case.cpu.append(cpu)
            of_case.computed = max(of_case.computed, tokens)
            if case == "exact":
                long_wall, long_cpu, tokens = generate(llm, prompt, 1 + MORE)
                figures["decode"].computed = (tokens - 1) // MORE
                figures["decode"].wall.append((long_wall - wall) / MORE)
                figures["decode"].cpu.append((long_cpu - cpu) / MORE)
    return {case: of_case.report() for case, of_case in figures.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--block-size", type=int, default=16, help="tokens")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[64, 256, 1000, 2000, 4000], help="tokens"
    )
    parser.add_argument("--cold", type=int, default=2, help="prompts of each length")
    parser.add_argument("--repeats", type=int, default=5, help="of each hit and prompt")
    parser.add_argument("--eager", action="store_true", help="no warm-up; compiling counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    longest = max(args.lengths)
    blocks = -(-longest // args.block_size)
    llm = LLM(
        args.model,
        dtype=args.dtype,
        block_size=args.block_size,
        max_num_seqs=8,
        max_model_len=longest + 1 + MORE,
        # Room for a prompt, and a last block of its own for each of its hits.
        num_gpu_blocks_override=blocks + args.cold * args.repeats + 16,
        enforce_eager=args.eager,
        disable_progress=True,
    )
    report = provenance("hits", "bench_hits.py", argv)
    report["model"] = llm.config.model
    print(
        f"{'prompt':<8}{'case':<8}{'computed':>9}{'ms':>9}{'least':>9}{'most':>9}{'cpu ms':>9}"
        f"{'exact/decode':>14}"
    )
    for length in args.lengths:
        found = measure(llm, length, args)
        report[f"prompt {length}"] = found
        steps = found["exact"]["cpu_ms"] / found["decode"]["cpu_ms"]
        for case, of_case in found.items():
            times = "".join(
                f"{of_case[key]:>9.1f}" for key in ("median_ms", "min_ms", "max_ms", "cpu_ms")
            )
            share = f"{steps:>14.2f}" if case == "exact" else ""
            print(f"{length:<8}{case:<8}{of_case['computed']:>9}{times}{share}", flush=True)
    llm.close()
    print()
    publish(report, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

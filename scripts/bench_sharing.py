"""What forks save, measured on the real scheduler without any device.

    python scripts/bench_sharing.py [--requests 300] [--sigma 1.0 0.7] [--seed 0] [--out FILE]

Reproduces the sharing table of the PagedAttention paper (arXiv 2309.06180, section 6.3, figure 15):
how many KV blocks parallel samples and the beams of a search share. `saved` is the number of blocks
that sharing saves, divided by those that the same sequences would hold if each had all its blocks
to itself, both summed over the steps of a run. Blocks have 16 tokens, prefix caching is off, and
all requests wait from the start. The pool is too large to run out, unless --pool-tokens makes it
smaller: then the youngest groups are preempted and begin again, and these share most.

Lengths are lognormal with the means that the paper states: Alpaca-like (19 prompt, 58 output
tokens) and ShareGPT-like (161, 338); all sequences of a request have the same length. How far the
outputs spread about their mean (--sigma) decides much, as long outputs, which share least of what
they hold, are there longest; the paper does not tell how far its own spread.

A search needs somebody to choose what it goes on with. Here that are the recorded choices of real
searches (--parents, made by scripts/record_beam_parents.py); each request follows one of them and
goes on with another one when that ends. What this choice matters is shown by three others:
  uniform   each next beam descends from a live one drawn at random (beams that are equally good)
  best      all next beams descend from the best one: the most that can be shared
  none      no beam ever ends: the least, what parallel samples share

Printed beside the paper's range, which goes from 2 to 6 sequences. The last line of the output is
JSON, which --out writes to a file as well.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_report import ROOT, provenance, publish

from jaxpaged.bench.lengths import MEANS, SIGMA, draw_lengths
from jaxpaged.core.groups import Group
from jaxpaged.core.plan import TokenResult
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler, SchedulerConfig

PARENTS = ROOT / "docs" / "benchmarks" / "sharing" / "beam_parents.json"
WIDTHS = (2, 4, 6)
PAPER = {
    ("samples", "alpaca"): "6.1-9.8 %",
    ("samples", "sharegpt"): "16.2-30.5 %",
    ("beams", "alpaca"): "37.6-55.2 %",
    ("beams", "sharegpt"): "44.3-66.3 %",
}
CHOICES = ("recorded", "uniform", "best", "none")


@dataclass(frozen=True)
class Work:
    """(prompt, output) tokens of the requests, and limits in tokens and sequences."""

    shapes: list[tuple[int, int]]
    pool_tokens: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    budget: int


@dataclass
class Result:
    """Of one run. `saved` is a share of the blocks without sharing; `computed` counts tokens, those
    computed again after a preemption excepted."""

    saved: float
    batch: float
    steps: int
    preemptions: int
    copied_blocks: int
    computed: int


class Parents:
    """Chooses what the beams of a search go on with: indices of live beams, one for each next."""

    def __init__(self, choice: str, width: int, recorded: Sequence[str], seed: int) -> None:
        self.choice, self.width = choice, width
        self._searches = [search.split() for search in recorded]
        self._rng = random.Random(f"{choice} {width} {seed}")

    def next(self, search: int, step: int) -> list[int]:
        """After `step` earlier choices, of which the first has only one beam to choose from."""
        width = self.width
        if step == 0 or self.choice == "best":
            return [0] * width
        if self.choice == "none":
            return list(range(width))
        if self.choice == "uniform":
            return [self._rng.randrange(width) for _ in range(width)]
        searches, place = self._searches, step
        while place >= len(searches[search % len(searches)]):
            place -= len(searches[search % len(searches)]) - 1  # its first step is no choice
            search += 1
        return [int(digit) for digit in searches[search % len(searches)][place]]


class Simulation:
    """All requests through one scheduler; whatever a device would compute is made up."""

    def __init__(self, work: Work, method: str, width: int, parents: Parents | None) -> None:
        self.work, self.width, self.parents = work, width, parents
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=work.pool_tokens // work.block_size + 1,  # the null block is not usable
                block_size=work.block_size,
                max_num_seqs=work.max_num_seqs,
                max_num_batched_tokens=work.budget,
                max_model_len=work.max_model_len,
                enable_prefix_caching=False,
            )
        )
        self._ready: dict[Group, set[Request]] = {}
        """Searches that have not been computed in whole, and their beams that have."""
        self._choices: dict[Group, int] = {}
        for index, (prompt, output) in enumerate(work.shapes):
            members = [
                Request(
                    f"{index} {place}",
                    [0] * prompt,
                    max_tokens=output,
                    arrival_time=float(index),
                    payload=index,
                )
                for place in range(width)
            ]
            if method == "beams":
                self.scheduler.add_beams(members)
            else:
                self.scheduler.add_group(members)

    def run(self) -> Result:
        scheduler, stats = self.scheduler, self.scheduler.stats
        alone = held = 0
        while (step := scheduler.schedule()) is not None:
            alone += sum(request.num_blocks for request in scheduler.running)
            held += scheduler.kv.pool.num_held
            for result in scheduler.update(step, [1] * len(step.rows)):
                if result.token is None:
                    self._computed(result)
        wanted = len(self.work.shapes) * (1 if self.parents else self.width)
        done = stats.requests_finished.get("length", 0)
        if done != wanted:
            raise RuntimeError(f"{done} of {wanted} requests were served")
        computed = stats.scheduled_tokens - stats.recomputed_tokens
        expected = sum(p + self.width * (o - 1) for p, o in self.work.shapes)
        if computed != expected:
            raise RuntimeError(f"{computed} tokens were computed, not {expected}")
        return Result(
            saved=1 - held / alone,
            batch=stats.mean_running,
            steps=stats.steps,
            preemptions=stats.preemptions,
            copied_blocks=stats.copied_blocks,
            computed=computed,
        )

    def _computed(self, result: TokenResult) -> None:
        """A beam has been computed; the search goes on when all of them have."""
        beam, group = result.request, result.request.group
        assert group is not None and self.parents is not None
        ready = self._ready.setdefault(group, set())
        ready.add(beam)
        if not ready.issuperset(group.live):
            return
        del self._ready[group]
        made = self._choices.get(group, 0)
        if made + 1 == beam.max_tokens:
            self.scheduler.finish(beam, "length")
            return
        self._choices[group] = made + 1
        assert isinstance(beam.payload, int)
        chosen = self.parents.next(beam.payload, made)
        self.scheduler.advance_beams(group, [(index, 1) for index in chosen])


def run_workload(
    name: str, title: str, work: Work, recorded: dict[str, list[str]], seed: int
) -> dict[str, object]:
    """All methods and widths on one workload."""
    report: dict[str, object] = {}
    print(f"\n{title:<20}" + "".join(f"{width:>9}" for width in WIDTHS) + "    paper, 2 to 6")
    for method, choices in (("samples", ("",)), ("beams", CHOICES)):
        for choice in choices:
            results = {}
            for width in WIDTHS:
                parents = Parents(choice, width, recorded[str(width)], seed) if choice else None
                results[str(width)] = Simulation(work, method, width, parents).run()
            label = f"{method}, {choice}" if choice else method
            saved = "".join(f"{result.saved:>9.1%}" for result in results.values())
            told = PAPER[method, name] if choice in ("", "recorded") else ""
            print(f"{label:<20}{saved}    {told}".rstrip(), flush=True)
            report[label] = {width: asdict(result) for width, result in results.items()}
    return report


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--sigma", type=float, nargs="+", default=[SIGMA, 0.7], help="of outputs")
    parser.add_argument("--pool-tokens", type=int, default=2**20, help="KV slots")
    parser.add_argument("--block-size", type=int, default=16, help="tokens")
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parents", type=Path, default=PARENTS, help="recorded beams")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    recorded = json.loads(args.parents.read_text())["parents"]
    report = provenance("sharing", "bench_sharing.py", argv)
    report["paper"] = {f"{method} {name}": told for (method, name), told in PAPER.items()}
    for sigma in args.sigma:
        for name in MEANS:
            work = Work(
                shapes=draw_lengths(
                    name, args.requests, args.max_model_len, args.seed, output_sigma=sigma
                ),
                pool_tokens=args.pool_tokens,
                block_size=args.block_size,
                max_model_len=args.max_model_len,
                max_num_seqs=args.max_num_seqs,
                budget=args.max_num_batched_tokens,
            )
            title = f"{name}, sigma {sigma:g}"
            report[title] = run_workload(name, title, work, recorded, args.seed)
    print()
    publish(report, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

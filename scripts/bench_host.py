"""What a step costs on the host: schedule, pack, launch, finish, detokenise, tell.

    python scripts/bench_host.py [--rows 1 8 32 128 256] [--steps 200] [--out FILE]
                                 [--dispatch] [--trace FILE.svg]

Runs the whole engine over a device that computes nothing (`scripts/host/null_device.py`) and takes
the CPU time of each part of each step; told are medians in microseconds. The target is 150 us and
4 us a running row for everything but the program's own dispatch. Cases:

- decode: so many running requests, with 0, 10 and 10,000 others waiting behind them;
- prefill: steps of 2,048 prompt tokens, in one prompt and in sixteen;
- samples, beams: requests with n=8, and searches of 8 beams, which are forked and die;
- waiting beams: a search of 64 beams of 4,000 tokens that has been preempted and does not fit yet;
- texts: every step tells all of every text so far, as `Engine.step` does by default;
- hashing: the names of a long prompt's blocks, in microseconds a token.

--dispatch loads SmolLM2 (or --model) and measures the call of its compiled step besides: idle, and
while another step runs. --trace runs it for some steps and draws when each part of them began and
ended: launch N+1 before the results of N. The last line of the output is JSON, which --out writes
to a file as well.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench_report import provenance, publish
from host.cases import hashing, run_cases
from host.phases import PHASES


def show(name: str, found: dict[str, float]) -> None:
    print(
        f"{name:<30}"
        + "".join(f"{found[phase]:>8.0f}" for phase in PHASES)
        + f"{found['total']:>9.0f}{found['target']:>8.0f}{found['total'] / found['target']:>7.2f}",
        flush=True,
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--steps", type=int, default=200, help="that are measured in each case")
    parser.add_argument("--only", nargs="+", help="cases whose names begin with one of these")
    parser.add_argument("--dispatch", action="store_true", help="of a real model, besides")
    parser.add_argument("--trace", type=Path, metavar="SVG", help="draw the steps of a real model")
    parser.add_argument("--model", help="of --dispatch and --trace; default: the embedded one")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    report = provenance("host", "bench_host.py", argv)
    print(f"{'us a step':<30}" + "".join(f"{phase:>8}" for phase in PHASES), end="")
    print(f"{'total':>9}{'target':>8}{'ratio':>7}")
    for name, found in run_cases(args.rows, args.steps, args.only):
        show(name, found)
        report[name] = {key: round(value, 1) for key, value in found.items()}
    report["hashing"] = {name: round(us, 3) for name, us in hashing().items()}
    print("\nhashing, us a token: ", report["hashing"])
    if args.dispatch or args.trace:
        from host.real import dispatch, trace

        if args.dispatch:
            report["dispatch"] = dispatch(args.model)
            print("\ndispatch, us: ", report["dispatch"])
        if args.trace:
            report["trace"] = trace(args.model, args.trace)
            print("\ntrace, ms: ", report["trace"])
    print()
    publish(report, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

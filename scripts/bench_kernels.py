"""Times the GPU kernels and the engine on the device at hand, or tunes the kernels for it.

    python scripts/bench_kernels.py --out DIR [--sections decode,prefill] [--budget 540] [--dry]
    python scripts/bench_kernels.py --tune --out FILE [--budget 540] [--dry]

Sections, in the order in which they run: ceilings, correctness, decode, step, engine, peer,
prefill, write, step_reference, step_plain, deterministic, ablations, tune. Without --sections all
of them do. Shares of the ceilings need `ceilings` in the same run. Every measurement is a line of
DIR/results.jsonl, written at once; a table comes last and is DIR/summary.md. A section that fails,
hangs or comes too late does not end the run.

--tune looks for the fastest configurations and writes a table in the format that
`pallas_kernels/tuning_table.json` has; rows and logs go beside FILE, to a folder FILE.run.

--dry does the same on CPU with tiny shapes and interpreted kernels: it proves the code, and
measures nothing.

Exit status: 0, whatever was fast or slow; 1 if a kernel's result was wrong or it failed in the
correctness section, or if a deterministic engine was not; 2 if there is no GPU. See
docs/gpu_suite.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu_suite.results import FILE as RESULTS
from gpu_suite.sections import BUDGET, BY_NAME, DEFAULT, TABLE_FILE
from gpu_suite.summary import summarise
from gpu_suite.supervisor import LOG, Supervisor


def section_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(BY_NAME)}")
    return sorted(set(names), key=DEFAULT.index)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="PATH")
    parser.add_argument("--sections", type=section_names, metavar="NAME,NAME")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS")
    parser.add_argument("--tune", action="store_true", help="write a tuning table to --out")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on CPU")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="keep compiled programs for later runs"
    )
    args = parser.parse_args(argv)
    if args.tune and args.sections:
        parser.error("--tune is a run of its own; leave out --sections")
    if args.tune and args.out.is_dir():
        parser.error(f"--out {args.out} is a folder; --tune needs the name of a file")
    if not args.tune and args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is a file; it must be a folder")
    if args.budget <= 0:
        parser.error(f"--budget must be above 0, got {args.budget}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    folder = (Path(f"{args.out}.run") if args.tune else args.out).resolve()
    names = ["tune"] if args.tune else args.sections or list(DEFAULT)
    for name in (RESULTS, LOG, TABLE_FILE):
        (folder / name).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu_suite_") as scratch:
        cache = args.cache or Path(scratch)
        Supervisor(folder, args.budget, args.dry, cache.resolve()).run(names)
    text, status = summarise(folder, dry=args.dry)
    print(text)
    if args.tune:
        if not (folder / TABLE_FILE).exists():
            print("error: nothing could be tuned; see above", file=sys.stderr)
            return status or 1
        shutil.copyfile(folder / TABLE_FILE, args.out)
    return status


if __name__ == "__main__":
    sys.exit(main())

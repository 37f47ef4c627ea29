"""What paging saves: this engine against itself with the memory managers of its predecessors.

    python scripts/bench_paging.py [--sections systems blocks watermark] [--out DIR]
    python scripts/bench_paging.py --sections device attention [--out DIR]

Repeats the comparison of the PagedAttention paper (arXiv 2309.06180, figures 2, 12, 13 and 18) with
one scheduler, one engine and one set of kernels. Lengths are lognormal (sigma 1) with the means of
the paper's data sets, ShareGPT-like (161 prompt, 338 output tokens) and Alpaca-like (19, 58),
clipped so that both fit into max_model_len. All requests wait from the start, prompts share
nothing, prefix caching is off. Every system has the same KV slots and the same token budget a step:
  static batches        a batch of as many as have max_model_len slots each; nobody is admitted
                        until it has ended (FasterTransformer). Those that have ended cost nothing.
  reserve max           continuous batching, max_model_len slots for each request (Orca, Max)
  reserve power of two  the prompt, and the output's length rounded up to a power of two (Orca,
                        Pow2); that needs to be foreseen
  reserve oracle        exactly the final length (Orca, Oracle), which nobody knows
  paged                 this engine as it is

Sections without a device (the real scheduler; running, waste, tokens a step and tokens/s are of the
time in which requests wait, as the end of a run is that of its longest outputs):
  systems     the systems above, blocks of 16, watermark 1 %
  blocks      paged, by block size
  watermark   paged, by watermark: preemptions, tokens computed again
`tokens/s by the model` counts output tokens by a model of a step's cost: OPT-13B on one A100 of
40 GB, the paper's case, by bytes read and operations (scripts/paging/cost.py).

Sections on a device:
  device      the systems with a real model (default: the embedded one), in turns, --rounds times
              after one of warming up; lengths are divided by --scale. The tokens must be the same.
  attention   the attention of a decode step by block size, on the backend that "auto" chooses

With --out each section's JSON goes to DIR, and DIR/README.md and DIR/paging.png (with matplotlib)
are made again from all that is there. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_report import provenance, publish
from paging.cost import OPT_13B_SLOTS
from paging.plot import plot
from paging.simulation import Work, simulate
from paging.systems import SYSTEMS
from paging.tables import TITLES, WORKLOADS, attention, on_device, readme, simulated

from jaxpaged.bench.lengths import draw_lengths

BLOCK_SIZES = (8, 16, 32, 64, 128)
WATERMARKS = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)
HOST_SECTIONS = ("systems", "blocks", "watermark")


def host_section(section: str, work: Work) -> dict[str, dict[str, Any]]:
    """The results of a section without device, on one workload."""
    paged = SYSTEMS[-1]
    if section == "systems":
        results = {system.name: simulate(work, system) for system in SYSTEMS}
    elif section == "blocks":
        results = {str(size): simulate(work, paged, block_size=size) for size in BLOCK_SIZES}
    else:
        results = {f"{mark:.0%}": simulate(work, paged, watermark=mark) for mark in WATERMARKS}
    return {name: asdict(result) for name, result in results.items()}


def host_work(name: str, args: argparse.Namespace) -> Work:
    return Work(
        shapes=draw_lengths(name, args.requests, args.max_model_len, args.seed),
        pool_tokens=args.pool_tokens,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        budget=args.max_num_batched_tokens,
    )


def device_section(args: argparse.Namespace) -> dict[str, Any]:
    """All systems on one engine."""
    from paging.device import measure

    from jaxpaged import LLM

    longest = args.max_model_len // args.scale
    llm = LLM(
        args.model,
        dtype=args.dtype,
        block_size=16,
        max_num_seqs=args.device_seqs,
        max_num_batched_tokens=max(256, args.device_seqs),
        max_model_len=longest,
        num_gpu_blocks_override=args.device_pool_tokens // 16 + 1,
        enable_prefix_caching=False,
        enforce_eager=args.eager,
        disable_progress=True,
    )
    budget = llm.engine.scheduler.config.max_num_batched_tokens
    results = {}
    for name in WORKLOADS:
        drawn = draw_lengths(name, args.device_requests, args.max_model_len, args.seed)
        shapes = [(max(1, p // args.scale), max(1, o // args.scale)) for p, o in drawn]
        work = Work(shapes, args.device_pool_tokens, longest, args.device_seqs, budget)
        results[name] = measure(llm, work, args.rounds, args.seed)
    llm.close()
    return results


def attention_section(args: argparse.Namespace) -> dict[str, Any]:
    from paging.attention import measure

    return measure(
        BLOCK_SIZES,
        rows=args.attention_rows,
        context=args.attention_context,
        dtype=args.attention_dtype,
        rounds=args.attention_rounds,
    )


def run_section(section: str, args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    report: dict[str, Any] = provenance(f"paging: {section}", "bench_paging.py", argv)
    report["date"] = datetime.date.today().isoformat()
    if section in HOST_SECTIONS:
        report["results"] = {n: host_section(section, host_work(n, args)) for n in WORKLOADS}
        told = simulated(report)
    elif section == "device":
        report["results"] = device_section(args)
        told = on_device(report)
    else:
        report["results"] = attention_section(args)
        told = attention(report)
    print(f"\n{TITLES[section]}\n\n{told}", flush=True)
    return report


def write(reports: Mapping[str, Any], out: Path) -> None:
    """Each section to its file; tables and picture of all that are there."""
    out.mkdir(parents=True, exist_ok=True)
    for section, report in reports.items():
        (out / f"{section}.json").write_text(json.dumps(report, indent=1) + "\n")
    files = {section: out / f"{section}.json" for section in TITLES}
    known = {s: json.loads(file.read_text()) for s, file in files.items() if file.exists()}
    (out / "README.md").write_text(readme(known))
    try:
        plot(known, out / "paging.png")
    except ImportError:
        print("No picture: matplotlib is not installed (pip install jaxpaged[plot]).")


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sections", nargs="+", choices=list(TITLES), default=list(HOST_SECTIONS))
    add("--out", type=Path, help="folder")
    add("--seed", type=int, default=0)
    add("--requests", type=int, default=1000)
    add("--pool-tokens", type=int, default=OPT_13B_SLOTS, help="KV slots")
    add("--max-model-len", type=int, default=2048, help="tokens")
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=2048, help="a step")
    add("--model", help="default: the embedded one")
    add("--dtype", default="auto")
    add("--eager", action="store_true", help="no warm-up; compiling counts")
    add("--rounds", type=int, default=2)
    add("--scale", type=int, default=4, help="what lengths are divided by on the device")
    add("--device-requests", type=int, default=96)
    add("--device-pool-tokens", type=int, default=4096, help="KV slots on the device")
    add("--device-seqs", type=int, default=64, help="max_num_seqs on the device")
    add("--attention-rows", type=int, default=32)
    add("--attention-context", type=int, default=1024, help="tokens")
    add("--attention-dtype", default="bfloat16")
    add("--attention-rounds", type=int, default=30)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = arguments(argv)
    reports = {section: run_section(section, args, argv) for section in args.sections}
    if args.out is not None:
        write(reports, args.out)
    publish(reports, None)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""This engine beside others on the same work, on a CPU.

    python scripts/bench_peers.py [--peer NAME=PYTHON ...] [--peer-model NAME=PATH ...]
                                  [--rounds 3] [--metrics c32 ...] [--quick] [--out DIR]
    python scripts/bench_peers.py --report DIR

Engines: jaxpaged and transformers run in this interpreter, vllm and openvino in those that --peer
names (docs/benchmarks/cpu/README.md tells how to make them); one that is not there, or fails, is
named, and the others go on. Each measurement has a fresh process, and the engines take turns: A B
C, A B C, for --rounds rounds. First each is started once with empty caches, which is the cold
start; the rounds find what that left. All have the same model in bfloat16 (--model, or the embedded
one, which is converted once; openvino has its own form of it, --peer-model openvino=DIR), the same
cores, a KV cache of 768 MB in bfloat16 (transformers keeps one a batch), and the same greedy
requests as token ids, of which none may end early: every answer's tokens are counted.

  c32 c8 c1  64, 32 and 8 requests at so many at once, prompts included; lognormal lengths, means
             about 120 and 64 tokens
  latency    a token at batch 1 after a prompt of 128, the mean of 64
  prefill    a prompt of 512 and one token
  prefix     first token of 416 tokens, cold and with 384 of them cached
  wave       32 requests at once that share 384 tokens
Always: the start, from the process to its first token, and the most memory the process had.

Printed are medians and, for each metric, the median over the rounds of the ratio to the best peer
of the same round, with what is aimed at. --out gets peers.jsonl (all times), peers.md and peers.png
(with matplotlib); --report makes the last two again. Run it alone: a run says how much the machine
did besides. The exit status is 1 if jaxpaged failed. About 10 minutes a round with all four.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from os import getloadavg
from pathlib import Path
from typing import Any

from bench_report import ROOT, provenance
from peers.engines import CLASSES, OURS
from peers.launch import Candidate, Launcher
from peers.machine import Watch, cpu_features, usable_cpus, without_folders
from peers.metrics import figures
from peers.plot import plot
from peers.summary import markdown
from peers.workload import GROUPS, QUICK, Sizes, make_plan

MODEL = ROOT / "out" / "peers" / "smollm2-135m-instruct"
"""The embedded model in the form that all can read; made when it is missing."""
JSONL, TABLE, PLOT = "peers.jsonl", "peers.md", "peers.png"
Write = Callable[[dict[str, Any]], None]


def main(argv: list[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.report is not None:
        _publish(_read(args.report / JSONL), args.report)
        return 0
    candidates, missing = _candidates(parser, args)
    model = args.model or _embedded_model()
    sizes = QUICK if args.quick else Sizes()
    rounds = args.rounds or (1 if args.quick else 3)
    hf_config = json.loads((model / "config.json").read_text())
    cpus = usable_cpus(args.threads)
    records: list[dict[str, Any]] = [
        {
            "kind": "run",
            **provenance("peers", "bench_peers.py", argv),
            "command": f"python scripts/bench_peers.py {without_folders(argv)}".strip(),
            "date": time.strftime("%Y-%m-%d"),
            "model": model.name,
            "cpus": len(cpus),
            "cpu_features": cpu_features(),
            "load": round(getloadavg()[0], 2),
            "rounds": rounds,
            "seed": args.seed,
            "quick": args.quick,
            "missing": missing,
        }
    ]
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / JSONL).write_text(json.dumps(records[0]) + "\n")

    def write(record: dict[str, Any]) -> None:
        records.append(record)
        if args.out is not None:
            with (args.out / JSONL).open("a") as file:
                file.write(json.dumps(record) + "\n")

    candidates = [replace(c, model=c.model or model) for c in candidates]
    with tempfile.TemporaryDirectory(prefix="peers-cache-") as cache:
        launcher = Launcher(sizes, hf_config, cpus, Path(cache), args.timeout)
        _measure(launcher, candidates, rounds, args.metrics, args.seed, write)
    _publish(records, args.out)
    failed = [r for r in records if r.get("engine") == OURS and r["error"]]
    return 1 if failed else 0


def _measure(
    launcher: Launcher,
    candidates: list[Candidate],
    rounds: int,
    groups: list[str],
    seed: int,
    write: Write,
) -> None:
    """All rounds. An engine that does not even start is not tried again."""
    left = list(candidates)
    for turn in range(rounds + 1):
        plan = make_plan(launcher.sizes, launcher.hf_config["vocab_size"], seed, turn)
        for candidate in list(left):
            began, watch = time.monotonic(), Watch()
            load = getloadavg()[0]
            lines, error = launcher.measure(candidate, plan, groups if turn else [])
            found = {line["kind"]: line for line in lines}
            times = {line["group"]: line["seconds"] for line in lines if line["kind"] == "times"}
            values = figures(times, plan, launcher.sizes)
            if "start" in found:
                values["start" if turn else "cold_start"] = found["start"]["seconds"]
            if turn and "memory" in found:
                values["rss"] = found["memory"]["peak_rss"] / 1e6
            record = {
                "kind": "measurement",
                "round": turn,
                "engine": candidate.name,
                "figures": values,
                "seconds": times,
                "sample": found.get("sample", {}).get("tokens"),
                "versions": _rest(found.get("versions")),
                "facts": _rest(found.get("facts")),
                "load": round(load, 2),
                "others": round(watch.others(), 3),
                # Not its output, which may name folders and users of this machine.
                "error": error.splitlines()[0] if error else None,
            }
            write(record)
            _progress(record, time.monotonic() - began, error)
            if error and not turn:
                left.remove(candidate)


def _rest(line: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (line or {}).items() if key != "kind"}


def _progress(record: dict[str, Any], seconds: float, error: str) -> None:
    what = f"round {record['round']}" if record["round"] else "first start"
    shown = ", ".join(f"{name} {value:.4g}" for name, value in record["figures"].items())
    print(f"{what}: {record['engine']}: {shown or 'nothing'} ({seconds:.0f} s)", flush=True)
    if error:
        print(f"{record['engine']} failed: {error}", file=sys.stderr, flush=True)


def _publish(records: list[dict[str, Any]], out: Path | None) -> None:
    table = markdown(records)
    print(f"\n{table}")
    if out is None:
        return
    (out / TABLE).write_text(table)
    try:
        plot(records, out / PLOT)
    except ImportError as error:
        print(f"no plot: {error}; pip install 'jaxpaged[plot]'", file=sys.stderr)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _candidates(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[list[Candidate], dict[str, str]]:
    """Engines in turn, and why the others are not among them."""
    pythons = dict(args.peer)
    models = dict(args.peer_model)
    options = {OURS: dict(args.set)}
    here = Path(sys.executable)
    pythons.setdefault(OURS, here)
    missing = {}
    if "transformers" not in pythons:
        if find_spec("torch") is not None:
            pythons["transformers"] = here
        else:
            missing["transformers"] = "torch is not installed here"
    found = []
    for name in CLASSES:
        if name in args.skip:
            missing[name] = "skipped"
        elif name not in pythons:
            missing.setdefault(name, f"no --peer {name}=PYTHON was given")
        elif name == "openvino" and name not in models:
            parser.error("openvino reads a form of its own: --peer-model openvino=DIR")
        else:
            model = models.get(name, args.model)
            found.append(Candidate(name, pythons[name], model, options.get(name, {})))
    return found, missing


def _embedded_model() -> Path:
    if not (MODEL / "config.json").exists():
        print(f"Converting the embedded model to {MODEL}", flush=True)
        source = MODEL.name  # its alias
        command = [sys.executable, "-m", "jaxpaged", "convert", source, str(MODEL)]
        options = ["--to", "safetensors", "--dtype", "bfloat16", "--disable-progress"]
        subprocess.run([*command, *options], cwd=ROOT, check=True)
    return MODEL


def _named(text: str) -> tuple[str, Path]:
    name, equals, value = text.partition("=")
    if not equals or not value or name not in CLASSES:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH with one of {list(CLASSES)}")
    return name, Path(value).absolute()


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peer", type=_named, action="append", default=[], metavar="NAME=PYTHON")
    add("--peer-model", type=_named, action="append", default=[], metavar="NAME=PATH")
    add("--skip", nargs="+", choices=tuple(CLASSES), default=[], help="engines to leave out")
    add("--model", type=Path, help="folder of safetensors in bfloat16; default: the embedded one")
    add(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="EngineConfig",
    )
    add("--threads", type=int, default=2, help="cores, of those that are there")
    add("--rounds", type=int, help="default: 3, or 1 with --quick")
    add("--metrics", nargs="+", choices=GROUPS, default=list(GROUPS))
    add("--quick", action="store_true", help="tiny sizes, to try the script")
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=1800, help="seconds for one measurement of one engine")
    add("--out", type=Path, help="folder for the results")
    add("--report", type=Path, metavar="DIR", help="table and plot of results in DIR, no run")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Where the time of a start goes: from a new process to the first token.

    python scripts/bench_start.py [--cases cold warm eager artefact] [--repeats 3] [--out FILE]
                                  [--model MODEL] [--set name=value ...]

Each start is a process of its own that makes an `LLM` and generates one token. The cases:
  cold      an empty compilation cache: every program is compiled
  warm      the cache that the cold start left behind
  xla       the same without the executables in it: programs are traced and found in XLA's cache
  eager     enforce_eager with that cache: only what the token needs is traced
  artefact  the programs of `jaxpaged compile`, with the cache off
`wall` is the clock and `cpu` the processor time in seconds, of all threads of the process for the
total, and of the phase's own thread for the phases; on a machine that does other work as well, only
the latter says much. Phases with a + run beside others, on threads of their own. Of several
repeats the one with the least CPU time is shown; cold starts are made once. Engine settings go
through --set, such as --set max_num_seqs=8. The last line of the output is JSON, which --out
writes to a file as well.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_report import provenance, publish

CASES = ("cold", "warm", "xla", "eager", "artefact")
PHASES = (
    ("jaxpaged.blueprint", "resolve_source", "model's header"),
    ("jaxpaged.blueprint", "load_tokenizer", "tokenizer"),
    ("jaxpaged.blueprint", "place_model", "device"),
    ("jaxpaged.blueprint", "_choose_backend", "attention backend"),
    ("jaxpaged.blueprint", "open_model", "modules"),
    ("jaxpaged.device.program_set.ProgramSet", "lower", "tracing, lowering"),
    ("jaxpaged.device.model_loader.OpenedModel", "load", "weights +"),
    ("jaxpaged.startup", "first_state", "KV pools +"),
    ("jaxpaged.startup", "prepare", "programs, all"),
    ("jaxpaged.startup", "_build", "engine, all"),
)
"""Module or class, function, and what its time is called."""
Times = dict[str, tuple[float, float]]


def child(began: float, settings: dict[str, Any]) -> None:
    """One start, told as JSON on standard output."""
    times: Times = {"interpreter": (time.time() - began, time.process_time())}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                before = times.get(name, (0.0, 0.0))
                times[name] = (
                    before[0] + time.perf_counter() - wall,
                    before[1] + time.thread_time() - cpu,
                )

        return run

    def imports() -> Any:
        from jaxpaged import LLM, SamplingParams

        return LLM, SamplingParams

    LLM, SamplingParams = timed("imports", imports)()
    for where, name, title in PHASES:
        module, _, cls = where.rpartition(".")
        holder = sys.modules.get(where) or getattr(sys.modules[module], cls)
        setattr(holder, name, timed(title, getattr(holder, name)))
    llm = LLM(disable_progress=True, **settings)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    timed("first token", lambda: llm.generate(["The"], params, use_tqdm=False))()
    times["total"] = (time.time() - began, time.process_time())
    ledger = llm.engine.runner.ledger
    told = {
        "times": times,
        "programs": ledger.compiles,
        "traced": ledger.traces,
        "from_cache": sum(record.cache_hit for record in ledger.records),
        "backend": llm.engine.runner.attention_backend,
        "kv_bytes": llm.engine.runner.memory_bytes()["kv_cache"],
    }
    print(json.dumps(told))


def start(settings: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", repr(time.time()), repr(settings)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(f"error: a start failed:\n{run.stderr[-3000:]}")
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return told


def compile_artefact(folder: Path, settings: dict[str, Any]) -> None:
    words = [sys.executable, "-m", "jaxpaged", "compile", settings["model"], "--out", str(folder)]
    for name, value in settings.items():
        if name != "model":
            words += [f"--{name.replace('_', '-')}", str(value)]
    subprocess.run(words, check=True, capture_output=True)


def measure(cases: list[str], settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="jaxpaged-start-") as scratch:
        cache = Path(scratch) / "cache"
        cached = {**settings, "compile_cache_dir": str(cache)}
        first = start(cached)  # later ones need what it leaves behind
        if "cold" in cases:
            found["cold"] = first
        for case in [case for case in CASES[1:] if case in cases]:
            more: dict[str, Any] = cached
            if case == "xla":
                shutil.rmtree(cache / "executables", ignore_errors=True)
            elif case == "eager":
                more = {**cached, "enforce_eager": True}
            elif case == "artefact":
                folder = Path(scratch) / "artefact"
                compile_artefact(folder, settings)
                more = {**settings, "compile_cache_dir": "", "compiled": str(folder)}
            runs = [start(more) for _ in range(repeats)]
            found[case] = min(runs, key=lambda run: float(run["times"]["total"][1]))
            found[case]["walls"] = [run["times"]["total"][0] for run in runs]
    return found


def table(found: dict[str, Any]) -> str:
    names = ["interpreter", "imports", *[title for *_, title in PHASES], "first token", "total"]
    lines = [f"{'':<18}" + "".join(f"{case + ' wall':>16}{'cpu':>8}" for case in found)]
    for name in names:
        cells = ""
        for told in found.values():
            wall, cpu = told["times"].get(name, (float("nan"), float("nan")))
            cells += f"{wall:>16.2f}{cpu:>8.2f}" if wall == wall else f"{'-':>16}{'-':>8}"
        lines.append(f"{name:<18}{cells}")
    for name in ("programs", "traced", "from_cache"):
        lines.append(f"{name:<18}" + "".join(f"{told[name]:>16}{'':>8}" for told in found.values()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--set", action="append", default=[], metavar="name=value")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    settings: dict[str, Any] = {"model": args.model}
    for pair in args.set:
        name, _, text = pair.partition("=")
        try:
            settings[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            settings[name] = text
    found = measure(args.cases, settings, args.repeats)
    print(table(found))
    report = provenance("start", "bench_start.py", sys.argv[1:])
    publish({**report, "settings": settings, "cases": found}, args.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(float(sys.argv[2]), ast.literal_eval(sys.argv[3]))
    else:
        main()

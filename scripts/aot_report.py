"""What a compiler knows of the GPU kernels, for an H200 and without one.

    python scripts/aot_report.py [NAME...] [--out FILE] [--table FILE] [--update-budgets]

Compiles every entry of the tuning table, some variants of the kernels and whole steps of an 8B
model for sm_90a, and prints a Markdown table: registers, spills, shared memory, programs that fit a
multiprocessor at once, asynchronous loads, tensor core instruction. Says nothing about speed.

  NAME...           programs whose name has one of these in it (default: all)
  --out FILE        write the table there; in a file that has a line "<!-- aot -->" the text behind
                    it is replaced, what stands above stays
  --table FILE      a tuning table of your own instead of the package's; its entries alone
  --update-budgets  record what was seen as the tests' budgets for the installed version of jax
  --jobs N          processes at a time (default: one a processor)

Needs XLA's CUDA plugin of jax's version and ptxas, which `sh scripts/test.sh` installs. Exits with
1 if a program cannot be compiled or spills registers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the harness is part of the tests, which are not installed
os.environ["JAX_PLATFORMS"] = "cpu"

from pallas_kernels.tuning import load_table  # noqa: E402
from tests.kernels.aot import budgets, toolchain  # noqa: E402
from tests.kernels.aot.compiler import compile_programs  # noqa: E402
from tests.kernels.aot.facts import ProgramFacts  # noqa: E402

MARK = "<!-- aot -->"
COLUMNS = (
    "program",
    "shape",
    "config",
    "kernel",
    "regs",
    "spilled B",
    "shared B",
    "CTAs/SM (regs, shared)",
    "16 B async loads",
    "tensor op",
)


def main() -> int:
    arguments = parse_arguments()
    reason = toolchain.missing()
    if reason is not None:
        print(f"error: nothing can be compiled here: {reason}", file=sys.stderr)
        return 1
    from tests.kernels.aot.programs import FAULTY_PREFIX, all_programs

    programs = all_programs(None if arguments.table is None else load_table(arguments.table))
    names = [name for name in programs if not name.startswith(FAULTY_PREFIX)]
    if arguments.names:
        names = [name for name in names if any(part in name for part in arguments.names)]
    if not names:
        print(f"error: no program is called like {arguments.names}", file=sys.stderr)
        return 1
    start = time.perf_counter()
    print(f"compiling {len(names)} programs for an H200", file=sys.stderr)
    told = compile_programs(names, table=arguments.table, workers=arguments.jobs)
    facts = {name: one for name, one in told.items() if isinstance(one, ProgramFacts)}
    text = report(facts)
    if arguments.out is None:
        print(text)
    else:
        write(arguments.out, text)
    failed = [name for name in names if name not in facts]
    for name in failed:
        print(f"error: {name} cannot be compiled: {told[name]}", file=sys.stderr)
    spilling = [n for n, one in facts.items() if any(k.spill_bytes for k in one.kernels)]
    for name in spilling:
        print(f"error: {name} spills registers", file=sys.stderr)
    if arguments.update_budgets and not failed:
        budgets.update(facts, metadata.version("jax"), partly=bool(arguments.names))
    print(f"{len(facts)} programs, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return 1 if failed or spilling else 0


def parse_arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--update-budgets", action="store_true")
    parser.add_argument("--jobs", type=int)
    arguments = parser.parse_args()
    if arguments.table is not None and arguments.update_budgets:
        parser.error("--update-budgets is for the package's own table, not for --table")
    return arguments


def report(facts: dict[str, ProgramFacts]) -> str:
    """Markdown: where it comes from, the kernels, the whole programs."""
    ptxas = toolchain.ptxas()
    assert ptxas is not None
    lines = [
        f"jax {metadata.version('jax')}, ptxas {toolchain.ptxas_version(ptxas)}, sm_90a (H200), "
        "compiled without a GPU. Written by `python scripts/aot_report.py --out docs/kernels.md`.",
        "",
        *table(COLUMNS, kernel_rows(facts)),
    ]
    steps = {name: one for name, one in facts.items() if one.kind in ("step", "copy")}
    if steps:
        lines += [
            "",
            "Whole steps and block copies, KV pools donated:",
            "",
            *table(
                ("program", "shape", "kernel launches", "copies of a pool", "pools", "temporaries"),
                [step_row(name, one) for name, one in steps.items()],
            ),
        ]
    return "\n".join(lines) + "\n"


def table(head: tuple[str, ...], rows: list[list[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def kernel_rows(facts: dict[str, ProgramFacts]) -> list[list[object]]:
    rows: list[list[object]] = []
    for name, one in facts.items():
        for kernel in one.kernels:
            ctas = f"{kernel.ctas_per_sm} ({kernel.ctas_by_registers}, "
            ctas += f"{kernel.ctas_by_shared_memory})"
            loads = str(kernel.async_loads_16) if kernel.async_loads_16 else ""
            if kernel.bulk_loads:
                loads = f"TMA {kernel.bulk_loads}"
            rows.append(
                [
                    name,
                    one.shape,
                    one.config,
                    budgets.base_name(kernel),
                    kernel.registers,
                    kernel.spill_bytes,
                    f"{kernel.shared_memory:,}",
                    ctas,
                    loads or "-",
                    kernel.tensor_op,
                ]
            )
    return rows


def step_row(name: str, one: ProgramFacts) -> list[object]:
    pools = f"{one.pool_bytes / 2**30:.1f} GiB"
    return [
        name,
        one.shape,
        one.launches,
        one.pool_copies,
        pools + (", in place" if one.alias_bytes >= one.pool_bytes else ", COPIED"),
        f"{one.temp_bytes / 2**20:.0f} MiB",
    ]


def write(path: Path, text: str) -> None:
    if path.exists() and MARK in path.read_text().splitlines():
        above = path.read_text().split(f"\n{MARK}\n")[0]
        text = f"{above}\n{MARK}\n\n{text}"
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())

"""Compiles programs for an H200 and tells what came of them, as JSON. A process of its own, because
XLA reads where to dump to once:

    python -m tests.kernels.aot.worker DUMP_FOLDER [--table FILE] NAME...

One line of JSON a program: `{"name": ..., "facts": {...}}` or `{"name": ..., "error": "..."}`.
`toolchain.worker_environment` has what must be in the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

from jax.sharding import Mesh

from pallas_kernels.tuning import load_table
from tests.kernels.aot import assembly, hlo_text, toolchain
from tests.kernels.aot.facts import ProgramFacts
from tests.kernels.aot.program import Program, h200
from tests.kernels.aot.programs import all_programs


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dump", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("names", nargs="+")
    given = parser.parse_args(arguments)
    # The Triton backend says at every lowering that it is deprecated.
    warnings.filterwarnings("ignore", message=".*Triton.*deprecated", category=DeprecationWarning)
    programs = all_programs(None if given.table is None else load_table(given.table))
    with h200() as mesh:
        for name in given.names:
            try:
                told = {"facts": dataclasses.asdict(compiled(programs[name], mesh, given.dump))}
            except Exception:
                told = {"error": traceback.format_exc()[-4000:]}
            sys.stdout.write(json.dumps({"name": name, **told}) + "\n")
            sys.stdout.flush()


def compiled(program: Program, mesh: Mesh, dump: Path) -> ProgramFacts:
    start = time.perf_counter()
    mosaic = dump / f"mosaic-{program.name}"
    mosaic.mkdir(parents=True)
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(mosaic)
    before = set(dump.glob("*.ptx"))
    executable = program.lower(mesh).compile()
    hlo = executable.as_text()
    memory = executable.memory_analysis()
    thunks = max(dump.glob("*thunk_sequence.txt"), key=lambda path: path.stat().st_mtime_ns)
    launched = assembly.launches(thunks.read_text())
    ptxas = toolchain.ptxas()
    assert ptxas is not None
    names = set(re.findall(r'\bname = "(\w+)"', hlo))
    kernels = assembly.kernels_of(set(dump.glob("*.ptx")) - before, ptxas, dict(launched), names)
    kernels += assembly.mosaic_kernels(mosaic, ptxas)
    together, apart = hlo_text.parted_sums(hlo)
    shapes = {assembly.hlo_shape(pool.dtype.name, pool.shape) for pool in program.pools}
    return ProgramFacts(
        kernels=kernels,
        launches=len(launched),
        pool_copies=assembly.copies_of(hlo, shapes),
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        seconds=time.perf_counter() - start,
        kind=program.kind,
        pool_bytes=sum(pool.size * pool.dtype.itemsize for pool in program.pools),
        shape=program.shape,
        config=program.config,
        library_products=hlo_text.products_of_libraries(hlo),
        joined_sums=together,
        parted_sums=apart,
    )


if __name__ == "__main__":
    main(sys.argv[1:])

"""What XLA's dumps and ptxas tell of a compiled program. Imports no jax."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.kernels.aot.toolchain import ARCHITECTURE

REGISTERS_PER_SM = 65536
SHARED_MEMORY_PER_SM = 233472
THREADS_PER_SM = 2048
_RESERVED_SHARED_MEMORY = 1024
"""Per block, by the driver."""
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_THREADS = re.compile(r"\.(?:reqntid|maxntid) (\d+)(?:, (\d+))?(?:, (\d+))?")
_THUNK = re.compile(
    r" (\w+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+) bytes"
)
_ASYNC_16 = re.compile(r"cp\.async\.c[ga]\.shared\.global\S* [^;]*?, (?:0x10|16)\b")
_ASYNC = re.compile(r"cp\.async\.c[ga]\.shared\.global")
_BULK = re.compile(r"cp\.async\.bulk\.tensor")
_STORE = re.compile(r"st\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)\b")
_LOAD = re.compile(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)\b")
_COMPILED = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_STATIC = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelFacts:
    """One kernel on the device. Loads and stores are instructions in the PTX, not executions."""

    name: str
    threads: int
    registers: int
    spill_bytes: int
    """Stores and loads together."""
    shared_memory: int
    """Static and dynamic, in bytes of one block."""
    grid: list[int]
    """Empty where the dump does not tell it (Mosaic)."""
    async_loads_16: int
    """Asynchronous copies of 16 bytes from global to shared memory."""
    async_loads_small: int
    bulk_loads: int
    """By the tensor memory accelerator."""
    tensor_op: str
    """wgmma, mma or none."""
    store_bytes: dict[str, int]
    """Width of a global store in bytes -> how many."""
    load_bytes: dict[str, int]
    """The same of loads into registers."""

    @property
    def ctas_by_registers(self) -> int:
        per_warp = -(-self.registers // 8) * 8 * 32
        return REGISTERS_PER_SM // (per_warp * -(-self.threads // 32))

    @property
    def ctas_by_shared_memory(self) -> int:
        return SHARED_MEMORY_PER_SM // (self.shared_memory + _RESERVED_SHARED_MEMORY)

    @property
    def ctas_per_sm(self) -> int:
        """Blocks that a multiprocessor of an H200 holds at once."""
        by_threads = THREADS_PER_SM // self.threads
        return min(by_threads, 32, self.ctas_by_registers, self.ctas_by_shared_memory)


@dataclass(frozen=True)
class Launch:
    grid: list[int]
    threads: int
    shared_memory: int


def launches(thunk_sequence: str) -> list[tuple[str, Launch]]:
    """The kernels that XLA launches, by name, in its order; those inside of conditionals and loops
    are not told.
    """
    found = []
    for name, grid, threads, shared in _THUNK.findall(thunk_sequence):
        x, y, z = (int(number) for number in threads.split(","))
        launch = Launch([int(number) for number in grid.split(",")], x * y * z, int(shared))
        found.append((name, launch))
    return found


def kernels_of(
    assembly: Iterable[Path], ptxas: Path, launched: dict[str, Launch], names: set[str] | None
) -> list[KernelFacts]:
    """Facts of the kernels in PTX files; `names` picks some, by name without a number behind it."""
    facts = []
    for path in assembly:
        text = path.read_text()
        bodies = dict(_bodies(text))
        wanted = [n for n in bodies if names is None or re.sub(r"_\d+$", "", n) in names]
        if wanted:
            resources = _resources(path, ptxas)
            facts += [_facts(n, bodies[n], resources[n], launched.get(n)) for n in wanted]
    return facts


def _bodies(text: str) -> Iterable[tuple[str, str]]:
    starts = [(match.start(), match[1]) for match in _ENTRY.finditer(text)]
    for index, (start, name) in enumerate(starts):
        end = starts[index + 1][0] if index + 1 < len(starts) else len(text)
        yield name, text[start:end]


def _resources(path: Path, ptxas: Path) -> dict[str, tuple[int, int, int]]:
    """Kernel name -> registers, bytes spilled, bytes of static shared memory."""
    command = [str(ptxas), f"-arch={ARCHITECTURE}", "-v", str(path), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses {path.name}: {done.stderr[-2000:]}")
    found = {}
    for part in done.stderr.split("Compiling entry function")[1:]:
        part = "Compiling entry function" + part
        name, spills, used = _COMPILED.search(part), _SPILLS.search(part), _USED.search(part)
        assert name and spills and used, part
        static = _STATIC.search(part)
        spilled = int(spills[2]) + int(spills[3])
        found[name[1]] = int(used[1]), spilled, int(static[1]) if static else 0
    return found


def _facts(
    name: str, body: str, resources: tuple[int, int, int], launch: Launch | None
) -> KernelFacts:
    registers, spilled, static = resources
    bound = _THREADS.search(body)
    assert bound, name
    threads = int(bound[1]) * int(bound[2] or 1) * int(bound[3] or 1)
    sixteen = len(_ASYNC_16.findall(body))
    return KernelFacts(
        name=name,
        threads=threads if launch is None else launch.threads,
        registers=registers,
        spill_bytes=spilled,
        shared_memory=static + (0 if launch is None else launch.shared_memory),
        grid=[] if launch is None else launch.grid,
        async_loads_16=sixteen,
        async_loads_small=len(_ASYNC.findall(body)) - sixteen,
        bulk_loads=len(_BULK.findall(body)),
        tensor_op="wgmma" if "wgmma.mma_async" in body else "mma" if "mma.sync" in body else "none",
        store_bytes=_widths(_STORE, body),
        load_bytes=_widths(_LOAD, body),
    )


def _widths(pattern: re.Pattern[str], body: str) -> dict[str, int]:
    counts = Counter(int(vector or 1) * int(bits) // 8 for vector, bits in pattern.findall(body))
    return {str(width): counts[width] for width in sorted(counts, reverse=True)}


def mosaic_kernels(dump: Path, ptxas: Path) -> list[KernelFacts]:
    """Of the kernels that Mosaic dumped, which XLA's schedule shows only as custom calls."""
    facts = []
    for path in sorted(dump.glob("*.ptx")):
        log = path.with_suffix(".mlir-passes.log").read_text()
        dynamic = re.search(r"dynamic_shared_memory_size %c(\d+)", log)
        shared = int(dynamic[1]) if dynamic else 0
        for name, body in _bodies(path.read_text()):
            fact = _facts(name, body, _resources(path, ptxas)[name], None)
            facts.append(replace(fact, shared_memory=fact.shared_memory + shared))
    return facts


_HLO_TYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "int8": "s8",
    "float8_e4m3fn": "f8e4m3fn",
}


def hlo_shape(dtype: str, shape: Iterable[int]) -> str:
    """As HLO writes it, without a layout: bf16[400000,8,128]."""
    return f"{_HLO_TYPES[dtype]}[{','.join(str(size) for size in shape)}]"


def copies_of(hlo: str, shapes: set[str]) -> int:
    """Copies in an optimised module whose result has one of these shapes; also those that became
    part of a fusion.
    """
    copied = re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", hlo)
    copied += re.findall(r"= \((\w+\[[\d,]*\])[^=]* copy-start\(", hlo)
    return sum(shape in shapes for shape in copied)

"""What the reader of compilers' output makes of it. Needs no compiler."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.kernels.aot import assembly, budgets, compiler, toolchain
from tests.kernels.aot.assembly import KernelFacts
from tests.kernels.aot.facts import ProgramFacts

PTX = """
.version 9.0
.target sm_90a
.visible .entry attend_1(
)
.reqntid 128, 1, 1
{
    cp.async.cg.shared.global [ %r3 + 0 ], [ %rd7 + 0 ], 0x10, %p1;
    @%p2 cp.async.cg.shared.global [ %r4 + 0 ], [ %rd8 + 0 ], 0x10, 0x10;
    cp.async.ca.shared.global [ %r5 + 0 ], [ %rd9 + 0 ], 0x4, %p1;
    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {};
    st.global.v4.b32 [ %rd9 + 0 ], { %r41, %r42, %r43, %r44 };
    st.global.b16 [ %rd9 + 0 ], { %rs1 };
    st.shared.v2.b32 [%rd23], {%r1, %r2};
}
.visible .entry fill(
)
.maxntid 64
{
    cp.async.bulk.tensor.5d.shared::cta.global.mbarrier::complete_tx::bytes [%r29], [%rd6];
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {};
}
"""
VERBOSE = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attend_1' for 'sm_90a'
ptxas info    : Function properties for attend_1
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes smem
ptxas info    : Compiling entry function 'fill' for 'sm_90a'
ptxas info    : Function properties for fill
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""
THUNKS = """\
001: kCopy         [source | next=002 (1)] kCopy
002: kCustomKernel [prev=001 (1)] attend_1 grid: [8, 64, 2] threads: [128, 1, 1]  shared_memory: \
71680 bytes
003: kCustomKernel [prev=002 (1)] loop_fusion grid: [1, 1, 1] threads: [64, 2, 1]  shared_memory: \
0 bytes
"""


def fake_ptxas(folder: Path, *, version: str = "13.0, V13.0.88", code: int = 0) -> Path:
    path = folder / "ptxas"
    (folder / "verbose").write_text(VERBOSE)
    path.write_text(
        f"#!/bin/sh\ncase $1 in --version) echo Cuda compilation tools, release {version} ;;\n"
        f"*) cat {folder}/verbose >&2; exit {code} ;; esac\n"
    )
    path.chmod(0o755)
    return path


def kernels(tmp_path: Path, names: set[str] | None, *, code: int = 0) -> list[KernelFacts]:
    (tmp_path / "module.ptx").write_text(PTX)
    (tmp_path / "empty.ptx").write_text("")
    launched = dict(assembly.launches(THUNKS))
    ptxas = fake_ptxas(tmp_path, code=code)
    return assembly.kernels_of(sorted(tmp_path.glob("*.ptx")), ptxas, launched, names)


def test_a_kernel_is_read_from_ptx_ptxas_and_the_schedule(tmp_path: Path) -> None:
    (attend,) = kernels(tmp_path, {"attend"})
    assert attend == KernelFacts(
        name="attend_1",
        threads=128,
        registers=168,
        spill_bytes=20,
        shared_memory=71696,
        grid=[8, 64, 2],
        async_loads_16=2,
        async_loads_small=1,
        bulk_loads=0,
        tensor_op="mma",
        store_bytes={"16": 1, "2": 1},
        load_bytes={"16": 1},
    )
    assert (attend.ctas_by_registers, attend.ctas_by_shared_memory, attend.ctas_per_sm) == (3, 3, 3)
    assert budgets.base_name(attend) == "attend"


def test_all_kernels_of_a_module_can_be_read(tmp_path: Path) -> None:
    _, fill = kernels(tmp_path, None)
    assert (fill.name, fill.threads, fill.registers, fill.grid) == ("fill", 64, 32, [])
    assert (fill.bulk_loads, fill.async_loads_16, fill.tensor_op) == (1, 0, "wgmma")
    assert fill.ctas_per_sm == 32


def test_assembly_that_ptxas_refuses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ptxas refuses module.ptx"):
        kernels(tmp_path, None, code=1)


def test_launches_are_in_order_with_their_sizes() -> None:
    assert [(name, launch.threads) for name, launch in assembly.launches(THUNKS)] == [
        ("attend_1", 128),
        ("loop_fusion", 128),
    ]


def test_only_copies_of_a_pools_shape_and_type_count() -> None:
    pool = assembly.hlo_shape("bfloat16", (64, 8, 128))
    assert pool == "bf16[64,8,128]"
    hlo = """
  %copy.1 = bf16[64,8,128]{2,1,0} copy(%param)
  %copy.2 = f32[64,8,128]{2,1,0} copy(%param)
  %copy.3 = (bf16[64,8,128]{2,1,0}, bf16[64,8,128]{2,1,0}, u32[]) copy-start(%param)
  %copy_like = bf16[64,8,128]{2,1,0} fusion(%copy.1), calls=%copy_fusion
"""
    assert assembly.copies_of(hlo, {pool}) == 2


def program(registers: int = 90, temp_bytes: int = 0) -> ProgramFacts:
    kernel = KernelFacts("attend", 128, registers, 0, 70000, [], 1, 0, 0, "mma", {}, {})
    return ProgramFacts([kernel], 1, 0, temp_bytes, 0, 1.0, "decode", 0, "", "")


def test_a_budget_is_for_a_version_and_leaves_a_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "PATH", tmp_path / "budgets.json")
    budgets.update({"one": program(90, 100)}, "1.0", partly=False)
    budgets.update({"one": program(100, 100)}, "2.0", partly=False)
    assert budgets.excesses("one", program(98, 100), "1.0") == []
    assert budgets.excesses("one", program(99, 100), "1.0") == [
        "attend: 99 registers, at most 98 are allowed"
    ]
    assert len(budgets.excesses("one", program(90, 2**21), "1.0")) == 1
    # An unknown version may take what any known one takes, and more room.
    assert budgets.excesses("one", program(124, 100), "3.0") == []
    assert len(budgets.excesses("one", program(125, 100), "3.0")) == 1
    assert len(budgets.excesses("two", program(), "1.0")) == 3


def test_a_part_of_the_budgets_can_be_recorded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "PATH", tmp_path / "budgets.json")
    budgets.update({"one": program(), "two": program()}, "1.0", partly=False)
    budgets.update({"two": program(200)}, "1.0", partly=True)
    recorded = json.loads(budgets.PATH.read_text())["1.0"]
    assert [recorded[name]["attend"]["registers"] for name in ("one", "two")] == [90, 200]
    budgets.update({"two": program()}, "1.0", partly=False)
    assert list(json.loads(budgets.PATH.read_text())["1.0"]) == ["two"]


# ---------------------------------------------------------------------------- the toolchain


@pytest.fixture
def _afresh() -> None:
    for function in (toolchain.missing, toolchain.ptxas, toolchain.ptxas_version):
        function.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], *ptxas: Path) -> None:
    monkeypatch.setattr(toolchain, "installed_version", versions.get)
    monkeypatch.setattr(toolchain.metadata, "version", lambda _: "0.11.2")
    monkeypatch.setattr(toolchain, "ptxas_candidates", lambda: list(ptxas))


@pytest.mark.usefixtures("_afresh")
def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = dict.fromkeys(toolchain.PLUGIN_PACKAGES, "0.11.2")
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    old_ptxas = fake_ptxas(old, version="12.8, V12.8.93")
    for versions, ptxas, said in (
        ({}, [], "jax-cuda13-pjrt is not installed"),
        (both | {"jax-cuda13-plugin": "0.12.0"}, [], "jax-cuda13-plugin is 0.12.0, but jax is"),
        (both, [], "there is no ptxas in PATH"),
        (both, [old_ptxas], r"ptxas is older than 13.0: .*ptxas \(12.8.93\)"),
    ):
        toolchain.missing.cache_clear()
        toolchain.ptxas.cache_clear()
        pretend(monkeypatch, versions, *ptxas)
        assert re.search(said, str(toolchain.missing()))
    toolchain.missing.cache_clear()
    toolchain.ptxas.cache_clear()
    pretend(monkeypatch, both, old_ptxas, fake_ptxas(new))
    assert toolchain.missing() is None
    assert toolchain.ptxas() == new / "ptxas"


def test_a_worker_that_dies_is_an_answer_for_each_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho \'{"name": "two", "error": "no such thing"}\'\necho gone >&2\nexit 3\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(compiler.sys, "executable", str(python))
    monkeypatch.setattr(compiler, "worker_environment", lambda _: {})
    told = compiler.compile_programs(["one", "two"], workers=1)
    assert told == {"one": "the worker ended with code 3: gone\n", "two": "no such thing"}


def test_facts_survive_the_way_from_a_worker() -> None:
    facts = program()
    assert compiler.facts_from(json.loads(json.dumps(dataclasses.asdict(facts)))) == facts

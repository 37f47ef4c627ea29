"""Kernels for every instruction set, any number of threads, and under sanitizers."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_kernels.native import build, toolchain
from tests.kernels.backends import backend
from tests.kernels.native import kernel_runs

LEVELS = [one.name for one in toolchain.instruction_sets()]


@pytest.fixture(scope="module")
def compiler() -> toolchain.Compiler:
    try:
        return toolchain.find_compiler()
    except build.NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    """As this process runs them."""
    if backend("native") is None:
        pytest.skip("native kernels do not run here")
    return kernel_runs.run(threads=2)


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_is_right(own: dict[str, Any], level: str) -> None:
    if LEVELS.index(level) > LEVELS.index(own["isa"]):
        pytest.skip("this processor cannot run it")
    if level == own["isa"]:
        return  # what `own` has checked
    assert kernel_runs.run(JAXPAGED_NATIVE_ISA=level)["isa"] == level


def test_a_level_that_nobody_knows_is_not_taken(own: dict[str, Any]) -> None:
    assert kernel_runs.run(JAXPAGED_NATIVE_ISA="z80") == own


@pytest.mark.parametrize("threads", [1, 5])
def test_threads_change_no_bit(own: dict[str, Any], threads: int) -> None:
    assert kernel_runs.run(threads=threads) == own


@pytest.mark.slow
def test_objects_share_nothing(compiler: toolchain.Compiler, tmp_path: Path) -> None:
    """A function that objects of several instruction sets have would be kept once by the linker, in
    whichever version. All that the kernels show is their table, and all they take is of C.
    """
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    # Without optimisation, so that nothing disappears into its callers.
    include = Path(jax.ffi.include_dir())
    toolchain.compile_library(compiler, include, tmp_path, extra_flags=("-O0",))
    objects = sorted(tmp_path.glob("kernels-*.o"))
    assert len(objects) >= 1
    for path in objects:
        listed = subprocess.run(
            ["nm", "-C", str(path)], check=True, capture_output=True, text=True
        ).stdout
        name = path.stem.removeprefix("kernels-")
        for line in listed.splitlines():
            found = re.fullmatch(r"[0-9a-f ]{16} (.) (.*)", line)
            assert found is not None, line
            kind, symbol = found.groups()
            if re.search("gxx_personality|_Unwind_Resume|__stack_chk|_TABLE_", symbol):
                continue  # of the compiler's, without code
            if kind == "U":
                assert re.fullmatch("mem(cpy|set|move)|ceilf|sqrtf", symbol), line
            elif kind.isupper() or kind in "wvu":
                assert symbol == f"jaxpaged::{name}::kernels", line


def _runtime(compiler: toolchain.Compiler, name: str) -> str | None:
    found = subprocess.run(
        [*compiler.command, f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return found if Path(found).is_absolute() else None


@pytest.mark.slow
def test_under_sanitizers(
    compiler: toolchain.Compiler,
    own: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No read or write out of bounds, nothing that C++ leaves undefined, and the same bits."""
    runtimes = [_runtime(compiler, name) for name in ("libasan.so", "libstdc++.so")]
    if platform.system() != "Linux" or None in runtimes:
        pytest.skip("there is no shared address sanitizer")
    monkeypatch.setattr(toolchain, "instruction_sets", toolchain.instruction_sets)  # put back
    kernel_runs.only_level(own["isa"])
    folder = tmp_path / "native"
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1")
    build.compile_into(folder, extra_flags=flags)
    found = kernel_runs.run(
        *("--folder", folder, "--level", own["isa"]),
        LD_PRELOAD=" ".join(map(str, runtimes)),
        ASAN_OPTIONS="detect_leaks=0",  # Python's are not for us to find
    )
    assert found == own

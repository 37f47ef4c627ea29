"""How the tests of the Mosaic GPU kernels run them on a CPU, and compile them for an H200."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_kernels import mosaic_compat
from tests.kernels.aot import toolchain
from tests.kernels.aot.assembly import KernelFacts, mosaic_kernels
from tests.kernels.aot.program import h200, lower_function

SHARED_MEMORY_PER_BLOCK = 232_448

interpreted = pytest.mark.skipif(
    not mosaic_compat.can_interpret(), reason="this jax cannot interpret Mosaic GPU kernels"
)
compiled_for_h200 = pytest.mark.skipif(
    toolchain.missing() is not None, reason=f"no compiler for GPUs: {toolchain.missing()}"
)


def run(function: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
    """Compiled with little effort: the interpreter costs more compiling than running."""
    quickly = {"xla_backend_optimization_level": 0}
    result: jax.Array = jax.jit(function, compiler_options=quickly)(*arrays)
    return result


def compile_for_h200(
    function: Callable[..., jax.Array],
    *arguments: Any,
    dump: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> KernelFacts:
    """What came of the one Mosaic kernel in a function of arguments of these shapes."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(dump))
    with h200() as mesh:
        lower_function(mesh, function, list(arguments)).compile()
    ptxas = toolchain.ptxas()
    assert ptxas is not None
    (kernel,) = mosaic_kernels(dump, ptxas)
    return kernel


def check_compiled(kernel: KernelFacts) -> None:
    """Nothing spills, it fits a multiprocessor, and the hardware's units are used."""
    assert kernel.spill_bytes == 0
    assert 0 < kernel.shared_memory <= SHARED_MEMORY_PER_BLOCK
    assert kernel.bulk_loads > 0
    assert kernel.tensor_op == "wgmma"

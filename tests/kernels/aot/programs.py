"""All programs that are compiled for an H200 without one."""

from __future__ import annotations

from pallas_kernels.tuning import TuningTable
from tests.kernels.aot.kernel_programs import faulty, kernel_programs
from tests.kernels.aot.program import Program
from tests.kernels.aot.step_programs import copy_programs, step_programs

FAULTY_PREFIX = "faulty-"
"""Of programs that have to fail the checks."""


def all_programs(table: TuningTable | None = None) -> dict[str, Program]:
    """By name. With `table`, only its entries."""
    listed = kernel_programs(table)
    if table is None:
        listed += [*step_programs(), *copy_programs(), *faulty()]
    named = {program.name: program for program in listed}
    assert len(named) == len(listed), "two programs have one name"
    return named

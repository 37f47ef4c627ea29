"""The kernels and whole steps, compiled for an H200 that is not there. Prints nothing of speed:
only what a compiler can know.
"""

from __future__ import annotations

from importlib import metadata

import pytest

from tests.kernels.aot import toolchain

if toolchain.missing() is not None:
    pytest.skip(f"no compiler for GPUs: {toolchain.missing()}", allow_module_level=True)

from pallas_kernels.tuning import builtin_table
from tests.kernels.aot import budgets
from tests.kernels.aot.compiler import compile_programs
from tests.kernels.aot.facts import ProgramFacts
from tests.kernels.aot.program import DEVICE_KIND, Program
from tests.kernels.aot.programs import FAULTY_PREFIX, all_programs

pytestmark = pytest.mark.slow
PROGRAMS = all_programs()
FAULTY = [name for name in PROGRAMS if name.startswith(FAULTY_PREFIX)]
SOUND = [name for name in PROGRAMS if name not in FAULTY]
STEPS = [name for name in SOUND if PROGRAMS[name].kind == "step"]
ENTRIES = [entry for entry in builtin_table().entries if entry.device == DEVICE_KIND]
LOGITS = 64 * 128256 * 4
"""Bytes of one float32 array of the steps' logits."""
LOADED_LATE = {"prefill-d576-int8", "prefill-d576-float8_e4m3fn"}
"""A tile that is converted for two products is not copied asynchronously (in decode it is loaded
twice instead)."""
Compiled = dict[str, ProgramFacts | str]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    # Those that take longest first, so that no worker is left with one of them at the end.
    return compile_programs(sorted(PROGRAMS, key=lambda name: PROGRAMS[name].kind != "step"))


def facts_of(compiled: Compiled, name: str) -> ProgramFacts:
    facts = compiled[name]
    assert not isinstance(facts, str), f"{name} cannot be compiled: {facts}"
    return facts


def named(*kinds: str) -> list[str]:
    return [name for name in SOUND if PROGRAMS[name].kind in kinds]


@pytest.mark.parametrize("name", SOUND)
def test_its_kernels_need_no_more_than_their_budget_and_spill_nothing(
    compiled: Compiled, name: str
) -> None:
    facts = facts_of(compiled, name)
    assert facts.kernels or facts.kind == "copy"  # which is XLA's alone
    for kernel in facts.kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.ctas_per_sm >= 1, kernel
    excess = budgets.excesses(name, facts, metadata.version("jax"))
    assert not excess, (
        f"{excess}; if that is meant, record it: python scripts/aot_report.py --update-budgets"
    )


@pytest.mark.parametrize("name", SOUND)
def test_it_copies_no_pool_and_changes_it_in_place(compiled: Compiled, name: str) -> None:
    facts, program = facts_of(compiled, name), PROGRAMS[name]
    assert facts.pool_copies == 0
    assert facts.temp_bytes < facts.pool_bytes / 4, "room for a copy of a pool"
    if program.in_place:
        assert facts.alias_bytes >= facts.pool_bytes


@pytest.mark.parametrize("name", named("decode", "prefill"))
def test_tiles_of_the_cache_are_loaded_asynchronously_and_16_bytes_wide(
    compiled: Compiled, name: str
) -> None:
    for kernel in facts_of(compiled, name).kernels:
        wide = kernel.async_loads_16 + kernel.bulk_loads > 0
        assert wide == (name not in LOADED_LATE), kernel
        if not is_8_bit(PROGRAMS[name]):  # else their scales are copied, 4 bytes each
            assert kernel.async_loads_small == 0, kernel


@pytest.mark.parametrize("name", named("decode", "prefill"))
def test_products_run_on_tensor_cores(compiled: Compiled, name: str) -> None:
    for kernel in facts_of(compiled, name).kernels:
        assert kernel.tensor_op in ("mma", "wgmma"), kernel


@pytest.mark.parametrize("name", named("write"))
def test_rows_are_written_in_wide_stores(compiled: Compiled, name: str) -> None:
    for kernel in facts_of(compiled, name).kernels:
        assert "16" in kernel.store_bytes, kernel
        if not is_8_bit(PROGRAMS[name]):  # else their scales are stored too
            assert set(kernel.store_bytes) == {"16"}, kernel


def is_8_bit(program: Program) -> bool:
    return program.pools[0].dtype.itemsize == 1


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry.key))
def test_an_entry_is_compiled_and_has_the_ctas_that_its_splits_are_made_for(
    compiled: Compiled, entry: object
) -> None:
    names = [name for name, program in PROGRAMS.items() if program.entry is entry]
    assert names
    ctas = [k.ctas_per_sm for name in names for k in facts_of(compiled, name).kernels]
    recorded = PROGRAMS[names[0]].entry.ctas_per_sm  # type: ignore[union-attr]
    # Versions differ by a few registers, and so by a block.
    assert recorded is None or abs(min(ctas) - recorded) <= 1, (recorded, ctas)


def test_a_whole_step_has_its_kernels_and_bounded_temporaries(compiled: Compiled) -> None:
    fixed = {"paged_prefill", "fixed_order_product", "fixed_order_sums"}
    kernels = {
        "step-decode-deterministic": fixed,
        "step-mixed-deterministic": fixed,
        "step-decode": {"paged_decode"},
        "step-mixed": {"paged_decode", "paged_prefill"},
        "step-mixed-int8": {"paged_decode", "paged_prefill", "write_kv"},
    }
    assert set(kernels) == set(STEPS)
    for name, expected in kernels.items():
        assert {budgets.base_name(k) for k in facts_of(compiled, name).kernels} == expected
    # The sampler's arrays over the vocabulary; nothing of attention's is of that size.
    assert facts_of(compiled, "step-decode").temp_bytes < 6 * LOGITS


def test_a_deterministic_step_leaves_no_choice_of_an_order(compiled: Compiled) -> None:
    """All products are our kernels', and whether a product and an addition are rounded once or
    twice is nowhere decided by where one kernel ends.
    """
    for name in ("step-decode-deterministic", "step-mixed-deterministic"):
        facts = facts_of(compiled, name)
        assert facts.library_products == 0
        assert (facts.joined_sums > 0, facts.parted_sums) == (True, 0)
    assert facts_of(compiled, "step-mixed").library_products > 0


def test_the_gate_sees_spills_and_copies(compiled: Compiled) -> None:
    kept = facts_of(compiled, "faulty-kept-pools")
    assert kept.pool_copies == 2
    assert kept.alias_bytes == 0
    spilling = facts_of(compiled, "faulty-spills")
    assert max(kernel.spill_bytes for kernel in spilling.kernels) > 0
    version = metadata.version("jax")
    assert budgets.excesses("faulty-spills", spilling, version)

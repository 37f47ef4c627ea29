"""What every kernel took of a multiprocessor when it was last looked at, by jax version.

`scripts/aot_report.py --update-budgets` writes the file anew for the installed version. Imports no
jax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.kernels.aot.assembly import KernelFacts
from tests.kernels.aot.facts import ProgramFacts

PATH = Path(__file__).with_name("budgets.json")
REGISTERS = 8
"""A kernel may need so many more than recorded: compilers of one version agree to the last one, but
small changes of a kernel move them."""
REGISTERS_OF_OTHER_VERSION = 24
SHARED_MEMORY = 2048
"""Bytes, likewise."""
TEMPORARIES = 1.1
"""Of a program, times what was recorded."""

Budget = dict[str, dict[str, int]]
"""Kernel name, or "program" -> resource -> amount."""


def budget_of(facts: ProgramFacts) -> Budget:
    budget: Budget = {"program": {"temp_bytes": facts.temp_bytes}}
    for kernel in facts.kernels:
        seen = budget.setdefault(base_name(kernel), {"registers": 0, "shared_memory": 0})
        for resource in seen:
            seen[resource] = max(seen[resource], getattr(kernel, resource))
    return budget


def base_name(kernel: KernelFacts) -> str:
    """Without the number that XLA tells equal names apart by."""
    return re.sub(r"_\d+$", "", kernel.name)


def excesses(program: str, facts: ProgramFacts, jax_version: str) -> list[str]:
    """Where a program takes more than its budget, for people. For a version without budgets those
    of all others together count.
    """
    recorded = json.loads(PATH.read_text())
    versions = [jax_version] if jax_version in recorded else list(recorded)
    registers = REGISTERS if jax_version in recorded else REGISTERS_OF_OTHER_VERSION
    budgets = [recorded[version].get(program, {}) for version in versions]
    found = []
    for owner, resources in budget_of(facts).items():
        for resource, amount in resources.items():
            known = [b[owner][resource] for b in budgets if owner in b]
            if not known:
                found.append(f"{owner} has no budget for {resource}")
                continue
            limit = max(known)
            if resource == "temp_bytes":
                limit = int(limit * TEMPORARIES) + 2**20
            else:
                limit += registers if resource == "registers" else SHARED_MEMORY
            if amount > limit:
                found.append(f"{owner}: {amount} {resource}, at most {limit} are allowed")
    return found


def update(programs: Mapping[str, ProgramFacts], jax_version: str, *, partly: bool) -> None:
    """Record what the programs take; `partly`: keep what is known of others."""
    recorded: dict[str, Any] = json.loads(PATH.read_text()) if PATH.exists() else {}
    kept = recorded.get(jax_version, {}) if partly else {}
    recorded[jax_version] = kept | {name: budget_of(facts) for name, facts in programs.items()}
    PATH.write_text(_json(dict(sorted(recorded.items()))))


def _json(recorded: dict[str, Any]) -> str:
    """One line a program."""
    versions = []
    for version, programs in recorded.items():
        lines: Iterable[str] = (
            f"    {json.dumps(name)}: {json.dumps(budget)}"
            for name, budget in sorted(programs.items())
        )
        versions.append(f"  {json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(versions) + "\n}\n"

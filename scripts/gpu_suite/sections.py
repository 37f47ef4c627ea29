"""What a run consists of, in the order of its value, and the time that each part may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BUDGET = 540.0
"""Seconds of a whole run that the shares below are made for."""
_OWN_MEMORY: Mapping[str, str] = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_PLAIN_LAUNCHES: Mapping[str, str] = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    module: str
    share: float
    """Most seconds in a run of `BUDGET`; what one section leaves, later ones may use up."""
    least: float
    """Seconds under which it is not begun."""
    process: str
    """Neighbours of one process run in it one after the other."""
    environment: Mapping[str, str] = field(default_factory=dict)


def _kernels(name: str, share: float, least: float, process: str) -> Section:
    return Section(name, name, share, least, process, _OWN_MEMORY)


SECTIONS = (
    _kernels("ceilings", 30, 10, "kernels"),
    _kernels("correctness", 75, 15, "kernels"),
    _kernels("decode", 90, 15, "kernels"),
    Section("step", "whole_step", 100, 40, "step"),
    Section("engine", "serving", 45, 25, "engine"),
    Section("peer", "peer", 60, 25, "peer"),
    _kernels("prefill", 35, 12, "more_kernels"),
    _kernels("write", 20, 8, "more_kernels"),
    Section("step_reference", "whole_step", 40, 30, "step_reference"),
    Section("step_plain", "whole_step", 40, 30, "step_plain", _PLAIN_LAUNCHES),
    Section("deterministic", "deterministic", 150, 40, "deterministic"),
    _kernels("ablations", 90, 15, "variants"),
    _kernels("tune", 120, 30, "variants"),
)
BY_NAME = {section.name: section for section in SECTIONS}
DEFAULT = tuple(section.name for section in SECTIONS)
TABLE_FILE = "tuning_table.json"
"""What `tune` writes, in the folder of the results."""


def limit(section: Section, names: Sequence[str], budget: float) -> float:
    """Most seconds of a section in a run of those sections."""
    shares = sum(BY_NAME[name].share for name in names)
    return section.share * max(budget / BUDGET, budget / shares)

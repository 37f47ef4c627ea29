"""One factor of the decode kernel at a time, the others as the engine takes them."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpu_suite.context import Context
from gpu_suite.decode_bench import DecodeBench
from gpu_suite.decode_case import DecodeCase
from pallas_kernels.pool_layout import PoolLayout

SHAPES = ((32, 4096), (64, 8192), (1, 8192))
CONFIGS: tuple[dict[str, Any], ...] = (
    *({"num_stages": n} for n in (1, 2, 3, 4, 5)),
    {"carry_pages": False},
    {"carry_pages": False, "num_stages": 5},
    {"carry_pages": False, "num_stages": 7},
    *({"block_kv": n} for n in (32, 64, 128)),
    {"block_kv": 128, "num_warps": 8},
    {"block_kv": 32, "num_stages": 4},
    *({"num_warps": n} for n in (2, 4, 8)),
    *({"splits": n} for n in (1, 2, 4, 8, 16, 32)),
    {"splits": 32, "min_split_tokens": 128},
)
OTHERS: tuple[dict[str, Any], ...] = (
    {"backend": "pallas_mosaic"},
    {"backend": "pallas_mosaic", "layout": PoolLayout.HND, "block_size": 64},
)
PLACES: tuple[dict[str, Any], ...] = (
    {"layout": PoolLayout.HND},
    {"layout": PoolLayout.COMBINED},
    {"block_size": 32},
    {"block_size": 64},
    {"block_size": 128},
    {"order": "sorted"},
)


def run(ctx: Context) -> None:
    bench = DecodeBench(ctx)
    for cases in variants(dry=ctx.dry):
        if ctx.late(0.0 if ctx.dry else 8.0):
            ctx.skip(f"from {cases[0].name}")
            return
        compiled = bench.compile([(case, None) for case in cases])
        base: float | None = None
        for number, case in enumerate(cases):
            seconds = bench.measure(case, compiled)
            if number == 0:
                base = seconds
            elif seconds is not None and base is not None:
                ctx.row(f"{case.name}: times the base", ratio=seconds / base)


def variants(*, dry: bool) -> list[list[DecodeCase]]:
    """A list for each shape, the engine's own choice first."""
    if dry:
        base = DecodeCase(2, 40, group=2, kv_heads=2, dim=16, block_size=8, label="base")
        cases = [base, _with_place(base, {"layout": PoolLayout.HND})]
        return [[*cases, _with_config(base, {"num_stages": 2})]]
    found = []
    for batch, context in SHAPES:
        base = DecodeCase(batch, context, label="base")
        cases = [base]
        cases += [_with_place(base, place) for place in PLACES]
        chosen = base.chosen_config()
        for change in CONFIGS:
            case = _with_config(base, change)
            if case.config != chosen:
                cases.append(case)
        found.append([*cases, *(_with_place(base, other) for other in OTHERS)])
    return found


def _label(change: dict[str, Any]) -> str:
    return " ".join(f"{k}={v.value if isinstance(v, PoolLayout) else v}" for k, v in change.items())


def _with_place(base: DecodeCase, change: dict[str, Any]) -> DecodeCase:
    return dataclasses.replace(base, label=_label(change), **change)


def _with_config(base: DecodeCase, change: dict[str, Any]) -> DecodeCase:
    config = dataclasses.replace(base.chosen_config(), **change)
    return dataclasses.replace(base, config=config, label=_label(change))

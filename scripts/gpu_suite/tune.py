"""The fastest kernel configurations of this device, as a tuning table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from gpu_suite.backends import cache_dtype
from gpu_suite.context import Context
from gpu_suite.decode_bench import DecodeBench
from gpu_suite.decode_case import DecodeCase
from gpu_suite.prefill_case import PrefillBench, PrefillCase
from gpu_suite.sections import TABLE_FILE
from pallas_kernels.kernel_configs import MAX_SPLITS
from pallas_kernels.tuning import Entry, write_table

ROOM_PER_BUCKET = 10.0
"""Seconds without which a bucket is not begun."""
WORTH = 0.02
"""By how much another configuration must be faster than the engine's own to be taken."""
KINDS: tuple[dict[str, Any], ...] = (
    {"group": 4},
    {"group": 4, "cache": "fp8"},
    {"group": 4, "cache": "int8"},
    {"group": 8},
    {"group": 4, "dim": 64},
)
"""What buckets are tuned for, the most used first; other fields are those of `DecodeCase`."""
DECODE_BUCKETS = (
    *((32, 4096), (64, 8192), (8, 4096), (128, 4096), (1, 8192), (256, 2048), (16, 8192)),
    *((8, 32768), (1, 32768), (1, 2048)),
)
"""(batch, context): an entry serves what is no larger than either."""
DECODE_TILES = tuple(
    {"block_kv": block, "num_warps": warps, "num_stages": stages}
    for block in (32, 64, 128)
    for warps in (4, 8)
    for stages in (2, 3, 4)
)
PREFILL_BUCKETS = ((2048, 8192), (2048, 0), (512, 2048), (8192, 0))
"""(tokens, past)."""
PREFILL_TILES = tuple(
    {"block_rows": rows, "block_kv": block, "num_warps": warps, "num_stages": stages}
    for rows, warps in ((64, 4), (128, 8), (64, 8), (128, 4))
    for block in (32, 64, 128)
    for stages in (2, 3, 4)
)


def run(ctx: Context) -> None:
    tune(ctx, ctx.results.path.parent / TABLE_FILE)


def tune(ctx: Context, path: Path) -> None:
    """Writes the table after every bucket: a run that is cut off keeps what it has."""
    entries: dict[tuple[object, ...], Entry] = {}
    decode, prefill = DecodeBench(ctx), PrefillBench(ctx)
    for bench, case in buckets(dry=ctx.dry):
        if ctx.late(0.0 if ctx.dry else ROOM_PER_BUCKET):
            ctx.skip(f"from {case.name}")
            break
        try:
            if bench == "decode":
                entry = _tune_decode(ctx, decode, case)
            else:
                entry = _tune_prefill(ctx, prefill, case)
        except Exception as error:
            ctx.fail(case.name, error)
            continue
        if entry is not None:
            entries[entry.key] = entry
            write_table(entries.values(), path)
    ctx.row("table", entries=len(entries), file=path.name)


def buckets(*, dry: bool) -> Iterable[tuple[str, Any]]:
    """(decode or prefill, case)."""
    if dry:
        tiny: dict[str, Any] = {"group": 2, "kv_heads": 2, "dim": 16, "block_size": 8}
        yield "decode", DecodeCase(2, 40, **tiny)
        return
    for number, kind in enumerate(KINDS):
        for batch, context in DECODE_BUCKETS:
            yield "decode", DecodeCase(batch, context, **kind)
        for tokens, past in PREFILL_BUCKETS[: 4 if number == 0 else 1]:
            yield "prefill", PrefillCase(((past, tokens),), **kind)


def _tune_decode(ctx: Context, bench: DecodeBench, case: DecodeCase) -> Entry | None:
    """The best tile with the engine's splits, then the best splits with that tile."""
    chosen = case.chosen_config()
    tiles = [chosen]
    tiles += [dataclasses.replace(chosen, **t) for t in DECODE_TILES[: 1 if ctx.dry else None]]
    best = _fastest(bench, case, tiles)
    if best is None:
        return None
    counts = {max(1, best.splits // 2), best.splits * 2, best.splits * 4}
    splits = [dataclasses.replace(best, splits=n) for n in sorted(counts) if n <= MAX_SPLITS]
    if not ctx.dry:
        best = _fastest(bench, case, [best, *splits]) or best
    return _entry(case, "decode", best, batch=case.batch, context=case.context)


def _fastest(bench: DecodeBench, case: DecodeCase, configs: Sequence[Any]) -> Any | None:
    """The first of `configs` unless another is clearly faster; None if none ran."""
    cases = [
        dataclasses.replace(case, config=config, label=f"tune {_short(config)}")
        for config in dict.fromkeys(configs)
    ]
    compiled = bench.compile([(one, None) for one in cases])
    timed = [(bench.measure(one, compiled), one.config) for one in cases]
    return _pick(timed)


def _tune_prefill(ctx: Context, bench: PrefillBench, case: PrefillCase) -> Entry | None:
    chosen = case.chosen_config()
    configs = [chosen, *(dataclasses.replace(chosen, **t) for t in PREFILL_TILES)]
    cases = [
        dataclasses.replace(case, config=config, label=f"tune {_short(config)}")
        for config in dict.fromkeys(configs)
    ]
    seconds = bench.run(cases)
    best = _pick([(seconds.get(one.name), one.config) for one in cases])
    if best is None:
        return None
    return _entry(case, "prefill", best, batch=case.tokens, context=case.context)


def _pick(timed: Sequence[tuple[float | None, Any]]) -> Any | None:
    ran = [(seconds, config) for seconds, config in timed if seconds is not None]
    if not ran:
        return None
    fastest = min(ran, key=lambda pair: pair[0])
    first = ran[0]
    usual = first[1] == timed[0][1]
    return first[1] if usual and first[0] <= fastest[0] * (1 + WORTH) else fastest[1]


def _short(config: Any) -> str:
    return " ".join(str(value) for value in dataclasses.astuple(config))


def _entry(case: Any, kernel: str, config: Any, *, batch: int, context: int) -> Entry:
    return Entry(
        kernel=kernel,
        device=jax.devices()[0].device_kind,
        head_dim=case.dim,
        kv_dtype=cache_dtype(case.cache, "bfloat16"),
        config=config,
        group=case.group,
        kv_heads=case.kv_heads,
        block_size=case.block_size,
        batch=batch,
        context=context,
        note=f"measured with jax {jax.__version__}",
    )

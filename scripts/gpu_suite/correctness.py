"""Every kernel against float64, with everything that must not be read poisoned; each run twice."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_suite.backends import (
    decode_config,
    kernel,
    prefill_config,
    prefill_tile,
    write_config,
)
from gpu_suite.cases import (
    DTYPES,
    LARGEST,
    Array,
    Case,
    attend,
    make_case,
    make_tiles,
    relative_error,
)
from gpu_suite.compiling import Compiled, Program, compile_all
from gpu_suite.context import Context
from gpu_suite.correctness_cases import DECODE, DRY, PREFILL, WRITE, Config
from pallas_kernels.paged_kv import PagedKV

TOLERANCE = {"float32": 1e-3, "float16": 4e-3, "bfloat16": 1e-2}
"""Of ||out - expected|| / ||expected||, by the type of the queries."""
PREPARERS = 8
"""Threads that make cases on the host."""
FOUL_BYTES = 256 * 2**20
Check = Callable[[Any, Any], dict[str, Any]]
"""(first result, second result) -> fields of the row, `status` among them."""
Prepared = tuple[Callable[..., Any], tuple[Any, ...], Check]
"""A function, its arguments, and what its results must be."""


def run(ctx: Context) -> None:
    chosen = DRY if ctx.dry else {"decode": DECODE, "prefill": PREFILL, "write": WRITE}
    cases = [(what, config) for what, configs in chosen.items() for config in configs]
    # The backend that has never run on a device comes last: it might not come back.
    cases.sort(key=lambda case: case[1].backend == "pallas_mosaic")
    with ThreadPoolExecutor(1 if ctx.dry else PREPARERS) as pool:
        futures = [pool.submit(_prepare, what, config, dry=ctx.dry) for what, config in cases]
    programs: list[Program] = []
    checks: dict[str, Check] = {}
    for (what, config), future in zip(cases, futures, strict=True):
        name = f"{what} {config.name}"
        try:
            function, arguments, checks[name] = future.result()
        except Exception as error:
            ctx.fail(name, error, backend=config.backend, stage="prepare")
            continue
        programs.append(Program(name, function, arguments, facts={"backend": config.backend}))
    compiled = compile_all(ctx, programs)
    for program in programs:
        if program.name not in compiled:
            continue
        if ctx.late():
            ctx.skip(program.name)
            continue
        _check(ctx, program, compiled[program.name], checks[program.name])


def _prepare(what: str, config: Config, *, dry: bool) -> Prepared:
    """Different numbers for every case, and the same in every run."""
    rng = np.random.default_rng(zlib.crc32(f"{what} {config.name}".encode()))
    return {"decode": _decode, "prefill": _prefill, "write": _write}[what](rng, config, dry=dry)


def _check(ctx: Context, program: Program, compiled: Compiled, check: Check) -> None:
    facts = program.facts
    try:
        results = []
        for _ in range(2):
            _foul_memory(ctx)
            with ctx.watch(program.name):
                out = jax.block_until_ready(compiled.call(*program.arguments))
            results.append(jax.tree.map(np.asarray, out))
        ctx.row(program.name, **check(*results), compile_s=compiled.seconds, **facts)
    except Exception as error:
        ctx.fail(program.name, error, stage="run", **facts)


def _foul_memory(ctx: Context) -> None:
    """Leave NaN in the memory that the next outputs are likely to get."""
    size = 2**16 if ctx.dry else FOUL_BYTES
    jnp.full((size // 4,), jnp.nan, jnp.float32).block_until_ready().delete()


def _same_bits(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


def _case(rng: np.random.Generator, config: Config, lengths: tuple[int, ...]) -> Case:
    return make_case(
        rng,
        lengths,
        group=config.group,
        kv_heads=config.kv_heads,
        dim=config.dim,
        block_size=config.block_size,
        dtype=config.dtype,
        cache=config.cache,
        latent=config.latent,
        layout=config.layout,
    )


def _settings(config: Config) -> dict[str, Any]:
    return {
        "scale": config.dim**-0.5,
        "window": config.window,
        "soft_cap": config.soft_cap,
    }


def _shape(config: Config) -> dict[str, Any]:
    return {
        "group": config.group,
        "kv_heads": config.kv_heads,
        "dim": config.dim,
        "block_size": config.block_size,
        "dtype": config.dtype,
        "cache": config.cache,
        "value_dim": config.latent,
        "backend": config.backend,
    }


def _verdict(config: Config, out: Array, again: Array, expected: Array, zeros: Array) -> Any:
    error, limit = relative_error(out, expected), TOLERANCE[config.dtype]
    worst = float(np.abs(out.astype(np.float64) - expected).max())
    equal = _same_bits(out, again)
    clean = not zeros.astype(np.float64).any()
    good = error <= limit and equal and clean
    return {
        "status": "ok" if good else "wrong",
        "relative_error": error,
        "limit": limit,
        "largest_error": worst,
        "repeats_bit_for_bit": equal,
        "padding_is_zero": clean,
    }


def _decode(rng: np.random.Generator, config: Config, *, dry: bool) -> Prepared:
    case = _case(rng, config, config.lengths)
    live, rows = len(config.lengths), len(config.lengths) + 2
    q = case.queries(rng, rows)
    tables = np.concatenate([case.tables, case.tables[:1], case.tables[:1]])
    positions = np.array([n - 1 for n in config.lengths] + [-1, -1], np.int32)
    chosen = decode_config(batch=rows, context=max(config.lengths), **_shape(config))
    chosen = dataclasses.replace(chosen, **dict(config.changes))
    function = kernel(config.backend, "decode", dry=dry, config=chosen, layout=config.layout)
    settings = _settings(config)

    def attention(*arrays: Any) -> Any:
        return function(*arrays, block_size=config.block_size, value_dim=config.latent, **settings)

    def check(out: Array, again: Array) -> dict[str, Any]:
        expected = np.concatenate(
            [
                attend(q[i : i + 1], case.keys[i], case.values[i], positions[i : i + 1], **settings)
                for i in range(live)
            ]
        )
        return dict(_verdict(config, out[:live], again[:live], expected, out[live:]))

    arguments = (jnp.asarray(q), case.kv, jnp.asarray(tables), jnp.asarray(positions))
    return attention, arguments, check


def _prefill(rng: np.random.Generator, config: Config, *, dry: bool) -> Prepared:
    chunks: tuple[tuple[int, int], ...] = config.lengths
    case = _case(rng, config, tuple(past + length for past, length in chunks))
    total = sum(length for _, length in chunks)
    context = max(past + length for past, length in chunks)
    chosen = prefill_config(tokens=total, context=context, **_shape(config))
    chosen = dataclasses.replace(chosen, **dict(config.changes))
    tile = prefill_tile(config.backend, config.group, chosen)
    tiles, tokens = make_tiles(chunks, tile)
    q = case.queries(rng, tokens)
    function = kernel(config.backend, "prefill", dry=dry, config=chosen, layout=config.layout)
    settings = _settings(config)

    def attention(*arrays: Any) -> Any:
        return function(
            *arrays,
            tile=tile,
            block_size=config.block_size,
            value_dim=config.latent,
            **settings,
        )

    def check(out: Array, again: Array) -> dict[str, Any]:
        expected, start = [], 0
        for row, (past, length) in enumerate(chunks):
            mine = q[start : start + length]
            places = np.arange(past, past + length)
            expected.append(attend(mine, case.keys[row], case.values[row], places, **settings))
            start += length
        tail = out[:0] if config.backend == "reference" else out[total:]
        return dict(_verdict(config, out[:total], again[:total], np.concatenate(expected), tail))

    return attention, (jnp.asarray(q), case.kv, jnp.asarray(case.tables), tiles), check


def _write(rng: np.random.Generator, config: Config, *, dry: bool) -> Prepared:
    case = _case(rng, config, (33, 7))
    slots_total = case.kv.k.shape[0]
    tokens = 11
    slots = rng.permutation(slots_total)[:tokens].astype(np.int32)
    dropped = np.array([2, 7])
    slots[dropped] = (slots_total + 3, 2**31 - 1)
    kept = np.setdiff1d(np.arange(tokens), dropped)
    new = [
        rng.standard_normal((tokens, config.kv_heads, config.dim), np.float32).astype(case.dtype)
        for _ in range(1 if config.latent else 2)
    ]
    chosen = write_config(
        tokens=tokens,
        kv_heads=config.kv_heads,
        dim=config.dim,
        block_size=config.block_size,
        dtype=config.dtype,
        cache=config.cache,
    )
    function = kernel(config.backend, "write", dry=dry, config=chosen, layout=config.layout)
    before = jax.tree.map(np.asarray, case.kv)

    def check(out: PagedKV, again: PagedKV) -> dict[str, Any]:
        untouched = np.setdiff1d(np.arange(slots_total), slots[kept])
        pairs = zip(jax.tree.leaves(out), jax.tree.leaves(before), strict=True)
        kept_bits = all(a[untouched].tobytes() == b[untouched].tobytes() for a, b in pairs)
        pools: list[Any] = [(out.k, out.k_scale), (out.v, out.v_scale)][: len(new)]
        excess = max(
            _excess(config, pool[slots[kept]], scale, slots[kept], values[kept])
            for (pool, scale), values in zip(pools, new, strict=True)
        )
        equal = _same_bits(out, again)
        good = kept_bits and equal and excess <= 1.0
        return {
            "status": "ok" if good else "wrong",
            "error_over_half_step": excess,
            "others_untouched": kept_bits,
            "repeats_bit_for_bit": equal,
        }

    values = tuple(jnp.asarray(one) for one in new)
    k, v = values if len(values) == 2 else (values[0], None)
    return function, (case.kv, k, v, jnp.asarray(slots)), check


def _excess(config: Config, stored: Array, scales: Any, slots: Array, given: Array) -> float:
    """Largest error over what rounding allows: 0 where nothing may be rounded and nothing was."""
    exact = given.astype(np.float64)
    if config.cache is None:
        return 0.0 if stored.tobytes() == given.astype(DTYPES[config.dtype]).tobytes() else 2.0
    scale = scales[slots].astype(np.float64)[..., None]
    error = np.abs(stored.astype(np.float64) * scale - exact)
    top = np.abs(exact).max(axis=-1, keepdims=True)
    step = top / LARGEST[config.cache]
    allowed = step / 2 if config.cache == "int8" else np.maximum(np.abs(exact) / 16, step / 512)
    excess = (error / (allowed * 1.001)).max()
    return float(excess) if np.isfinite(excess) else float("inf")

"""Prefill attention against the rate of matrix products."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gpu_suite.compiling import Program, compile_all
from gpu_suite.context import Context
from gpu_suite.prefill_case import MATMUL_RATE, PrefillBench, PrefillCase
from gpu_suite.timing import feed, iterations_for, loop, time_program

PASTS = (8192, 0, 32768)
CHANGES: tuple[dict[str, Any], ...] = (
    {"block_rows": 64, "num_warps": 4, "block_kv": 64},
    {"block_rows": 128, "num_warps": 8, "block_kv": 64},
    {"block_rows": 128, "num_warps": 8, "block_kv": 128},
    {"block_rows": 128, "num_warps": 8, "block_kv": 64, "num_stages": 4},
    {"block_rows": 128, "num_warps": 8, "block_kv": 64, "num_stages": 2},
    {"block_rows": 64, "num_warps": 4, "block_kv": 128},
)


def run(ctx: Context) -> None:
    PrefillBench(ctx).run(cases_of(dry=ctx.dry))
    for new, past in ((16, 0), (16, 16)) if ctx.dry else ((2048, 0), (2048, 8192)):
        if not ctx.late():
            _cudnn(ctx, new, past)


def cases_of(*, dry: bool) -> list[PrefillCase]:
    if dry:
        return [PrefillCase(((16, 12),), group=2, kv_heads=2, dim=16, block_size=8)]
    base = [PrefillCase(((past, 2048),), group=group) for past in PASTS for group in (4, 8)]
    middle = base[0]
    chosen = middle.chosen_config()
    cases = [*base, PrefillCase(((1024, 128),) * 16)]
    cases += [
        dataclasses.replace(case, backend="pallas_mosaic", label="mosaic") for case in base[:4]
    ]
    for change in CHANGES:
        config = dataclasses.replace(chosen, **change)
        label = " ".join(f"{k}={v}" for k, v in change.items())
        if config != chosen:
            cases.append(dataclasses.replace(middle, config=config, label=label))
    cases += [dataclasses.replace(middle, cache=cache) for cache in ("int8", "fp8")]
    cases += [PrefillCase(((8192, 2048),), dim=64)]
    return cases


def _cudnn(ctx: Context, new: int, past: int) -> None:
    """Another library's kernel without pages: causal over the chunk, or all of a past context
    without a mask (it has no causal mask that ends at the last key).
    """
    heads, dim, group = (2, 16, 2) if ctx.dry else (8, 128, 4)
    kind: Any = "xla" if ctx.dry else "cudnn"
    name = f"contiguous {kind}: chunk {new}, " + (f"{past} keys" if past else "causal")
    keys = jax.random.split(jax.random.key(4), 3)
    length = past or new

    def step(zero: Any, q: Any, k: Any, v: Any) -> Any:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=not past, implementation=kind)
        return feed(q, zero, out)

    q = jax.random.normal(keys[0], (1, new, heads * group, dim), jnp.bfloat16)
    k, v = (jax.random.normal(key, (1, length, heads, dim), jnp.bfloat16) for key in keys[1:])
    pairs = new * past if past else new * (new + 1) // 2
    flops = 4 * pairs * heads * group * dim
    iterations = iterations_for(flops / MATMUL_RATE, dry=ctx.dry)
    arguments = (jnp.zeros((), jnp.float32), q, k, v)
    empty = Program(f"empty {name}", loop(lambda z, q: feed(q, z, q), iterations), arguments[:2])
    compiled = compile_all(ctx, [Program(name, loop(step, iterations), arguments), empty])
    if len(compiled) < 2:
        return
    try:
        base = (compiled[empty.name], arguments[:2])
        timing = time_program(compiled[name], arguments, iterations, empty=base)
    except Exception as error:
        ctx.fail(name, error)
        return
    rate = flops / timing.seconds / 1e12
    top = ctx.results.value("ceilings", "matmul", "tflops")
    ctx.row(
        name,
        us=timing.seconds * 1e6,
        tflops=rate,
        of_matmul=None if top is None else rate / top,
        flops=flops,
    )

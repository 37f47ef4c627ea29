"""Decode attention against the rate at which memory can be read, and beside other kernels."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_suite.compiling import Program, compile_all
from gpu_suite.context import Context
from gpu_suite.decode_bench import DecodeBench
from gpu_suite.decode_case import DecodeCase, attention_of
from gpu_suite.timing import feed, iterations_for, latency, loop, time_program
from pallas_kernels.paged_kv import PagedKV

SHAPES = (
    *((32, 4096), (64, 8192), (1, 1024), (1, 4096), (1, 8192), (1, 32768), (8, 4096)),
    *((64, 2048), (128, 4096), (256, 1024), (256, 2048), (8, 1024), (16, 8192)),
)
BESIDE = ((8, 4096), (32, 4096), (64, 2048))
"""Where other kernels are timed, too."""
CONTIGUOUS = ((32, 4096), (64, 2048), (64, 8192))
TINY: dict[str, Any] = {"group": 2, "kv_heads": 2, "dim": 16, "block_size": 8}


def run(ctx: Context) -> None:
    bench = DecodeBench(ctx)
    cases = cases_of(dry=ctx.dry)
    compiled = bench.compile(cases)
    seconds: dict[str, float | None] = {}
    for case, _ in sorted(cases, key=lambda pair: _rank(pair[0])):
        seconds[case.name] = bench.measure(case, compiled)
    _over_contiguous(ctx, seconds, dry=ctx.dry)
    if not ctx.late():
        _latency(ctx, bench)
    for batch, context in ((2, 32),) if ctx.dry else CONTIGUOUS[:2]:
        if not ctx.late():
            _cudnn(ctx, batch, context)


def cases_of(*, dry: bool) -> list[tuple[DecodeCase, Any]]:
    """Cases, and what replaces their kernel (None: nothing)."""
    if dry:
        case = DecodeCase(2, 40, **TINY)
        ours = [case, *_contiguous(case)]
        gather = dataclasses.replace(case, backend="xla", label="xla gather")
        return [*((c, None) for c in ours), (gather, dense_gather(gather))]
    base = [DecodeCase(batch, context) for batch, context in SHAPES]
    ours = [*base, *(dataclasses.replace(case, group=8) for case in base)]
    ours += [
        c for case in base if (case.batch, case.context) in CONTIGUOUS for c in _contiguous(case)
    ]
    rng = np.random.default_rng(5)
    ragged = tuple(sorted(rng.integers(128, 8193, 32).tolist(), reverse=True))
    ours.append(DecodeCase(32, 8192, lengths=ragged, label="ragged"))
    mosaic = [
        DecodeCase(b, c, backend="pallas_mosaic", label="mosaic")
        for b, c in ((1, 8192), (32, 4096), (64, 8192))
    ]
    ours += mosaic
    for cache in ("int8", "fp8"):
        ours += [DecodeCase(b, c, cache=cache) for b, c in ((1, 8192), (32, 4096), (64, 8192))]
    ours += [DecodeCase(b, c, dim=64) for b, c in ((1, 4096), (32, 4096), (128, 4096))]
    latent: dict[str, Any] = {"kv_heads": 1, "dim": 576, "latent": 512, "label": "latent"}
    ours += [DecodeCase(b, 4096, group=g, **latent) for b, g in ((1, 16), (32, 16), (128, 16))]
    ours.append(DecodeCase(32, 4096, group=128, **latent))
    cases: list[tuple[DecodeCase, Any]] = [(case, None) for case in ours]
    for batch, context in BESIDE:
        gather = DecodeCase(batch, context, backend="xla", label="xla gather")
        cases.append((gather, dense_gather(gather)))
        shipped = DecodeCase(batch, context, backend="jax", label="jax paged_attention")
        cases.append((shipped, shipped_op(shipped, dry=dry)))
    return cases


def _contiguous(case: DecodeCase) -> list[DecodeCase]:
    """Our kernel where every sequence lies in one piece: blocks as they are, and large ones."""
    large = 32 if case.block_size == 8 else 128
    return [
        dataclasses.replace(case, order="identity", label="identity"),
        dataclasses.replace(case, order="identity", block_size=large, label="identity large"),
    ]


def _rank(case: DecodeCase) -> tuple[bool, bool, str]:
    """Cases of one pool together, the usual one first; last a backend that might not come back."""
    unusual = case.pool_key != DecodeCase(1, 1).pool_key
    return case.backend == "pallas_mosaic", unusual, str(case.pool_key)


def dense_gather(case: DecodeCase) -> Callable[..., Any]:
    """What XLA makes of paged attention: gather all pages, then attend."""

    def attention(q: Any, kv: PagedKV, tables: Any, positions: Any) -> Any:
        offsets = jnp.arange(case.block_size, dtype=jnp.int32)
        slots = (tables[..., None] * case.block_size + offsets).reshape(case.batch, -1)
        assert kv.v is not None
        k, v = jnp.take(kv.k, slots, axis=0), jnp.take(kv.v, slots, axis=0)
        grouped = q.reshape(case.batch, case.kv_heads, case.group, case.dim)
        scores = jnp.einsum("bkgh,blkh->bkgl", grouped, k, preferred_element_type=jnp.float32)
        seen = jnp.arange(slots.shape[1])[None, :] <= positions[:, None]
        scores = jnp.where(seen[:, None, None], scores * case.dim**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        out = jnp.einsum("bkgl,blkh->bkgh", weights, v, preferred_element_type=jnp.float32)
        return out.astype(q.dtype).reshape(q.shape)

    return attention


def shipped_op(case: DecodeCase, *, dry: bool) -> Callable[..., Any]:
    """The paged attention that comes with JAX (deprecated there)."""

    def attention(q: Any, kv: PagedKV, tables: Any, positions: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        pages = kv.k.shape[0] // case.block_size
        shape = (case.kv_heads, pages, case.block_size, case.dim)
        assert kv.v is not None
        scaled = (q.astype(jnp.float32) * case.dim**-0.5).astype(q.dtype)
        return paged_attention(
            scaled,
            kv.k.reshape(shape),
            kv.v.reshape(shape),
            tables,
            positions + 1,
            interpret=dry,
        )

    return attention


def _over_contiguous(ctx: Context, seconds: dict[str, float | None], *, dry: bool) -> None:
    """How much longer our kernel takes because blocks are small and lie anywhere."""
    for batch, context in ((2, 40),) if dry else CONTIGUOUS:
        case = DecodeCase(batch, context, **(TINY if dry else {}))
        paged = seconds.get(case.name)
        others = [seconds.get(c.name) for c in _contiguous(case)]
        best = min((s for s in others if s is not None), default=None)
        if paged is not None and best is not None:
            ctx.row(
                f"paged over contiguous B{batch} ctx{context}",
                excess=paged / best - 1,
                paged_us=paged * 1e6,
                contiguous_us=best * 1e6,
            )


def _latency(ctx: Context, bench: DecodeBench) -> None:
    """One call with everything that the host does for it."""
    case = DecodeCase(1, 40, **TINY) if ctx.dry else DecodeCase(1, 1024)
    name = f"{case.name} dispatch included"
    _, (q, tables), kv, positions = bench.shapes(case)
    attention = attention_of(case, dry=ctx.dry)
    compiled = compile_all(ctx, [Program(name, attention, (q, kv, tables, positions))])
    if name not in compiled:
        return
    try:
        _, (q, tables), kv, positions = bench.arguments(case)
        seconds = latency(compiled[name].call, (q, kv, tables, positions), 3 if ctx.dry else 50)
        ctx.row(name, us=seconds * 1e6)
    except Exception as error:
        ctx.fail(name, error)


def _cudnn(ctx: Context, batch: int, context: int) -> None:
    """Another library's kernel on K and V without pages: what contiguous memory would allow."""
    heads, dim, group = (2, 16, 2) if ctx.dry else (8, 128, 4)
    name = f"B{batch} ctx{context} G{group} contiguous cudnn"
    kind: Any = "xla" if ctx.dry else "cudnn"
    keys = jax.random.split(jax.random.key(3), 3)

    def step(zero: Any, q: Any, k: Any, v: Any) -> Any:
        return feed(q, zero, jax.nn.dot_product_attention(q, k, v, implementation=kind))

    q = jax.random.normal(keys[0], (batch, 1, heads * group, dim), jnp.bfloat16)
    shape = (batch, context, heads, dim)
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:])
    size = k.nbytes + v.nbytes
    iterations = iterations_for(size / 4e12, dry=ctx.dry)
    arguments = (jnp.zeros((), jnp.float32), q, k, v)
    compiled = compile_all(ctx, [Program(name, loop(step, iterations), arguments)])
    if name not in compiled:
        return
    try:
        timing = time_program(compiled[name], arguments, iterations)
    except Exception as error:
        ctx.fail(name, error)
        return
    read = ctx.results.value("ceilings", "read", "tbps")
    rate = size / timing.seconds / 1e12
    ctx.row(
        name,
        us=timing.seconds * 1e6,
        tbps=rate,
        of_read=None if read is None else rate / read,
        kv_bytes=size,
        implementation=kind,
    )

"""A whole decode step of an 8B-shaped model against the bytes that it must read."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from gpu_suite.context import Context
from gpu_suite.models import LLAMA_8B, TINY, Limits, ModelShape, open_engine
from gpu_suite.serving import serve

CONTEXT = 2048
BATCHES = (1, 32, 128)
LIMITS = Limits((8, 32, 128), 2048, 4096, 128 * 136 + 1)
DRY_LIMITS = Limits((8,), 32, 64, 65)
BACKENDS = {"step": "auto", "step_reference": "reference", "step_plain": "auto"}
"""By section; `step_plain` is the one whose process runs without command buffers."""
REPEATS = 5
TARGET_SECONDS = 0.12


def run(ctx: Context) -> None:
    shape, limits = (TINY, DRY_LIMITS) if ctx.dry else (LLAMA_8B, LIMITS)
    batches, context = ((1, 3), 20) if ctx.dry else (BATCHES, CONTEXT)
    main = ctx.section == "step"
    backend = BACKENDS[ctx.section]
    if ctx.dry:
        backend = "pallas_interpret"
    if not main:  # beside the main section, the extremes will do
        batches = batches[:2]
        limits = dataclasses.replace(limits, decode_buckets=limits.decode_buckets[:2])
    llm = open_engine(ctx, shape, limits, backend, utilization=0.85)
    try:
        for batch in batches:
            name = f"{ctx.section} {shape.name} B{batch} ctx{context}"
            if ctx.late(0.0 if ctx.dry else 2.0):
                ctx.skip(name)
                continue
            try:
                _step(ctx, llm.engine.runner, shape, batch, context, name)
            except Exception as error:
                ctx.fail(name, error)
        if main:
            serve(ctx, llm, shape)
    finally:
        llm.close()


def _step(
    ctx: Context, runner: Any, shape: ModelShape, batch: int, context: int, name: str
) -> None:
    packed = decode_step(runner, shape, batch, context)
    weights, kv = shape.step_weight_bytes, batch * context * shape.kv_bytes_per_token
    rate = ctx.results.value("ceilings", "read", "tbps")
    guess = (weights + kv) / 3e12
    steps = 2 if ctx.dry else max(5, min(40, round(TARGET_SECONDS / guess)))
    _run_steps(runner, packed, 2)
    samples = [_run_steps(runner, packed, steps) for _ in range(2 if ctx.dry else REPEATS)]
    seconds = statistics.median(one for one, _ in samples)
    floor = None if rate is None else (weights + kv) / (rate * 1e12)
    ctx.row(
        name,
        ms=1e3 * seconds,
        launch_ms=1e3 * statistics.median(launch for _, launch in samples),
        floor_ms=None if floor is None else 1e3 * floor,
        of_floor=None if floor is None else floor / seconds,
        tokens_per_s=batch / seconds,
        spread=(max(samples)[0] - min(samples)[0]) / seconds,
        weight_bytes=weights,
        kv_bytes=kv,
        batch=batch,
        context=context,
        rows=packed.layout.shape.rows,
        backend=runner._backend.name,
    )


def _run_steps(runner: Any, packed: Any, count: int) -> tuple[float, float]:
    """Seconds of a step, and of its launch on the host, over `count` steps in a row."""
    start = time.perf_counter()
    launched = [runner.launch(packed, wants_prompt=False) for _ in range(count)]
    launch = time.perf_counter() - start
    result = runner.read(launched[-1])
    seconds = time.perf_counter() - start
    live = np.unique(result.samples.status)
    if live.size != 1 or live[0] != 0:
        raise RuntimeError(f"the step's rows have status {live.tolist()}")
    return seconds / count, launch / count


def decode_step(runner: Any, shape: ModelShape, batch: int, context: int) -> Any:
    """The arrays of a step with `batch` rows at the end of `context` tokens in random blocks."""
    from jaxpaged.device.buckets import StepShape
    from jaxpaged.device.packing import pack
    from jaxpaged.device.sampling_state import INT_FIELDS

    rows = next(size for size in runner.buckets.decode if size >= batch)
    layout = runner.layout(StepShape(rows, 0))
    packed = pack([], [], layout, runner.max_num_seqs)
    fields = layout.split(packed.ints)
    rng = np.random.default_rng(batch)
    place = np.arange(batch)
    fields["decode_token"][:batch] = rng.integers(3, shape.vocab, batch)
    fields["decode_position"][:batch] = context - 1
    fields["row_slot"][:batch] = place
    fields["rope_length"][:batch] = context
    fields["logits_index"][:batch] = place
    block_size = runner._backend.sizes.block_size
    width = -(-context // block_size)
    order = 1 + rng.permutation(runner.num_blocks - 1)[: batch * width]
    fields["block_tables"][0, :batch, :width] = order.reshape(batch, width)
    sample = dict(zip(INT_FIELDS, fields["sample"], strict=True))
    sample["slot"][:batch] = place
    sample["position"][:batch] = context
    sample["prompt_len"][:batch] = context
    return packed

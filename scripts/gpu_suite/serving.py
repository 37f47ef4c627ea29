"""The engine with random weights and prompts: tokens a second, and whether the device waits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_suite.context import Context
from gpu_suite.models import LLAMA_1B, TINY, Limits, ModelShape, open_engine


@dataclass(frozen=True, slots=True)
class Workload:
    """So many requests at once, all of one length, answered with the same number of tokens."""

    requests: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        return f"B{self.requests} in{self.prompt} out{self.output}"


WORKLOADS = (Workload(32, 512, 128), Workload(1, 128, 128), Workload(128, 512, 128))
DRY_WORKLOADS = (Workload(3, 12, 4),)
LIMITS_1B = Limits((8, 32, 128), 2048, 4096, None)
DRY_LIMITS = Limits((8,), 32, 64, 65)


def run(ctx: Context) -> None:
    """A small model, with as many blocks as its memory plan finds room for."""
    shape, limits = (TINY, DRY_LIMITS) if ctx.dry else (LLAMA_1B, LIMITS_1B)
    backend = "pallas_interpret" if ctx.dry else "auto"
    llm = open_engine(ctx, shape, limits, backend, utilization=0.6)
    try:
        serve(ctx, llm, shape)
    finally:
        llm.close()


def serve(ctx: Context, llm: Any, shape: ModelShape) -> None:
    """Each workload, once for its first tokens alone and once in full."""
    generate(llm, shape, Workload(2, 16, 4), 0)
    for number, work in enumerate(DRY_WORKLOADS if ctx.dry else WORKLOADS):
        name = f"serve {shape.name} {work.name}"
        if ctx.late(0.0 if ctx.dry else 4.0):
            ctx.skip(name)
            continue
        try:
            _serve_one(ctx, llm, shape, work, name, number)
        except Exception as error:
            ctx.fail(name, error)


def _serve_one(
    ctx: Context, llm: Any, shape: ModelShape, work: Workload, name: str, number: int
) -> None:
    from jaxpaged.metrics import EngineMetrics

    first = generate(llm, shape, Workload(work.requests, work.prompt, 1), 10 * number + 1)
    before = llm.stats()
    metrics = llm.engine.metrics = EngineMetrics()
    seconds = generate(llm, shape, work, 10 * number + 2)
    llm.engine.metrics = None
    after = llm.stats()
    decode = max(seconds - first, 1e-9)
    steps = metrics.iteration_tokens.count
    ctx.row(
        name,
        tokens_per_s=work.requests * work.output / seconds,
        decode_tokens_per_s=work.requests * (work.output - 1) / decode,
        first_token_s=first,
        seconds=seconds,
        host_gap=metrics.host_gap.sum / seconds,
        launch_ms_per_step=1e3 * metrics.launch_time.sum / max(1, steps),
        steps=steps,
        compiles=after.compiles_after_warmup,
        preemptions=after.preemptions - before.preemptions,
        requests=work.requests,
        prompt=work.prompt,
        output=work.output,
        model=shape.name,
    )


def generate(llm: Any, shape: ModelShape, work: Workload, seed: int) -> float:
    """Seconds."""
    from jaxpaged import SamplingParams

    rng = np.random.default_rng(seed)
    prompts = rng.integers(3, shape.vocab, (work.requests, work.prompt)).tolist()
    params = SamplingParams(
        temperature=0.0, max_tokens=work.output, ignore_eos=True, detokenize=False
    )
    start = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - start
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if lengths != {work.output}:
        reasons = {output.outputs[0].finish_reason for output in outputs}
        raise RuntimeError(f"requests ended early: lengths {lengths}, reasons {reasons}")
    return seconds

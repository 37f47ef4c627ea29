"""A workload through the scheduler, without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import SchedulerConfig
from paging.cost import OPT_13B_A100, StepCost
from paging.systems import BenchScheduler, System


@dataclass(frozen=True)
class Work:
    """(prompt, output) tokens of the requests, and limits in tokens and sequences."""

    shapes: Sequence[tuple[int, int]]
    pool_tokens: int
    max_model_len: int
    max_num_seqs: int
    budget: int

    def config(self, block_size: int, watermark: float) -> SchedulerConfig:
        return SchedulerConfig(
            num_blocks=self.pool_tokens // block_size + 1,  # the null block is not usable
            block_size=block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
            watermark=watermark,
            enable_prefix_caching=False,
        )


@dataclass(frozen=True)
class Result:
    """`running`, `waste`, `tokens_per_step` and `output_per_second` are of the steps in which
    requests waited: there memory decides how many run. All other figures are of the whole run,
    whose last part is that of the longest outputs.
    """

    running: float
    waste: float
    """Share of the slots in use, or kept for somebody, that hold no token."""
    preemptions: int
    recomputed: float
    """Share of all tokens computed that had been computed before."""
    recomputed_tokens: int
    steps: int
    tokens_per_step: float
    output_per_second: float
    """By the model of a step's cost."""
    whole_output_per_second: float


def simulate(
    work: Work,
    system: System,
    *,
    block_size: int = 16,
    watermark: float = 0.01,
    cost: StepCost = OPT_13B_A100,
) -> Result:
    """All requests wait from the start. Raises `RuntimeError` if one of them is not served."""
    # Whoever reserves never grows, so there is nothing to keep free for.
    scheduler = BenchScheduler(
        work.config(block_size, 0.0 if system.reserve else watermark), system
    )
    for index, (prompt, output) in enumerate(work.shapes):
        request = Request(str(index), [0] * prompt, max_tokens=output, arrival_time=float(index))
        scheduler.add(request)
    stats, seconds = scheduler.stats, 0.0
    busy, waste, running, computed, delivered, passed = 0, 0.0, 0, 0, 0, 0.0
    while (step := scheduler.schedule()) is not None:
        seconds += cost.seconds(step)
        scheduler.update(step, [1] * len(step.rows))
        if scheduler.num_waiting:
            busy, waste, running = stats.steps, stats.waste_sum, stats.running_sum
            computed, delivered = stats.scheduled_tokens, stats.generation_tokens
            passed = seconds
    if not busy:
        raise RuntimeError(f"{system.name}: all requests ran at once; take more, or fewer slots")
    done = stats.requests_finished.get("length", 0)
    if done != len(work.shapes):
        raise RuntimeError(f"{system.name}: {done} of {len(work.shapes)} requests were served")
    return Result(
        running=running / busy,
        waste=waste / busy,
        preemptions=stats.preemptions,
        recomputed=stats.recomputed_tokens / stats.scheduled_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        steps=stats.steps,
        tokens_per_step=computed / busy,
        output_per_second=delivered / passed,
        whole_output_per_second=stats.generation_tokens / seconds,
    )

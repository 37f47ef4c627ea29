"""Small engines for end-to-end tests, and results in a form that can be compared bit by bit."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxpaged import LLM, SamplingParams
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.core.plan import ScheduledStep
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine import Engine
from jaxpaged.outputs import CompletionOutput, LogprobDict, RequestOutput

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "decode_buckets": (8,),
    "prefill_buckets": (64,),
    "max_model_len": 128,
    "block_size": 4,
    "num_gpu_blocks_override": 100,
    "check_integrity": True,
    "disable_progress": True,
}
"""Two programs. Tests that keep these shapes find them in the session's compilation cache."""
CPU_BACKENDS = ("auto", "reference")
"""Attention on CPUs: the native kernels (where there is a compiler), and plain XLA. Either keeps
what is promised about bits.
"""
LONG: dict[str, Any] = {"max_model_len": 200, "num_gpu_blocks_override": 256}
"""On top of `SMALL`: contexts of up to four chunks of the reference attention."""


def small_llm(model: Path | str, **settings: Any) -> LLM:
    """An engine with two programs; `settings` are fields of `EngineConfig`."""
    return LLM(str(model), **{**SMALL, **settings})


def engine_over(llm: LLM, *, async_scheduling: bool = True, **limits: Any) -> Engine:
    """An engine without history over the programs and the pool of `llm`, which must be idle.

    `limits` replace fields of its `SchedulerConfig`; the pool may become smaller, not larger.
    """
    base = llm.engine
    assert not base.has_unfinished_requests()
    config = dataclasses.replace(base.scheduler.config, **limits)
    assert config.num_blocks <= base.scheduler.config.num_blocks
    assert config.block_size == base.scheduler.config.block_size
    return Engine(
        Scheduler(config),
        base.runner,
        base.intake,
        base.default_params,
        async_scheduling=async_scheduling,
        check_integrity=True,
        eager=False,
    )


def live_bytes() -> int:
    """Of all arrays on the (one) device; a buffer with several handles counts once."""
    gc.collect()
    buffers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.live_arrays()
        if not array.is_deleted()
        for shard in array.addressable_shards
    }
    return sum(buffers.values())


# ------------------------------------------------------------------ results


@dataclass(frozen=True)
class Result:
    """Everything a user can read of one completion. Equality is to the last bit."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    text: str
    cumulative_logprob: float | None
    logprobs: tuple[Any, ...] | None
    prompt_logprobs: tuple[Any, ...] | None
    score: float | None = None


def results(output: RequestOutput) -> list[Result]:
    """One `Result` a completion of the request."""
    assert output.finished
    prompt = None if output.prompt_logprobs is None else frozen(output.prompt_logprobs)
    return [
        Result(
            tuple(done.token_ids),
            done.finish_reason,
            done.stop_reason,
            done.text,
            done.cumulative_logprob,
            None if done.logprobs is None else frozen(done.logprobs),
            prompt,
            done.score,
        )
        for done in output.outputs
    ]


def frozen(entries: Sequence[LogprobDict | None]) -> tuple[Any, ...]:
    """(token, logprob, rank) of each entry, in the order shown."""
    return tuple(
        None if entry is None else tuple((t, f.logprob, f.rank) for t, f in entry.items())
        for entry in entries
    )


# ------------------------------------------------------------------ running requests


@dataclass
class Watch:
    """What the scheduler planned inside a `watched` block."""

    preemptions: int = 0
    resumed_chunks: int = 0
    """Rows that compute a part of what a preemption lost, and draw nothing yet."""
    copies: int = 0
    """Blocks copied."""
    first_draws: int = 0
    """Rows that draw the first token of a sample from the logits of another one's row."""
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """Per step: tokens computed, tokens drawn, prompt chunks that end before their prompt."""


@contextmanager
def watched(engine: Engine) -> Iterator[Watch]:
    """Check what holds for every step that is planned inside the block, and count."""
    watch = Watch()
    scheduler = engine.scheduler
    plan = scheduler.schedule

    def schedule() -> ScheduledStep | None:
        step = plan()
        if step is not None:
            check_step(step, scheduler.config.max_num_batched_tokens)
            watch.preemptions += len(step.preempted)
            watch.copies += len(step.copies)
            watch.first_draws += sum(row.source >= 0 for row in step.rows)
            unfinished = [row for row in step.rows if not row.samples]
            watch.resumed_chunks += sum(r.request.num_output_tokens > 0 for r in unfinished)
            watch.steps.append((step.num_tokens, len(step.rows) - len(unfinished), len(unfinished)))
        return step

    scheduler.schedule = schedule  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        scheduler.schedule = plan  # type: ignore[method-assign]


def check_step(step: ScheduledStep, budget: int) -> None:
    """No empty launch, no row past its request's tokens, a draw exactly where the tokens end."""
    assert step.num_tokens == sum(row.num_tokens for row in step.rows)
    assert 1 <= step.num_tokens <= budget
    for row in step.rows:
        request = row.request
        # The row's own draw is counted as in flight by now.
        known = request.num_tokens_with_inflight - row.samples
        end = row.start + row.num_tokens
        assert row.num_tokens >= 1 or row.source >= 0, (
            "nothing to compute, and nothing to draw from"
        )
        assert end <= known
        assert row.samples == (end == known and not request.only_scores)


Params = SamplingParams | BeamSearchParams


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Params | Sequence[Params],
    *,
    order: Sequence[int] | None = None,
    gaps: Sequence[int] | None = None,
) -> list[list[Result]]:
    """All requests; results in the order of the prompts.

    They arrive in `order`, the i-th to arrive after `gaps[i]` more steps of the engine.
    """
    count = len(prompts)
    given = [params] * count if isinstance(params, Params) else list(params)
    done: dict[str, list[Result]] = {}

    def step() -> None:
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done
                done[output.request_id] = results(output)

    for place, index in enumerate(order or range(count)):
        for _ in range(gaps[place] if gaps else 0):
            step()
        engine.add_request(str(index), list(prompts[index]), given[index])
    while engine.has_unfinished_requests():
        step()
    return [done[str(index)] for index in range(count)]


def run_alone(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Params | Sequence[Params],
) -> list[list[Result]]:
    """Each request by itself on an empty cache: what all other ways are compared with."""
    given = [params] * len(prompts) if isinstance(params, Params) else params
    found = []
    for prompt, one in zip(prompts, given, strict=True):
        assert llm.reset_prefix_cache()
        found += run(llm.engine, [prompt], one)
    return found


def ids(found: Sequence[Sequence[Result]]) -> list[tuple[int, ...]]:
    """Token ids of each request's first completion."""
    return [completions[0].token_ids for completions in found]


# ------------------------------------------------------------------ stored references


def stored_reference(name: str) -> list[dict[str, Any]]:
    """Cases that scripts/make_reference.py wrote."""
    path = Path(__file__).resolve().parent.parent / "data" / f"{name}_reference.json"
    cases: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return cases


@dataclass(frozen=True)
class Answer:
    """One stored case and what the engine says to it."""

    case: dict[str, Any]
    prompt_token_ids: list[int]
    output: CompletionOutput

"""Small engines for end-to-end tests, and what of a request's result must not depend on its company."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpaged import LLM, SamplingParams
from jaxpaged.core.plan import ScheduledStep
from jaxpaged.outputs import LogprobDict, RequestOutput

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "decode_buckets": (8,),
    "prefill_buckets": (64,),
    "max_model_len": 160,
    "block_size": 4,
    "num_gpu_blocks_override": 401,
    "check_integrity": True,
    "disable_progress": True,
}
"""Two programs. Tests that keep these shapes find them in the session's compilation cache."""

Prompt = Sequence[int]
Scores = list[tuple[int, float, int | None]]


def small_llm(model: Path | str, **settings: Any) -> LLM:
    """An engine with two programs; `settings` are fields of `EngineConfig`."""
    return LLM(str(model), **{**SMALL, **settings})


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
        )
        for done in output.outputs
    ]


def frozen(entries: Sequence[LogprobDict | None]) -> tuple[Any, ...]:
    return tuple(None if entry is None else tuple(scores(entry)) for entry in entries)


def scores(entry: LogprobDict) -> Scores:
    """(token, logprob, rank) in the order shown."""
    return [(token, found.logprob, found.rank) for token, found in entry.items()]


@dataclass
class Watch:
    """What the scheduler planned while a test ran."""

    rows: int = 0
    preemptions: int = 0
    resumed_chunks: int = 0
    """Rows that compute a part of what a preemption lost, and draw nothing yet."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Per step: tokens computed, tokens drawn."""


@contextmanager
def watched(llm: LLM) -> Iterator[Watch]:
    """Check what holds for every step that is planned inside the block, and count."""
    watch = Watch()
    scheduler = llm.engine.scheduler
    plan = scheduler.schedule

    def schedule() -> ScheduledStep | None:
        step = plan()
        if step is not None:
            check_step(step, llm.config.max_num_batched_tokens or 0)
            watch.rows += len(step.rows)
            watch.preemptions += len(step.preempted)
            watch.steps.append((step.num_tokens, sum(row.samples for row in step.rows)))
            watch.resumed_chunks += sum(
                not row.samples and row.request.num_output_tokens > 0 for row in step.rows
            )
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
        # The row's own draw is counted in num_inflight by now.
        known = request.num_tokens_with_inflight - row.samples
        end = row.start + row.num_tokens
        assert row.num_tokens >= 1
        assert end <= known
        assert row.samples == (end == known and not request.only_scores)


def run(
    llm: LLM,
    prompts: Sequence[Prompt | Mapping[str, Any]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[list[Result]]:
    """All requests at once; results in the order of the prompts."""
    given = params if isinstance(params, SamplingParams) else list(params)
    return [results(o) for o in llm.generate(list(prompts), given, use_tqdm=False)]


def run_spread(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    order: Sequence[int],
    gaps: Sequence[int],
) -> list[list[Result]]:
    """Requests arrive in `order`, the i-th after `gaps[i]` more steps; results as for `run`."""
    engine = llm.engine
    done: dict[str, list[Result]] = {}

    def step() -> None:
        for output in engine.step():
            if output.finished:
                done[output.request_id] = results(output)

    for index, gap in zip(order, gaps, strict=True):
        for _ in range(gap):
            step()
        engine.add_request(f"spread-{index}", list(prompts[index]), params[index])
    while engine.has_unfinished_requests():
        step()
    return [done[f"spread-{index}"] for index in range(len(prompts))]


def run_alone(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> list[list[Result]]:
    """Each request by itself on an empty cache: what all other ways are compared with."""
    found = []
    for prompt, one in zip(prompts, params, strict=True):
        assert llm.reset_prefix_cache()
        found += run(llm, [prompt], one)
    return found

"""Whether a request has the same bits in any company, with `deterministic` and without, and what
that costs in tokens a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_suite.context import Context
from gpu_suite.models import LLAMA_1B, LLAMA_8B, TINY, Limits, ModelShape, open_engine
from gpu_suite.serving import Workload, generate

Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens of a completion, and the log-probability of each."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one model is asked. Lengths in tokens."""

    limits: Limits
    work: Workload
    """Whose rate is compared."""
    shortest: int
    longest: int
    output: int
    alone: int
    """Requests that run by themselves too; the others are company."""
    chunk: int
    small_pool: int
    """Blocks that make the batch preempt."""


PLAN = Plan(
    Limits((8, 32), 2048, 4096, 32 * 80 + 1), Workload(32, 512, 128), 20, 700, 48, 6, 96, 620
)
DRY_PLAN = Plan(Limits((8,), 32, 64, 65), Workload(3, 12, 4), 5, 14, 24, 2, 5, 9)
MODELS = (LLAMA_1B, LLAMA_8B)
SECONDS = 45.0
"""That two engines of the larger model take at least."""


def run(ctx: Context) -> None:
    plan = DRY_PLAN if ctx.dry else PLAN
    backend = "pallas_interpret" if ctx.dry else "auto"
    for shape in (TINY,) if ctx.dry else MODELS:
        name = f"deterministic {shape.name}"
        if shape is LLAMA_8B and ctx.late(SECONDS):
            ctx.skip(name)
            continue
        rates = {}
        for flag in (False, True):
            try:
                rates[flag] = _one_engine(ctx, shape, plan, backend, flag=flag)
            except Exception as error:
                ctx.fail(f"{name} {_word(flag=flag)}", error)
        if len(rates) == 2:
            ctx.row(
                f"{name} cost",
                cost=1.0 - rates[True] / rates[False],
                tokens_per_s=rates[True],
                tokens_per_s_without=rates[False],
                work=plan.work.name,
            )


def _one_engine(ctx: Context, shape: ModelShape, plan: Plan, backend: str, *, flag: bool) -> float:
    """Tokens a second of the workload."""
    llm = open_engine(
        ctx,
        shape,
        plan.limits,
        backend,
        utilization=0.85,
        deterministic=flag,
        enable_prefix_caching=True,
    )
    try:
        _compare(ctx, llm, shape, plan, flag=flag)
        _reset(llm)
        generate(llm, shape, Workload(2, 16, 4), 0)
        # Prompts of other seeds, so that none of them is found in the cache.
        seconds = [generate(llm, shape, plan.work, seed) for seed in ((1,) if ctx.dry else (1, 2))]
        return plan.work.requests * plan.work.output / min(seconds)
    finally:
        llm.close()


def _compare(ctx: Context, llm: Any, shape: ModelShape, plan: Plan, *, flag: bool) -> None:
    """Each way of running the same requests against running them alone on an empty cache."""
    rng = np.random.default_rng(7)
    count = plan.limits.max_num_seqs
    lengths = rng.integers(plan.shortest, plan.longest + 1, count)
    prompts = [rng.integers(3, shape.vocab, length).tolist() for length in lengths]
    chosen = list(range(0, count, max(1, count // plan.alone)))[: plan.alone]
    alone: dict[int, Answer] = {}
    for index in chosen:
        _reset(llm)
        alone |= _answers(llm.engine, prompts, plan, [index])
    everyone = list(range(count))

    def batch(**limits: Any) -> Callable[[], tuple[Any, dict[int, Answer]]]:
        def go() -> tuple[Any, dict[int, Answer]]:
            engine = _engine_over(llm, **limits)
            return engine, _answers(engine, prompts, plan, everyone)

        return go

    def hit() -> tuple[Any, dict[int, Answer]]:
        engine = _engine_over(llm)
        _answers(engine, prompts, plan, chosen)
        return engine, _answers(engine, prompts, plan, chosen)

    def samples() -> tuple[Any, dict[int, Answer]]:
        engine = _engine_over(llm)
        return engine, _answers(engine, prompts, plan, chosen, samples=2)

    ways = {
        f"batch {count}": batch(),
        "chunked": batch(long_prefill_token_threshold=plan.chunk),
        "preempted": batch(num_blocks=plan.small_pool),
        "hit": hit,
        "first of n samples": samples,
    }
    for way, go in ways.items():
        name = f"{shape.name} {_word(flag=flag)}: {way}"
        if ctx.late(0.0 if ctx.dry else 3.0):
            ctx.skip(name)
            continue
        _reset(llm)
        try:
            engine, found = go()
        except Exception as error:
            ctx.fail(name, error)
            continue
        _report(ctx, name, alone, found, engine.stats(), way, flag=flag)


def _report(
    ctx: Context,
    name: str,
    alone: dict[int, Answer],
    found: dict[int, Answer],
    stats: Any,
    way: str,
    *,
    flag: bool,
) -> None:
    happened = {
        "preempted": stats.preemptions,
        "hit": stats.prefix_hit_tokens,
        "first of n samples": stats.forks,
    }
    if happened.get(way) == 0:
        ctx.row(name, "error", error=f"nothing was {way}: the comparison says nothing")
        return
    tokens = sum(found[index][0] == answer[0] for index, answer in alone.items())
    bits = sum(found[index] == answer for index, answer in alone.items())
    errors = [_error(found[index], answer) for index, answer in alone.items()]
    ctx.row(
        name,
        "wrong" if flag and bits < len(alone) else "ok",
        requests=len(alone),
        same_tokens=tokens,
        same_bits=bits,
        logprob_error=max(errors),
        deterministic=flag,
        preemptions=stats.preemptions,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        forks=stats.forks,
    )


def _error(found: Answer, answer: Answer) -> float:
    """The largest difference of two log-probabilities up to the first other token."""
    pairs = zip(*found, *answer, strict=True)
    worst = 0.0
    for token, logprob, other, expected in pairs:
        if token != other:
            break
        worst = max(worst, abs(logprob - expected))
    return worst


def _answers(
    engine: Any, prompts: list[list[int]], plan: Plan, chosen: list[int], *, samples: int = 1
) -> dict[int, Answer]:
    """What requests that run together get, by their number; of several samples the first."""
    from jaxpaged import SamplingParams

    for index in chosen:
        params = SamplingParams(
            temperature=1.0,
            seed=index,
            n=samples,
            max_tokens=plan.output,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )
        engine.add_request(str(index), prompts[index], params)
    found: dict[int, Answer] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = _answer(output.outputs[0])
    return found


def _answer(done: Any) -> Answer:
    if done.finish_reason != "length":
        raise RuntimeError(f"a request ended early: {done.finish_reason}")
    tokens = tuple(done.token_ids)
    entries = zip(tokens, done.logprobs, strict=True)
    return tokens, tuple(entry[token].logprob for token, entry in entries)


def _engine_over(llm: Any, **limits: Any) -> Any:
    """An engine without history over the same programs and pool; `limits` are its scheduler's."""
    from jaxpaged.core.scheduler import Scheduler
    from jaxpaged.engine import Engine

    base = llm.engine
    return Engine(
        Scheduler(dataclasses.replace(base.scheduler.config, **limits)),
        base.runner,
        base.intake,
        base.default_params,
        async_scheduling=True,
        check_integrity=False,
        eager=False,
    )


def _reset(llm: Any) -> None:
    if not llm.reset_prefix_cache():
        raise RuntimeError("the engine is not idle")


def _word(*, flag: bool) -> str:
    return "with it" if flag else "without it"

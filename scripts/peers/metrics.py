"""The figures that are made of what was timed, and what is aimed at."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from peers.workload import Plan, Sizes

Seconds = Mapping[str, Sequence[float]]
"""Of each pass, by group."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the times are of."""

    seconds: Seconds
    plan: Plan
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    title: str
    group: str
    """Of the workload, or where the figure comes from otherwise: start, cold start or rss."""
    higher: bool
    """Whether more is better."""
    digits: int
    ratio: float | None = None
    """Aim for the ratio of our figure to that of the best peer of the same round."""
    limit: float | None = None
    """Aim for the figure itself."""
    figure: Callable[[Work], float] | None = None


def _latency(work: Work) -> float:
    """Milliseconds a token: two answers that differ only in how many tokens follow the first."""
    seconds = work.seconds["latency"]
    each = [
        (long - short) / work.sizes.decode
        for short, long in zip(seconds[::2], seconds[1::2], strict=True)
    ]
    return 1000 * statistics.median(each)


def _prefill(work: Work) -> float:
    return work.sizes.long / statistics.median(work.seconds["prefill"])


def _cold(work: Work) -> float:
    return 1000 * statistics.median(work.seconds["prefix"][:: 1 + work.sizes.hits])


def _hit(work: Work) -> float:
    period = 1 + work.sizes.hits
    seconds = work.seconds["prefix"]
    return 1000 * statistics.median(s for i, s in enumerate(seconds) if i % period)


def _wave(work: Work) -> float:
    return statistics.median(work.seconds["wave"])


def _throughput(group: str) -> Callable[[Work], float]:
    def figure(work: Work) -> float:
        tokens = sum(part.output_tokens for part in work.plan[group])
        return tokens / sum(work.seconds[group])

    return figure


METRICS = (
    *(
        Metric(
            f"c{concurrency}",
            f"{concurrency} at once, output tokens/s",
            f"c{concurrency}",
            True,
            0,
            ratio=aim,
            figure=_throughput(f"c{concurrency}"),
        )
        for concurrency, aim in ((32, 1.5), (8, 1.2), (1, 1.0))
    ),
    Metric("latency", "a token at batch 1, ms", "latency", False, 1, 1.0, figure=_latency),
    Metric("prefill", "prefill of 512, tokens/s", "prefill", True, 0, 0.9, figure=_prefill),
    Metric("ttft_cold", "first token, cold, ms", "prefix", False, 0, figure=_cold),
    Metric("ttft_hit", "first token, prefix cached, ms", "prefix", False, 1, 0.8, figure=_hit),
    Metric("wave", "32 requests sharing 384 tokens, s", "wave", False, 2, 0.8, figure=_wave),
    Metric("start", "start, caches warm, s", "start", False, 1, limit=5),
    Metric("cold_start", "first start, caches empty, s", "cold start", False, 1, limit=40),
    Metric("rss", "peak memory, MB", "rss", False, 0, limit=2000),
)


def figures(seconds: Seconds, plan: Plan, sizes: Sizes) -> dict[str, float]:
    """By metric, of those whose group was timed."""
    work = Work(seconds, plan, sizes)
    return {
        metric.name: metric.figure(work)
        for metric in METRICS
        if metric.figure is not None and metric.group in seconds
    }

"""The result of `bench serve` as lines and as JSON, in the words that `vllm bench serve` made
familiar: plots and parsers read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxpaged.bench.metric_names import METRICS
from jaxpaged.bench.metrics import Summary

WIDTH = 50
LABEL = 40


@dataclass(frozen=True, slots=True)
class Load:
    """How requests were sent."""

    request_rate: float
    """Requests per second; infinite for all at once."""
    burstiness: float
    max_concurrency: int | None


def lines(
    summary: Summary, load: Load, shown: Sequence[str], percentiles: Sequence[float]
) -> list[str]:
    """The table. `shown` are keys of `METRICS`."""
    rows = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]

    def row(label: str, value: float) -> None:
        text = str(value) if isinstance(value, int) else f"{value:.2f}"
        rows.append(f"{label:<{LABEL}} {text}")

    row("Successful requests:", summary.completed)
    row("Failed requests:", summary.failed)
    if load.max_concurrency is not None:
        row("Maximum request concurrency:", load.max_concurrency)
    if math.isfinite(load.request_rate):
        row("Request rate configured (RPS):", load.request_rate)
    row("Benchmark duration (s):", summary.duration)
    row("Total input tokens:", summary.total_input_tokens)
    row("Total generated tokens:", summary.total_output_tokens)
    row("Request throughput (req/s):", summary.request_throughput)
    if summary.request_goodput is not None:
        row("Request goodput (req/s):", summary.request_goodput)
    row("Output token throughput (tok/s):", summary.output_throughput)
    row("Peak output token throughput (tok/s):", summary.max_output_tokens_per_s)
    row("Peak concurrent requests:", summary.max_concurrent_requests)
    row("Total token throughput (tok/s):", summary.total_token_throughput)
    statistics = summary.statistics(percentiles)
    for name in shown:
        short, title = METRICS[name]
        rows.append(f"{title:-^{WIDTH}}")
        row(f"Mean {short} (ms):", statistics[f"mean_{name}_ms"])
        row(f"Median {short} (ms):", statistics[f"median_{name}_ms"])
        for percentile in percentiles:
            row(f"P{percentile:g} {short} (ms):", statistics[f"p{percentile:g}_{name}_ms"])
    rows.append("=" * WIDTH)
    return rows


def as_json(summary: Summary, percentiles: Sequence[float]) -> dict[str, Any]:
    """All figures, those of every metric included, whichever are shown."""
    figures: dict[str, Any] = {
        name: getattr(summary, name)
        for name in (
            "duration",
            "completed",
            "failed",
            "total_input_tokens",
            "total_output_tokens",
            "request_throughput",
            "request_goodput",
            "output_throughput",
            "total_token_throughput",
            "max_output_tokens_per_s",
            "max_concurrent_requests",
        )
    }
    return {**figures, **summary.statistics(percentiles)}


def file_name(backend: str, load: Load, model: str, now: datetime) -> str:
    """What a result is called where the user names no file."""
    rate = f"{load.request_rate:g}qps"
    concurrency = f"-concurrency{load.max_concurrency}" if load.max_concurrency else ""
    base = model.rstrip("/").rpartition("/")[2]
    return f"{backend}-{rate}{concurrency}-{base}-{now:%Y%m%d-%H%M%S}.json"


def save(path: Path, result: Mapping[str, Any], *, append: bool) -> None:
    """Write one JSON object, or add it as a line of its own. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.write(json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n")

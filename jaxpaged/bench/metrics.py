"""The arithmetic of a serving benchmark: from records of requests to rates and latencies.

Definitions, per request: TTFT, first chunk with choices minus sending. E2EL, last such chunk minus
sending. TPOT, (E2EL - TTFT) / (output tokens - 1), for two tokens and more. ITL, the gaps between
such chunks, of all requests together. Only requests that succeeded count, but for `failed` and the
number of concurrent requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from jaxpaged.bench.metric_names import METRICS


@dataclass(frozen=True, slots=True)
class Record:
    """One request that has ended. Times are in seconds, of one clock."""

    start: float
    """When it was sent."""
    end: float
    """When its answer was complete, or it failed."""
    times: Sequence[float]
    """When each chunk with choices came."""
    prompt_tokens: int
    output_tokens: int
    text: str = ""
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def latency(self) -> float:
        return self.times[-1] - self.start

    @property
    def tpot(self) -> float:
        """0 for a single token, which has no time between tokens."""
        if self.output_tokens < 2:
            return 0.0
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole run. Rates are per second; `seconds` holds the samples of each of `METRICS`."""

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    """None where no goals were set."""
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    seconds: Mapping[str, Sequence[float]]

    def statistics(self, percentiles: Iterable[float]) -> dict[str, float]:
        """mean, median, std and pNN of every metric in ms; 0 where there are no samples."""
        result: dict[str, float] = {}
        for name in METRICS:
            values = np.asarray(self.seconds[name] or [0.0]) * 1000.0
            result[f"mean_{name}_ms"] = float(values.mean())
            result[f"median_{name}_ms"] = float(np.median(values))
            result[f"std_{name}_ms"] = float(values.std())
            for percentile in percentiles:
                key = f"p{percentile:g}_{name}_ms"
                result[key] = float(np.percentile(values, percentile))
        return result


def summarise(
    records: Sequence[Record], duration: float, goals: Mapping[str, float] | None = None
) -> Summary:
    """`duration` is the run's, in seconds. `goals` maps some of `GOALS` to milliseconds that a
    request must not exceed to count as good.
    """
    good = [record for record in records if record.error is None]
    per_second = 1.0 / duration if duration > 0 else 0.0
    total_input = sum(record.prompt_tokens for record in good)
    total_output = sum(record.output_tokens for record in good)
    goodput = sum(_meets(record, goals) for record in good) * per_second if goals else None
    return Summary(
        duration=duration,
        completed=len(good),
        failed=len(records) - len(good),
        total_input_tokens=total_input,
        total_output_tokens=total_output,
        request_throughput=len(good) * per_second,
        request_goodput=goodput,
        output_throughput=total_output * per_second,
        total_token_throughput=(total_input + total_output) * per_second,
        max_output_tokens_per_s=peak_rate(good, min(1.0, duration)),
        max_concurrent_requests=peak_concurrency(records),
        seconds={
            "ttft": [record.ttft for record in good],
            "tpot": [record.tpot for record in good if record.output_tokens > 1],
            "itl": [gap for record in good for gap in record.itls],
            "e2el": [record.latency for record in good],
        },
    )


def peak_rate(records: Iterable[Record], window: float) -> float:
    """The most output tokens per second within any `window` seconds.

    A chunk counts for its share of the request's tokens: servers may send several in one.
    """
    if window <= 0:
        return 0.0
    arrivals = sorted(
        (time, record.output_tokens / len(record.times))
        for record in records
        for time in record.times
    )
    inside: deque[tuple[float, float]] = deque()
    tokens = most = 0.0
    for time, count in arrivals:
        inside.append((time, count))
        tokens += count
        while time - inside[0][0] >= window:
            tokens -= inside.popleft()[1]
        most = max(most, tokens)
    return most / window


def peak_concurrency(records: Iterable[Record]) -> int:
    """The most requests under way at once. One that ends as another begins does not overlap it."""
    changes = sorted(
        change for record in records for change in ((record.start, 1), (record.end, -1))
    )
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def _meets(record: Record, goals: Mapping[str, float]) -> bool:
    reached = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.latency}
    return all(reached[name] * 1000.0 <= limit for name, limit in goals.items())


def details(records: Sequence[Record], began: float) -> dict[str, list[Any]]:
    """Every request's own figures, in the order in which they were planned; times in seconds,
    `start_times` since the run `began`. A failed request has latency, TTFT and ITLs of what came.
    """
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.ttft if record.times else 0.0 for record in records],
        "itls": [record.itls for record in records],
        "latencies": [record.latency if record.times else 0.0 for record in records],
        "start_times": [record.start - began for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }

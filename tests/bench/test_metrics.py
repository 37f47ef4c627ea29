"""Exact figures of made-up records."""

from __future__ import annotations

import math
import re
from datetime import datetime

import pytest

from jaxpaged.bench import report
from jaxpaged.bench.metrics import Record, details, peak_concurrency, peak_rate, summarise


def record(
    start: float, *times: float, tokens: int, prompt: int = 10, error: str | None = None
) -> Record:
    end = times[-1] if times else start
    return Record(start, end, times, prompt, tokens, "text", error)


A = record(1.0, 1.5, 1.7, 2.1, 2.5, tokens=5)
B = record(1.0, 1.1, tokens=1)
FAILED = record(1.0, 1.2, tokens=9, error="status 500: no")


def test_one_request() -> None:
    assert A.ttft == pytest.approx(0.5)
    assert A.latency == pytest.approx(1.5)
    assert A.tpot == pytest.approx((1.5 - 0.5) / 4)
    assert A.itls == pytest.approx([0.2, 0.4, 0.4])
    assert B.tpot == 0.0
    assert B.itls == []


def test_a_run() -> None:
    summary = summarise([A, B, FAILED], 2.0)
    assert (summary.completed, summary.failed) == (2, 1)
    assert (summary.total_input_tokens, summary.total_output_tokens) == (20, 6)
    assert summary.request_throughput == 1.0
    assert summary.output_throughput == 3.0
    assert summary.total_token_throughput == 13.0
    assert summary.request_goodput is None
    assert summary.seconds["ttft"] == pytest.approx([0.5, 0.1])
    assert summary.seconds["tpot"] == pytest.approx([0.25])  # a single token has none
    assert summary.seconds["itl"] == pytest.approx([0.2, 0.4, 0.4])
    assert summary.seconds["e2el"] == pytest.approx([1.5, 0.1])


def test_statistics_in_milliseconds() -> None:
    found = summarise([A, B], 2.0).statistics([50, 99, 99.9])
    assert found["mean_ttft_ms"] == pytest.approx(300)
    assert found["median_ttft_ms"] == pytest.approx(300)
    assert found["std_ttft_ms"] == pytest.approx(200)
    assert found["p50_ttft_ms"] == pytest.approx(300)
    assert found["p99_ttft_ms"] == pytest.approx(100 + 400 * 0.99)
    assert found["p99.9_itl_ms"] == pytest.approx(400)
    assert found["mean_itl_ms"] == pytest.approx(1000 / 3)


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({"ttft": 499.0}, 1),  # B alone
        ({"ttft": 501.0}, 2),
        ({"tpot": 249.0}, 1),  # the TPOT of a single token is 0
        ({"ttft": 501.0, "e2el": 1499.0}, 1),
        ({"e2el": 1501.0, "tpot": 251.0}, 2),
    ],
)
def test_goodput_counts_requests_that_meet_every_goal(goals: dict[str, float], good: int) -> None:
    assert summarise([A, B, FAILED], 2.0, goals).request_goodput == good / 2.0


def test_nothing_succeeded() -> None:
    summary = summarise([FAILED], 0.5)
    assert summary.output_throughput == summary.max_output_tokens_per_s == 0.0
    assert set(summary.statistics([99]).values()) == {0.0}
    assert summarise([], 0.0).request_throughput == 0.0


def test_peak_rate_is_of_any_window() -> None:
    # Ten tokens in five chunks of two; three of them within one second, across a full second.
    chunks = record(0.0, 0.7, 0.9, 1.6, 3.0, 5.0, tokens=10)
    assert peak_rate([chunks], 1.0) == 6.0
    assert peak_rate([chunks, chunks], 1.0) == 12.0
    assert peak_rate([chunks], 0.5) == 8.0
    assert peak_rate([record(0.0, 1.0, 2.0, tokens=2)], 1.0) == 1.0  # exactly a window apart


def test_peak_concurrency() -> None:
    def span(start: float, end: float) -> Record:
        return record(start, end, tokens=1)

    assert peak_concurrency([span(0, 2), span(1, 3), span(2, 4)]) == 2
    assert peak_concurrency([span(0, 5), span(1, 2), span(1.5, 3)]) == 3
    assert peak_concurrency([]) == 0


def test_details() -> None:
    refused = record(1.25, tokens=0, error="status 400: no")
    found = details([A, refused], 1.0)
    assert found["ttfts"] == pytest.approx([0.5, 0.0])
    assert found["latencies"] == pytest.approx([1.5, 0.0])
    assert found["itls"][1] == []
    assert found["start_times"] == [0.0, 0.25]
    assert found["errors"] == ["", "status 400: no"]
    assert found["generated_texts"] == ["text", "text"]
    assert (found["input_lens"], found["output_lens"]) == ([10, 10], [5, 0])


def test_the_table() -> None:
    summary = summarise([A, B, FAILED], 2.0, {"ttft": 1000.0})
    load = report.Load(4.0, 1.0, 8)
    lines = report.lines(summary, load, ("ttft", "tpot", "itl", "e2el"), (99.0,))
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    labels = [
        "Successful requests:",
        "Failed requests:",
        "Maximum request concurrency:",
        "Request rate configured (RPS):",
        "Benchmark duration (s):",
        "Total input tokens:",
        "Total generated tokens:",
        "Request throughput (req/s):",
        "Request goodput (req/s):",
        "Output token throughput (tok/s):",
        "Peak output token throughput (tok/s):",
        "Peak concurrent requests:",
        "Total token throughput (tok/s):",
        "Mean TTFT (ms):",
        "Median TTFT (ms):",
        "P99 TTFT (ms):",
    ]
    rows = [line for line in lines[1:] if not line.startswith(("-", "="))]
    assert [row[:40].rstrip() for row in rows[: len(labels)]] == labels
    assert "Output token throughput (tok/s):         3.00" in lines
    assert "Successful requests:                     2" in lines
    titles = [line.strip("-") for line in lines if line.startswith("-")]
    assert titles == [
        "Time to First Token",
        "Time per Output Token (excl. 1st token)",
        "Inter-token Latency",
        "End-to-end Latency",
    ]
    assert {len(line) for line in lines if line.startswith("-")} == {50}


def test_lines_that_say_nothing_are_left_out() -> None:
    lines = report.lines(
        summarise([A], 1.0), report.Load(math.inf, 1.0, None), ("itl",), (50, 99.9)
    )
    text = "\n".join(lines)
    for label in ("concurrency:", "configured", "goodput", "TTFT"):
        assert label not in text
    assert "P99.9 ITL (ms):" in text


def test_json_keys() -> None:
    found = report.as_json(summarise([A], 1.0), (99.0,))
    assert list(found)[:11] == [
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
    ]
    rest = set(list(found)[11:])
    assert rest == {
        f"{kind}_{name}_ms"
        for kind in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    }


def test_file_names() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5)
    load = report.Load(math.inf, 1.0, None)
    assert report.file_name("openai", load, "a/b", now) == "openai-infqps-b-20260102-030405.json"
    load = report.Load(2.5, 1.0, 16)
    name = report.file_name("openai-chat", load, "/models/m/", now)
    assert re.fullmatch(r"openai-chat-2\.5qps-concurrency16-m-[0-9-]+\.json", name)

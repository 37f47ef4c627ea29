"""What is recorded: buckets, phases of requests, and readers beside the recording thread."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.block_pool import BlockPool
from jaxpaged.metrics import (
    ITERATION_TOKEN_BOUNDS,
    REQUEST_LATENCY_BOUNDS,
    TIME_TO_FIRST_TOKEN_BOUNDS,
    TOKEN_COUNT_BOUNDS,
    TOKEN_LATENCY_BOUNDS,
    EngineMetrics,
    FinishedRequest,
    Histogram,
    one_two_five,
)

REQUEST = FinishedRequest(
    reason="stop",
    num_prompt_tokens=100,
    num_cached_tokens=64,
    num_generated_tokens=11,
    longest_sample=11,
    max_tokens=16,
    n=1,
    num_preemptions=2,
    arrival=10.0,
    scheduled=10.5,
    first_token=11.0,
    last_token=13.0,
    finished=13.25,
)


def recorded(request: FinishedRequest) -> EngineMetrics:
    metrics = EngineMetrics()
    metrics.request_finished(request)
    return metrics


def test_a_value_on_a_bound_counts_in_the_bucket_that_the_bound_closes() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 5.001):
        histogram.observe(value)
    assert histogram.cumulative() == [(1, 2), (2, 4), (5, 5), (math.inf, 6)]
    assert histogram.count == 6
    assert histogram.sum == pytest.approx(14.501)


def test_bounds_above_the_largest_are_left_out_and_their_values_are_not() -> None:
    histogram = Histogram((1, 2, 5, 10))
    for value in (1, 2, 3, 50):
        histogram.observe(value)
    assert histogram.cumulative(4) == [(1, 1), (2, 2), (math.inf, 4)]


@given(st.lists(st.floats(0, 1e9)), st.one_of(st.none(), st.floats(0, 1e9)))
def test_pairs_count_what_is_at_most_their_bound(values: list[float], largest: float) -> None:
    histogram = Histogram(TOKEN_COUNT_BOUNDS)
    for value in values:
        histogram.observe(value)
    pairs = histogram.cumulative(largest)
    assert pairs == [(bound, sum(v <= bound for v in values)) for bound, _ in pairs]
    assert pairs[-1] == (math.inf, len(values))


def test_one_two_five() -> None:
    assert one_two_five(1) == (1,)
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(4096)[-3:] == (500, 1000, 2000)


def test_the_bounds_are_those_that_dashboards_know() -> None:
    assert (1, *(8 * 2**i for i in range(12))) == ITERATION_TOKEN_BOUNDS
    assert ITERATION_TOKEN_BOUNDS[-1] == 16384
    for bounds, first, last, number in (
        (TIME_TO_FIRST_TOKEN_BOUNDS, 0.001, 2560, 22),
        (TOKEN_LATENCY_BOUNDS, 0.01, 80, 19),
        (REQUEST_LATENCY_BOUNDS, 0.3, 7680, 21),
    ):
        assert list(bounds) == sorted(set(bounds))
        assert (bounds[0], bounds[-1], len(bounds)) == (first, last, number)


def test_the_phases_of_a_request_add_up() -> None:
    metrics = recorded(REQUEST)
    assert metrics.finished == {"stop": 1}
    sums = {
        name: histogram.sum
        for name in metrics.__dict__
        if isinstance(histogram := getattr(metrics, name), Histogram) and histogram.count
    }
    assert sums == {
        "prompt_tokens": 100,
        "generation_tokens": 11,
        "max_generation_tokens": 11,
        "params_max_tokens": 16,
        "params_n": 1,
        "preemptions": 2,
        "prefill_computed_tokens": 36,
        "e2e_latency": 3.25,
        "queue_time": 0.5,
        "prefill_time": 0.5,
        "decode_time": 2.0,
        "inference_time": 2.5,
        "time_per_output_token": 0.2,
    }
    assert all(getattr(metrics, name).count == 1 for name in sums)


def test_phases_that_never_came_are_not_counted() -> None:
    waiting = dataclasses.replace(
        REQUEST,
        reason="abort",
        num_generated_tokens=0,
        longest_sample=0,
        max_tokens=None,
        scheduled=None,
        first_token=None,
        last_token=None,
    )
    metrics = recorded(waiting)
    assert metrics.e2e_latency.count == 1
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time"):
        assert getattr(metrics, name).count == 0, name
    assert metrics.params_max_tokens.count == 0

    in_prefill = dataclasses.replace(waiting, scheduled=10.5)
    metrics = recorded(in_prefill)
    assert metrics.queue_time.count == 1
    assert metrics.prefill_time.count == 0


def test_one_token_has_no_time_per_further_token() -> None:
    metrics = recorded(dataclasses.replace(REQUEST, longest_sample=1, last_token=11.0))
    assert metrics.decode_time.count == 1
    assert metrics.time_per_output_token.count == 0


def test_samples_of_one_request_count_once_with_their_tokens_together() -> None:
    request = dataclasses.replace(REQUEST, n=3, num_generated_tokens=30, longest_sample=21)
    metrics = recorded(request)
    assert metrics.params_n.cumulative()[2] == (5, 1)
    assert metrics.generation_tokens.sum == 30
    assert metrics.max_generation_tokens.sum == 21
    assert metrics.time_per_output_token.sum == pytest.approx(2.0 / 20)


def test_steps_padding_and_rejections() -> None:
    metrics = EngineMetrics()
    step = {"tokens": 5, "launch_s": 0.001, "wait_s": 0.02}
    metrics.step(**step, padding=3, bucket="decode[8]", host_gap_s=None)
    metrics.step(**step, padding=1, bucket="decode[8]", host_gap_s=0.0)
    metrics.step(**step, padding=0, bucket="prefill[64]", host_gap_s=0.003)
    assert metrics.padding_tokens == {"decode[8]": 4, "prefill[64]": 0}
    assert metrics.iteration_tokens.count == metrics.launch_time.count == 3
    assert metrics.wait_time.sum == pytest.approx(0.06)
    assert metrics.host_gap.count == 2
    metrics.rejected("queue_full")
    metrics.rejected("queue_full")
    assert metrics.rejections == {"queue_full": 2}
    metrics.first_token(0.5)
    metrics.next_token(0.05)
    assert metrics.time_to_first_token.sum == 0.5
    assert metrics.inter_token_latency.sum == 0.05


def test_a_reader_beside_the_recording_thread_sees_whole_pairs() -> None:
    metrics = EngineMetrics()
    stop = threading.Event()

    def record() -> None:
        i = 0
        while not stop.is_set():
            i += 1
            metrics.next_token(i % 97 / 40)

    thread = threading.Thread(target=record)
    thread.start()
    try:
        seen = 0
        for _ in range(300):
            counts = [count for _, count in metrics.inter_token_latency.cumulative()]
            assert counts == sorted(counts)
            assert counts[-1] >= seen
            seen = counts[-1]
    finally:
        stop.set()
        thread.join(10)
    assert metrics.inter_token_latency.count == metrics.inter_token_latency.cumulative()[-1][1]


def test_blocks_by_state() -> None:
    pool = BlockPool(10, enable_caching=True)
    empty = {"free": 9, "cached": 0, "held": 0, "shared": 0, "null": 1}
    assert pool.count_by_state() == empty
    first, second, third = pool.get_new_blocks(3)
    pool.register(first, b"a")
    pool.touch([second])
    assert pool.count_by_state() == empty | {"free": 6, "held": 2, "shared": 1}
    pool.free_blocks([third, first])
    assert pool.count_by_state() == empty | {"free": 7, "cached": 1, "shared": 1}
    pool.free_blocks([second])
    assert pool.count_by_state() == empty | {"free": 7, "cached": 1, "held": 1}


def test_offline_use_needs_no_prometheus_client() -> None:
    code = "import sys, jaxpaged.metrics; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

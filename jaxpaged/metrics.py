"""What the engine counts about itself: histograms and totals, recorded without locks.

One thread records (the engine's), any thread reads. Each observation is a few additions on plain
ints, floats and lists, so a reader sees every value whole; a histogram's sum may be one observation
ahead of its buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

TIME_TO_FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Seconds."""

TOKEN_LATENCY_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
"""Seconds between two tokens of one request."""

REQUEST_LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Seconds a request spends in one of its phases, or in all of them."""

STEP_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0),
)
"""Seconds of one part of one step."""

ITERATION_TOKEN_BOUNDS = (1.0, *(float(2**power) for power in range(3, 15)))
"""Tokens computed in one step: 1, 8, 16, ..., 16384."""

SAMPLE_COUNT_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTION_BOUNDS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

_MOST_TOKENS = 10**8


def one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to and including `largest`."""
    bounds = []
    power = 1
    while power <= largest:
        bounds += [float(m * power) for m in (1, 2, 5) if m * power <= largest]
        power *= 10
    return tuple(bounds)


TOKEN_COUNT_BOUNDS = one_two_five(_MOST_TOKENS)
"""Tokens of one request. Wider than any context, so that nobody need know the model's length to
record; a reader leaves out what is beyond it (`Histogram.cumulative`)."""


class Histogram:
    """Counts per bucket; a value on a bound counts in the bucket that the bound closes."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """One a bound, then one for all that is above the last bound."""
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self, largest: float | None = None) -> list[tuple[float, int]]:
        """(upper bound, observations up to it), ending with (infinity, all of them).

        `largest`: leave out the bounds above it; what they held shows in the last pair only.
        """
        counts = list(self.counts)  # one copy, so that the pairs agree with one another
        pairs, total = [], 0
        for bound, count in zip(self.bounds, counts, strict=False):
            total += count
            if largest is None or bound <= largest:
                pairs.append((bound, total))
        pairs.append((float("inf"), sum(counts)))
        return pairs


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request that has ended. Times are `time.monotonic()` seconds, None where it never got
    so far."""

    reason: str
    """stop, length, abort or error."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens taken from the prefix cache at first admission."""
    num_generated_tokens: int
    """Of all its samples together."""
    longest_sample: int
    """Generated tokens of the longest one."""
    max_tokens: int | None
    n: int
    """Samples."""
    num_preemptions: int
    arrival: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    finished: float


class EngineMetrics:
    """Histograms and totals since the engine was made. See docs/metrics.md for each one's name."""

    def __init__(self) -> None:
        self.iteration_tokens = Histogram(ITERATION_TOKEN_BOUNDS)
        self.time_to_first_token = Histogram(TIME_TO_FIRST_TOKEN_BOUNDS)
        self.inter_token_latency = Histogram(TOKEN_LATENCY_BOUNDS)
        self.time_per_output_token = Histogram(TOKEN_LATENCY_BOUNDS)
        self.e2e_latency = Histogram(REQUEST_LATENCY_BOUNDS)
        self.queue_time = Histogram(REQUEST_LATENCY_BOUNDS)
        self.inference_time = Histogram(REQUEST_LATENCY_BOUNDS)
        self.prefill_time = Histogram(REQUEST_LATENCY_BOUNDS)
        self.decode_time = Histogram(REQUEST_LATENCY_BOUNDS)
        self.prompt_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.generation_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.max_generation_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.params_max_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.prefill_computed_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.params_n = Histogram(SAMPLE_COUNT_BOUNDS)
        self.preemptions = Histogram(PREEMPTION_BOUNDS)
        self.launch_time = Histogram(STEP_BOUNDS)
        self.wait_time = Histogram(STEP_BOUNDS)
        self.host_gap = Histogram(STEP_BOUNDS)
        self.padding_tokens: dict[str, int] = {}
        """Bucket -> rows that its steps computed for nobody."""
        self.finished: dict[str, int] = {}
        """Finish reason -> requests."""
        self.rejections: dict[str, int] = {}
        """Reason -> requests refused at the door."""

    def step(
        self,
        *,
        tokens: int,
        padding: int,
        bucket: str,
        launch_s: float,
        wait_s: float,
        host_gap_s: float | None,
    ) -> None:
        """One step: what it computed, how long its launch took and how long the host then waited
        for its results.

        `host_gap_s`: seconds for which the device had nothing to do before it; None when nobody
        waited (the first step after idling).
        """
        self.iteration_tokens.observe(tokens)
        self.launch_time.observe(launch_s)
        self.wait_time.observe(wait_s)
        if host_gap_s is not None:
            self.host_gap.observe(host_gap_s)
        self.padding_tokens[bucket] = self.padding_tokens.get(bucket, 0) + padding

    def first_token(self, seconds: float) -> None:
        """A request's first token came `seconds` after its arrival."""
        self.time_to_first_token.observe(seconds)

    def next_token(self, seconds: float, samples: int = 1) -> None:
        """The next token of so many samples came `seconds` after the one before."""
        self.inter_token_latency.observe(seconds, samples)

    def request_finished(self, request: FinishedRequest) -> None:
        """A request ended, for whatever reason. Once a request, however many samples it had."""
        self.finished[request.reason] = self.finished.get(request.reason, 0) + 1
        self.prompt_tokens.observe(request.num_prompt_tokens)
        self.generation_tokens.observe(request.num_generated_tokens)
        self.max_generation_tokens.observe(request.longest_sample)
        if request.max_tokens is not None:
            self.params_max_tokens.observe(request.max_tokens)
        self.params_n.observe(request.n)
        self.preemptions.observe(request.num_preemptions)
        self.prefill_computed_tokens.observe(request.num_prompt_tokens - request.num_cached_tokens)
        self.e2e_latency.observe(request.finished - request.arrival)
        self._phases(request)

    def _phases(self, request: FinishedRequest) -> None:
        """Only phases that took place: a zero for each of the others would drag the means down."""
        if request.scheduled is None:
            return
        self.queue_time.observe(request.scheduled - request.arrival)
        if request.first_token is None or request.last_token is None:
            return
        self.prefill_time.observe(request.first_token - request.scheduled)
        self.inference_time.observe(request.last_token - request.scheduled)
        decode = request.last_token - request.first_token
        self.decode_time.observe(decode)
        if request.longest_sample > 1:
            self.time_per_output_token.observe(decode / (request.longest_sample - 1))

    def rejected(self, reason: str) -> None:
        """A request was refused before it was queued."""
        self.rejections[reason] = self.rejections.get(reason, 0) + 1

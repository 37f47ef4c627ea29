"""Counters of the scheduler, all in tokens, blocks, requests or steps; no clocks here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpaged.core.kv_groups import Copy

MOST_RECENT_COPIES = 256


class PrefixHitWindow:
    """Prefix-cache hit rate in tokens over the most recent requests.

    Entries are whole steps; the newest one is always kept, even if it alone exceeds the window.
    """

    def __init__(self, max_requests: int = 1000) -> None:
        self._max_requests = max_requests
        self._steps: deque[tuple[int, int, int]] = deque()
        self._requests = self._queries = self._hits = 0

    def record(self, requests: int, queries: int, hits: int) -> None:
        """One step admitted `requests` that looked up `queries` tokens and found `hits`."""
        if requests == 0:
            return
        self._steps.append((requests, queries, hits))
        self._requests += requests
        self._queries += queries
        self._hits += hits
        while len(self._steps) > 1 and self._requests > self._max_requests:
            requests, queries, hits = self._steps.popleft()
            self._requests -= requests
            self._queries -= queries
            self._hits -= hits

    def reset(self) -> None:
        self._steps.clear()
        self._requests = self._queries = self._hits = 0

    @property
    def hit_rate(self) -> float:
        """Hits / queries, 0 when nothing was looked up."""
        return self._hits / self._queries if self._queries else 0.0


@dataclass(slots=True)
class SchedulerStats:
    """Totals since start. Look-ups count at admission only, so a request that is refused and
    tried again counts once; never when caching is off or the request skips it."""

    steps: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    """For lack of blocks, and by a reset or a failed step."""
    rope_restarts: int = 0
    """Requests started over because they grew into other rotary frequencies."""
    scheduled_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed for the first time (cached ones excluded)."""
    generation_tokens: int = 0
    """Tokens delivered."""
    recomputed_tokens: int = 0
    """Tokens computed again after a preemption or a restart."""
    forks: int = 0
    """Sequences that began as a copy by reference of another one's block table."""
    copied_blocks: int = 0
    """Blocks copied before they were written, because others held them or could find them."""
    recent_copies: deque[Copy] = field(default_factory=lambda: deque(maxlen=MOST_RECENT_COPIES))
    """The last ones of these."""
    peak_running: int = 0
    running_sum: int = 0
    """Running requests summed over steps; divided by `steps` the mean batch size."""
    peak_blocks_used: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preempted_query_tokens: int = 0
    """Look-ups of requests that resume, kept apart: they mostly find their own blocks."""
    preempted_hit_tokens: int = 0
    waste_sum: float = 0.0
    requests_finished: dict[str, int] = field(default_factory=dict)
    """Finish reason -> count."""
    window: PrefixHitWindow = field(default_factory=PrefixHitWindow)
    _step_lookups: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Requests, query tokens and hit tokens of the step that is being planned."""

    @property
    def kv_waste(self) -> float:
        """Share of allocated KV slots that hold no token, averaged over steps."""
        return self.waste_sum / self.steps if self.steps else 0.0

    @property
    def mean_running(self) -> float:
        return self.running_sum / self.steps if self.steps else 0.0

    def record_lookup(self, queries: int, hits: int, *, resumed: bool) -> None:
        """A request was admitted that had looked up `queries` tokens and found `hits`."""
        if resumed:
            self.preempted_query_tokens += queries
            self.preempted_hit_tokens += hits
            return
        self.prefix_query_tokens += queries
        self.prefix_hit_tokens += hits
        for index, amount in enumerate((1, queries, hits)):
            self._step_lookups[index] += amount

    def record_copies(self, copies: Sequence[Copy]) -> None:
        """A step was planned that begins with these."""
        self.copied_blocks += len(copies)
        self.recent_copies.extend(copies)

    def record_step(self, *, running: int, tokens: int, blocks: int, waste: float) -> None:
        """One step was planned with `blocks` held, a share `waste` of their slots empty."""
        self.steps += 1
        self.scheduled_tokens += tokens
        self.running_sum += running
        self.waste_sum += waste
        self.peak_running = max(self.peak_running, running)
        self.peak_blocks_used = max(self.peak_blocks_used, blocks)
        self.window.record(*self._step_lookups)
        self._step_lookups = [0, 0, 0]

"""Decides what each step computes: continuous batching over a paged KV pool.

There are no phases. A request has known tokens and computed tokens, and every step computes some
more of the difference; a step mixes decode rows with chunks of prompts. The next step is planned
before the tokens of the last one are read: a row that draws a token adds a placeholder, and the
row after it may be planned on top of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jaxpaged.core.integrity import check_scheduler
from jaxpaged.core.kv_manager import KVManager
from jaxpaged.core.plan import ScheduledRow, ScheduledStep, SchedulerConfig, TokenResult
from jaxpaged.core.refusals import check_prompt, outgrown_text, stalled_text
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.core.rope import enter_regime, must_restart
from jaxpaged.core.stats import SchedulerStats
from jaxpaged.core.waiting_queue import FcfsQueue, PriorityQueue, WaitingQueue
from jaxpaged.errors import InvalidRequestError

__all__ = ["ScheduledRow", "ScheduledStep", "Scheduler", "SchedulerConfig", "TokenResult"]

_STALL_LIMIT = 3
"""Plans without any row, with nothing in flight, before the watchdog ends a request. One is
normal: a lone request that outgrew the pool has just preempted itself."""


class Scheduler:
    """Owns all requests from `add` until they end. Single-threaded.

    The cycle is `schedule`, launch, and later `update` with the tokens, oldest step first; any
    number of steps may be in flight between. Nothing is lost, repeated or delivered twice by
    preemption, and `schedule` never stalls: see there.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KVManager(
            config.num_blocks,
            config.block_size,
            enable_caching=config.enable_prefix_caching,
            windows=config.windows,
            max_tokens_in_step=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        )
        self.stats = SchedulerStats()
        self._requests: dict[str, Request] = {}
        self._waiting: WaitingQueue = FcfsQueue() if config.policy == "fcfs" else PriorityQueue()
        self._running: dict[Request, None] = {}
        """In the order of admission; a dict so that any of them can leave in O(1)."""
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: dict[int, ScheduledStep] = {}
        self._failed: list[Request] = []
        self._num_added = self._num_admitted = self._next_step_id = 0

    # ---------------------------------------------------------------- what the engine can ask

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without slot: new and preempted ones."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and neither updated nor failed."""
        return len(self._in_flight)

    @property
    def kv_usage(self) -> float:
        """Share of usable blocks that running requests hold, 0..1."""
        return self.kv.pool.usage

    @property
    def running(self) -> Iterator[Request]:
        """In the order of admission."""
        return iter(self._running)

    @property
    def waiting(self) -> Iterator[Request]:
        """In the order in which they would be admitted."""
        return iter(self._waiting)

    @property
    def in_flight(self) -> Iterable[ScheduledStep]:
        """Oldest first."""
        return self._in_flight.values()

    def take_failed(self) -> list[Request]:
        """Requests that `schedule` itself had to end with an error since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def check_integrity(self) -> None:
        """Prove every invariant of pool, tables and queues. Raises `AssertionError`; O(blocks)."""
        check_scheduler(self)

    # ---------------------------------------------------------------- requests come and go

    def add(self, request: Request) -> None:
        """Queue a new request. Raises `InvalidRequestError` if it can never run."""
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} is in use; wait for it to end or take another.",
                param="request_id",
            )
        check_prompt(request, self.config)
        enter_regime(request, self.config.rope_rule, self.config.rope_threshold)
        self.kv.extend_hashes(request)
        request.queue_order = self._num_added
        self._num_added += 1
        self._waiting.push(request)
        self._requests[request.request_id] = request

    def finish(
        self,
        request: Request,
        reason: str,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """End a request in whatever phase it is; its blocks are free at once and its tokens still
        in flight are dropped. Does nothing if it has ended already."""
        if request.status is RequestStatus.FINISHED:
            return
        assert self._requests.get(request.request_id) is request, "a request of nobody's"
        was_running = request.status is RequestStatus.RUNNING
        if was_running:
            self._release(request)
        request.status = RequestStatus.FINISHED
        request.epoch += 1
        request.num_inflight = 0
        if not was_running:
            self._waiting.note_finished()
        del self._requests[request.request_id]
        self._record_ending(request, reason, stop_reason, error)

    def amend_ending(
        self,
        request: Request,
        reason: str,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """Correct how a request has ended, when its last token's text tells more than the token."""
        assert request.status is RequestStatus.FINISHED and request.finish_reason is not None
        counts = self.stats.requests_finished
        counts[request.finish_reason] -= 1
        if counts[request.finish_reason] == 0:
            del counts[request.finish_reason]
        self._record_ending(request, reason, stop_reason, error)

    def _record_ending(
        self, request: Request, reason: str, stop_reason: int | str | None, error: str | None
    ) -> None:
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.error = error
        counts = self.stats.requests_finished
        counts[reason] = counts.get(reason, 0) + 1

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached prefixes. False, and nothing changed, while requests hold blocks,
        unless `preempt_running`: they go back to waiting, in order, and are recomputed."""
        if preempt_running:
            self._preempt_all()
        return self.kv.pool.reset_prefix_cache()

    def fail_steps(self, steps: Sequence[ScheduledStep], error: str) -> list[Request]:
        """The device failed in these steps (all that were launched and depend on the failure) and
        the contents of the pool are gone. Returns the requests that ended with "error": those in
        the steps. All others are preempted, in order, and every hash is forgotten.
        """
        failed: list[Request] = []
        for step in steps:
            self._in_flight.pop(step.step_id)
            for row in step.rows:
                if row.epoch == row.request.epoch:
                    self.finish(row.request, "error", error=error)
                    failed.append(row.request)
        self.stats.failed_steps += len(steps)
        self._preempt_all()
        if not self.kv.pool.reset_prefix_cache():
            raise AssertionError("blocks are held though nothing runs")
        return failed

    # ---------------------------------------------------------------- planning a step

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or None if nothing can be launched now.

        None with no step in flight means that no request is left: a request that cannot go on is
        ended with an error (`take_failed`) rather than left waiting.
        """
        stalls = 0
        while True:
            step = self._plan()
            if step is not None or self._in_flight or not self._requests:
                return step
            stalls += 1
            if stalls >= _STALL_LIMIT:
                # The watchdog: nothing runs on the device and nothing can be planned.
                stuck = self._waiting.peek() or next(iter(self._running))
                self._fail(stuck, stalled_text(self, stuck))
                stalls = 0

    def _plan(self) -> ScheduledStep | None:
        preempted = self._restart_crossing() if self.config.rope_rule == "longrope" else []
        rows, budget = self._plan_running(preempted)
        for row in rows:
            self._commit(row)
        if not preempted:
            budget = self._admit(rows, budget)
        if not rows:
            return None
        step = ScheduledStep(
            step_id=self._next_step_id,
            rows=rows,
            num_tokens=self.config.max_num_batched_tokens - budget,
            preempted=preempted,
        )
        self._next_step_id += 1
        self._in_flight[step.step_id] = step
        self._record(step)
        return step

    def _plan_running(self, preempted: list[Request]) -> tuple[list[ScheduledRow], int]:
        """Rows of requests that run already, in the order of admission, and the budget left."""
        budget = self.config.max_num_batched_tokens
        cap = self.config.long_prefill_token_threshold or budget
        max_model_len, allocate_slots = self.config.max_model_len, self.kv.allocate_slots
        # Nothing is committed until the pass is over, since a later request may preempt an
        # earlier one (by priority) whose row then goes as if it had never been.
        rows: dict[Request, ScheduledRow] = {}
        for request in list(self._running):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:  # preempted in this very loop
                continue
            start = request.num_computed_tokens
            count = request.num_tokens_with_inflight - start
            if count == 0 or request.end_is_in_flight(max_model_len):
                continue
            if count > 1:
                count = min(count, cap, budget)
            while not allocate_slots(request, count):
                if self.kv.trim_all(self._running):
                    continue
                victim = self._choose_victim()
                self._preempt(victim)
                preempted.append(victim)
                refunded = rows.pop(victim, None)
                if refunded is not None:
                    budget += refunded.num_tokens
                if victim is request:
                    break
            else:
                rows[request] = self._row(request, start, count, admitted=False)
                budget -= count
        return list(rows.values()), budget

    def _admit(self, rows: list[ScheduledRow], budget: int) -> int:
        """Append rows of waiting requests while they fit; returns the budget left.

        The first that does not fit ends the search: nobody overtakes.
        """
        config, kv = self.config, self.kv
        cap = config.long_prefill_token_threshold or budget
        if not budget or not len(self._waiting) or len(self._running) == config.max_num_seqs:
            return budget
        promised = self._promised_blocks()
        while budget > 0 and len(self._running) < config.max_num_seqs:
            request = self._waiting.peek()
            # One that was preempted with a token in flight needs that token first.
            if request is None or request.num_inflight:
                break
            if config.blocks_for_sequence(request.num_tokens) > kv.pool.num_usable:
                self._fail(request, outgrown_text(request, config))
                continue
            if config.rope_rule == "longrope" and request.num_output_tokens:
                enter_regime(request, config.rope_rule, config.rope_threshold)
                kv.extend_hashes(request)
            headroom = config.watermark_blocks + promised if self._running else 0
            if kv.pool.num_free <= headroom:  # saves the look-up: a block is always needed
                break
            hits, num_hit = kv.get_computed_blocks(request)
            count = request.num_tokens - num_hit
            if config.enable_chunked_prefill:
                count = min(count, cap, budget)
            elif count > budget:
                break
            if not kv.allocate_slots(
                request, count, hit_tables=hits, reserve_full=True, headroom=headroom
            ):
                break
            self._waiting.pop()
            self._start(request, num_hit)
            row = self._row(request, num_hit, count, admitted=True)
            self._commit(row)
            rows.append(row)
            budget -= count
            promised += kv.blocks_to_come(request)
        return budget

    def _promised_blocks(self) -> int:
        """Blocks that running requests still need for tokens known already. They were admitted
        because these blocks were free, so a later admission must not take them."""
        blocks_to_come = self.kv.blocks_to_come
        return sum(blocks_to_come(r) for r in self._running if r.num_computed_tokens < r.num_tokens)

    def _row(self, request: Request, start: int, count: int, *, admitted: bool) -> ScheduledRow:
        reaches_end = start + count == request.num_tokens_with_inflight
        samples = reaches_end and not request.only_scores
        return ScheduledRow(request, request.epoch, start, count, samples, admitted)

    def _commit(self, row: ScheduledRow) -> None:
        """Take the row as computed, so that the next step can be planned on top of it."""
        request, end = row.request, row.start + row.num_tokens
        request.num_computed_tokens = end
        if row.samples:
            request.num_inflight += 1
        self.kv.register(request)
        if row.start < request.num_prompt_tokens or row.start < request.recompute_until:
            first_time = max(row.start, request.recompute_until)
            self.stats.recomputed_tokens += min(end, first_time) - row.start
            self.stats.prompt_tokens += max(0, min(end, request.num_prompt_tokens) - first_time)

    def _start(self, request: Request, num_hit: int) -> None:
        resumed = request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit
        request.slot = self._free_slots.pop()
        self._running[request] = None
        if self.config.enable_prefix_caching and not request.skip_prefix_cache:
            self.stats.record_lookup(request.num_tokens, num_hit, resumed=resumed)
        if not resumed:
            request.num_cached_tokens = num_hit
            request.admission_order = self._num_admitted
            self._num_admitted += 1

    def _record(self, step: ScheduledStep) -> None:
        # Only a request's own last blocks, one in each group, have empty slots, as shared blocks
        # are full; so no walk over blocks is needed to count a shared one once. What a window has
        # left behind in a block that it still needs is a token all the same.
        block_size, held = self.config.block_size, self.kv.pool.num_held
        empty = sum([r.capacity - r.num_computed_tokens for r in self._running])
        self.stats.record_step(
            running=len(self._running),
            tokens=step.num_tokens,
            blocks=held,
            waste=empty * len(self.config.windows) / (held * block_size),
        )

    # ---------------------------------------------------------------- results of a step

    def update(self, step: ScheduledStep, tokens: Sequence[int]) -> list[TokenResult]:
        """Read the tokens of the oldest step in flight; `tokens[i]` belongs to `step.rows[i]` and
        is ignored where the row draws none.

        Returns, in row order, one result for each row that drew a token and whose request has not
        ended since. A request preempted since still gets its token.
        """
        assert len(tokens) == len(step.rows), "one token a row"
        assert next(iter(self._in_flight), None) == step.step_id, "steps are read in order"
        del self._in_flight[step.step_id]
        results: list[TokenResult] = []
        for row, token in zip(step.rows, tokens, strict=True):
            request = row.request
            if row.epoch != request.epoch:
                continue
            if row.samples:
                results.append(TokenResult(request, token, self._append(request, token)))
            elif request.only_scores and row.start + row.num_tokens == request.num_prompt_tokens:
                self.finish(request, "length")
                results.append(TokenResult(request, None, finished=True))
        self.stats.generation_tokens += sum(r.token is not None for r in results)
        return results

    def _append(self, request: Request, token: int) -> bool:
        """Append a token that was in flight; True if it ends the request."""
        request.num_inflight -= 1
        request.token_ids.append(token)
        if request.num_tokens % self.config.block_size == 0:
            self.kv.extend_hashes(request)
            # The block may be full already: a later step was planned before its token was known.
            if request.status is RequestStatus.RUNNING:
                self.kv.register(request)
        verdict = request.stop_verdict(self.config.max_model_len)
        if verdict is None:
            return False
        self.finish(request, verdict[0], stop_reason=verdict[1])
        return True

    # ---------------------------------------------------------------- giving up blocks

    def _choose_victim(self) -> Request:
        """The running request that loses its blocks when they run out."""
        if self.config.policy == "fcfs":
            return next(reversed(self._running))
        return max(self._running, key=_urgency)

    def _preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self._set_back(request)

    def _restart_crossing(self) -> list[Request]:
        """Set back the running requests that the next row takes beyond the rope threshold: the KV
        that they have is of no use there. They come back, in the order that they had, with all
        their tokens known and so in the long regime, which nobody leaves."""
        threshold, max_model_len = self.config.rope_threshold, self.config.max_model_len
        crossing = [r for r in self._running if must_restart(r, threshold, max_model_len)]
        for request in reversed(crossing):
            self._set_back(request)
        self.stats.rope_restarts += len(crossing)
        return crossing

    def _set_back(self, request: Request) -> None:
        """From running to waiting; its tokens are kept and its KV is not."""
        request.recompute_until = max(request.recompute_until, request.num_computed_tokens)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        self._waiting.push(request)

    def _preempt_all(self) -> None:
        # Backwards, as each goes to the front of the queue: the first admitted comes out first.
        for request in list(reversed(self._running)):
            self._preempt(request)

    def _release(self, request: Request) -> None:
        self.kv.free(request)
        self._free_slots.append(request.slot)
        request.slot = -1
        del self._running[request]

    # ---------------------------------------------------------------- requests that cannot go on

    def _fail(self, request: Request, error: str) -> None:
        self.finish(request, "error", error=error)
        self._failed.append(request)


def _urgency(request: Request) -> tuple[int, float, int]:
    """Smaller is served sooner under the priority policy."""
    return request.priority, request.arrival_time, request.queue_order

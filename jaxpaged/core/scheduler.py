"""Decides what each step computes: continuous batching over a paged KV pool.

The next step is planned before the tokens of the last one are read: a row that draws a token adds a
placeholder, and the row after it may be planned on top of that.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpaged.core.groups import Group, make_groups
from jaxpaged.core.plan import ScheduledRow, ScheduledStep, SchedulerConfig, TokenResult
from jaxpaged.core.planner import Planner
from jaxpaged.core.refusals import check_prompt, stalled_text
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.core.rope import enter_regime
from jaxpaged.errors import InvalidRequestError

__all__ = ["ScheduledRow", "ScheduledStep", "Scheduler", "SchedulerConfig", "TokenResult"]

_STALL_LIMIT = 3
"""Plans without any row, with nothing in flight, before the watchdog ends a request. One is
normal: a lone request that outgrew the pool has just preempted itself."""


class Scheduler(Planner):
    """Owns all requests from `add` until they end. Single-threaded.

    The cycle is `schedule`, launch, and later `update` with the tokens, oldest step first; any
    number of steps may be in flight between. Nothing is lost, repeated or delivered twice by
    preemption, and `schedule` never stalls: see there.
    """

    # ---------------------------------------------------------------- requests come and go

    def add(self, request: Request) -> None:
        """Queue a new request. Raises `InvalidRequestError` if it can never run."""
        self.add_group([request])

    def add_group(self, requests: Sequence[Request]) -> None:
        """Queue samples of one prompt: it is computed once, and they share its KV.

        More of them than fit together are several groups, one after the other. Raises
        `InvalidRequestError`, and queues none, if they can never run.
        """
        self._queue(requests)
        make_groups(requests, self.config.max_num_seqs)

    def add_beams(self, requests: Sequence[Request]) -> None:
        """Queue a beam search: one request for each beam, all of one prompt. The first begins it;
        see `advance_beams`. Raises `InvalidRequestError`, and queues nothing, if it can never run.
        """
        width, most = len(requests), self.config.max_num_seqs
        if width > most:
            raise InvalidRequestError(
                f"beam_width={width} is more than max_num_seqs={most}, and the beams of a search "
                "run together; search with fewer, or raise --max-num-seqs.",
                param="beam_width",
            )
        self._queue(requests)
        Group(requests, is_beams=True)

    def _queue(self, requests: Sequence[Request]) -> None:
        first = requests[0]
        for request in requests:
            if request.request_id in self._requests:
                raise InvalidRequestError(
                    f"request_id {request.request_id!r} is in use; wait for it to end or take "
                    "another.",
                    param="request_id",
                )
        check_prompt(first, self.config)
        enter_regime(first, self.config.rope_rule, self.config.rope_threshold)
        self.kv.extend_hashes(first)
        for request in requests:
            if request is not first:
                request.inherit(first)
            request.queue_order = self._num_added
            self._num_added += 1
            self._waiting.push(request)
            self._requests[request.request_id] = request

    def advance_beams(self, group: Group, continuations: Sequence[tuple[int, int]]) -> None:
        """Go on with a search whose live beams have all been computed.

        `continuations` are the next live beams in their order: the index of a live beam, and a
        token to append to it. A beam without any gives its blocks back at once; one with several
        is forked.
        """
        before = group.live
        assert continuations and len(continuations) <= len(group.members)
        assert before[0].status is RequestStatus.RUNNING, "the search waits"
        assert not any(beam.num_inflight for beam in before), "a step of a beam is in flight"
        computed = all(beam.num_computed_tokens == beam.num_tokens for beam in before)
        assert computed, "a beam is not computed yet"
        goes_on = {id(before[index]) for index, _ in continuations}
        spare = [beam for beam in group.members if id(beam) not in goes_on]
        live: list[Request] = []
        for index, _ in continuations:
            parent = before[index]
            if id(parent) in goes_on:  # its first continuation takes its place
                goes_on.remove(id(parent))
                live.append(parent)
                continue
            child = spare.pop(0)
            child.inherit(parent)
            self._fork(parent, child)
            live.append(child)
        for beam in spare:
            self.kv.free(beam)
            beam.awaits_fork = True
        for beam, (_, token) in zip(live, continuations, strict=True):
            beam.token_ids.append(token)
            if beam.num_tokens % self.config.block_size == 0:
                self.kv.extend_hashes(beam)
        group.live = live
        self.stats.generation_tokens += len(live)

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
        block_size, max_model_len = self.config.block_size, self.config.max_model_len
        results: list[TokenResult] = []
        num_delivered = 0
        for index, (row, token) in enumerate(zip(step.rows, tokens, strict=True)):
            request = row.request
            if row.epoch != request.epoch:
                continue
            if not row.samples:
                if request.only_scores and row.start + row.num_tokens == request.num_prompt_tokens:
                    self.finish(request, "length")
                    results.append(TokenResult(request, None, True, index))
                continue
            request.num_inflight -= 1
            if request.group is not None and request.group.is_beams:
                results.append(TokenResult(request, None, False, index))
                continue
            known = request.token_ids
            known.append(token)
            total = len(known)
            if total % block_size == 0:
                self._name_block(request)
            # Most tokens end nothing, and need no verdict.
            may_end = (
                token in request.ending_ids or total >= request.longest or total >= max_model_len
            )
            ended = may_end and self._end_by_verdict(request)
            results.append(TokenResult(request, token, ended, index))
            num_delivered += 1
        self.stats.generation_tokens += num_delivered
        return results

    def _name_block(self, request: Request) -> None:
        """The last known token is the last of a block."""
        self.kv.extend_hashes(request)
        # The block may be full already: a later step was planned before its token was known.
        if request.status is RequestStatus.RUNNING:
            self.kv.register(request)

    def _end_by_verdict(self, request: Request) -> bool:
        """End the request if its last token does; True if so."""
        verdict = request.stop_verdict(self.config.max_model_len)
        if verdict is None:
            return False
        self.finish(request, verdict[0], stop_reason=verdict[1])
        return True

"""Requests on their way through the scheduler: who waits, who runs, and how one leaves again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxpaged.core.groups import Group
from jaxpaged.core.integrity import check_scheduler
from jaxpaged.core.kv_manager import KVManager
from jaxpaged.core.plan import ScheduledStep, SchedulerConfig
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.core.stats import SchedulerStats
from jaxpaged.core.waiting_queue import FcfsQueue, PriorityQueue, WaitingQueue


class Queues:
    """All requests of a scheduler with their slots and blocks, and the steps in flight."""

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

    # ---------------------------------------------------------------- endings

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
        group = request.group
        if group is not None and not group.is_beams:
            self._leave_group(request, group)
        # A beam's end is that of its search.
        for ending in list(group.members) if group and group.is_beams else [request]:
            was_running = ending.status is RequestStatus.RUNNING
            if was_running:
                self._release(ending)
            ending.status = RequestStatus.FINISHED
            ending.finish_reason, ending.error = reason, error
            ending.epoch += 1
            ending.num_inflight = 0
            ending.stand_alone()
            if not was_running:
                self._waiting.note_finished()
            del self._requests[ending.request_id]
        self._record_ending(request, reason, stop_reason, error)

    def _leave_group(self, request: Request, group: Group) -> None:
        """A sample goes on alone, or ends. If the others still wait for the prompt that it
        computes, one of them takes that over.
        """
        followers = group.followers(request)
        if followers:
            heir = followers[0]
            self._fork(request, heir)
            heir.fork_at = request.fork_at
            for follower in followers[1:]:
                follower.leader = heir
        request.stand_alone()
        group.leave(request)

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

    def _fail(self, request: Request, error: str) -> None:
        """It cannot go on; the engine is told by `take_failed`."""
        self.finish(request, "error", error=error)
        self._failed.append(request)

    # ---------------------------------------------------------------- giving up blocks

    def _choose_victims(self) -> list[Request]:
        """The running requests that lose their blocks when they run out: one, or a group.

        A group of samples with nobody else to make way gives up its last sample, which goes on by
        itself later.
        """
        if self.config.policy == "fcfs":
            victim = next(reversed(self._running))
        else:
            victim = max(self._running, key=_urgency)
        group = victim.group
        if group is None:
            return [victim]
        alone = len(group.members) == len(self._running)
        if group.is_beams and alone:
            # What it takes is counted when it resumes. Should it not get further with that, it is
            # to end rather than to try for ever.
            length = group.live[0].num_tokens
            group.is_stuck = length == group.lone_length
            group.lone_length = length
        if group.is_beams or not alone:
            return group.members[::-1]
        last = group.members[-1]
        self._leave_group(last, group)
        return [last]

    def _preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self._set_back(request)

    def _set_back(self, request: Request) -> None:
        """From running to waiting; its tokens are kept and its KV is not."""
        request.recompute_until = max(request.recompute_until, request.num_computed_tokens)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.stand_alone()
        if request.is_beam:
            # What is in flight is computed again: a search cannot go on while it waits.
            request.epoch += 1
            request.num_inflight = 0
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

    def _fork(self, parent: Request, child: Request) -> None:
        child.awaits_fork, child.leader = False, None
        self.kv.fork(parent, child)
        self.stats.forks += 1


def _urgency(request: Request) -> tuple[int, float, int]:
    """Smaller is served sooner under the priority policy."""
    return request.priority, request.arrival_time, request.queue_order

"""Proof, at any moment between two calls, that the scheduler's state is consistent."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from jaxpaged.core.block_pool import require
from jaxpaged.core.request import Request, RequestStatus

if TYPE_CHECKING:
    from jaxpaged.core.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises `AssertionError` that names the first broken invariant. O(blocks + requests)."""
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    scheduler.kv.pool.check(r.block_ids for r in running)
    require(len(waiting) == scheduler.num_waiting, "num_waiting is not the length of the queue")
    known = [*running, *waiting]
    require(len(set(known)) == len(known), "a request is queued twice")
    require(set(known) == set(scheduler._requests.values()), "queues and request map differ")
    max_num_seqs = scheduler.config.max_num_seqs
    slots = sorted([*scheduler._free_slots, *(r.slot for r in running)])
    require(slots == list(range(max_num_seqs)), "a slot is lost or used twice")
    inflight = Counter(
        row.request
        for step in scheduler.in_flight
        for row in step.rows
        if row.samples and row.epoch == row.request.epoch
    )
    for request in known:
        _check_request(scheduler, request)
        drawn = inflight.pop(request, 0)
        require(request.num_inflight == drawn, f"{request!r}: {drawn} tokens are in flight")
    require(not inflight, "an ended request has live rows in flight")
    for request in running:
        _check_running(scheduler, request)
    for request in waiting:
        statuses = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        require(request.status in statuses, f"{request!r} waits")
        idle = not request.block_ids and request.slot == -1 and request.num_computed_tokens == 0
        require(idle and request.num_registered_blocks == 0, f"{request!r} waits but holds KV")


def _check_request(scheduler: Scheduler, request: Request) -> None:
    config = scheduler.config
    total = request.num_tokens_with_inflight
    require(total <= config.max_model_len, f"{request!r} is past max_model_len")
    outputs = total - request.num_prompt_tokens
    require(outputs <= request.max_tokens, f"{request!r} is past max_tokens")
    full = request.num_tokens // config.block_size if config.enable_prefix_caching else 0
    require(
        len(request.block_hashes) == full, f"{request!r} has {len(request.block_hashes)} hashes"
    )


def _check_running(scheduler: Scheduler, request: Request) -> None:
    kv, computed = scheduler.kv, request.num_computed_tokens
    require(request.status is RequestStatus.RUNNING, f"{request!r} is in the running list")
    require(0 < computed <= request.num_tokens_with_inflight, f"{request!r} computed too much")
    require(len(request.block_ids) == kv.blocks_for(computed), f"{request!r}: table length")
    full = min(computed // kv.block_size, len(request.block_hashes))
    require(request.num_registered_blocks == full, f"{request!r}: {full} blocks are full")
    for index in range(full):
        found = kv.pool.block_hash(request.block_ids[index])
        require(found == request.block_hashes[index], f"{request!r}: block {index} misnamed")

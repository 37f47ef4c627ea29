"""Proof, at any moment between two calls, that the scheduler's state is consistent."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from jaxpaged.core.block_pool import NULL_BLOCK, require
from jaxpaged.core.request import Request, RequestStatus

if TYPE_CHECKING:
    from jaxpaged.core.kv_manager import KVManager
    from jaxpaged.core.plan import SchedulerConfig
    from jaxpaged.core.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises `AssertionError` that names the first broken invariant. O(blocks + requests)."""
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    scheduler.kv.pool.check([b for b in table if b] for r in running for table in r.tables)
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
        idle = not any(request.tables) and request.slot == -1 and request.num_computed_tokens == 0
        idle = idle and request.capacity == request.trimmed_at == 0
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
    _check_rope(config, request)


def _check_running(scheduler: Scheduler, request: Request) -> None:
    kv, computed = scheduler.kv, request.num_computed_tokens
    require(request.status is RequestStatus.RUNNING, f"{request!r} is in the running list")
    require(0 < computed <= request.num_tokens_with_inflight, f"{request!r} computed too much")
    require(len(request.tables) == len(kv.windows), f"{request!r}: a table for each group")
    blocks = kv.blocks_for(computed)
    require(request.capacity == blocks * kv.block_size, f"{request!r}: capacity")
    full = min(computed // kv.block_size, len(request.block_hashes))
    require(request.num_registered_blocks == full, f"{request!r}: {full} blocks are full")
    _check_trimming(scheduler, request)
    for group, table in enumerate(request.tables):
        require(len(table) == blocks, f"{request!r}: table length")
        _check_nulls(kv, request, group)
        for index, block in enumerate(table[:full]):
            if block != NULL_BLOCK:
                key = kv.key(request.block_hashes[index], group)
                require(kv.pool.block_hash(block) == key, f"{request!r}: block {index} misnamed")


def _check_trimming(scheduler: Scheduler, request: Request) -> None:
    """Blocks behind the windows were given back when the newest row was planned, or since."""
    computed, trimmed_at = request.num_computed_tokens, request.trimmed_at
    require(0 <= trimmed_at <= computed, f"{request!r}: trimmed at {trimmed_at}")
    rows = [row for step in scheduler.in_flight for row in step.rows if row.request is request]
    if rows:
        newest = rows[-1]
        require(newest.start + newest.num_tokens == computed, f"{request!r}: newest row")
        late = scheduler.kv.has_windows and trimmed_at < newest.start
        require(not late, f"{request!r}: not trimmed since {trimmed_at}")


def _check_nulls(kv: KVManager, request: Request, group: int) -> None:
    """Exactly the blocks are null of which no position from `trimmed_at` on sees any: with a window
    of W tokens those that end at or before position trimmed_at - W + 1; with full attention none.
    """
    table, window = request.tables[group], kv.windows[group]
    nulls = 0 if window is None else max(0, request.trimmed_at - window + 1) // kv.block_size
    require(not any(table[:nulls]), f"{request!r}: group {group} holds blocks behind its window")
    require(all(table[nulls:]), f"{request!r}: group {group} lacks blocks of its window")
    held = len(table) - nulls
    require(held == kv.held_blocks(request, group), f"{request!r}: group {group} is miscounted")
    require(held <= kv.caps[group], f"{request!r}: group {group} holds {held} blocks")


def _check_rope(config: SchedulerConfig, request: Request) -> None:
    """The regime follows from the tokens known at the admission; "longrope" starts over in time."""
    length, regime, threshold = request.rope_length, request.rope_regime, config.rope_threshold
    if config.rope_rule == "dynamic":
        require(length == request.num_prompt_tokens, f"{request!r}: rope length {length}")
        require(regime == (length if length > threshold else None), f"{request!r}: {regime}")
    elif config.rope_rule == "longrope":
        require(regime == ("long" if length > threshold else None), f"{request!r}: {regime}")
        inside = regime is not None or request.num_computed_tokens <= threshold
        require(inside, f"{request!r} has grown out of its regime")
    else:
        require(length == 0 and regime is None, f"{request!r} has a regime")

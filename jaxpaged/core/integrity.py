"""Proof, at any moment between two calls, that the scheduler's state is consistent."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from jaxpaged.core.block_pool import NULL_BLOCK, require
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.core.steady import steady_until

if TYPE_CHECKING:
    from jaxpaged.core.groups import Group
    from jaxpaged.core.kv_manager import KVManager
    from jaxpaged.core.plan import SchedulerConfig
    from jaxpaged.core.queues import Queues


def check_scheduler(scheduler: Queues) -> None:
    """Raises `AssertionError` that names the first broken invariant. O(blocks + requests)."""
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    require(not scheduler.kv.has_open_plan, "copies or pins of a plan are left")
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
        if request.awaits_fork:
            require(_holds_nothing(request), f"{request!r} holds KV before the fork")
            require(request.slot >= 0, f"{request!r} has no slot")
        else:
            _check_running(scheduler, request)
    for group in {id(r.group): r.group for r in known if r.group is not None}.values():
        _check_group(group)
    for request in waiting:
        statuses = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        require(request.status in statuses, f"{request!r} waits")
        idle = _holds_nothing(request) and request.slot == -1 and not request.awaits_fork
        require(idle, f"{request!r} waits but holds KV")


def _holds_nothing(request: Request) -> bool:
    counters = (request.num_computed_tokens, request.capacity, request.trimmed_at)
    return not any(request.tables) and not any((*counters, request.num_registered_blocks))


def _check_group(group: Group) -> None:
    """Members wait or run together. Those that await a fork follow another one that runs and has
    not come to the point yet, or are beams that are not live.
    """
    members = group.members
    require(0 < len(members) == len(set(members)), "a group is empty or has a member twice")
    require(group.is_beams or len(members) > 1, f"{members[0]!r} is in a group of its own")
    require(group.is_beams or group.live == members, f"{members[0]!r}: live and members differ")
    require(set(group.live) <= set(members), f"{members[0]!r}: a live one is no member")
    require(all(m.group is group for m in members), f"{members[0]!r}: a member of another group")
    runs = {m.status is RequestStatus.RUNNING for m in members}
    require(len(runs) == 1, f"{members[0]!r}: not all of a group run")
    for member in members:
        leader = member.leader
        waits = runs == {True} and (leader is not None or member not in group.live)
        require(member.awaits_fork == waits, f"{member!r}: awaits_fork is not {waits}")
        if leader is None:
            continue
        require(leader in group.live and not leader.awaits_fork, f"{member!r} follows {leader!r}")
        late = leader.num_computed_tokens >= leader.fork_at
        require(not late, f"{leader!r} has passed {leader.fork_at}, where {member!r} waits")
        common = leader.token_ids[: leader.fork_at] == member.token_ids[: leader.fork_at]
        require(common, f"{member!r} follows {leader!r}, which goes another way")


def _check_request(scheduler: Queues, request: Request) -> None:
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


def _check_running(scheduler: Queues, request: Request) -> None:
    kv, computed = scheduler.kv, request.num_computed_tokens
    require(request.status is RequestStatus.RUNNING, f"{request!r} is in the running list")
    require(0 < computed <= request.num_tokens_with_inflight, f"{request!r} computed too much")
    require(len(request.tables) == len(kv.windows), f"{request!r}: a table for each group")
    blocks = kv.blocks_for(computed)
    require(request.capacity == blocks * kv.block_size, f"{request!r}: capacity")
    for table in request.tables if computed % kv.block_size else ():
        alone = kv.pool.ref_count(table[-1]) == 1
        require(alone or request.shares_tail, f"{request!r} would write a block of others")
    full = min(computed // kv.block_size, len(request.block_hashes))
    require(request.num_registered_blocks == full, f"{request!r}: {full} blocks are full")
    if computed < request.steady_until:
        until = steady_until(request, kv, scheduler.config.max_model_len)
        require(request.steady_until <= until, f"{request!r} is steady until {until} only")
    _check_trimming(scheduler, request)
    for group, table in enumerate(request.tables):
        require(len(table) == blocks, f"{request!r}: table length")
        _check_nulls(kv, request, group)
        for index, block in enumerate(table[:full]):
            if block != NULL_BLOCK:
                key = kv.key(request.block_hashes[index], group)
                require(kv.pool.block_hash(block) == key, f"{request!r}: block {index} misnamed")


def _check_trimming(scheduler: Queues, request: Request) -> None:
    """Blocks behind the windows were given back when the newest row was planned, or since."""
    computed, trimmed_at = request.num_computed_tokens, request.trimmed_at
    require(0 <= trimmed_at <= computed, f"{request!r}: trimmed at {trimmed_at}")
    rows = [row for step in scheduler.in_flight for row in step.rows if row.request is request]
    if rows and rows[-1].epoch == request.epoch:
        newest = rows[-1]
        require(newest.start + newest.num_tokens == computed, f"{request!r}: newest row")
        # A row without tokens takes no blocks: its tables are as those of whom it was forked from.
        planned = newest.num_tokens > 0 and scheduler.kv.has_windows
        late = planned and trimmed_at < newest.start
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

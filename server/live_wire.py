"""The live view as JSON: the whole of it once, then what has changed.

Request ids are cut to their last characters and no text of any request is in it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.core.groups import common_length
from jaxpaged.core.snapshot import PoolSnapshot, RequestSnapshot
from jaxpaged.outputs import EngineStats

ID_CHARS = 8
"""How much of a request's id is shown: enough to know one's own by, nothing to act on."""

_ENGINE_ID = re.compile(r"(\d+)_(.+)-[0-9a-f]{8}(?:-(\d+))?", re.DOTALL)
"""Sample, what the client calls the request, and which of its prompts it is (`chunks.engine_id`,
`runs.start_run`)."""

COUNTERS = (
    "steps",
    "preemptions",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "prompt_tokens",
    "generation_tokens",
    "recomputed_tokens",
    "failed_steps",
    "forks",
    "copied_blocks",
)
"""Fields of `EngineStats`."""


@dataclass(frozen=True, slots=True)
class View:
    """One look at the engine. `seconds` is `time.monotonic()` when it was taken."""

    pool: PoolSnapshot
    counters: Mapping[str, int]
    status: str
    seconds: float


def counters_of(stats: EngineStats) -> dict[str, int]:
    return {name: getattr(stats, name) for name in COUNTERS}


def whole(view: View) -> dict[str, Any]:
    """Everything. `states` has a letter a block: 0 null, f free, c cached, h held, s shared."""
    pool = view.pool
    return {
        **_gauges(view),
        "block_size": pool.block_size,
        "windows": pool.windows,
        "states": pool.states,
        "shared": pool.shared,
        "requests": [_request(r) for r in (*pool.running, *pool.next_waiting)],
    }


def change(before: View, after: View) -> dict[str, Any] | None:
    """What to apply to a copy of `before` to get `after`; None if nothing has changed.

    `blocks` has [first id, letters] for each run of blocks that changed; `hits` are blocks that
    another request took over as they were, `evicted` cached ones that were given out for something
    else, `copies` has [source, destination] for each block copied on write (of very many the last
    ones). A table's change is [group, leading null entries, position, ids]: cut it at the position,
    append the ids, then set the leading entries to null. Raises `ValueError` if the pool's size
    differs.
    """
    old, new = before.pool, after.pool
    blocks = new.changed_since(old)
    requests = _request_changes(old, new)
    gauges = _gauges(after)
    if not blocks and not requests and {**_gauges(before), "seconds": after.seconds} == gauges:
        return None
    return {
        **gauges,
        "blocks": _runs(new.states, [b for b in blocks if new.states[b] != old.states[b]]),
        "shared": {b: new.refs[b] for b in blocks if new.refs[b] > 1},
        "hits": new.hits_since(old),
        "evicted": new.evicted_since(old, blocks),
        "copies": new.copies_since(old),
        "requests": requests,
    }


def _gauges(view: View) -> dict[str, Any]:
    return {
        "seconds": view.seconds,
        "status": view.status,
        "running": len(view.pool.running),
        "waiting": view.pool.num_waiting,
        "counts": view.pool.counts,
        "counters": view.counters,
    }


def _facts(request: RequestSnapshot) -> dict[str, Any]:
    return {
        "status": request.status,
        "tokens": request.num_tokens,
        "computed": request.num_computed_tokens,
        "prompt": request.num_prompt_tokens,
        "cached": request.num_cached_tokens,
        "preemptions": request.num_preemptions,
    }


def _request(request: RequestSnapshot) -> dict[str, Any]:
    found = _ENGINE_ID.fullmatch(request.request_id)
    sample, name, prompt = found.groups() if found else ("0", request.request_id, None)
    return {
        "key": request.key,
        "id": name[-ID_CHARS:],
        "place": int(prompt or 0),
        "sample": int(sample),
        **_facts(request),
        "tables": [table.tolist() for table in request.tables],
    }


def _request_changes(old: PoolSnapshot, new: PoolSnapshot) -> dict[str, Any]:
    """`order`: the keys of all that are listed now, if it changed; `new` in full; `changed`."""
    before = {r.key: r for r in (*old.running, *old.next_waiting)}
    listed = (*new.running, *new.next_waiting)
    fresh, changed = [], []
    for request in listed:
        known = before.get(request.key)
        # A request gets a table for each group of layers only when it is admitted.
        if known is None or len(known.tables) != len(request.tables):
            fresh.append(_request(request))
        elif known != request:
            changed.append(_request_change(known, request))
    order = [r.key for r in listed]
    changes: dict[str, Any] = {}
    if order != list(before):
        changes["order"] = order
    if fresh:
        changes["new"] = fresh
    if changed:
        changes["changed"] = changed
    return changes


def _request_change(old: RequestSnapshot, new: RequestSnapshot) -> dict[str, Any]:
    facts, before = _facts(new), _facts(old)
    tables = [
        [group, *_table_change(was, now)]
        for group, (was, now) in enumerate(zip(old.tables, new.tables, strict=True))
        if was != now
    ]
    changed = {name: value for name, value in facts.items() if value != before[name]}
    return {"key": new.key, **changed, **({"tables": tables} if tables else {})}


def _table_change(was: array[int], now: array[int]) -> tuple[int, int, list[int]]:
    """(leading null entries, where to cut, what to append). Tables nearly always only grow, or have
    another block in the place of their last one, which was copied.
    """
    behind = 0
    while behind < len(now) and now[behind] == 0:
        behind += 1
    if behind > len(was):
        return behind, 0, now.tolist()
    # The first entry, from there on, in which they differ.
    most = min(len(was), len(now)) - behind
    cut = behind + common_length(was[behind:], now[behind:], most)
    return behind, cut, now[cut:].tolist()


def _runs(states: str, blocks: list[int]) -> list[tuple[int, str]]:
    """[first id, letters] of ascending ids; small gaps are sent along, as that is shorter."""
    most_gap = 6
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block - runs[-1][1] <= most_gap:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return [(first, states[first : last + 1]) for first, last in runs]

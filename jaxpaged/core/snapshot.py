"""What the pool and the requests look like at one moment, copied so that others can read it.

Taking one costs a few plain copies on the engine's thread. What is derived from them (a letter a
block, counts, differences) is worked out later, on the thread of whoever looks.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from jaxpaged.core.block_pool import NULL_BLOCK
from jaxpaged.core.block_states import CACHED, SHARED, block_states, count_states
from jaxpaged.core.kv_groups import Copy, Windows
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler

_CHUNK = 512
"""Blocks that are compared at once when differences are looked for."""


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """One request. `tables` has one list of block ids for each group of layers."""

    key: int
    """Its rank among all requests ever added: unlike its id never used twice."""
    request_id: str
    status: str
    """waiting, running or preempted."""
    num_tokens: int
    """Prompt, and outputs read so far."""
    num_computed_tokens: int
    """Positions whose KV is in the pool once every launched step has run."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens taken from the prefix cache at the first admission."""
    num_hit_tokens: int
    """The same at the last admission, outputs included; 0 where it is a fork of another one."""
    num_preemptions: int
    tables: tuple[array[int], ...]


@dataclass(frozen=True)
class PoolSnapshot:
    """The pool and the queues between two steps. Immutable; safe to read on any thread."""

    block_size: int
    """Tokens per block."""
    windows: Windows
    """For each group of layers its window in tokens; None is full attention."""
    refs: Sequence[int]
    """Holders of each block, index = id."""
    hashes: Sequence[bytes | None]
    """What each block can be found by, index = id."""
    running: tuple[RequestSnapshot, ...]
    """In the order of admission."""
    next_waiting: tuple[RequestSnapshot, ...]
    """The first of those that wait, in the order in which they would be admitted."""
    num_waiting: int
    copied_blocks: int = 0
    """Blocks copied on write since the engine's start."""
    recent_copies: tuple[Copy, ...] = ()
    """The last ones of these, source and destination."""

    @property
    def num_blocks(self) -> int:
        """The null block included."""
        return len(self.refs)

    @cached_property
    def states(self) -> str:
        """One letter a block: NULL, FREE, CACHED, HELD or SHARED."""
        return block_states(self.refs, self.hashes)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Blocks in each state, by its name in STATE_NAMES; they add up to `num_blocks`."""
        return count_states(self.states)

    @cached_property
    def shared(self) -> dict[int, int]:
        """Block -> its holders, where there are at least two."""
        return {m.start(): self.refs[m.start()] for m in re.finditer(SHARED, self.states)}

    def changed_since(self, before: PoolSnapshot) -> list[int]:
        """Ids, ascending, of the blocks whose state or number of holders differs.

        Raises `ValueError` if the other snapshot is of a pool of another size.
        """
        self._check_same_pool(before)
        return [
            block
            for start in _unequal_chunks(self.refs, before.refs, self.states, before.states)
            for block in range(start, min(start + _CHUNK, self.num_blocks))
            if self.refs[block] != before.refs[block] or self.states[block] != before.states[block]
        ]

    def hits_since(self, before: PoolSnapshot) -> list[int]:
        """Blocks, ascending, that a prefix hit has given another holder: those that requests
        admitted since then found. More holders alone are no hit: a fork brings them, too.

        Of a prompt that was cached as a whole the last block is a copy, and so is not among them.
        """
        ran_before = {request.key: request.num_preemptions for request in before.running}
        found: set[int] = set()
        for request in self.running:
            if ran_before.get(request.key) != request.num_preemptions:
                pages = request.num_hit_tokens // self.block_size
                found.update(*(table[:pages] for table in request.tables))
        return sorted(found - {NULL_BLOCK})

    def copies_since(self, before: PoolSnapshot) -> list[Copy]:
        """Blocks copied on write since then, source and destination, the oldest first; of very many
        the last ones.
        """
        count = self.copied_blocks - before.copied_blocks
        return list(self.recent_copies[-count:]) if count else []

    def evicted_since(self, before: PoolSnapshot, changed: Sequence[int]) -> list[int]:
        """Those of the `changed` blocks that were cached and whose content is gone."""
        return [
            block
            for block in changed
            if before.states[block] == CACHED and self.hashes[block] != before.hashes[block]
        ]

    def _check_same_pool(self, before: PoolSnapshot) -> None:
        if before.num_blocks != self.num_blocks:
            raise ValueError(
                f"snapshots of pools of {before.num_blocks} and {self.num_blocks} blocks cannot be "
                "compared; send the whole of the second."
            )


def take_snapshot(scheduler: Scheduler, *, most_waiting: int = 16) -> PoolSnapshot:
    """Copy what can be seen, on the scheduler's own thread. O(blocks + entries of all tables), each
    a memory copy: a fraction of a millisecond for tens of thousands of blocks.

    `most_waiting` bounds how many of the waiting requests are listed.
    """
    pool = scheduler.kv.pool
    return PoolSnapshot(
        block_size=scheduler.config.block_size,
        windows=scheduler.config.windows,
        refs=pool.copy_refs(),
        hashes=pool.copy_hashes(),
        running=tuple(_copy(request) for request in scheduler.running),
        next_waiting=tuple(_copy(r) for r in islice(scheduler.waiting, most_waiting)),
        num_waiting=scheduler.num_waiting,
        copied_blocks=scheduler.stats.copied_blocks,
        recent_copies=tuple(scheduler.stats.recent_copies),
    )


def _copy(request: Request) -> RequestSnapshot:
    return RequestSnapshot(
        key=request.queue_order,
        request_id=request.request_id,
        status=request.status.value,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_hit_tokens=request.num_hit_tokens,
        num_preemptions=request.num_preemptions,
        tables=tuple(table[:] for table in request.tables),
    )


def _unequal_chunks(
    refs: Sequence[int], old_refs: Sequence[int], states: str, old_states: str
) -> Iterator[int]:
    """Starts of the chunks in which anything differs; the rest is compared at C speed."""
    for start in range(0, len(refs), _CHUNK):
        end = start + _CHUNK
        if states[start:end] != old_states[start:end] or refs[start:end] != old_refs[start:end]:
            yield start

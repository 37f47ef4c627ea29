"""Gives requests their KV blocks: cache hits, new blocks, registration, release."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from jaxpaged.core.block_pool import NULL_BLOCK, BlockPool
from jaxpaged.core.kv_groups import Copy, WindowHit, Windows, blocks_behind, ceil_div, window_cap
from jaxpaged.core.prefix_hash import extend_hashes, hash_tail
from jaxpaged.core.request import Request


@dataclass(frozen=True, slots=True)
class TailHit:
    """A cached block a group of layers that begins with the `num_tokens` tokens which follow the
    full blocks of a hit, up to the one before the last.
    """

    blocks: list[int]
    num_tokens: int


class KVManager:
    """Block tables of requests over one `BlockPool`. `block_size` is in tokens.

    `windows` has one entry for each group of layers, and a request one table for each group. In
    the table of a window group the null block stands for those behind the window. The limits of a
    step and of a sequence, in tokens, bound what a window group holds.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_caching: bool,
        windows: Windows = (None,),
        max_tokens_in_step: int = sys.maxsize,
        max_model_len: int = sys.maxsize,
    ) -> None:
        self.pool = BlockPool(num_blocks, enable_caching=enable_caching)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.windows = windows
        self.caps = tuple(
            sys.maxsize
            if window is None
            else window_cap(window, block_size, max_tokens_in_step, max_model_len)
            for window in windows
        )
        """The most blocks that one request holds in each group."""
        self._window_groups = [(g, w) for g, w in enumerate(windows) if w is not None]
        # Equal tokens have a block in each group, so the group is part of the name.
        self._tags = [b"" if len(windows) == 1 else bytes([g]) for g in range(len(windows))]
        self._copies: dict[Request, list[Copy]] = {}
        """Copies that the step being planned begins with, by who needs them."""
        self._pinned: list[int] = []
        """Sources of copies that might lose their last holder before the plan is made."""
        self._unwritten: set[int] = set()
        """Blocks that can be found already, but are only written by the step being planned."""

    @property
    def has_windows(self) -> bool:
        """True if some group gives blocks back while a request runs."""
        return bool(self._window_groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Entries of a table for this many tokens."""
        return -(-num_tokens // self.block_size)

    def key(self, block_hash: bytes, group: int) -> bytes:
        """What the pool knows the block of this hash in this group by."""
        return block_hash + self._tags[group]

    def held_blocks(self, request: Request, group: int) -> int:
        """Blocks in the request's table of this group, null ones not counted."""
        behind = blocks_behind(self.windows[group], request.trimmed_at, self.block_size)
        return request.capacity // self.block_size - behind

    def blocks_to_come(self, request: Request) -> int:
        """Blocks that a request still takes for its known tokens."""
        more = self.blocks_for(request.num_tokens) - request.capacity // self.block_size
        if not self._window_groups:
            return more * len(self.windows)
        return sum(
            min(more, cap - self.held_blocks(request, group)) for group, cap in enumerate(self.caps)
        )

    def copies_to_come(self, requests: Iterable[Request]) -> int:
        """Blocks that these still take to part where they share a last block."""
        sharers = [request for request in requests if request.shares_tail]
        if not sharers:
            return 0
        shared = {table[-1] for request in sharers for table in request.tables}
        return sum(self.pool.ref_count(block) - 1 for block in shared)

    def blocks_of_branch(self, request: Request, fork_at: int) -> int:
        """Blocks that a request takes for its known tokens, and the next one, if it shares the
        first `fork_at` tokens with another.
        """
        more = self.blocks_for(request.num_tokens + 1) - fork_at // self.block_size
        return sum(min(more, cap) for cap in self.caps)

    def blocks_of_tree(self, lengths: Sequence[tuple[int, int]]) -> int:
        """Blocks of several requests, by their tokens and what each shares with another (see
        `groups.shared_lengths`).
        """
        ends = [self.blocks_for(tokens) for tokens, _ in lengths]
        starts = [shared // self.block_size for _, shared in lengths]
        total = sum(ends) - sum(starts)
        return sum(min(total, sum(min(end, cap) for end in ends)) for cap in self.caps)

    def extend_hashes(self, request: Request) -> None:
        """Bring `request.block_hashes` up to its known tokens."""
        if not self.enable_caching:
            return
        extend_hashes(
            request.block_hashes,
            request.token_ids,
            self.block_size,
            cache_salt=request.cache_salt,
            rope_regime=request.rope_regime,
        )
        if request.tail_hash is None and request.num_prompt_tokens % self.block_size:
            request.tail_hash = hash_tail(
                request.block_hashes,
                request.prompt_token_ids,
                self.block_size,
                cache_salt=request.cache_salt,
                rope_regime=request.rope_regime,
            )

    # ---------------------------------------------------------------- cached prefixes

    def get_computed_blocks(
        self, request: Request, num_tokens: int | None = None
    ) -> tuple[list[list[int]], int]:
        """The longest prefix that every group has cached as (one table a group, tokens). A pure
        look-up: nothing is held yet.

        At least the last of the first `num_tokens` tokens (default: of all known ones) is left to
        compute, because its logits are needed.
        """
        tables: list[list[int]] = [[] for _ in self.windows]
        if not self.enable_caching or request.skip_prefix_cache:
            return tables, 0
        end = request.num_tokens if num_tokens is None else num_tokens
        hashes = request.block_hashes[: (end - 1) // self.block_size]
        for group, window in enumerate(self.windows):
            if window is None:
                tables[group] = self._full_hit(hashes, group)
                del hashes[len(tables[group]) :]
        length = len(hashes)
        if self._window_groups:
            length = self._add_window_hits(tables, hashes)
        for table in tables:
            del table[length:]
        return tables, length * self.block_size

    def get_tail(self, request: Request, num_hit: int, num_tokens: int) -> TailHit | None:
        """What makes a hit of `num_hit` tokens, in full blocks, one of all `num_tokens` tokens but
        the last: a cached block with the rest. Its content is to be copied, as the request goes on
        in the same block. None if there is none, or if only one token is left anyway.
        """
        size = self.block_size
        missing = num_tokens - 1 - num_hit
        if not self.enable_caching or request.skip_prefix_cache or not 0 < missing < size:
            return None
        find: Callable[[bytes], int | None]
        if num_tokens % size == 0:
            name, find = request.block_hashes[num_tokens // size - 1], self.pool.get_cached
        elif num_tokens == request.num_prompt_tokens and request.tail_hash is not None:
            name, find = request.tail_hash, self.pool.get_tail
        else:
            return None
        blocks: list[int] = []
        for tag in self._tags:
            block = find(name + tag)
            # A copy is made before the step writes anything.
            if block is None or block in self._unwritten:
                return None
            blocks.append(block)
        return TailHit(blocks, missing)

    def _full_hit(self, hashes: Sequence[bytes], group: int) -> list[int]:
        """Blocks of full attention, up to the first that is not cached."""
        hits: list[int] = []
        get_cached, tag = self.pool.get_cached, self._tags[group]
        for key in (block_hash + tag for block_hash in hashes) if tag else hashes:
            block = get_cached(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def _add_window_hits(self, tables: list[list[int]], hashes: Sequence[bytes]) -> int:
        """Fill in the tables of window groups; returns the length that suits every group.

        A group can only shorten the prefix, and has to look again when another one did.
        """
        hits, length = {}, len(hashes)
        for group, window in self._window_groups:
            lookup = partial(self._cached_block, hashes, group)
            hits[group] = WindowHit(lookup, ceil_div(window - 1, self.block_size), length)
        before = -1
        while length != before:
            before = length
            for hit in hits.values():
                length = hit.cut(length)
        for group, hit in hits.items():
            tables[group] = hit.table(length)
        return length

    def _cached_block(self, hashes: Sequence[bytes], group: int, index: int) -> int | None:
        return self.pool.get_cached(hashes[index] + self._tags[group])

    # ---------------------------------------------------------------- taking and giving back

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        hit_tables: Sequence[Sequence[int]] = (),
        tail: TailHit | None = None,
        reserve_full: bool = False,
        headroom: int = 0,
    ) -> bool:
        """Extend the tables so that `num_new_tokens` more can be computed. False: they do not fit,
        and nothing was changed, except that blocks behind the windows are given back in any case.

        `hit_tables` (from `get_computed_blocks`, in this same step) are the first entries of the
        tables of a request that holds nothing yet, and `tail` (from `get_tail`) is copied to what
        follows them. A last block that others hold too is copied as well. `reserve_full` asks for
        room for all known tokens, though only the blocks of the new ones are taken. `headroom`
        blocks must remain free on top.
        """
        assert num_new_tokens > 0, "an allocation for no tokens"
        copied: Sequence[int] = ()
        if request.shares_tail:
            copied = self._groups_to_copy(request)
            request.shares_tail = bool(copied)  # the last holder of a block writes it in place
        if self._window_groups and request.capacity:
            self.trim(request)
        if request.num_computed_tokens + num_new_tokens <= request.capacity:
            # The last block has room; of some beams it must be copied first.
            if copied and len(copied) + headroom > self.pool.num_free:
                return False
            self._copy_on_write(request, copied)
            return True
        num_hit = len(hit_tables[0]) if hit_tables else 0
        assert not num_hit or not request.capacity, "hits for a request that already holds blocks"
        start = request.num_computed_tokens + num_hit * self.block_size
        start += tail.num_tokens if tail else 0
        have = request.capacity // self.block_size + num_hit
        num_new = self.blocks_for(start + num_new_tokens) - have
        known = self.blocks_for(request.num_tokens) - have if reserve_full else 0
        required = self._required(num_new, known, hit_tables) + len(copied)
        if tail:
            required += self.pool.count_free(tail.blocks)
        if required > 0 and required + headroom > self.pool.num_free:
            return False
        if len(request.tables) != len(self.windows):  # a new request knows of one group
            request.tables = [array("i") for _ in self.windows]
        # Before new blocks are taken, in any group: those could otherwise be the hits themselves.
        for table, hits in zip(request.tables, hit_tables, strict=False):
            self.pool.touch(hits)
            table.extend(hits)
        if tail:
            self.pool.touch(tail.blocks)
            self._pinned += tail.blocks
        if num_hit:
            request.num_registered_blocks = num_hit
        self._copy_on_write(request, copied)
        for table in request.tables if num_new else ():
            table.extend(self.pool.get_new_blocks(num_new))
        request.capacity = (have + num_new) * self.block_size
        request.trimmed_at = start
        if tail:
            ours = [table[have] for table in request.tables]
            self._copies[request] = list(zip(tail.blocks, ours, strict=True))
            self._trim(request, start)
        return True

    def _groups_to_copy(self, request: Request) -> list[int]:
        """Groups in which another one holds the block that the request writes next."""
        index = request.num_computed_tokens // self.block_size
        return self.pool.find_shared([table[index] for table in request.tables])

    def _copy_on_write(self, request: Request, groups: Sequence[int]) -> None:
        """Give the request a last block of its own in these groups.

        The copies of a step are made before it writes any KV, and all read before any is written;
        so a source may be given up here, and even be given out again in the same step.
        """
        index = request.num_computed_tokens // self.block_size
        for group in groups:
            table = request.tables[group]
            (ours,) = self.pool.get_new_blocks(1)
            self._copies.setdefault(request, []).append((table[index], ours))
            self.pool.free_blocks([table[index]])
            table[index] = ours
        request.shares_tail = False

    @property
    def has_open_plan(self) -> bool:
        """True between an allocation that needs copies and `take_copies`."""
        return bool(self._copies or self._pinned)

    def begin_plan(self) -> None:
        """What has been registered so far is written by steps that run before the next one."""
        self._unwritten.clear()

    def take_copies(self) -> list[Copy]:
        """The plan of a step is complete: the copies that it begins with, no block twice as a
        destination. Those of requests that were set back again are not among them.
        """
        copies = [copy for of_request in self._copies.values() for copy in of_request]
        self._copies.clear()
        if self._pinned:
            self.pool.free_blocks(self._pinned)
            self._pinned.clear()
        return copies

    def fork(self, parent: Request, child: Request) -> None:
        """Let a request share all that the parent has computed, in place of what it holds. Of their
        last block, if it is not full, whoever writes next gets a copy.
        """
        assert parent.num_computed_tokens > 0
        common = 0
        if child.capacity:
            common = _common_start(child.tables, parent.tables)
            self._give_back(child, common)
        for table in parent.tables:
            self.pool.touch(table[common:])
        parent.steady_until = child.steady_until = 0
        child.tables = [table[:] for table in parent.tables]
        child.num_hit_tokens = 0
        child.shares_tail = False
        child.capacity, child.trimmed_at = parent.capacity, parent.trimmed_at
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_registered_blocks = parent.num_registered_blocks
        if parent.num_computed_tokens % self.block_size:
            parent.shares_tail = child.shares_tail = True

    def share(
        self, parent: Request, request: Request, hit_tables: Sequence[Sequence[int]], num_hit: int
    ) -> None:
        """Let a request take a hit (from `get_computed_blocks`) that is longer than what it has, if
        it has anything, and than what it shares with the parent, which may be itself. Of that it
        takes the parent's blocks, as the cache may have others with the same content: for those
        there might be no room.
        """
        shared = parent.num_computed_tokens // self.block_size
        before, parents = request.tables, parent.tables
        request.tables = [array("i", hits) for hits in hit_tables]
        for table, theirs in zip(request.tables, parents, strict=True):
            for index in range(shared):
                if NULL_BLOCK not in (table[index], theirs[index]):
                    table[index] = theirs[index]
            self.pool.touch(table)
        for table in before:
            self.pool.free_blocks(table[::-1])
        request.shares_tail = False
        request.capacity = request.trimmed_at = request.num_computed_tokens = num_hit
        request.num_hit_tokens = num_hit
        request.num_registered_blocks = num_hit // self.block_size

    def _required(self, num_new: int, known: int, hit_tables: Sequence[Sequence[int]]) -> int:
        """Free blocks, over all groups, for `num_new` more entries in each table now and, if that
        is more, `known` in the end. Only a group's cap of them are ever held at once."""
        if not hit_tables and not known:
            return num_new * len(self.windows)
        required = 0
        for group, cap in enumerate(self.caps):
            # Hits that nobody holds are in the free list now and leave it when they are taken.
            asleep = self.pool.count_free(hit_tables[group]) if hit_tables else 0
            required += max(num_new + asleep, min(known + asleep, cap))
        return required

    def trim(self, request: Request) -> bool:
        """Give back the blocks behind the windows of a request that has its tables; True if there
        were any. They stay in the cache, those deepest in the sequence to be evicted first.

        Steps run in order on the device, so nobody who is given such a block can write it before
        the steps in flight have read it.
        """
        return self._trim(request, request.num_computed_tokens)

    def _trim(self, request: Request, computed: int) -> bool:
        trimmed = False
        request.trimmed_at = computed
        for group, window in self._window_groups:
            table, size = request.tables[group], self.block_size
            index = end = blocks_behind(window, computed, size)
            while index and table[index - 1] != NULL_BLOCK:
                index -= 1
            if index < end:
                self.pool.free_blocks(table[index:end][::-1])
                table[index:end] = array("i", [NULL_BLOCK]) * (end - index)
                trimmed = True
        return trimmed

    def trim_all(self, requests: Iterable[Request]) -> bool:
        """`trim` each; True if any block was given back."""
        if not self._window_groups:
            return False
        trimmed = [self.trim(request) for request in requests if request.capacity]
        return any(trimmed)

    def register(self, request: Request) -> None:
        """Make the request's full blocks findable.

        Counted are blocks whose tokens are all known and which a scheduled step fills; the caller
        promises that the step runs, or that the whole cache is reset. A request in the same step
        may hit them, as a step writes all KV of a layer before it reads any. A block that has left
        the window before its tokens were known is never registered.
        """
        if request.num_computed_tokens < (request.num_registered_blocks + 1) * self.block_size:
            return
        full = min(request.num_computed_tokens // self.block_size, len(request.block_hashes))
        first = request.num_registered_blocks
        if full <= first:
            return
        hashes = request.block_hashes[first:full]
        for table, tag in zip(request.tables, self._tags, strict=True):
            blocks = table[first:full]
            self.pool.register_all(blocks, [name + tag for name in hashes] if tag else hashes)
            self._unwritten.update(blocks)
        request.num_registered_blocks = full

    def register_tail(self, request: Request) -> None:
        """Make the last block of the prompt findable, now that a scheduled step computes its end;
        as `register`.
        """
        if request.tail_hash is None:
            return
        index = request.num_prompt_tokens // self.block_size
        for table, tag in zip(request.tables, self._tags, strict=True):
            if table[index] != NULL_BLOCK:
                self.pool.register_tail(table[index], request.tail_hash + tag)
                self._unwritten.add(table[index])

    def free(self, request: Request) -> None:
        """Give up all blocks of the request; it has computed nothing afterwards.

        The deepest blocks are evicted first, the most shareable ones last; those of one position
        together, as they are of use only together.
        """
        self._give_back(request, 0)
        self._copies.pop(request, None)
        request.shares_tail = False
        # New ones: somebody may still look at the old buffers.
        request.tables = [array("i") for _ in request.tables]
        request.capacity = request.trimmed_at = request.steady_until = 0
        request.num_registered_blocks = 0
        request.num_computed_tokens = request.num_hit_tokens = 0

    def _give_back(self, request: Request, start: int) -> None:
        """All blocks from an index of the tables on."""
        tables = [table[start:][::-1] for table in request.tables]
        if len(tables) == 1:
            self.pool.free_blocks(tables[0])
        else:
            backwards = zip(*tables, strict=True)
            self.pool.free_blocks([block for column in backwards for block in column])


def _common_start(ours: Sequence[array[int]], theirs: Sequence[array[int]]) -> int:
    """A number of entries that two requests have in common at the start of all their tables; few
    more are. Beams of a search mostly differ in their last blocks alone.
    """
    common = min(len(ours[0]), len(theirs[0]))
    for our, their in zip(ours, theirs, strict=True):
        back = 1
        while our[:common] != their[:common]:
            common, back = max(0, common - back), 2 * back
    return common

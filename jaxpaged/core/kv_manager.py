"""Gives requests their KV blocks: cache hits, new blocks, registration, release."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import partial

from jaxpaged.core.block_pool import NULL_BLOCK, BlockPool
from jaxpaged.core.kv_groups import WindowHit, Windows, blocks_behind, ceil_div, window_cap
from jaxpaged.core.prefix_hash import extend_hashes
from jaxpaged.core.request import Request


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

    def extend_hashes(self, request: Request) -> None:
        """Bring `request.block_hashes` up to its known tokens."""
        if self.enable_caching:
            extend_hashes(
                request.block_hashes,
                request.token_ids,
                self.block_size,
                cache_salt=request.cache_salt,
                rope_regime=request.rope_regime,
            )

    # ---------------------------------------------------------------- cached prefixes

    def get_computed_blocks(self, request: Request) -> tuple[list[list[int]], int]:
        """The longest prefix that every group has cached as (one table a group, tokens). A pure
        look-up: nothing is held yet.

        At least the last known token is left to compute, because its logits are needed.
        """
        tables: list[list[int]] = [[] for _ in self.windows]
        if not self.enable_caching or request.skip_prefix_cache:
            return tables, 0
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
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
        reserve_full: bool = False,
        headroom: int = 0,
    ) -> bool:
        """Extend the tables so that `num_new_tokens` more can be computed. False: they do not fit,
        and nothing was changed, except that blocks behind the windows are given back in any case.

        `hit_tables` (from `get_computed_blocks`, in this same step) are the first entries of the
        tables of a request that holds nothing yet. `reserve_full` asks for room for all known
        tokens, though only the blocks of the new ones are taken. `headroom` blocks must remain
        free on top.
        """
        assert num_new_tokens > 0, "an allocation for no tokens"
        if request.num_computed_tokens + num_new_tokens <= request.capacity:
            if self._window_groups:
                self.trim(request)
            return True  # most decode rows: the last block has room
        if self._window_groups and request.capacity:
            self.trim(request)
        num_hit = len(hit_tables[0]) if hit_tables else 0
        assert not num_hit or not request.capacity, "hits for a request that already holds blocks"
        start = request.num_computed_tokens + num_hit * self.block_size
        have = request.capacity // self.block_size + num_hit
        num_new = self.blocks_for(start + num_new_tokens) - have
        known = self.blocks_for(request.num_tokens) - have if reserve_full else 0
        required = self._required(num_new, known, hit_tables)
        if required > 0 and required + headroom > self.pool.num_free:
            return False
        if len(request.tables) != len(self.windows):  # a new request knows of one group
            request.tables = [array("i") for _ in self.windows]
        # Before new blocks are taken, in any group: those could otherwise be the hits themselves.
        for table, hits in zip(request.tables, hit_tables, strict=False):
            self.pool.touch(hits)
            table.extend(hits)
        if num_hit:
            request.num_registered_blocks = num_hit
        for table in request.tables:
            table.extend(self.pool.get_new_blocks(num_new))
        request.capacity = (have + num_new) * self.block_size
        request.trimmed_at = start
        return True

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
        trimmed = False
        computed = request.trimmed_at = request.num_computed_tokens
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
        trimmed = [self.trim(request) for request in requests]
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
        for index in range(request.num_registered_blocks, full):
            block_hash = request.block_hashes[index]
            for table, tag in zip(request.tables, self._tags, strict=True):
                if table[index] != NULL_BLOCK:
                    self.pool.register(table[index], block_hash + tag)
        request.num_registered_blocks = max(full, request.num_registered_blocks)

    def free(self, request: Request) -> None:
        """Give up all blocks of the request; it has computed nothing afterwards.

        The deepest blocks are evicted first, the most shareable ones last; those of one position
        together, as they are of use only together.
        """
        tables = request.tables
        if len(tables) == 1:
            self.pool.free_blocks(tables[0][::-1])
        else:
            backwards = zip(*(table[::-1] for table in tables), strict=True)
            self.pool.free_blocks([block for column in backwards for block in column])
        # New ones: somebody may still look at the old buffers.
        request.tables = [array("i") for _ in tables]
        request.capacity = request.trimmed_at = 0
        request.num_registered_blocks = 0
        request.num_computed_tokens = 0

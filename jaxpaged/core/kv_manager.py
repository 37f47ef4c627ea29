"""Gives requests their KV blocks: cache hits, new blocks, registration, release."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from jaxpaged.core.block_pool import BlockPool
from jaxpaged.core.prefix_hash import extend_hashes
from jaxpaged.core.request import Request


class KVManager:
    """Block tables of requests over one `BlockPool`. `block_size` is in tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, enable_caching=enable_caching)
        self.block_size = block_size
        self.enable_caching = enable_caching

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def extend_hashes(self, request: Request) -> None:
        """Bring `request.block_hashes` up to its known tokens."""
        if self.enable_caching:
            extend_hashes(
                request.block_hashes,
                request.token_ids,
                self.block_size,
                cache_salt=request.cache_salt,
            )

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """The longest cached prefix as (block ids, tokens). A pure look-up: nothing is held yet.

        At least the last known token is left to compute, because its logits are needed.
        """
        hits: list[int] = []
        if not self.enable_caching or request.skip_prefix_cache:
            return hits, 0
        get_cached = self.pool.get_cached
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = get_cached(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits, len(hits) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        hit_block_ids: Sequence[int] = (),
        reserve_full: bool = False,
        headroom: int = 0,
    ) -> bool:
        """Extend the table so that `num_new_tokens` more can be computed. False: they do not fit,
        and nothing at all was changed.

        `hit_block_ids` (from `get_computed_blocks`, in this same step) come first in the table of
        a request that holds nothing yet. `reserve_full` asks for room for all known tokens, though
        only the blocks of the new ones are taken. `headroom` blocks must remain free on top.
        """
        assert num_new_tokens > 0, "an allocation for no tokens"
        table = request.block_ids
        if table and request.num_computed_tokens + num_new_tokens <= len(table) * self.block_size:
            return True  # most decode rows: the last block has room
        assert not hit_block_ids or not table, "hits for a request that already holds blocks"
        num_after = request.num_computed_tokens + num_new_tokens
        num_after += len(hit_block_ids) * self.block_size
        have = len(table) + len(hit_block_ids)
        num_new = self.blocks_for(num_after) - have
        required = num_new
        if reserve_full:
            required = max(num_new, self.blocks_for(request.num_tokens) - have)
        # Hits that nobody holds are in the free list now and leave it when they are taken.
        required += sum(self.pool.ref_count(block) == 0 for block in hit_block_ids)
        if required > 0 and required + headroom > self.pool.num_free:
            return False
        if hit_block_ids:
            # Before new blocks are taken: those could otherwise be the hits themselves.
            self.pool.touch(hit_block_ids)
            table.extend(hit_block_ids)
            request.num_registered_blocks = len(table)
        if num_new > 0:
            table.extend(self.pool.get_new_blocks(num_new))
        return True

    def register(self, request: Request) -> None:
        """Make the request's full blocks findable.

        Counted are blocks whose tokens are all known and which a scheduled step fills; the caller
        promises that the step runs, or that the whole cache is reset. A request in the same step
        may hit them, as a step writes all KV of a layer before it reads any.
        """
        if request.num_computed_tokens < (request.num_registered_blocks + 1) * self.block_size:
            return
        full = min(request.num_computed_tokens // self.block_size, len(request.block_hashes))
        for index in range(request.num_registered_blocks, full):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        request.num_registered_blocks = max(full, request.num_registered_blocks)

    def free(self, request: Request) -> None:
        """Give up all blocks of the request; it has computed nothing afterwards.

        The deepest block is evicted first, the most shareable one last.
        """
        self.pool.free_blocks(request.block_ids[::-1])
        request.block_ids = array("i")  # a new one: somebody may still look at the old buffer
        request.num_registered_blocks = 0
        request.num_computed_tokens = 0

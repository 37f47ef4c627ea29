"""The pool of KV blocks: reference counts, the free list in eviction order, and the hash map."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from jaxpaged.core.block_states import block_states, count_states

NULL_BLOCK = 0
"""Never allocated, always zero; padding points at it."""


class BlockPool:
    """Hands out block ids 1..num_blocks-1. Every operation is O(1) a block.

    A block is either held (reference count >= 1) or in the free list (count 0), in the order in
    which free blocks will be given out again. A free block keeps its hash, and so can be found and
    taken back by `touch`, until it is given out.
    """

    def __init__(self, num_blocks: int, *, enable_caching: bool) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1 (the null block), got {num_blocks}.")
        self.num_blocks = num_blocks
        self.num_usable = num_blocks - 1
        self.enable_caching = enable_caching
        self.num_free = self.num_usable
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        # A circular doubly linked list. Block 0 never takes part in anything else, so it serves as
        # the end marker: _next[0] is the first free block, _prev[0] the last. -1: not in the list.
        self._next = [(i + 1) % num_blocks for i in range(num_blocks)]
        self._prev = [(i - 1) % num_blocks for i in range(num_blocks)]
        self._cached: dict[bytes, int] = {}
        """Hash -> the block that has carried it longest."""
        self._duplicates: dict[bytes, OrderedDict[int, None]] = {}
        """Hash -> further blocks with the same content, oldest first."""
        self._tails: dict[bytes, int] = {}
        """Name of a prompt's tail -> a block that begins with it."""
        self._tail_of: dict[int, bytes] = {}
        """The same the other way round."""

    @property
    def usage(self) -> float:
        """Share of usable blocks that are held, 0..1. Cached blocks that nobody holds are free."""
        return 1.0 - self.num_free / self.num_usable if self.num_usable else 0.0

    @property
    def num_held(self) -> int:
        return self.num_usable - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by a hash, duplicates included."""
        hashed = len(self._cached) + sum(len(d) for d in self._duplicates.values())
        return hashed + sum(self._hashes[block] is None for block in self._tail_of)

    def count_by_state(self) -> dict[str, int]:
        """How many blocks are free (and hold nothing), cached (free, but findable by their hash),
        held (by one), shared (by several) and null. O(num_blocks); from any thread.

        The counts always add up to `num_blocks`. Beside a thread that changes the pool, a block may
        be told in the state that it has just left.
        """
        # The two copies are each of one moment.
        return count_states(block_states(self.copy_refs(), self.copy_hashes()))

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def find_shared(self, blocks: Sequence[int]) -> list[int]:
        """Places in the list of the blocks that several hold."""
        refs = self._refs
        return [place for place, block in enumerate(blocks) if refs[block] > 1]

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks, the null block aside, nobody holds."""
        refs = self._refs
        return sum([refs[block] == 0 and block != NULL_BLOCK for block in blocks])

    def block_hash(self, block: int) -> bytes | None:
        return self._hashes[block]

    def get_cached(self, block_hash: bytes) -> int | None:
        """The block that has carried this hash longest, held or free; None if there is none."""
        return self._cached.get(block_hash)

    def get_tail(self, name: bytes) -> int | None:
        """A block that begins with this tail of a prompt, held or free; None if there is none."""
        return self._tails.get(name)

    def copy_refs(self) -> list[int]:
        """Reference count of every block, index = id; the caller's own list."""
        return self._refs.copy()

    def copy_hashes(self) -> list[bytes | None]:
        """What each block can be found by, its hash before the name of a tail, None where there is
        nothing; index = id; the caller's own list.
        """
        hashes = self._hashes.copy()
        for block, name in self._tail_of.copy().items():
            if hashes[block] is None:
                hashes[block] = name
        return hashes

    def free_order(self) -> list[int]:
        """Free blocks, the next to be given out first. O(free); for tests and checks."""
        return self._walk(self._next)

    def _walk(self, links: list[int]) -> list[int]:
        order: list[int] = []
        block = links[NULL_BLOCK]
        while block != NULL_BLOCK:
            # Links that are broken may run in a circle; a check must end all the same.
            require(block > 0 and len(order) < self.num_usable, "the free list is broken")
            order.append(block)
            block = links[block]
        return order

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free list; what they cached is forgotten.

        Raises `RuntimeError`, and changes nothing, if fewer are free.
        """
        if count < 0 or count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} are free")
        following, hashes, tails = self._next, self._hashes, self._tail_of
        taken = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            if hashes[block] is not None or block in tails:
                self._forget(block)
            self._refs[block] = 1
            taken.append(block)
            after = following[block]
            following[block] = self._prev[block] = -1
            block = after
        following[NULL_BLOCK], self._prev[block] = block, NULL_BLOCK
        self.num_free -= count
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block, taking it out of the free list if it was there."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._refs[block] == 0:
                self._unlink(block)
            self._refs[block] += 1

    def free_blocks(self, ordered: Sequence[int]) -> None:
        """Remove one holder from each block. `ordered` is the order in which to evict them.

        Blocks that end without holder go back to the free list in that order: those without hash
        to its front, since nothing is lost by using them again, those with one to its end.
        Raises `RuntimeError` if a block has no holder.
        """
        refs, hashes, tails = self._refs, self._hashes, self._tail_of
        front: list[int] = []
        back: list[int] = []
        for block in ordered:
            if block == NULL_BLOCK:
                continue
            if block < 0 or refs[block] < 1:
                raise RuntimeError(f"block {block} is freed but nothing holds it (double free)")
            refs[block] -= 1
            if refs[block] == 0:
                hashed = hashes[block] is not None or block in tails
                (back if hashed else front).append(block)
        if back:
            self._link_after(self._prev[NULL_BLOCK], back)
        if front:
            self._link_after(NULL_BLOCK, front)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a held, full block findable by its hash. Raises `RuntimeError` if it has a hash."""
        if block == NULL_BLOCK:
            raise RuntimeError("the null block cannot be registered")
        self.register_all([block], [block_hash])

    def register_all(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        """`register` each block that is not null."""
        if not self.enable_caching:
            raise RuntimeError("the pool was made without caching")
        refs, known, cached = self._refs, self._hashes, self._cached
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block == NULL_BLOCK:
                continue
            if refs[block] < 1 or known[block] is not None:
                raise RuntimeError(f"block {block} is free or already registered")
            known[block] = block_hash
            if cached.setdefault(block_hash, block) != block:
                self._duplicates.setdefault(block_hash, OrderedDict())[block] = None

    def register_tail(self, block: int, name: bytes) -> None:
        """Make a held block findable by the tail of the prompt that it begins with. Whatever comes
        after the tail may still be written. Does nothing if another block has the name already.
        """
        if not self.enable_caching:
            raise RuntimeError("the pool was made without caching")
        if block == NULL_BLOCK or self._refs[block] < 1:
            raise RuntimeError(f"block {block} is null or free")
        if name not in self._tails and block not in self._tail_of:
            self._tails[name] = block
            self._tail_of[block] = name

    def evict_blocks(self, blocks: Iterable[int]) -> None:
        """Forget the hashes of these blocks, whose content is not (or no longer) what they say.

        Holders keep them; they can no longer be found.
        """
        for block in blocks:
            self._forget(block)

    def reset_prefix_cache(self) -> bool:
        """Forget every hash. Refuses (False, nothing changed) while any block is held."""
        if self.num_free != self.num_usable:
            return False
        self._hashes = [None] * self.num_blocks
        self._cached.clear()
        self._duplicates.clear()
        self._tails.clear()
        self._tail_of.clear()
        return True

    def _forget(self, block: int) -> None:
        """Nobody can find this block any more."""
        if block in self._tail_of:
            del self._tails[self._tail_of.pop(block)]
        block_hash = self._hashes[block]
        if block_hash is None:
            return
        self._hashes[block] = None
        others = self._duplicates.get(block_hash)
        if self._cached[block_hash] != block:
            assert others is not None
            del others[block]
        elif others is None:
            del self._cached[block_hash]
        else:
            self._cached[block_hash] = others.popitem(last=False)[0]
        if others is not None and not others:
            del self._duplicates[block_hash]

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        if before < 0 or block == NULL_BLOCK:
            raise RuntimeError(f"block {block} is not in the free list")
        self._next[before] = after
        self._prev[after] = before
        self._prev[block] = self._next[block] = -1
        self.num_free -= 1

    def _link_after(self, before: int, blocks: Sequence[int]) -> None:
        after = self._next[before]
        for block in blocks:
            self._next[before], self._prev[block] = block, before
            before = block
        self._next[before], self._prev[after] = after, before
        self.num_free += len(blocks)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove the pool's invariants; `tables` are the block tables of all holders.

        O(num_blocks). Raises `AssertionError` that names the first one broken.
        """
        forward = self.free_order()
        require(
            forward == self._walk(self._prev)[::-1], "the free list differs forwards and backwards"
        )
        require(len(forward) == self.num_free, f"num_free {self.num_free} != {len(forward)} listed")
        free = set(forward)
        require(len(free) == len(forward), "a block is in the free list twice")
        holders = Counter(b for table in tables for b in table)
        require(NULL_BLOCK not in holders, "a table holds the null block")
        for block in range(1, self.num_blocks):
            refs = self._refs[block]
            require(refs == holders[block], f"block {block}: {refs} refs, {holders[block]} holders")
            require((refs == 0) == (block in free), f"block {block}: {refs} refs, free list wrong")
            linked = self._next[block] >= 0
            require(linked == (block in free), f"block {block} has stale links")
        self._check_hashes()

    def _check_hashes(self) -> None:
        found: dict[int, bytes] = {}
        for block_hash, block in self._cached.items():
            others = self._duplicates.get(block_hash, OrderedDict())
            for carrier in (block, *others):
                require(carrier not in found, f"block {carrier} is in the hash map twice")
                found[carrier] = block_hash
        require(self._duplicates.keys() <= self._cached.keys(), "a duplicate has no first block")
        require(all(self._duplicates.values()), "an empty set of duplicates was kept")
        hashed = {b: h for b, h in enumerate(self._hashes) if h is not None}
        require(found == hashed, "the hash map and the blocks' hashes differ")
        require(NULL_BLOCK not in hashed, "the null block has a hash")
        require(self.enable_caching or not hashed, "a hash without caching")
        tails = {block: name for name, block in self._tails.items()}
        require(tails == self._tail_of, "the names of tails and the blocks' names differ")
        require(self.enable_caching or not tails, "a tail without caching")


def require(condition: bool, message: str) -> None:
    """An assertion that `python -O` keeps: integrity checks must not turn into no-ops."""
    if not condition:
        raise AssertionError(message)

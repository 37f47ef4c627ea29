from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxpaged.core.block_pool import NULL_BLOCK, BlockPool


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_new_pool_gives_out_ascending_ids_and_never_the_null_block() -> None:
    pool = BlockPool(6, enable_caching=True)
    assert (pool.num_usable, pool.num_free, pool.usage) == (5, 5, 0.0)
    assert pool.get_new_blocks(5) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_held, pool.usage) == (0, 5, 1.0)
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 are free"):
        pool.get_new_blocks(1)
    pool.check([[1, 2, 3, 4, 5]])


def test_a_pool_of_the_null_block_alone() -> None:
    pool = BlockPool(1, enable_caching=True)
    assert (pool.num_usable, pool.usage, pool.free_order()) == (0, 0.0, [])
    assert pool.get_new_blocks(0) == []
    assert pool.reset_prefix_cache()
    pool.check([])
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0, enable_caching=True)


def test_asking_for_too_many_changes_nothing() -> None:
    pool = BlockPool(4, enable_caching=True)
    pool.get_new_blocks(1)
    with pytest.raises(RuntimeError):
        pool.get_new_blocks(3)
    with pytest.raises(RuntimeError):
        pool.get_new_blocks(-1)
    assert pool.free_order() == [2, 3]
    pool.check([[1]])


def test_unhashed_blocks_go_to_the_front_and_hashed_ones_to_the_end_in_the_given_order() -> None:
    pool = BlockPool(9, enable_caching=True)
    blocks = pool.get_new_blocks(6)
    for block in (2, 4, 5):
        pool.register(block, name(block))
    pool.free_blocks([])
    pool.free_blocks(blocks[::-1])
    assert pool.free_order() == [6, 3, 1, 7, 8, 5, 4, 2]
    pool.check([])


def test_without_hashes_the_last_freed_are_the_first_used() -> None:
    pool = BlockPool(6, enable_caching=False)
    pool.free_blocks(pool.get_new_blocks(3))
    assert pool.free_order() == [1, 2, 3, 4, 5]
    pool.free_blocks(pool.get_new_blocks(2)[::-1])
    assert pool.free_order() == [2, 1, 3, 4, 5]
    with pytest.raises(RuntimeError, match="without caching"):
        pool.register(1, name(1))


def test_touching_takes_a_free_block_out_of_the_middle() -> None:
    pool = BlockPool(6, enable_caching=True)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.register(block, name(block))
    pool.free_blocks(blocks)
    pool.touch([2])
    assert pool.free_order() == [4, 5, 1, 3]
    pool.touch([2])
    assert pool.ref_count(2) == 2
    pool.check([[2], [2]])


def test_the_null_block_may_be_touched_and_freed_without_effect() -> None:
    pool = BlockPool(3, enable_caching=True)
    pool.touch([NULL_BLOCK, NULL_BLOCK])
    pool.free_blocks([NULL_BLOCK])
    assert pool.ref_count(NULL_BLOCK) == 0
    assert pool.free_order() == [1, 2]
    with pytest.raises(RuntimeError):
        pool.register(NULL_BLOCK, name(0))


@pytest.mark.parametrize("block", [1, 2, -1])
def test_double_free_raises(block: int) -> None:
    pool = BlockPool(4, enable_caching=True)
    pool.free_blocks(pool.get_new_blocks(1))
    with pytest.raises(RuntimeError, match="double free"):
        pool.free_blocks([block])
    assert pool.num_free == 3
    pool.check([])


def test_a_block_used_again_carries_no_old_hash() -> None:
    pool = BlockPool(3, enable_caching=True)
    blocks = pool.get_new_blocks(2)
    pool.register(1, name(7))
    pool.free_blocks(blocks)
    assert pool.get_cached(name(7)) == 1
    assert pool.get_new_blocks(1) == [2]
    assert pool.get_cached(name(7)) == 1
    assert pool.get_new_blocks(1) == [1]
    assert pool.get_cached(name(7)) is None
    assert pool.block_hash(1) is None


def test_a_block_is_registered_once_and_only_while_held() -> None:
    pool = BlockPool(4, enable_caching=True)
    pool.get_new_blocks(1)
    pool.register(1, name(1))
    with pytest.raises(RuntimeError, match="already registered"):
        pool.register(1, name(2))
    with pytest.raises(RuntimeError, match="free"):
        pool.register(2, name(2))


def test_duplicates_the_oldest_is_found_and_each_leaves_alone() -> None:
    pool = BlockPool(6, enable_caching=True)
    pool.get_new_blocks(4)
    for block in (3, 1, 2):
        pool.register(block, name(9))
    assert (pool.get_cached(name(9)), pool.num_cached) == (3, 3)
    pool.evict_blocks([1])
    assert (pool.get_cached(name(9)), pool.num_cached) == (3, 2)
    pool.evict_blocks([3])
    assert pool.get_cached(name(9)) == 2
    pool.evict_blocks([3, 4])  # nothing to forget
    assert pool.get_cached(name(9)) == 2
    pool.evict_blocks([2])
    assert (pool.get_cached(name(9)), pool.num_cached) == (None, 0)
    pool.check([[1, 2, 3, 4]])


def test_when_the_found_block_goes_the_next_oldest_takes_its_place() -> None:
    pool = BlockPool(6, enable_caching=True)
    pool.get_new_blocks(5)
    for block in (4, 2, 5, 1):
        pool.register(block, name(9))
    found = []
    for _ in range(4):
        found.append(pool.get_cached(name(9)))
        pool.evict_blocks(found[-1:])  # type: ignore[arg-type]
    assert found == [4, 2, 5, 1]


def test_reset_is_refused_while_a_block_is_held_and_keeps_the_free_order() -> None:
    pool = BlockPool(5, enable_caching=True)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.register(block, name(block % 2))
    pool.free_blocks([3, 2])
    before = pool.free_order()
    assert not pool.reset_prefix_cache()
    assert pool.num_cached == 3
    assert pool.free_order() == before
    pool.free_blocks([1])
    before = pool.free_order()
    assert pool.reset_prefix_cache()
    assert pool.num_cached == 0
    assert pool.get_cached(name(1)) is None
    assert pool.free_order() == before
    pool.check([])


@pytest.mark.parametrize("damage", ["ref", "hash", "list", "count", "holder"])
def test_the_check_finds_damage(damage: str) -> None:
    pool = BlockPool(5, enable_caching=True)
    pool.get_new_blocks(2)
    pool.register(1, name(1))
    tables = [[1, 2]]
    pool.check(tables)
    if damage == "ref":
        pool._refs[2] = 2
    elif damage == "hash":
        pool._hashes[2] = name(5)
    elif damage == "list":
        pool._prev[4] = 2
    elif damage == "count":
        pool.num_free += 1
    else:
        tables = [[1]]
    with pytest.raises(AssertionError):
        pool.check(tables)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that keeps plain lists and searches them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, enable_caching=True)
        self.order = list(range(1, 10))
        self.tables: list[list[int]] = []
        self.hashes: dict[int, bytes] = {}
        """In the order of registration."""

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        if count > len(self.order):
            with pytest.raises(RuntimeError):
                self.pool.get_new_blocks(count)
            return
        expected, self.order = self.order[:count], self.order[count:]
        for block in expected:
            self.hashes.pop(block, None)
        assert self.pool.get_new_blocks(count) == expected
        self.tables.append(expected)

    @rule(blocks=st.sets(st.integers(1, 9), max_size=4))
    def touch(self, blocks: set[int]) -> None:
        self.pool.touch(blocks)
        self.order = [b for b in self.order if b not in blocks]
        self.tables.append(list(blocks))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free_blocks(table[::-1])
        gone = [b for b in table[::-1] if not any(b in t for t in self.tables)]
        front = [b for b in gone if b not in self.hashes]
        self.order = front + self.order + [b for b in gone if b in self.hashes]

    @rule(block=st.integers(1, 9), number=st.integers(0, 2))
    def register(self, block: int, number: int) -> None:
        if block in self.hashes or block in self.order:
            with pytest.raises(RuntimeError):
                self.pool.register(block, name(number))
            return
        self.pool.register(block, name(number))
        self.hashes[block] = name(number)

    @rule(blocks=st.sets(st.integers(1, 9), max_size=3))
    def evict(self, blocks: set[int]) -> None:
        self.pool.evict_blocks(blocks)
        for block in blocks:
            self.hashes.pop(block, None)

    @rule(block=st.integers(1, 9))
    def free_twice(self, block: int) -> None:
        if block in self.order:
            with pytest.raises(RuntimeError):
                self.pool.free_blocks([block])

    @rule()
    def reset(self) -> None:
        idle = len(self.order) == 9
        assert self.pool.reset_prefix_cache() == idle
        if idle:
            self.hashes.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.free_order() == self.order
        for number in range(3):
            carriers = [b for b, h in self.hashes.items() if h == name(number)]
            assert self.pool.get_cached(name(number)) == (carriers[0] if carriers else None)
        assert self.pool.num_cached == len(self.hashes)
        assert self.pool.usage == pytest.approx(1 - len(self.order) / 9)


PoolMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)
TestPoolMachine = PoolMachine.TestCase

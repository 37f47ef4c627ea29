"""What others are shown of the pool: every letter, count and difference against the pool itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from jaxpaged.core.snapshot import PoolSnapshot, take_snapshot
from tests.core.harness import Sim, make_config, make_request


def snapshot_of(
    refs: list[int], hashes: list[bytes | None] | None = None, **more: object
) -> PoolSnapshot:
    return PoolSnapshot(
        block_size=4,
        windows=(None,),
        refs=refs,
        hashes=[None] * len(refs) if hashes is None else hashes,
        running=(),
        next_waiting=(),
        num_waiting=0,
        **more,  # type: ignore[arg-type]
    )


def assert_agrees(sim: Sim) -> PoolSnapshot:
    """Every letter follows from the pool and the tables."""
    scheduler = sim.scheduler
    pool, snapshot = scheduler.kv.pool, take_snapshot(scheduler)
    assert snapshot.num_blocks == pool.num_blocks == len(snapshot.states)
    holders = Counter(b for r in scheduler.running for t in r.tables for b in t if b)
    for block, letter in enumerate(snapshot.states):
        cached = pool.copy_hashes()[block] is not None
        expected = (
            "0" if block == 0 else "fc"[cached] if not holders[block] else "hs"[holders[block] > 1]
        )
        assert letter == expected, block
    assert snapshot.shared == {b: n for b, n in holders.items() if n > 1}
    counts = snapshot.counts
    assert sum(counts.values()) == pool.num_blocks and counts["null"] == 1
    assert counts["held"] + counts["shared"] == pool.num_held
    assert counts["free"] + counts["cached"] == pool.num_free
    assert [r.request_id for r in snapshot.running] == [r.request_id for r in scheduler.running]
    for seen, request in zip(snapshot.running, scheduler.running, strict=True):
        assert list(seen.tables) == request.tables
        assert seen.num_computed_tokens == request.num_computed_tokens
        assert seen.status == "running"
    assert snapshot.num_waiting == scheduler.num_waiting
    return snapshot


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_it_agrees_with_the_pool_at_every_step_of_a_busy_run(windows: tuple[int | None]) -> None:
    rng = random.Random(5)
    blocks = 20 * len(windows)
    config = make_config(
        num_blocks=blocks, max_num_seqs=6, max_num_batched_tokens=24, windows=windows
    )
    sim, seen, preempted = Sim(config), Counter[str](), False
    shared_prompt = [rng.randrange(50) for _ in range(13)]
    for i in range(25):
        prompt = shared_prompt + [rng.randrange(50) for _ in range(rng.randrange(1, 8))]
        sim.add(make_request(f"r{i}", prompt, max_tokens=rng.randrange(4, 24)))
    before = assert_agrees(sim)
    for _ in range(400):
        if not sim.scheduler.has_unfinished:
            break
        sim.turn()
        after = assert_agrees(sim)
        seen.update(after.states)
        preempted |= any(r.status == "preempted" for r in after.next_waiting)
        assert after.changed_since(before) == [
            b
            for b in range(config.num_blocks)
            if (after.states[b], after.refs[b]) != (before.states[b], before.refs[b])
        ]
        before = after
    sim.assert_drained()
    assert all(seen[letter] > 50 for letter in "fchs"), seen
    assert preempted and sim.scheduler.stats.preemptions > 0


def test_a_snapshot_does_not_follow_later_steps() -> None:
    sim = Sim(make_config(num_blocks=20))
    sim.add(make_request("a", range(10), max_tokens=30))
    sim.turn()
    snapshot = take_snapshot(sim.scheduler)
    tables = [list(r.tables[0]) for r in snapshot.running]
    sim.run()
    assert [list(r.tables[0]) for r in snapshot.running] == tables == [[1, 2, 3]]
    assert snapshot.states == "0hhh" + 16 * "f"  # worked out only now


def test_a_hit_is_told_from_a_block_given_out_anew() -> None:
    sim = Sim(make_config(num_blocks=8, block_size=4))
    sim.add(make_request("first", range(9), max_tokens=2))
    sim.run()
    idle = take_snapshot(sim.scheduler)
    assert idle.states == "0cccffff"  # the last one by the end of the prompt that it begins with
    sim.add(make_request("again", range(9), max_tokens=12))
    sim.turn()
    hit = take_snapshot(sim.scheduler)
    changed = hit.changed_since(idle)
    assert changed == [1, 2, 4]
    assert hit.hits_since(idle) == [1, 2]
    assert hit.evicted_since(idle, changed) == []
    sim.run()
    # Other tokens, and more of them than there are blocks that cache nothing.
    idle = take_snapshot(sim.scheduler)
    sim.add(make_request("other", range(20, 44), max_tokens=2))
    sim.turn()
    evicted = take_snapshot(sim.scheduler)
    changed = evicted.changed_since(idle)
    assert evicted.hits_since(idle) == []
    lost = evicted.evicted_since(idle, changed)
    assert lost and all(idle.states[b] == "c" for b in lost)
    assert lost == [b for b in changed if idle.states[b] == "c"]


def test_hits_within_one_step_are_hits_too() -> None:
    sim = Sim(make_config(num_blocks=20, block_size=4))
    before = take_snapshot(sim.scheduler)
    for name, last in (("a", 8), ("b", 9)):
        sim.add(make_request(name, [*range(8), last], max_tokens=9))
    sim.turn()
    after = take_snapshot(sim.scheduler)
    assert after.states == "0sshh" + 15 * "f"  # written and shared in the same step
    assert after.hits_since(before) == [1, 2]
    sim.turn()
    later = take_snapshot(sim.scheduler)
    assert later.hits_since(after) == []


def test_a_third_holder_is_a_change_and_may_be_a_hit() -> None:
    sim = Sim(make_config(num_blocks=20, block_size=4))
    for name, last in (("a", 8), ("b", 9)):
        sim.add(make_request(name, [*range(8), last], max_tokens=9))
    sim.turn()
    before = take_snapshot(sim.scheduler)
    sim.add(make_request("c", range(6), max_tokens=9))
    sim.turn()
    after = take_snapshot(sim.scheduler)
    assert before.states[1] == after.states[1] == "s"
    assert 1 in after.changed_since(before)
    assert (before.shared, after.shared) == ({1: 2, 2: 2}, {1: 3, 2: 2})
    assert after.hits_since(before) == [1]
    assert before.hits_since(after) == []


@pytest.mark.parametrize("num_tokens", [8, 10])
def test_a_fork_is_no_hit(num_tokens: int) -> None:
    sim = Sim(make_config(num_blocks=30, block_size=4))
    before = take_snapshot(sim.scheduler)
    sim.add_group([make_request(f"{i}_a", range(num_tokens), max_tokens=9) for i in range(3)])
    sim.turn()
    forked = take_snapshot(sim.scheduler)
    assert forked.shared.keys() >= {1, 2} and set(forked.shared.values()) == {3}
    assert forked.hits_since(before) == [] == forked.copies_since(before)
    sim.turn()
    parted = take_snapshot(sim.scheduler)
    copies = parted.copies_since(forked)
    # All but the last writer of the block that the prompt does not fill get a copy of it.
    assert [source for source, _ in copies] == ([3, 3] if num_tokens == 10 else [])
    assert [parted.states[block] for _, block in copies] == ["h"] * len(copies)
    assert parted.copied_blocks == len(copies) == sim.scheduler.stats.copied_blocks
    assert parted.hits_since(forked) == [] == forked.copies_since(forked)


def test_forks_of_a_prompt_that_is_cached_in_part() -> None:
    sim = Sim(make_config(num_blocks=30, block_size=4))
    sim.add(make_request("first", range(9), max_tokens=2))
    sim.run()
    before = take_snapshot(sim.scheduler)
    tokens = [*range(8), *range(50, 56)]
    sim.add_group([make_request(f"{i}_a", tokens, max_tokens=9) for i in range(3)])
    sim.turn()
    after = take_snapshot(sim.scheduler)
    assert len(after.shared) == 4
    assert after.hits_since(before) == [1, 2]


@pytest.mark.parametrize("num_tokens", [8, 10, 11])
def test_of_a_prompt_that_is_all_cached_the_last_block_is_a_copy(num_tokens: int) -> None:
    sim = Sim(make_config(num_blocks=20, block_size=4))
    sim.add(make_request("first", range(num_tokens), max_tokens=2))
    sim.run()
    before = take_snapshot(sim.scheduler)
    sim.add(make_request("again", range(num_tokens), max_tokens=9))
    sim.turn()
    after = take_snapshot(sim.scheduler)
    [again] = after.running
    assert again.num_cached_tokens == again.num_hit_tokens == num_tokens - 1
    shared = (num_tokens - 1) // 4
    assert after.hits_since(before) == list(range(1, shared + 1))
    assert after.copies_since(before) == [(shared + 1, again.tables[0][-1])]
    assert after.states[shared + 1] == "c", "the source stays where it is, for the next one"


def test_what_a_resumed_request_finds_again_is_a_hit() -> None:
    sim = Sim(make_config(num_blocks=20, block_size=4))
    sim.add(make_request("a", range(9), max_tokens=9))
    sim.turn()
    before = take_snapshot(sim.scheduler)
    request = next(sim.scheduler.running)
    sim.scheduler._preempt(request)
    while not sim.scheduler.num_running:  # once the token in flight has come
        sim.turn()
    after = take_snapshot(sim.scheduler)
    [again] = after.running
    assert (again.num_preemptions, again.num_cached_tokens, again.num_hit_tokens) == (1, 0, 8)
    assert after.hits_since(before) == [1, 2]


def test_of_very_many_copies_the_last_are_told() -> None:
    before = snapshot_of([0, 1], copied_blocks=1, recent_copies=((1, 2),))
    after = snapshot_of([0, 1], copied_blocks=9, recent_copies=((3, 4), (5, 6)))
    assert after.copies_since(before) == [(3, 4), (5, 6)]
    assert before.copies_since(before) == []


def test_more_holders_than_a_byte_counts() -> None:
    snapshot = snapshot_of([0, 300, 256, 255, 1, 0], [None, b"x", None, b"y", None, b"z"])
    assert snapshot.states == "0ssshc"
    assert snapshot.shared == {1: 300, 2: 256, 3: 255}


def test_changes_in_a_large_pool_are_found_in_any_place() -> None:
    rng = random.Random(1)
    size = 5000
    refs = [0, *(rng.randrange(3) for _ in range(size - 1))]
    places = sorted({1, 511, 512, 513, size - 1, *rng.sample(range(1, size), 20)})
    other = list(refs)
    for place in places:
        other[place] += 1
    assert snapshot_of(other).changed_since(snapshot_of(refs)) == places
    assert snapshot_of(refs).changed_since(snapshot_of(refs)) == []


def test_pools_of_different_size_are_not_compared() -> None:
    with pytest.raises(ValueError, match="2 and 3 blocks"):
        snapshot_of([0, 0, 0]).changed_since(snapshot_of([0, 0]))


def test_waiting_requests_are_listed_up_to_a_limit() -> None:
    sim = Sim(make_config(max_num_seqs=1))
    for i in range(7):
        sim.add(make_request(f"r{i}", range(5)))
    sim.turn()
    snapshot = take_snapshot(sim.scheduler, most_waiting=3)
    assert [r.request_id for r in snapshot.next_waiting] == ["r1", "r2", "r3"]
    assert snapshot.num_waiting == 6
    assert [r.status for r in snapshot.next_waiting] == ["waiting"] * 3
    assert [r.key for r in (*snapshot.running, *snapshot.next_waiting)] == [0, 1, 2, 3]

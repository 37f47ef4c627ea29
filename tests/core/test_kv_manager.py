from __future__ import annotations

import random

import pytest

from jaxpaged.core.kv_manager import KVManager
from jaxpaged.core.request import Request
from tests.core.harness import make_request


def manager(num_blocks: int = 9, *, enable_caching: bool = True) -> KVManager:
    return KVManager(num_blocks, 4, enable_caching=enable_caching)


def compute(kv: KVManager, request: Request, count: int) -> bool:
    """What the scheduler does for `count` more tokens of a request that is admitted."""
    if not kv.allocate_slots(request, count):
        return False
    request.num_computed_tokens += count
    kv.register(request)
    return True


def admit(kv: KVManager, name: str, tokens: list[int], **more: object) -> Request:
    """Look up, allocate and compute a whole prompt."""
    request = make_request(name, tokens, **more)
    kv.extend_hashes(request)
    hits, num_hit = kv.get_computed_blocks(request)
    count = request.num_tokens - num_hit
    assert kv.allocate_slots(request, count, hit_tables=hits, reserve_full=True)
    request.num_computed_tokens = request.num_tokens
    request.num_cached_tokens = num_hit
    kv.register(request)
    return request


def check(kv: KVManager, *requests: Request) -> None:
    kv.pool.check(r.block_ids for r in requests)


def state(kv: KVManager) -> tuple[object, ...]:
    pool = kv.pool
    refs = [pool.ref_count(b) for b in range(pool.num_blocks)]
    hashes = [pool.block_hash(b) for b in range(pool.num_blocks)]
    return pool.free_order(), refs, hashes


def test_the_life_of_shared_blocks() -> None:
    """Sharing, freeing order, the last-token rule, duplicates and eviction, step by step."""
    kv = manager()
    pool = kv.pool
    a = admit(kv, "a", list(range(10)))
    assert list(a.block_ids) == [1, 2, 3]
    assert [pool.block_hash(b) is not None for b in (1, 2, 3)] == [True, True, False]
    assert pool.free_order() == [4, 5, 6, 7, 8]
    b = admit(kv, "b", [*range(8), 91, 92, 93])
    assert list(b.block_ids) == [1, 2, 4]
    assert (pool.ref_count(1), pool.ref_count(2)) == (2, 2)
    kv.free(a)
    assert pool.free_order() == [3, 5, 6, 7, 8]
    kv.free(b)
    assert pool.free_order() == [4, 3, 5, 6, 7, 8, 2, 1]
    c = admit(kv, "c", list(range(8)))
    assert list(c.block_ids) == [1, 4]
    assert c.num_cached_tokens == 4
    assert pool.block_hash(4) == pool.block_hash(2) is not None
    kv.free(c)
    assert pool.free_order() == [3, 5, 6, 7, 8, 2, 4, 1]
    d = admit(kv, "d", list(range(500, 524)))
    assert list(d.block_ids) == [3, 5, 6, 7, 8, 2]
    again = make_request("again", list(range(10)))
    kv.extend_hashes(again)
    assert kv.get_computed_blocks(again) == ([[1, 4]], 8)
    check(kv, d)


def test_decoding_takes_a_block_at_the_edge_only_and_names_the_full_one() -> None:
    kv = manager()
    request = admit(kv, "a", [1, 2, 3, 4, 5, 6])
    assert len(request.block_ids) == 2
    for token, blocks in ((7, 2), (8, 2), (9, 3)):
        request.token_ids.append(token)
        kv.extend_hashes(request)
        assert compute(kv, request, 1)
        assert len(request.block_ids) == blocks
        assert request.num_registered_blocks == request.num_computed_tokens // 4
    hashed = [kv.pool.block_hash(b) for b in request.block_ids]
    assert hashed == [*request.block_hashes, None]
    check(kv, request)


def test_a_block_with_a_token_still_in_flight_is_not_named() -> None:
    kv = manager()
    request = admit(kv, "a", [1, 2, 3])
    assert compute(kv, request, 1)  # its input is not known yet
    assert request.num_registered_blocks == 0
    request.token_ids.append(9)
    kv.extend_hashes(request)
    kv.register(request)
    assert kv.pool.get_cached(request.block_hashes[0]) == request.block_ids[0]


def test_two_requests_freed_in_turn_are_evicted_in_turn_the_deepest_block_first() -> None:
    kv = manager(10)
    a = admit(kv, "a", list(range(11)))
    b = admit(kv, "b", list(range(50, 62)))
    kv.free(a)
    kv.free(b)
    assert kv.pool.free_order() == [3, 7, 8, 9, 2, 1, 6, 5, 4]
    c = admit(kv, "c", [*range(11), 77])  # takes 1 and 2 from the middle of the list
    assert list(c.block_ids) == [1, 2, 3]
    assert kv.pool.free_order() == [7, 8, 9, 6, 5, 4]
    check(kv, c)


def test_a_hit_block_is_never_the_one_evicted() -> None:
    kv = manager(3)
    a = admit(kv, "a", [1, 2, 3, 4])
    b = admit(kv, "b", [5, 6, 7, 8])
    kv.free(a)
    kv.free(b)
    c = admit(kv, "c", [1, 2, 3, 4, 9])
    assert list(c.block_ids) == [1, 2]
    assert kv.pool.get_cached(b.block_hashes[0]) is None
    assert kv.pool.get_cached(a.block_hashes[0]) == 1


def test_free_hits_count_against_the_free_blocks_and_a_refusal_changes_nothing() -> None:
    kv = manager(10)
    held = admit(kv, "held", list(range(12)))  # 1, 2, 3 stay held
    longer = admit(kv, "longer", [*range(12), *range(30, 42)])  # 4, 5, 6 on top
    kv.free(longer)
    other = admit(kv, "other", [77])
    assert kv.pool.num_free == 5
    request = make_request("new", [*range(12), *range(30, 42), *range(60, 72)])
    kv.extend_hashes(request)
    hits, num_hit = kv.get_computed_blocks(request)
    assert (len(hits[0]), num_hit) == (6, 24)
    before = state(kv)
    assert not kv.allocate_slots(request, 12, hit_tables=hits)
    assert state(kv) == before
    assert (len(request.block_ids), request.num_registered_blocks) == (0, 0)
    # 3 free hits and 2 new blocks are just the 5 that are free.
    assert kv.allocate_slots(request, 8, hit_tables=hits)
    assert kv.pool.num_free == 0
    check(kv, held, other, request)


def test_a_full_reservation_needs_room_for_all_tokens_but_takes_only_what_it_computes() -> None:
    kv = manager()
    request = make_request("a", list(range(32)))
    kv.extend_hashes(request)
    assert not kv.allocate_slots(request, 4, reserve_full=True, headroom=1)
    assert kv.allocate_slots(request, 4, reserve_full=True)
    assert len(request.block_ids) == 1
    small = manager(8)
    other = make_request("b", list(range(32)))
    before = state(small)
    assert not small.allocate_slots(other, 4, reserve_full=True)
    assert state(small) == before
    assert small.allocate_slots(other, 4)


def test_headroom_stays_free() -> None:
    kv = manager()
    request = make_request("a", list(range(20)))
    assert not kv.allocate_slots(request, 20, headroom=4)
    assert kv.allocate_slots(request, 20, headroom=3)


def test_a_token_that_needs_no_block_fits_into_a_full_pool() -> None:
    kv = manager(3)
    request = admit(kv, "a", list(range(7)))
    assert kv.pool.num_free == 0
    assert compute(kv, request, 1)
    assert not compute(kv, request, 1)
    assert request.num_computed_tokens == 8


@pytest.mark.parametrize("length", range(1, 18))
def test_at_least_the_last_token_is_computed(length: int) -> None:
    kv = manager(20)
    first = admit(kv, "first", list(range(length)))
    again = make_request("again", list(range(length)))
    kv.extend_hashes(again)
    hits, num_hit = kv.get_computed_blocks(again)
    assert num_hit == (length - 1) // 4 * 4
    assert hits == [list(first.block_ids[: num_hit // 4])]
    assert all(kv.pool.ref_count(b) == 1 for b in hits[0])  # looked up, not held


def test_salts_keep_tenants_apart() -> None:
    kv = manager(30)
    prompt = list(range(13))
    admit(kv, "a", prompt, cache_salt="one")
    assert admit(kv, "b", prompt, cache_salt="one").num_cached_tokens == 12
    assert admit(kv, "c", prompt, cache_salt="two").num_cached_tokens == 0
    assert admit(kv, "d", prompt).num_cached_tokens == 0


def test_who_needs_every_position_takes_nothing_from_the_cache_but_gives_to_it() -> None:
    kv = manager(30)
    prompt = list(range(13))
    a = admit(kv, "a", prompt)
    b = admit(kv, "b", prompt, skip_prefix_cache=True)
    assert b.num_cached_tokens == 0
    assert not set(a.block_ids) & set(b.block_ids)
    named = [kv.pool.block_hash(x) for x in b.block_ids]
    assert named == [kv.pool.block_hash(x) for x in a.block_ids]
    assert named[:3] == b.block_hashes
    kv.free(a)
    kv.pool.evict_blocks([1, 2, 3])
    assert admit(kv, "c", prompt).num_cached_tokens == 12


def test_without_caching_nothing_hits() -> None:
    kv = manager(enable_caching=False)
    a = admit(kv, "a", list(range(16)))
    b = admit(kv, "b", list(range(16)))
    assert (a.block_hashes, b.num_cached_tokens, kv.pool.num_cached) == ([], 0, 0)
    assert not kv.allocate_slots(make_request("c", [1]), 1)
    kv.free(a)
    assert admit(kv, "d", list(range(16))).num_cached_tokens == 0


def test_freeing_a_request_that_holds_nothing_is_harmless() -> None:
    kv = manager()
    request = make_request("a", [1, 2, 3])
    kv.free(request)
    kv.free(request)
    assert kv.pool.num_free == 8


def test_a_buffer_view_of_a_freed_table_stays_as_it_was() -> None:
    kv = manager()
    request = admit(kv, "a", list(range(10)))
    view = memoryview(request.block_ids)
    kv.free(request)
    assert view.tolist() == [1, 2, 3]
    assert len(request.block_ids) == 0


def test_evicted_prefixes_are_forgotten() -> None:
    """Three prompts that fill the pool in turn, then the first again."""
    kv = manager(6)
    first, second, third = (list(range(n, n + 12)) for n in (1, 101, 201))
    for tokens in (first, second, third):
        kv.free(admit(kv, "x", tokens))
    again = make_request("again", first)
    kv.extend_hashes(again)
    assert kv.get_computed_blocks(again) == ([[]], 0)
    kept = make_request("kept", third)
    kv.extend_hashes(kept)
    assert kv.get_computed_blocks(kept)[1] == 8


@pytest.mark.parametrize("seed", range(4))
def test_what_is_predicted_is_what_is_taken(seed: int) -> None:
    """Random traffic: an accepted allocation takes exactly the blocks that its length needs, a
    refused one nothing, and one is refused exactly when the blocks are not there."""
    rng = random.Random(seed)
    kv = manager(16)
    live: list[Request] = []
    refused = hit = 0
    for number in range(600):
        if live and rng.random() < 0.35:
            kv.free(live.pop(rng.randrange(len(live))))
        elif live and rng.random() < 0.5:
            request = rng.choice(live)
            request.token_ids.extend(rng.randrange(3) for _ in range(rng.randrange(1, 6)))
            kv.extend_hashes(request)
            count = request.num_tokens - request.num_computed_tokens
            need = -(-request.num_tokens // 4) - len(request.block_ids)
            before, free = state(kv), kv.pool.num_free
            if compute(kv, request, count):
                assert free - kv.pool.num_free == need
            else:
                assert need > free
                assert state(kv) == before
                del request.token_ids[request.num_computed_tokens :]
                del request.block_hashes[request.num_tokens // 4 :]
                refused += 1
        else:
            request = make_request(
                str(number), [rng.randrange(2) for _ in range(rng.choice([5, 9]))]
            )
            kv.extend_hashes(request)
            hits, num_hit = kv.get_computed_blocks(request)
            asleep = sum(kv.pool.ref_count(b) == 0 for b in hits[0])
            need = -(-request.num_tokens // 4) - len(hits[0]) + asleep
            before, free = state(kv), kv.pool.num_free
            taken = kv.allocate_slots(request, request.num_tokens - num_hit, hit_tables=hits)
            assert taken == (need <= free)
            if not taken:
                assert state(kv) == before
                refused += 1
                continue
            assert free - kv.pool.num_free == need
            request.num_computed_tokens = request.num_tokens
            kv.register(request)
            live.append(request)
            hit += num_hit > 0
        for request in live:
            assert len(request.block_ids) == -(-request.num_tokens // 4)
            assert request.num_registered_blocks == request.num_computed_tokens // 4
        check(kv, *live)
    assert refused > 10
    assert hit > 10

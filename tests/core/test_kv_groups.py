"""Groups of layers with windows: counts, trimming, hits, admission, and that it all agrees."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from jaxpaged.core.kv_groups import WindowHit, blocks_behind, blocks_for_sequence, window_cap
from jaxpaged.core.kv_manager import KVManager
from jaxpaged.core.request import Request
from jaxpaged.errors import InvalidRequestError
from tests.core.harness import Sim, make_config, make_request

Windows = tuple[int | None, ...]


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def manager(num_blocks: int, windows: Windows, block_size: int = 4, step: int = 64) -> KVManager:
    return KVManager(
        num_blocks,
        block_size,
        enable_caching=True,
        windows=windows,
        max_tokens_in_step=step,
        max_model_len=1000,
    )


def compute(kv: KVManager, request: Request, count: int) -> bool:
    if not kv.allocate_slots(request, count):
        return False
    request.num_computed_tokens += count
    kv.register(request)
    return True


def admit(kv: KVManager, name: str, tokens: list[int], chunk: int = 1000) -> Request:
    """Look up, allocate and compute a whole prompt in chunks."""
    request = make_request(name, tokens)
    kv.extend_hashes(request)
    hits, num_hit = kv.get_computed_blocks(request)
    count = min(chunk, len(tokens) - num_hit)
    assert kv.allocate_slots(request, count, hit_tables=hits, reserve_full=True)
    request.num_cached_tokens = num_hit
    request.num_computed_tokens = num_hit + count
    kv.register(request)
    while request.num_computed_tokens < len(tokens):
        assert compute(kv, request, min(chunk, len(tokens) - request.num_computed_tokens))
    return request


def check(kv: KVManager, *requests: Request) -> None:
    kv.pool.check([b for b in table if b] for r in requests for table in r.tables)


# ---------------------------------------------------------------- counting


@pytest.mark.parametrize(
    ("window", "block_size", "step", "length", "cap"),
    [
        (17, 4, 32, 1000, 13),  # 48 positions and one block for the offset
        (17, 4, 33, 1000, 14),
        (1, 4, 1, 1000, 2),
        (1000, 4, 64, 40, 11),  # no more than a whole sequence
        (1024, 16, 8192, 100_000, 577),
    ],
)
def test_the_most_that_a_window_holds(
    window: int, block_size: int, step: int, length: int, cap: int
) -> None:
    assert window_cap(window, block_size, step, length) == cap


def test_blocks_of_a_sequence_over_all_groups() -> None:
    counts = [
        blocks_for_sequence(
            n, block_size=4, windows=(None, 17, 5), max_tokens_in_step=32, max_model_len=1000
        )
        for n in (1, 4, 5, 36, 37, 48, 52, 53, 1000)
    ]
    # Caps of 13 and 10 blocks.
    assert counts == [3, 3, 6, 27, 30, 34, 36, 37, 273]


@pytest.mark.parametrize("window", range(1, 9))
@pytest.mark.parametrize("block_size", range(1, 5))
def test_blocks_behind_are_those_that_no_later_token_sees(window: int, block_size: int) -> None:
    for computed in range(30):
        seen = range(max(0, computed - window + 1), computed + 1)
        assert blocks_behind(window, computed, block_size) == seen[0] // block_size
        assert blocks_behind(None, computed, block_size) == 0


# ---------------------------------------------------------------- a prefix to go on from


@pytest.mark.parametrize(
    ("cached", "table"),
    [
        ("", ""),
        ("0", ""),
        ("1", "1"),  # shorter than the window, but all that there is
        ("11", "11"),
        ("10", "1"),
        ("01", ""),
        ("110", "11"),
        ("101", "1"),
        ("011", "-11"),
        ("11001", "11"),
        ("01101", "-11"),
        ("111011", "----11"),
        ("1111110", "----11"),
        ("010101", ""),
        ("1001010", "1"),
    ],
)
def test_the_longest_prefix_that_a_window_of_two_blocks_can_continue(
    cached: str, table: str
) -> None:
    blocks = [100 + i if c == "1" else None for i, c in enumerate(cached)]
    hit = WindowHit(blocks.__getitem__, 2, len(cached))
    end = hit.cut(len(cached))
    assert hit.table(end) == [100 + i if c == "1" else 0 for i, c in enumerate(table)]


def longest(cached: tuple[bool, ...], need: int, end: int) -> int:
    return max(e for e in range(end + 1) if all(cached[max(0, e - need) : e]))


@pytest.mark.parametrize("need", range(5))
def test_every_pattern_and_every_further_cut(need: int) -> None:
    rng = random.Random(need)
    for cached in itertools.product([False, True], repeat=9):
        asked: Counter[int] = Counter()

        def lookup(index: int, cached: tuple[bool, ...] = cached) -> int | None:
            asked[index] += 1  # noqa: B023
            return 50 + index if cached[index] else None

        hit, end = WindowHit(lookup, need, 9), 9
        while end > 0:
            best = longest(cached, need, end)
            assert hit.cut(end) == best
            first = max(0, best - need)
            assert hit.table(best) == [0] * first + [50 + i for i in range(first, best)]
            end = min(best, end - 1, rng.randrange(10))
        assert not asked or max(asked.values()) == 1


@pytest.mark.parametrize("windows", [(None, 5), (9, None, 4), (5, 14), (None, None, 1)])
def test_a_hit_is_what_every_group_can_serve(windows: Windows) -> None:
    """Against all patterns of blocks that are gone, by trying each length."""
    kv = manager(100, windows)
    donor = admit(kv, "donor", prompt(33))
    tables = [list(t) for t in donor.tables]
    request = make_request("new", prompt(33))
    kv.extend_hashes(request)
    rng = random.Random(1)
    lengths = set()
    for _ in range(300):
        gone = [[rng.random() < 0.25 for _ in range(8)] for _ in windows]
        for group, table in enumerate(tables):
            for index in range(8):
                if gone[group][index]:
                    kv.pool.evict_blocks([table[index]])
                elif kv.pool.block_hash(table[index]) is None:
                    kv.pool.register(table[index], kv.key(donor.block_hashes[index], group))
        needs = [8 if w is None else -(-(w - 1) // 4) for w in windows]
        fit = [
            e
            for e in range(9)
            if not any(
                any(lost[max(0, e - need) : e]) for lost, need in zip(gone, needs, strict=True)
            )
        ]
        hits, num_hit = kv.get_computed_blocks(request)
        assert num_hit == 4 * max(fit)
        lengths.add(num_hit)
        for hit, table, need in zip(hits, tables, needs, strict=True):
            first = max(0, max(fit) - need)
            assert hit == [0] * first + table[first : max(fit)]
    assert len(lengths) > 4


def test_equal_blocks_of_different_groups_are_different() -> None:
    kv = manager(30, (None, 100, None))
    first = admit(kv, "a", prompt(9))
    second = admit(kv, "b", prompt(9))
    assert [list(t[:2]) for t in second.tables] == [list(t[:2]) for t in first.tables]
    assert len({b for t in first.tables for b in t}) == 9
    assert kv.pool.num_cached == 6
    check(kv, first, second)


def test_a_single_group_keeps_the_plain_hash_as_its_key() -> None:
    for windows in ((None,), (6,)):
        kv = manager(30, windows)
        request = admit(kv, "a", prompt(9))
        assert kv.pool.get_cached(request.block_hashes[1]) == request.block_ids[1]


# ---------------------------------------------------------------- trimming


def test_blocks_behind_the_window_become_null_one_by_one() -> None:
    kv = manager(12, (4,), block_size=2)
    request = make_request("r", prompt(20))
    kv.extend_hashes(request)
    nulls = []
    for _ in range(12):
        assert compute(kv, request, 1)
        table = list(request.block_ids)
        count = table.count(0)
        assert table == [0] * count + list(range(count + 1, len(table) + 1))
        nulls.append(count)
        check(kv, request)
    # Before position p is computed those blocks go that end at or before p - 3.
    assert nulls == [0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert kv.pool.free_order() == [7, 8, 9, 10, 11, 1, 2, 3, 4]
    assert [kv.pool.get_cached(h) for h in request.block_hashes[:6]] == [1, 2, 3, 4, 5, 6]


def test_a_long_chunk_leaves_many_at_once_the_deepest_to_be_evicted_first() -> None:
    kv = manager(12, (4,), block_size=2)
    request = make_request("r", prompt(20))
    kv.extend_hashes(request)
    assert compute(kv, request, 15)
    assert list(request.block_ids) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert compute(kv, request, 1)
    assert list(request.block_ids) == [0] * 6 + [7, 8]
    assert kv.pool.free_order() == [9, 10, 11, 6, 5, 4, 3, 2, 1]
    kv.free(request)
    assert kv.pool.num_free == 11


def test_a_refused_allocation_trims_all_the_same() -> None:
    kv = manager(9, (None, 5))
    request = make_request("r", prompt(16))
    assert compute(kv, request, 16)
    assert kv.pool.num_free == 0
    assert not compute(kv, request, 17)
    assert list(request.tables[1][:3]) == [0, 0, 0]
    assert kv.pool.num_free == 3
    assert request.num_computed_tokens == 16
    check(kv, request)
    assert compute(kv, request, 4)


def test_a_shared_block_stays_with_those_that_still_see_it() -> None:
    kv = manager(30, (5,))
    a = admit(kv, "a", prompt(12))
    b = admit(kv, "b", prompt(13))
    assert list(b.block_ids[:3]) == [0, 0, a.block_ids[2]]
    shared = a.block_ids[2]
    for token in range(6):
        a.token_ids.append(70 + token)
        assert compute(kv, a, 1)
    assert a.block_ids[2] == 0
    assert kv.pool.ref_count(shared) == 1
    check(kv, a, b)


def test_a_block_that_leaves_the_window_before_its_tokens_are_known_is_never_named() -> None:
    kv = manager(30, (None, 2), block_size=2)
    request = admit(kv, "a", prompt(3))
    for _ in range(4):  # the tokens of positions 3..6 are still in flight
        assert compute(kv, request, 1)
    assert list(request.tables[1][:2]) == [0, 0]
    request.token_ids += [91, 92, 93, 94]
    kv.extend_hashes(request)
    kv.register(request)
    named = [
        [kv.pool.get_cached(kv.key(h, group)) for h in request.block_hashes] for group in (0, 1)
    ]
    assert named[0] == list(request.tables[0][:3])
    assert named[1] == [named[1][0], None, request.tables[1][2]]
    check(kv, request)


def test_a_freed_request_is_evicted_from_its_end_in_all_groups_alike() -> None:
    kv = manager(8, (None, 5))
    request = admit(kv, "a", prompt(12))
    assert [list(t) for t in request.tables] == [[1, 2, 3], [4, 5, 6]]
    kv.free(request)
    assert kv.pool.free_order() == [7, 3, 6, 2, 5, 1, 4]
    assert not any(request.tables)
    assert (request.capacity, request.trimmed_at) == (0, 0)


# ---------------------------------------------------------------- room


def test_hits_of_all_groups_are_held_before_any_group_takes_a_block() -> None:
    kv = manager(7, (None, 8))
    kv.free(admit(kv, "a", prompt(8)))
    kv.free(admit(kv, "b", prompt(4, 100)))
    assert set(kv.pool.free_order()[:4]) == {1, 2, 3, 4}  # the first to be evicted
    request = admit(kv, "c", prompt(9))
    assert request.num_cached_tokens == 8
    assert [list(t[:2]) for t in request.tables] == [[1, 2], [3, 4]]
    assert kv.pool.num_free == 0
    check(kv, request)


def test_sleeping_hits_count_and_null_placeholders_do_not() -> None:
    kv = manager(41, (None, 9))
    kv.free(admit(kv, "a", prompt(40)))
    request = make_request("b", prompt(80))
    kv.extend_hashes(request)
    hits, num_hit = kv.get_computed_blocks(request)
    assert [sum(map(bool, hit)) for hit in hits] == [10, 2]
    before = kv.pool.num_free
    # 10 + 2 hits that nobody holds and 10 new blocks in each group.
    assert not kv.allocate_slots(request, 40, hit_tables=hits, headroom=9)
    assert kv.pool.num_free == before == 40
    assert kv.allocate_slots(request, 40, hit_tables=hits, headroom=8)
    assert kv.pool.num_free == 8
    assert request.trimmed_at == num_hit == 40


@pytest.mark.parametrize("blocks", [32, 64])
def test_a_long_prompt_is_admitted_with_its_window_group_capped(blocks: int) -> None:
    """The window group needs 13 blocks however long the prompt is."""
    settings = {"windows": (None, 17), "max_num_batched_tokens": 32}
    sim = Sim(make_config(num_blocks=blocks + 13 + 1, max_model_len=blocks * 4, **settings))
    request = sim.add(make_request("r", prompt(4 * blocks - 1), 1))
    held = []
    while sim.scheduler.has_unfinished:
        sim.turn()
        if request.slot >= 0:
            held.append(sum(map(bool, request.tables[1])))
    assert 12 <= max(held) <= 13
    sim.assert_outputs()
    assert sim.scheduler.stats.preemptions == 0
    small = Sim(make_config(num_blocks=blocks + 12 + 1, max_model_len=blocks * 4, **settings))
    words = (
        rf"needs {blocks + 13} KV blocks of 4 tokens \(over .*full, window 17.*has {blocks + 12}"
    )
    with pytest.raises(InvalidRequestError, match=words) as caught:
        small.add(make_request("r", prompt(4 * blocks - 1), 1))
    assert "--max-num-batched-tokens 32" in str(caught.value)


def test_full_attention_is_reserved_in_full_beside_a_window() -> None:
    kv = manager(11, (None, 5), step=4)
    request = make_request("r", prompt(32))
    assert not kv.allocate_slots(request, 4, reserve_full=True)
    assert not any(request.tables)
    assert kv.allocate_slots(request, 4)


def test_what_a_window_group_still_takes_is_bounded_by_its_cap() -> None:
    kv = manager(60, (None, 5), step=8)  # at most 4 blocks in the second group
    request = make_request("r", prompt(80))
    to_come = []
    for _ in range(10):
        assert compute(kv, request, 8)
        to_come.append(kv.blocks_to_come(request))
    assert to_come == [18 + 2, 16 + 1, 14 + 1, 12 + 1, 10 + 1, 8 + 1, 6 + 1, 4 + 1, 2 + 1, 0]


@pytest.mark.parametrize("windows", [(3,), (None, 6), (5, None, 9), (1, None)])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_counted_is_enough_and_one_less_is_refused(windows: Windows, depth: int) -> None:
    """Refusal, admission and what is really taken agree, whatever the sizes: in a pool of just the
    blocks counted a request ends well, without any preemption."""
    rng = random.Random(str(windows))
    for _ in range(60):
        length, outputs = rng.randrange(1, 50), rng.randrange(1, 30)
        settings = {
            "windows": windows,
            "block_size": rng.randrange(1, 6),
            "max_num_batched_tokens": rng.randrange(8, 30),
            "max_model_len": length + outputs,
        }
        config = make_config(**settings)
        # The KV of the last token is never computed.
        enough = config.blocks_for_sequence(length + outputs - 1)
        sim = Sim(make_config(num_blocks=enough + 1, **settings), depth=depth)
        sim.add(make_request("r", prompt(length), outputs))
        sim.run()
        sim.assert_outputs()
        assert sim.scheduler.stats.preemptions == 0
        for_prompt = config.blocks_for_sequence(length)
        if for_prompt > 1:
            sim = Sim(make_config(num_blocks=for_prompt, **settings), depth=depth)
            with pytest.raises(InvalidRequestError, match=f"needs {for_prompt} KV blocks"):
                sim.add(make_request("r", prompt(length), outputs))


# ---------------------------------------------------------------- in the scheduler


def test_blocks_behind_windows_are_given_back_before_anybody_is_preempted() -> None:
    """The last one holds a long chunk of which it needs only the end; the first wants blocks."""
    sim = Sim(make_config(num_blocks=19, windows=(None, 5)), depth=1)
    a = sim.add(make_request("a", prompt(7), 3))
    sim.turn()
    b = sim.add(make_request("b", prompt(27, 100), 5))
    sim.turn()
    assert (a.num_computed_tokens, a.num_blocks, b.num_blocks) == (8, 2, 7)
    assert sim.scheduler.kv.pool.num_free == 0
    step = sim.turn()  # a gives one block back itself and needs two
    assert step is not None
    assert ([row.request for row in step.rows], step.preempted) == ([a, b], [])
    assert list(b.tables[1][:5]) == [0] * 5
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_outgrows_the_pool_is_told_the_blocks_of_all_groups(depth: int) -> None:
    sim = Sim(make_config(num_blocks=10, windows=(None, 8), max_num_batched_tokens=8), depth=depth)
    huge = sim.add(make_request("huge", prompt(10), 50))
    small = sim.add(make_request("small", prompt(10, 100), 4))
    sim.run()
    sim.assert_outputs(allow_failed=True)
    assert huge.finish_reason == "error"
    assert huge.error is not None
    for part in ("KV blocks of 4 tokens", "full, window 8", "has 9", "max_tokens"):
        assert part in huge.error
    assert small.finish_reason == "length"


def test_windows_let_more_run_at_once() -> None:
    """The same pool, all layers with full attention or half of them with a window."""
    peaks = []
    for windows in ((None, None), (None, 8)):
        sim = Sim(make_config(num_blocks=81, windows=windows, max_num_batched_tokens=16))
        for i in range(8):
            sim.add(make_request(str(i), prompt(40, 100 * i), 20))
        sim.run()
        sim.assert_outputs()
        peaks.append(sim.scheduler.stats.mean_running)
    assert peaks[1] > 1.2 * peaks[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_one_prefix_for_full_and_window_layers_then_again_in_full(depth: int) -> None:
    """40 tokens, then others that share only the first 20, then the first ones again."""
    sim = Sim(make_config(windows=(None, 8), max_num_batched_tokens=16), depth=depth)
    tokens = prompt(40)
    for request_tokens in (tokens, tokens[:20] + prompt(20, 500), tokens):
        sim.add(make_request(str(len(sim.requests)), request_tokens, 12))
        sim.run()
    sim.assert_outputs()
    assert [r.num_cached_tokens for r in sim.requests] == [0, 20, 39]  # an exact hit costs one


def test_a_failed_step_and_a_reset_forget_all_groups() -> None:
    sim = Sim(make_config(windows=(None, 6), max_num_seqs=4))
    for i in range(3):
        sim.add(make_request(str(i), prompt(20, 100 * i), 30))
    for _ in range(12):
        sim.turn()
    assert sim.scheduler.reset_prefix_cache(preempt_running=True)
    assert sim.scheduler.kv.pool.num_cached == 0
    for _ in range(6):
        sim.turn()
    assert sim.fail()
    assert sim.scheduler.kv.pool.num_cached == 0
    sim.add(make_request("last", prompt(20), 30))
    sim.run()
    sim.assert_outputs(allow_failed=True)
    assert sim.requests[-1].num_cached_tokens == 0

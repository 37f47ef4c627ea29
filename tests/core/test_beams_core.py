"""Beams as the scheduler sees them: one row each a step, forks by reference, the dead ones gone.

`Sim` compares every search with one over plain lists of tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from jaxpaged.core.request import RequestStatus
from jaxpaged.errors import InvalidRequestError
from tests.core.harness import Search, Sim, make_request, make_samples, small_config

WINDOWS = [(None,), (None, 8), (3, 9)]


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def held_blocks(search: Search) -> int:
    """Different blocks that the beams of a search hold."""
    return len({b for beam in search.members for table in beam.tables for b in table if b})


def rows_of(search: Search) -> int:
    """Rows that a search needs after its prompt: one for each live beam of each step."""
    return sum(len(follow) for follow in search.history)


def copies_of(search: Search, length: int, block_size: int) -> int:
    """Copies of a block, in each group of layers, that its branches cost: none where they part at
    the edge of one.
    """
    return sum(
        sum(count - 1 for count in Counter(index for index, _ in follow).values())
        for step, follow in enumerate(search.history)
        if (length + step) % block_size
    )


# ---------------------------------------------------------------- what a search costs


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("ending", "even"), [(0, False), (4, False), (0, True)])
def test_a_beam_costs_one_token_a_step_and_copies_only_where_it_parts(
    *, ending: int, even: bool, depth: int, caching: bool, windows: Any
) -> None:
    for length, width in itertools.product([1, 4, 6], [1, 2, 5]):
        sim = Sim(small_config(enable_prefix_caching=caching, windows=windows), depth=depth)
        search = sim.add_beams("b", prompt(length), width, 11, ending=ending, even=even)
        sim.run()
        sim.assert_outputs()
        stats = sim.scheduler.stats
        assert len(search.history) == 11 or (ending and width < 5)
        assert stats.scheduled_tokens == length + rows_of(search)
        assert stats.copied_blocks == len(windows) * copies_of(search, length, 4)
        assert stats.requests_finished == {"length": 1}
        if width == 5 and not even:
            parents = [{index for index, _ in follow} for follow in search.history[1:-1]]
            assert any(len(alive) < 5 for alive in parents), "no beam has died"
            assert stats.forks > 10


def test_branches_at_the_edge_of_a_block_share_it_whole() -> None:
    sim = Sim(small_config(num_blocks=30), depth=1)
    search = sim.add_beams("b", prompt(8), 3, 6)
    sim.turn()  # the prompt; its end has three continuations
    assert [list(beam.block_ids) for beam in search.members] == [[1, 2]] * 3
    step = sim.turn()
    assert step is not None
    assert [(row.start, row.num_tokens) for row in step.rows] == [(8, 1)] * 3
    assert step.copies == []
    sim.run()
    sim.assert_outputs()


def test_the_blocks_of_a_dead_beam_are_free_at_once() -> None:
    sim = Sim(small_config(num_blocks=60, block_size=1, enable_prefix_caching=False), depth=1)
    search = sim.add_beams("b", prompt(3), 4, 20)
    freed = 0
    while sim.scheduler.has_unfinished:
        sim.launch()
        before = sim.scheduler.kv.pool.num_held
        sim.read()
        group = search.members[0].group
        assert group is not None
        dead = [beam for beam in group.members if beam not in group.live]
        assert all(not any(beam.tables) for beam in dead)
        held = sim.scheduler.kv.pool.num_held
        assert held == held_blocks(search)
        freed += held < before and sim.scheduler.has_unfinished
    assert freed > 3
    sim.assert_outputs()


def test_beams_share_what_they_have_in_common() -> None:
    """Without sharing four beams of 40 tokens and more would need over 40 blocks."""
    sim = Sim(small_config(num_blocks=60), depth=1)
    search = sim.add_beams("b", prompt(38), 4, 8)
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.peak_blocks_used <= 9 + 4 * 3
    assert len(search.history) == 8


def test_the_prompt_of_a_search_comes_in_chunks_and_from_the_cache() -> None:
    sim = Sim(small_config(max_num_batched_tokens=8))
    first = sim.add_beams("a", prompt(22), 4, 6)
    sim.run()
    before = sim.scheduler.stats.scheduled_tokens
    again = sim.add_beams("b", prompt(22), 4, 6)
    sim.run()
    sim.assert_outputs()
    assert before == 22 + rows_of(first)
    assert sim.scheduler.stats.scheduled_tokens - before == 1 + rows_of(again)
    assert again.members[0].num_cached_tokens == 21


def test_rows_of_one_search_may_come_in_several_steps() -> None:
    """Another one uses up half of the budget with its prompt."""
    config = small_config(max_num_batched_tokens=8, max_num_seqs=6, long_prefill_token_threshold=4)
    sim = Sim(config)
    sim.add(make_request("long", prompt(90, 100), 3))
    sim.turn()
    search = sim.add_beams("b", prompt(5), 5, 6)
    sim.run()
    sim.assert_outputs()
    ours = [[r for r in step.rows if r.request in search.members] for step in sim.steps]
    assert any(rows and len(rows) < 5 and rows[0].start > 5 for rows in ours)


# ---------------------------------------------------------------- how a search ends


def test_a_search_without_continuations_is_over() -> None:
    sim = Sim(small_config())
    search = sim.add_beams("b", prompt(6), 3, 9, ending=1)
    sim.run()
    sim.assert_outputs()
    assert search.history == [[]]
    assert sim.scheduler.stats.scheduled_tokens == 6


def test_a_search_of_one_step_computes_the_prompt_alone() -> None:
    sim = Sim(small_config())
    sim.add_beams("b", prompt(6), 3, 1)
    sim.run()
    sim.assert_outputs()
    assert (sim.scheduler.stats.scheduled_tokens, sim.scheduler.stats.forks) == (6, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_search_ends_at_the_longest_sequence(depth: int) -> None:
    sim = Sim(small_config(max_model_len=14), depth=depth)
    search = sim.add_beams("b", prompt(6), 3, 50)
    sim.run()
    sim.assert_outputs()
    assert len(search.history) == 8


def test_a_search_wider_than_the_batch_is_refused_with_the_way_out() -> None:
    sim = Sim(small_config(max_num_seqs=3))
    with pytest.raises(InvalidRequestError, match="beam_width=4 is more than max_num_seqs=3") as e:
        sim.add_beams("b", prompt(6), 4)
    assert e.value.param == "beam_width"
    assert "--max-num-seqs" in str(e.value)
    sim.assert_drained()
    sim.add_beams("b", prompt(6), 3)
    sim.run()
    sim.assert_outputs()


@pytest.mark.parametrize("length", [3, 9])
def test_a_lone_search_that_outgrows_the_pool_ends_with_the_numbers(length: int) -> None:
    sim = Sim(small_config(num_blocks=8, max_model_len=28))
    search = sim.add_beams("b", prompt(length), 5, 16, even=True)
    sim.run()
    first = search.members[0]
    assert {beam.finish_reason for beam in search.members} == {"error"}
    assert {beam.error for beam in search.members} == {first.error}
    assert first.error is not None
    assert "The beam search has grown to 5 beams of" in first.error
    assert "KV blocks of 4 tokens, but the pool has 7." in first.error
    assert "Ask for fewer beams or max_tokens" in first.error
    assert len(sim.scheduler.take_failed()) == 1
    sim.assert_outputs(allow_failed=True)
    sim.add(make_request("after", prompt(9), 9))
    sim.run()
    sim.assert_outputs(allow_failed=True)


PHASES = ["waiting", "computing the prompt", "first tokens in flight", "searching", "preempted"]


def brought_to(phase: str, depth: int) -> tuple[Sim, Search]:
    config = small_config(num_blocks=40, max_num_batched_tokens=8, max_model_len=60)
    sim = Sim(config, depth=depth)
    sim.add(make_request("other", prompt(3, 200), 45))
    if phase != "waiting":
        sim.turn()
    search = sim.add_beams("b", prompt(22), 4, 12)
    first = search.members[0]
    if phase == "computing the prompt":
        sim.until(lambda: first.num_computed_tokens > 8)
        assert first.num_computed_tokens < 22
    elif phase == "first tokens in flight":
        while first.num_inflight == 0:
            sim.launch()
    elif phase in ("searching", "preempted"):
        sim.until(lambda: len(search.history) == 4)
    if phase == "preempted":
        for beam in search.members[::-1]:
            sim.scheduler._preempt(beam)
    return sim, search


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("member", [0, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_ends_the_whole_search(depth: int, member: int, phase: str) -> None:
    sim, search = brought_to(phase, depth)
    sim.scheduler.finish(search.members[member], "abort")
    sim.scheduler.check_integrity()
    assert all(beam.status is RequestStatus.FINISHED for beam in search.members)
    assert held_blocks(search) == 0
    assert sim.scheduler.stats.requests_finished == {"abort": 1}
    sim.run()
    sim.assert_outputs()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_ends_a_search_that_is_in_it(depth: int, phase: str) -> None:
    sim, search = brought_to(phase, depth)
    if not sim.queue:
        sim.launch()
    struck = any(
        row.request in search.members and row.epoch == row.request.epoch
        for step, _ in sim.queue
        for row in step.rows
    )
    failed = sim.fail()
    assert sum(request in search.members for request in failed) == struck
    sim.run()
    sim.assert_outputs(allow_failed=True)
    assert search.members[0].finish_reason == ("error" if struck else "length")


# ---------------------------------------------------------------- preemption


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_search_gives_way_as_one_and_goes_on_where_it_was(
    *, depth: int, policy: str, caching: bool
) -> None:
    config = small_config(
        num_blocks=26, max_model_len=60, policy=policy, enable_prefix_caching=caching
    )
    sim = Sim(config, depth=depth)
    first = sim.add(make_request("first", prompt(37), 20))
    search = sim.add_beams("b", prompt(18, 100), 4, 16, priority=1, arrival_time=1.0, even=True)
    step = sim.until(lambda: sim.scheduler.stats.preemptions)
    assert step is not None
    assert step.preempted == search.members[::-1]
    assert first.num_preemptions == 0
    done = len(search.history)
    assert done > 2
    sim.until(lambda: len(search.history) > done)
    assert [beam.num_preemptions for beam in search.members] == [1] * 4
    sharing = held_blocks(search)
    assert sharing <= sum(beam.num_blocks for beam in search.members) - 3 * 4
    sim.run()
    sim.assert_outputs()


@pytest.mark.parametrize("caching", [True, False])
def test_what_was_in_flight_at_a_preemption_is_computed_again_and_used_once(
    *, caching: bool
) -> None:
    sim = Sim(small_config(enable_prefix_caching=caching), depth=100)
    search = sim.add_beams("b", prompt(9), 4, 6)
    sim.launch()
    sim.read()
    sim.launch()
    assert sum(beam.num_inflight for beam in search.members) == 4
    for beam in search.members[::-1]:
        sim.scheduler._preempt(beam)
    assert sum(beam.num_inflight for beam in search.members) == 0
    sim.launch()  # while the old step is in flight
    assert sim.read() == []
    assert len(search.history) == 1
    sim.depth = 1
    sim.run()
    sim.assert_outputs()


def preempted_at(step: int, sim: Sim, search: Search) -> None:
    """Turn until the search has gone on so many times, and set it back, if it has not ended."""
    while sim.scheduler.has_unfinished and len(search.history) < step:
        sim.turn()
    for beam in search.members[::-1] if sim.scheduler.has_unfinished else ():
        sim.scheduler._preempt(beam)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("caching", [True, False])
def test_a_search_that_resumes_holds_no_more_than_before(*, caching: bool, windows: Any) -> None:
    """Its beams share as a tree, not only what all of them have in common."""
    more_than_the_stem = 0
    for block_size, step in itertools.product([1, 2, 4], [3, 9, 13]):
        settings = small_config(
            num_blocks=200, block_size=block_size, enable_prefix_caching=caching, windows=windows
        )
        held = []
        for disturbed in (False, True):
            sim = Sim(settings, depth=1)
            search = sim.add_beams("b", prompt(5), 5, 16)
            if disturbed:
                preempted_at(step, sim, search)
                assert held_blocks(search) == 0
            # Only the second step gives back what windows have left behind.
            while len(search.history) < step + 2:
                sim.turn()
            held.append(held_blocks(search))
            live = [beam for beam in search.members if beam.num_blocks]
            stem = set.intersection(*(set(beam.block_ids) for beam in live))
            alone = sum(len(set(beam.block_ids) - stem) for beam in live)
            more_than_the_stem += len(stem) + alone > len({b for r in live for b in r.block_ids})
            sim.run()
            sim.assert_outputs()
        assert held[1] <= held[0], (block_size, step)
    assert more_than_the_stem > 3


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_search_that_fits_just_so_comes_back(*, block_size: int, caching: bool) -> None:
    """A preemption never ends a search that would have got through without."""
    ended_right = 0
    for width, step, num_blocks in itertools.product([3, 4], [4, 8], range(7, 30)):
        settings = small_config(
            num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching
        )
        alone = Sim(settings, depth=1)
        undisturbed = alone.add_beams("b", prompt(1), width, 12)
        alone.run()
        sim = Sim(settings, depth=1)
        search = sim.add_beams("b", prompt(1), width, 12)
        preempted_at(step, sim, search)
        sim.run(limit=300)
        sim.assert_outputs(allow_failed=True)
        reasons = [found.members[0].finish_reason for found in (undisturbed, search)]
        assert reasons[0] == reasons[1], (width, step, num_blocks)
        ended_right += reasons[1] == "length" and search.members[0].num_preemptions > 0
    assert ended_right > 20


def test_many_searches_in_a_small_pool_all_end_right() -> None:
    sim = Sim(small_config(num_blocks=22, max_num_seqs=8, max_model_len=50))
    for number in range(6):
        sim.add_beams(f"{number}.", prompt(7, 40 * number), 4, 14, even=True)
        sim.add_group(make_samples(f"s{number}.", prompt(6, 40 * number), 3, 14))
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.preemptions > 10


# ---------------------------------------------------------------- rotary frequencies by length


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_search_crosses_the_threshold_of_longrope_once_and_as_one(
    depth: int, windows: Any
) -> None:
    sim = Sim(small_config(rope_rule="longrope", rope_threshold=12, windows=windows), depth=depth)
    search = sim.add_beams("b", prompt(9), 4, 10)
    sim.run()
    sim.assert_outputs()
    stats = sim.scheduler.stats
    assert (stats.rope_restarts, stats.preemptions) == (4, 0)
    assert all(beam.rope_regime == "long" for beam in search.members if beam.num_output_tokens > 4)


@pytest.mark.parametrize("length", [8, 17])
def test_a_search_under_dynamic_frequencies(length: int) -> None:
    sim = Sim(small_config(rope_rule="dynamic", rope_threshold=10))
    search = sim.add_beams("b", prompt(length), 3, 9)
    sim.run()
    sim.assert_outputs()
    assert {beam.rope_length for beam in search.members} == {length}

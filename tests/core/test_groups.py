"""Parallel samples: one prefill, forked tables, copies on the first write, no block left behind.

`Sim` compares every sample with a run of its own that shares nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jaxpaged.core.groups import common_length
from jaxpaged.core.request import Request, RequestStatus
from tests.core.harness import Sim, make_request, make_samples, small_config

WINDOWS = [(None,), (None, 8), (3, 9)]


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def tables(requests: list[Request]) -> list[list[int]]:
    return [list(request.block_ids) for request in requests]


def blocks_of(requests: list[Request]) -> tuple[int, int]:
    """Blocks that these hold, and that they would hold if they shared none."""
    entries = [block for r in requests for table in r.tables for block in table if block]
    return len(set(entries)), len(entries)


def planned(sim: Sim) -> list[tuple[str, int, int, int]]:
    """Rows of the newest step: request, start, tokens and the row that its token is drawn from."""
    rows = sim.steps[-1].rows
    return [(row.request.request_id, row.start, row.num_tokens, row.source) for row in rows]


# ---------------------------------------------------------------- what is shared, and for how long


def test_samples_share_the_prompt_and_all_but_the_last_writer_copy_its_tail() -> None:
    sim = Sim(small_config(num_blocks=20), depth=1)
    samples = sim.add_group(make_samples("s", prompt(6), 3))
    sim.launch()
    assert planned(sim) == [("s0", 0, 6, -1), ("s1", 6, 0, 0), ("s2", 6, 0, 0)]
    assert tables(samples) == [[1, 2]] * 3
    refs = sim.scheduler.kv.pool.ref_count
    assert [refs(block) for block in (1, 2, 3)] == [3, 3, 0]
    assert sim.steps[-1].copies == []
    sim.read()
    step = sim.launch()
    assert step is not None
    assert step.copies == [(2, 3), (2, 4)]
    assert tables(samples) == [[1, 3], [1, 4], [1, 2]]
    assert [refs(block) for block in (1, 2, 3, 4)] == [3, 1, 1, 1]
    assert blocks_of(samples) == (sim.scheduler.kv.pool.num_held, 6) == (4, 6)
    sim.run()
    sim.assert_outputs()
    assert (sim.scheduler.stats.forks, sim.scheduler.stats.copied_blocks) == (2, 2)


def test_a_prompt_that_fills_its_blocks_needs_no_copy() -> None:
    sim = Sim(small_config(num_blocks=20), depth=1)
    samples = sim.add_group(make_samples("s", prompt(8), 3))
    sim.turn()
    assert tables(samples) == [[1, 2]] * 3
    sim.turn()
    assert tables(samples) == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert blocks_of(samples) == (5, 9)
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.copied_blocks == 0


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "plain"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [5, 64])
def test_the_prompt_is_computed_once(budget: int, depth: int, caching: bool, windows: Any) -> None:
    for length, count in itertools.product([1, 4, 6, 13], [2, 5]):
        sim = Sim(
            small_config(
                enable_prefix_caching=caching,
                windows=windows,
                max_num_batched_tokens=budget,
                max_num_seqs=5,
            ),
            depth=depth,
        )
        sim.add_group(make_samples("s", prompt(length), count, 9))
        sim.run()
        sim.assert_outputs()
        stats = sim.scheduler.stats
        assert stats.scheduled_tokens == length + count * 8
        assert (stats.prompt_tokens, stats.forks) == (length, count - 1)
        tails = len(windows) if length % 4 else 0
        assert stats.copied_blocks == (count - 1) * tails
        assert len({tuple(r.output_token_ids) for r in sim.requests}) > 1


def test_without_chunks_the_prompt_is_one_row() -> None:
    sim = Sim(
        small_config(enable_chunked_prefill=False, max_num_batched_tokens=40, max_model_len=40)
    )
    sim.add_group(make_samples("s", prompt(25), 3, 5))
    sim.add_group(make_samples("t", prompt(25, 100), 3, 5))
    sim.run()
    sim.assert_outputs()
    assert [row.num_tokens for step in sim.steps for row in step.rows if not row.start] == [25, 25]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "plain"])
def test_samples_end_one_by_one(depth: int, caching: bool) -> None:
    config = small_config(enable_prefix_caching=caching)
    sim = Sim(config, depth=depth)
    samples = sim.add_group(make_samples("s", prompt(6), 6, 30, stop_token_ids=range(5)))
    sim.run()
    sim.assert_outputs()
    lengths = [sample.num_output_tokens for sample in samples]
    assert len(set(lengths)) > 3
    stopped = [sample.finish_reason == "stop" for sample in samples]
    assert any(stopped)
    least = 6 + sum(length - 1 for length in lengths)
    computed = sim.scheduler.stats.scheduled_tokens
    # A step later than the last token nobody knew yet that it was the last.
    assert least <= computed <= least + (sum(stopped) if depth == 2 else 0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::3], ids=str)
def test_samples_leave_in_any_order(order: tuple[int, ...]) -> None:
    sim = Sim(small_config(num_blocks=40), depth=2)
    samples = sim.add_group(make_samples("s", prompt(6), 4, 40))
    sim.until(lambda: samples[0].num_output_tokens == 3)
    held = [sim.scheduler.kv.pool.num_held]
    for index in order:
        sim.scheduler.finish(samples[index], "abort")
        held.append(sim.scheduler.kv.pool.num_held)
        sim.scheduler.check_integrity()
        sim.turn()
    assert held[-1] == 0 < held[0]
    assert all(a > b for a, b in itertools.pairwise(held))
    sim.run()
    sim.assert_outputs()


def test_a_prompt_that_only_is_scored_is_computed_once_for_all() -> None:
    sim = Sim(small_config())
    samples = sim.add_group(make_samples("s", prompt(9), 4, 0, skip_prefix_cache=True))
    sim.run()
    sim.assert_outputs()
    assert [sample.finish_reason for sample in samples] == ["length"] * 4
    assert sim.scheduler.stats.scheduled_tokens == 9


def test_who_takes_nothing_from_the_cache_forks_all_the_same() -> None:
    sim = Sim(small_config())
    for name in "ab":
        sim.add_group(make_samples(name, prompt(9), 3, 5, skip_prefix_cache=True))
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.scheduled_tokens == 2 * (9 + 3 * 4)


@pytest.mark.parametrize("length", [8, 10])
def test_the_next_group_of_a_prompt_computes_one_token_of_it(length: int) -> None:
    sim = Sim(small_config())
    sim.add_group(make_samples("a", prompt(length), 3, 5))
    sim.run()
    before = sim.scheduler.stats.scheduled_tokens
    second = sim.add_group(make_samples("b", prompt(length), 3, 5))
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.scheduled_tokens - before == 1 + 3 * 4
    assert second[0].num_cached_tokens == length - 1


def test_two_groups_of_one_prompt_in_one_step_compute_it_once() -> None:
    sim = Sim(small_config(), depth=1)
    a = sim.add_group(make_samples("a", prompt(10), 2, 5))
    b = sim.add_group(make_samples("b", prompt(10), 2, 5))
    sim.launch()
    assert planned(sim) == [("a0", 0, 10, -1), ("a1", 10, 0, 0), ("b0", 10, 0, 0), ("b1", 10, 0, 0)]
    assert blocks_of([*a, *b]) == (3, 12)
    sim.read()
    sim.launch()
    assert blocks_of([*a, *b]) == (6, 12)
    sim.read()
    sim.run()
    sim.assert_outputs()


# ---------------------------------------------------------------- more than fits


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "plain"])
def test_more_samples_than_slots_are_several_groups(caching: bool) -> None:
    sim = Sim(small_config(max_num_seqs=3, enable_prefix_caching=caching))
    samples = sim.add_group(make_samples("s", prompt(10), 7, 5))
    sim.run()
    sim.assert_outputs()
    stats = sim.scheduler.stats
    assert (stats.forks, stats.peak_running) == (4, 3)
    again = 1 if caching else 10
    assert stats.scheduled_tokens == 10 + 2 * again + 7 * 4
    assert sim.admitted == samples


def test_a_group_waits_for_slots_and_nobody_overtakes_it() -> None:
    sim = Sim(small_config(max_num_seqs=3), depth=1)
    first = sim.add(make_request("first", prompt(5), 6))
    group = sim.add_group(make_samples("s", prompt(6, 50), 3, 4))
    late = sim.add(make_request("late", prompt(5, 90), 2))
    sim.turn()
    assert list(sim.scheduler.running) == [first]
    sim.run()
    sim.assert_outputs()
    assert sim.admitted == [first, *group, late]


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "plain"])
@pytest.mark.parametrize("num_blocks", [6, 7, 8])
def test_a_group_that_needs_more_than_the_pool_is_parted(num_blocks: int, caching: bool) -> None:
    config = small_config(
        num_blocks=num_blocks, max_model_len=(num_blocks - 1) * 4, enable_prefix_caching=caching
    )
    sim = Sim(config)
    samples = sim.add_group(make_samples("s", prompt(7), 8, 12))
    sim.launch()
    assert 1 <= sim.scheduler.num_running < 8
    sim.run()
    sim.assert_outputs()
    assert {sample.finish_reason for sample in samples} == {"length"}
    assert sim.admitted[:1] == samples[:1]


def test_a_lone_group_that_outgrows_the_pool_gives_up_its_last_samples() -> None:
    sim = Sim(small_config(num_blocks=12, max_model_len=44), depth=1)
    samples = sim.add_group(make_samples("s", prompt(8), 4, 20))
    step = sim.until(lambda: sim.scheduler.stats.preemptions)
    assert step is not None
    assert step.preempted == [samples[3]]
    assert [sample.group is not None for sample in samples] == [True, True, True, False]
    sim.run()
    sim.assert_outputs()
    assert samples[0].num_preemptions == 0
    assert {sample.finish_reason for sample in samples} == {"length"}


# ---------------------------------------------------------------- preemption


@pytest.mark.parametrize("windows", [(None,), (None, 8)], ids=str)
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "plain"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_gives_way_as_one_and_comes_back_sharing(
    depth: int,
    policy: str,
    caching: bool,
    windows: Any,
) -> None:
    config = small_config(
        num_blocks=28 if windows == (None,) else 46,
        max_model_len=60,
        policy=policy,
        enable_prefix_caching=caching,
        windows=windows,
    )
    sim = Sim(config, depth=depth)
    first = sim.add(make_request("first", prompt(33), 20))
    group = sim.add_group(make_samples("s", prompt(22, 100), 4, 20, priority=1, arrival_time=1.0))
    step = sim.until(lambda: sim.scheduler.stats.preemptions)
    assert step is not None
    assert step.preempted == group[::-1]
    assert first.num_preemptions == 0
    assert all(sample.status is RequestStatus.PREEMPTED for sample in group)
    outputs = [sample.num_tokens_with_inflight - 22 for sample in group]
    assert min(outputs) >= 1
    computed = sim.scheduler.stats.scheduled_tokens
    sim.until(lambda: all(sample.num_computed_tokens > 22 for sample in group))
    assert [sample.num_preemptions for sample in group] == [1] * 4
    held, alone = blocks_of(group)
    assert held <= alone - 3 * (20 // 4 if windows == (None,) else 2)
    # The prompt, and what followed, was computed again once and not four times.
    others = sum(row.num_tokens for s in sim.steps for row in s.rows if row.request is first)
    assert sim.scheduler.stats.scheduled_tokens - computed < 22 + sum(outputs) + 4 + others
    sim.run()
    sim.assert_outputs()


def test_samples_with_one_beginning_share_it_again() -> None:
    """What samples have in common after a preemption may be more than their prompt."""
    found = 0
    for first in range(0, 400, 20):
        sim = Sim(small_config(enable_prefix_caching=False), depth=1)
        a, b = sim.add_group(make_samples("s", prompt(5, first), 2, 9))
        sim.until(lambda a=a: a.num_output_tokens == 4)  # type: ignore[misc]
        same = common_length(a.token_ids, b.token_ids, 9)
        found += 5 < same < 9
        assert sim.scheduler.reset_prefix_cache(preempt_running=True)
        sim.until(lambda b=b: b.num_computed_tokens == 9)  # type: ignore[misc]
        shared = min(same, 8)
        assert blocks_of([a, b])[0] == 6 - shared // 4
        assert sim.hits[b] == [5, shared]
        sim.run()
        sim.assert_outputs()
    assert found > 3


def test_a_more_urgent_request_outlives_a_group() -> None:
    sim = Sim(small_config(num_blocks=14, policy="priority", max_model_len=52), depth=1)
    group = sim.add_group(make_samples("s", prompt(8), 3, 20, priority=3))
    sim.until(lambda: group[0].num_output_tokens == 2)
    urgent = sim.add(make_request("urgent", prompt(8, 100), 20, priority=0, arrival_time=5.0))
    step = sim.until(lambda: sim.scheduler.stats.preemptions)
    assert step is not None
    assert set(step.preempted) == set(group)
    sim.until(lambda: urgent.is_finished)
    assert urgent.num_preemptions == 0
    sim.run()
    sim.assert_outputs()


def test_the_copies_of_a_group_that_gives_way_in_the_same_step_are_not_made() -> None:
    config = small_config(
        num_blocks=8, max_num_batched_tokens=12, policy="priority", max_model_len=28
    )
    sim = Sim(config, depth=1)
    group = sim.add_group(make_samples("s", prompt(14), 2, 6, priority=3))
    sim.turn()
    urgent = sim.add(make_request("urgent", prompt(8, 100), 6, priority=0))
    sim.turn()
    assert all(sample.shares_tail for sample in group)
    assert sim.scheduler.kv.pool.num_free == 1
    step = sim.turn()  # the first of the group takes that block for a copy, then urgent needs one
    assert step is not None
    assert step.preempted == group[::-1]
    assert [row.request for row in step.rows] == [urgent]
    assert step.copies == []
    sim.run()
    sim.assert_outputs()


# ---------------------------------------------------------------- an end in every phase


def brought_to(phase: str, depth: int, caching: bool) -> tuple[Sim, list[Request]]:
    """A group of four, of a prompt of 22 tokens, beside another request."""
    config = small_config(
        num_blocks=24, max_num_batched_tokens=8, max_model_len=60, enable_prefix_caching=caching
    )
    sim = Sim(config, depth=depth)
    other = sim.add(make_request("other", prompt(3, 200), 45))
    # Their outputs end after 10, 5, 12 and 12 tokens.
    group = make_samples("s", prompt(22, 240), 4, 12, stop_token_ids=range(4))
    if phase == "waiting":
        sim.add_group(group)
        return sim, group
    sim.turn()
    sim.add_group(group)
    if phase == "computing the prompt":
        sim.until(lambda: group[0].num_computed_tokens > 8)
        assert 8 < group[0].num_computed_tokens < 22
        assert all(sample.awaits_fork for sample in group[1:])
    elif phase == "first tokens in flight":
        while group[3].num_inflight == 0:
            sim.launch()
    elif phase == "decoding":
        sim.until(lambda: group[0].num_output_tokens == 2)
    elif phase == "after one ended":
        sim.until(lambda: any(sample.is_finished for sample in group))
        assert not all(sample.is_finished for sample in group)
    else:
        assert phase == "preempted"
        sim.until(lambda: group[0].num_output_tokens == 2)
        for sample in group[::-1]:
            sim.scheduler._preempt(sample)
    assert not other.is_finished
    return sim, group


PHASES = [
    "waiting",
    "computing the prompt",
    "first tokens in flight",
    "decoding",
    "after one ended",
    "preempted",
]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("whom", ["first", "last", "middle", "all"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "plain"])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_leaves_no_block_and_the_others_go_on(
    depth: int,
    caching: bool,
    whom: str,
    phase: str,
) -> None:
    sim, group = brought_to(phase, depth, caching)
    alive = [sample for sample in group if not sample.is_finished]
    chosen = {"first": alive[:1], "last": alive[-1:], "middle": alive[1:2], "all": alive}[whom]
    for sample in chosen:
        sim.scheduler.finish(sample, "abort")
        sim.scheduler.check_integrity()
    assert all(not any(sample.tables) for sample in chosen)
    assert all((s.finish_reason, s.epoch, s.slot) == ("abort", 1, -1) for s in chosen)
    sim.run()
    sim.assert_outputs()
    assert all(s.finish_reason in ("stop", "length") for s in alive if s not in chosen)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_ends_those_in_it_and_no_others(depth: int, phase: str) -> None:
    sim, group = brought_to(phase, depth, caching=True)
    if not sim.queue:
        sim.launch()
    in_flight = {row.request for step, _ in sim.queue for row in step.rows}
    in_flight -= {request for request in in_flight if request.is_finished}
    failed = sim.fail()
    assert set(failed) <= in_flight
    assert all(request.finish_reason == "error" for request in failed)
    sim.run()
    sim.assert_outputs(allow_failed=True)
    assert all(s.finish_reason in ("stop", "length", "error") for s in group)
    assert all(s.finish_reason != "error" for s in group if s not in in_flight)


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "plain"])
def test_when_the_one_that_computes_the_prompt_goes_the_next_takes_over(caching: bool) -> None:
    sim = Sim(small_config(max_num_batched_tokens=8, enable_prefix_caching=caching), depth=1)
    group = sim.add_group(make_samples("s", prompt(30), 4, 6))
    sim.turn()
    for gone in range(2):
        sim.scheduler.finish(group[gone], "abort")
        assert group[gone + 1].num_computed_tokens == 8 * (gone + 1)
        sim.turn()
        assert planned(sim) == [(f"s{gone + 1}", 8 * (gone + 1), 8, -1)]
    sim.run()
    sim.assert_outputs()
    # Nothing was computed twice.
    assert sim.scheduler.stats.scheduled_tokens == 30 + 2 * 5
    assert sim.scheduler.stats.prompt_tokens == 30


def test_the_last_of_a_group_goes_on_by_itself() -> None:
    sim = Sim(small_config(max_num_batched_tokens=8), depth=1)
    group = sim.add_group(make_samples("s", prompt(20), 3, 6))
    sim.turn()
    sim.scheduler.finish(group[2], "abort")
    assert group[0].group is group[1].group is not None
    sim.scheduler.finish(group[1], "abort")
    assert group[0].group is None
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.forks == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_reset_sets_groups_back_in_order(depth: int) -> None:
    sim = Sim(small_config(max_num_seqs=8), depth=depth)
    a = sim.add_group(make_samples("a", prompt(9), 3, 12))
    b = sim.add_group(make_samples("b", prompt(9, 50), 3, 12))
    sim.until(lambda: b[0].num_output_tokens == 3)
    assert sim.scheduler.reset_prefix_cache(preempt_running=True)
    assert list(sim.scheduler.waiting) == [*a, *b]
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.forks == 8


# ---------------------------------------------------------------- rotary frequencies by length


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "plain"])
def test_samples_cross_the_threshold_of_longrope(
    caching: bool,
    depth: int,
    windows: Any,
) -> None:
    config = small_config(
        rope_rule="longrope",
        rope_threshold=12,
        windows=windows,
        enable_prefix_caching=caching,
        max_num_seqs=4,
    )
    sim = Sim(config, depth=depth)
    sim.add_group(make_samples("s", prompt(9), 4, 12, stop_token_ids=[1]))
    sim.add_group(make_samples("t", prompt(14, 100), 4, 12))
    sim.run()
    sim.assert_outputs()
    stats = sim.scheduler.stats
    assert stats.rope_restarts >= 3
    assert all(len(sim.hits[sample]) == 1 for sample in sim.requests[4:])  # long from the start


@pytest.mark.parametrize("length", [8, 17])
def test_samples_under_dynamic_frequencies(length: int) -> None:
    sim = Sim(small_config(rope_rule="dynamic", rope_threshold=10))
    for name in "ab":
        sim.add_group(make_samples(name, prompt(length), 3, 9))
        sim.run()
    sim.assert_outputs()
    regime = None if length < 10 else length
    assert {(r.rope_regime, r.rope_length) for r in sim.requests} == {(regime, length)}
    assert sim.requests[3].num_cached_tokens == length - 1


def test_a_group_that_waits_across_the_threshold_goes_on_apart() -> None:
    """Set back with lengths on both sides of it: equal tokens, but not equal keys."""
    config = small_config(rope_rule="longrope", rope_threshold=12, max_num_batched_tokens=8)
    sim = Sim(config, depth=1)
    a, b = sim.add_group(make_samples("s", prompt(6), 2, 12))
    sim.until(lambda: a.num_output_tokens == 6)
    a.token_ids.append(3)  # as if a step of one row had run
    sim.delivered[a].append(3)
    for sample in (b, a):
        sim.scheduler._preempt(sample)
    sim.launch()
    assert (a.group, b.group) == (None, None)
    assert (a.rope_regime, b.rope_regime) == ("long", None)
    for sample in (a, b):
        sim.scheduler.finish(sample, "abort")
    sim.run()
    sim.assert_drained()

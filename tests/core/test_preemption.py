"""Pools too small for the work: preemption, watermark, promises, failures, never a hang.

Every test here asserts that what it is about did happen.
"""

from __future__ import annotations

import random

import pytest

from jaxpaged.core.request import RequestStatus
from jaxpaged.core.scheduler import Scheduler
from tests.core.harness import Sim, make_config, make_request


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def ids(requests: object) -> list[str]:
    return [r.request_id for r in requests]  # type: ignore[attr-defined]


def test_the_last_admitted_gives_way_and_keeps_its_late_token() -> None:
    config = make_config(
        num_blocks=11, block_size=16, max_num_batched_tokens=100, enable_prefix_caching=False
    )
    sim = Sim(config)
    a = sim.add(make_request("a", prompt(79), 20))
    assert [r.num_tokens for r in sim.launch().rows] == [79]  # type: ignore[union-attr]
    b = sim.add(make_request("b", prompt(80, 500), 5))
    step = sim.launch()
    assert step is not None
    assert [r.num_tokens for r in step.rows] == [1, 80]
    assert sim.scheduler.kv.pool.num_free == 0
    step = sim.launch()  # a computes its 81st token and needs a sixth block
    assert step is not None
    assert [row.request for row in step.rows] == [a]
    assert step.preempted == [b]
    assert (b.status, b.num_inflight, b.slot) == (RequestStatus.PREEMPTED, 1, -1)
    assert ids(sim.scheduler.waiting) == ["b"]
    sim.read()
    assert [r.request for r in sim.read()] == [a, b]
    assert (b.num_output_tokens, b.num_inflight) == (1, 0)
    sim.run()
    sim.assert_outputs()
    assert sim.hits[b] == [0, 0]
    assert sim.scheduler.stats.recomputed_tokens == 80
    assert sim.computed[b] == 80 + 85 - 1


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    sim = Sim(make_config(num_blocks=11, max_num_seqs=4))
    sim.add(make_request("a", prompt(19), 20))
    sim.add(make_request("b", prompt(19, 100), 20))
    sim.launch()
    sim.add(make_request("small", [7], 2))
    preempting = [sim.launch() for _ in range(3)]
    events = [step for step in preempting if step is not None and step.preempted]
    assert [ids(step.preempted) for step in events] == [["b"]]
    assert not any(row.admitted for step in events for row in step.rows)
    sim.run()
    sim.assert_outputs()


def test_by_priority_the_worst_running_one_gives_way_and_resumes_with_its_outputs() -> None:
    sim = Sim(make_config(num_blocks=5, block_size=16, policy="priority"), depth=1)
    low = sim.add(make_request("low", prompt(30), 6, priority=5, arrival_time=0.0))
    sim.turn()
    high = sim.add(make_request("high", prompt(32, 100), 3, priority=0, arrival_time=1.0))
    sim.turn()
    step = sim.turn()
    assert step is not None
    assert [row.request for row in step.rows] == [high]
    assert step.preempted == [low]
    assert low.num_output_tokens == 2
    sim.run()
    sim.assert_outputs()
    resumed = next(r for s in sim.steps[2:] for r in s.rows if r.request is low)
    assert resumed.admitted
    assert resumed.start + resumed.num_tokens == 32


def test_a_victim_planned_already_in_this_step_is_taken_back() -> None:
    """By priority the victim may come first in the order of admission; its tokens and budget
    are free again and the others lose no turn."""
    sim = Sim(make_config(num_blocks=8, policy="priority"), depth=1)
    low = sim.add(make_request("low", prompt(8), 9, priority=5, arrival_time=0.0))
    sim.turn()
    mid = sim.add(make_request("mid", prompt(7, 100), 6, priority=1, arrival_time=1.0))
    sim.turn()
    top = sim.add(make_request("top", prompt(8, 200), 6, priority=0, arrival_time=2.0))
    sim.turn()
    assert [len(r.block_ids) for r in (low, mid, top)] == [3, 2, 2]
    assert sim.scheduler.kv.pool.num_free == 0
    step = sim.turn()  # low still has room in its last block, mid has not
    assert step is not None
    assert step.preempted == [low]
    assert [row.request for row in step.rows] == [mid, top]
    assert step.num_tokens == 2
    assert (low.num_inflight, low.num_computed_tokens) == (0, 0)
    sim.run()
    sim.assert_outputs()


def test_one_that_gives_way_itself_costs_the_others_no_turn() -> None:
    sim = Sim(make_config(num_blocks=5, policy="priority"), depth=1)
    low = sim.add(make_request("low", prompt(7), 9, priority=5, arrival_time=0.0))
    sim.turn()
    high = sim.add(make_request("high", prompt(6, 100), 3, priority=0, arrival_time=1.0))
    sim.turn()
    assert sim.scheduler.kv.pool.num_free == 0
    step = sim.turn()
    assert step is not None
    assert step.preempted == [low]
    assert [row.request for row in step.rows] == [high]
    sim.run()
    sim.assert_outputs()


def test_by_priority_equals_give_way_by_arrival() -> None:
    sim = Sim(make_config(num_blocks=5, policy="priority"), depth=1)
    late = sim.add(make_request("late", prompt(7), 9, priority=1, arrival_time=5.0))
    sim.turn()
    early = sim.add(make_request("early", prompt(7, 50), 9, priority=1, arrival_time=3.0))
    sim.run()
    sim.assert_outputs()
    assert (late.num_preemptions > 0, early.num_preemptions) == (True, 0)


def test_by_priority_the_preempted_come_first_among_equals() -> None:
    sim = Sim(make_config(num_blocks=6, policy="priority", max_num_seqs=2), depth=1)
    first = sim.add(make_request("first", prompt(8), 8, priority=1, arrival_time=1.0))
    second = sim.add(make_request("second", prompt(8, 50), 8, priority=1, arrival_time=2.0))
    sim.turn()
    waiting = [
        sim.add(make_request("eager", prompt(8, 90), 3, priority=1, arrival_time=0.5)),
        sim.add(make_request("better", prompt(4, 150), 3, priority=0, arrival_time=9.0)),
    ]
    sim.until(lambda: second.num_preemptions)
    assert list(sim.scheduler.waiting) == [waiting[1], second, waiting[0]]
    sim.run()
    sim.assert_outputs()
    assert first.num_preemptions == 0


def test_preempting_one_does_not_skip_the_next_in_line() -> None:
    sim = Sim(make_config(num_blocks=7, policy="priority", max_num_seqs=4), depth=1)
    a = sim.add(make_request("a", prompt(8), 9, priority=9, arrival_time=0.0))
    others = [
        sim.add(make_request(n, prompt(7, 60 * i), 3, priority=i, arrival_time=float(i)))
        for i, n in enumerate(["b", "c"], start=1)
    ]
    sim.turn()
    step = sim.until(lambda: a.num_preemptions)
    assert step is not None
    assert {row.request for row in step.rows} == set(others)
    sim.run()
    sim.assert_outputs()


# ---------------------------------------------------------------- room kept for those that run


def test_admissions_leave_the_watermark_free_but_growth_may_use_it() -> None:
    sim = Sim(make_config(num_blocks=11, watermark=0.15, max_num_seqs=4), depth=1)
    assert sim.scheduler.config.watermark_blocks == 2
    first = sim.add(make_request("first", prompt(20), 20))  # 5 of 10 blocks
    second = sim.add(make_request("second", prompt(13, 100), 2))  # 4 more leave 1
    third = sim.add(make_request("third", [9], 2))
    step = sim.turn()
    assert step is not None
    assert ids(row.request for row in step.rows) == ["first"]  # and third may not overtake
    sim.until(lambda: first.num_computed_tokens > 36)
    assert len(first.block_ids) == 10
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.preemptions == 0
    assert sim.admitted == [first, second, third]


@pytest.mark.parametrize(
    ("fraction", "num_blocks", "expected"),
    [(0.0, 101, 0), (0.001, 101, 1), (0.01, 101, 1), (0.01, 102, 2), (0.5, 11, 5), (0.01, 2, 1)],
)
def test_the_watermark_in_blocks(fraction: float, num_blocks: int, expected: int) -> None:
    assert make_config(watermark=fraction, num_blocks=num_blocks).watermark_blocks == expected


def test_the_watermark_never_keeps_the_only_request_out() -> None:
    sim = Sim(make_config(num_blocks=5, watermark=0.9))
    sim.add(make_request("a", prompt(16), 1))
    sim.add(make_request("b", prompt(16, 50), 1))
    sim.run()
    sim.assert_outputs()


def preemptions_with(watermark: float) -> int:
    rng = random.Random(3)
    sim = Sim(make_config(num_blocks=61, max_num_seqs=16, watermark=watermark), check=False)
    for i in range(80):
        sim.add(make_request(str(i), prompt(rng.randrange(4, 16), 100 * i), rng.randrange(5, 40)))
    sim.run()
    sim.assert_outputs()
    return sim.scheduler.stats.preemptions


def test_a_watermark_saves_preemptions() -> None:
    without, some = preemptions_with(0.0), preemptions_with(0.1)
    assert without > 0
    assert some < without


def test_a_prompt_is_admitted_only_if_all_of_it_fits_beside_what_was_promised_before() -> None:
    """Both prompts fit alone, and their first chunks fit together. Admitting the second would
    only mean to preempt it."""
    sim = Sim(make_config(num_blocks=21, max_num_batched_tokens=16, long_prefill_token_threshold=8))
    first = sim.add(make_request("first", prompt(60), 2))
    second = sim.add(make_request("second", prompt(40, 100), 2))
    step = sim.launch()
    assert step is not None
    assert [row.request for row in step.rows] == [first]
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.preemptions == 0
    assert second.is_finished


# ---------------------------------------------------------------- never a hang


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_one_that_outgrows_the_pool_ends_with_numbers_and_the_next_runs(
    policy: str, depth: int
) -> None:
    sim = Sim(make_config(num_blocks=5, policy=policy), depth=depth)
    huge = sim.add(make_request("huge", prompt(10), 50))
    small = sim.add(make_request("small", prompt(10, 100), 6))
    sim.run()
    sim.assert_outputs(allow_failed=True)
    assert huge.finish_reason == "error"
    assert huge.num_output_tokens == 7
    assert huge.error is not None
    for part in ("17 tokens", "5 KV blocks", "has 4", "max_tokens", "--num-gpu-blocks-override"):
        assert part in huge.error
    assert sim.scheduler.take_failed() == [huge]
    assert sim.scheduler.take_failed() == []
    assert small.finish_reason == "length"


def test_one_that_uses_the_pool_to_the_last_slot_is_served() -> None:
    sim = Sim(make_config(num_blocks=5))
    request = sim.add(make_request("r", prompt(10), 7))
    sim.run()
    sim.assert_outputs()
    assert request.num_tokens == 17  # the last token needs no KV
    assert sim.scheduler.stats.preemptions == 0


def test_a_lone_request_preempts_itself_and_may_end_with_the_token_in_flight() -> None:
    sim = Sim(make_config(num_blocks=5))
    everything = range(50)
    request = sim.add(make_request("r", prompt(14), 50, min_tokens=3, eos_token_ids=everything))
    other = sim.add(make_request("other", [1], 2))
    for _ in range(3):
        sim.launch()
    assert sim.launch() is None  # nothing else may be admitted before its tokens are read
    assert (request.status, request.num_inflight) == (RequestStatus.PREEMPTED, 3)
    sim.run()
    assert request.finish_reason == "stop"
    assert other.finish_reason == "length"
    sim.assert_outputs()


def test_none_without_steps_in_flight_means_that_nothing_is_left() -> None:
    """An engine may go to sleep on None; then no request may be waiting for it."""
    scheduler = Scheduler(make_config(num_blocks=5))
    scheduler.add(make_request("r", prompt(16), 50))
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(step, [1])
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished
    assert len(scheduler.take_failed()) == 1


def test_the_watchdog_ends_what_cannot_go_on() -> None:
    scheduler = Scheduler(make_config(num_blocks=5))
    stuck, fine = make_request("stuck", prompt(6)), make_request("fine", prompt(6, 50))
    scheduler.add(stuck)
    scheduler.add(fine)
    stuck.num_inflight = 1  # a bug of ours: a token that will never come
    step = scheduler.schedule()
    assert step is not None
    assert [row.request for row in step.rows] == [fine]
    assert scheduler.take_failed() == [stuck]
    assert stuck.error is not None
    assert "no progress" in stuck.error
    assert "4 of 4 KV blocks free" in stuck.error


# ---------------------------------------------------------------- outputs do not depend on it all


SMALL = {
    "resumed by known tokens, not by the prompt": (
        {"num_blocks": 16, "max_num_batched_tokens": 8, "max_num_seqs": 5},
        [(n, 30) for n in range(9, 16)] * 2,
        0,
    ),
    "out of blocks in decode": ({"num_blocks": 8, "max_num_seqs": 4}, [(6, 12)] * 4, 0),
    "a shared prefix and a lookup after every preemption": (
        {"num_blocks": 17, "max_num_seqs": 6, "max_num_batched_tokens": 16},
        [(n, 24) for n in range(1, 13)],
        16,
    ),
}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
def test_small_pools_give_what_a_big_one_gives(
    case: str, depth: int, policy: str, *, caching: bool
) -> None:
    changes, shapes, shared = SMALL[case]
    sim = Sim(make_config(**changes, policy=policy, enable_prefix_caching=caching), depth=depth)
    for i, (length, outputs) in enumerate(shapes):
        tokens = prompt(shared) + prompt(length, 100 + 50 * i)
        sim.add(make_request(str(i), tokens, outputs, priority=i % 3, arrival_time=float(i)))
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.preemptions > 0
    assert sim.scheduler.stats.recomputed_tokens > 0
    assert all(len(sim.hits[r]) == 1 + r.num_preemptions for r in sim.requests)
    if caching:
        assert any(start > 0 for starts in sim.hits.values() for start in starts[1:])
    else:
        assert not any(start for starts in sim.hits.values() for start in starts)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_tokens_in_flight_at_a_preemption_arrive_once_and_in_order(depth: int) -> None:
    sim = Sim(make_config(num_blocks=14, max_num_seqs=6), depth=depth)
    late = 0
    for i in range(20):
        sim.add(make_request(str(i), prompt(6, 100 * i), 14))
    while sim.scheduler.has_unfinished or sim.queue:
        step = sim.launch()
        if step is not None:
            late += sum(r.num_inflight > 0 for r in step.preempted)
        if sim.queue and (step is None or len(sim.queue) >= depth):
            sim.read()
    assert late > 0
    sim.assert_outputs()


def test_a_forced_reset_under_pressure_loses_and_repeats_nothing() -> None:
    sim = Sim(make_config(num_blocks=14, max_num_seqs=6), depth=3)
    for i in range(12):
        sim.add(make_request(str(i), prompt(6, 100 * i), 14))
    resets = turns = 0
    while sim.scheduler.has_unfinished or sim.queue:
        sim.turn()
        turns += 1
        if turns % 9 == 0:
            resets += any(r.num_inflight for r in sim.scheduler.running)
            assert sim.scheduler.reset_prefix_cache(preempt_running=True)
            assert sim.scheduler.kv.pool.num_cached == 0
    assert resets > 3
    sim.assert_outputs()


def test_evicted_prefixes_are_computed_again() -> None:
    """Prompts that push each other out of the pool, then the first again."""
    sim = Sim(make_config(num_blocks=6))
    cold, again = [], []
    for i, first in enumerate((1, 101, 201, 1)):
        request = sim.add(make_request(str(i), prompt(12, first), 4))
        sim.run()
        (cold if i == 0 else again).append(request)
    sim.assert_outputs()
    assert again[-1].output_token_ids == cold[0].output_token_ids
    assert again[-1].num_cached_tokens == 0


# ---------------------------------------------------------------- failed steps


def test_a_failed_step_ends_its_requests_and_the_others_run_on() -> None:
    sim = Sim(make_config(max_num_seqs=6))
    inside = [sim.add(make_request(n, prompt(9, 100 * ord(n)), 8)) for n in "ab"]
    sim.launch()
    sim.launch()
    waiting = [sim.add(make_request(n, prompt(9, 100 * ord(n)), 8)) for n in "cd"]
    assert sim.fail("device lost") == inside
    assert all((r.finish_reason, r.error) == ("error", "device lost") for r in inside)
    assert sim.scheduler.kv.pool.num_cached == 0
    sim.add(make_request("e", prompt(9, 100 * ord("a")), 8))
    sim.run()
    sim.assert_outputs(allow_failed=True)
    assert all(r.finish_reason == "length" for r in waiting)
    assert sim.requests[-1].num_cached_tokens == 0
    assert sim.scheduler.stats.failed_steps == 2


def test_those_that_run_but_are_not_in_the_failed_step_keep_their_tokens_and_order() -> None:
    sim = Sim(make_config())
    ending = [sim.add(make_request(n, prompt(9, 100 * i), 2)) for i, n in enumerate("abc")]
    longer = sim.add(make_request("d", prompt(9, 900), 8))
    sim.launch()
    sim.read()
    sim.launch()
    step = sim.scheduler.schedule()  # its launch fails on the host; the one before runs on
    assert step is not None
    assert [row.request for row in step.rows] == [longer]
    assert sim.scheduler.fail_steps([step], "out of memory") == [longer]
    sim.scheduler.check_integrity()
    assert list(sim.scheduler.waiting) == ending
    assert sim.scheduler.schedule() is None
    assert [r.request for r in sim.read()] == ending
    sim.assert_outputs(allow_failed=True)
    assert all(r.finish_reason == "length" for r in ending)
    assert longer.num_output_tokens == 1


def test_when_only_the_pool_is_lost_everything_is_recomputed_in_order() -> None:
    sim = Sim(make_config(num_blocks=40), depth=1)
    for i in range(6):
        sim.add(make_request(str(i), prompt(9, 100 * i), 8))
    for _ in range(4):
        sim.turn()
    assert sim.fail() == []
    assert list(sim.scheduler.waiting) == sim.requests
    sim.run()
    sim.assert_outputs()
    assert all(sim.hits[r] == [0, 0] for r in sim.requests)


def test_a_preempted_request_with_a_token_in_the_failed_step_ends_too() -> None:
    sim = Sim(make_config(num_blocks=11))
    a = sim.add(make_request("a", prompt(19), 20))
    b = sim.add(make_request("b", prompt(19, 100), 20))
    sim.depth = 100  # read nothing
    sim.until(lambda: b.num_preemptions)
    assert b.num_inflight > 0
    assert sim.fail() == [a, b]
    sim.assert_outputs(allow_failed=True)


@pytest.mark.parametrize("seed", range(3))
def test_waves_with_aborts_and_failures_give_every_block_back(seed: int) -> None:
    rng = random.Random(seed)
    sim = Sim(make_config(num_blocks=16, max_num_batched_tokens=32), check=False)
    number = 0
    while number < 500:
        wave = []
        for _ in range(8):
            tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
            stops = range(rng.choice([0, 0, 5]))
            request = make_request(str(number), tokens, rng.randrange(1, 20), stop_token_ids=stops)
            wave.append(sim.add(request))
            number += 1
        while sim.scheduler.has_unfinished or sim.queue:
            sim.turn()
            if rng.random() < 0.03:
                sim.scheduler.finish(rng.choice(wave), "abort")
            if rng.random() < 0.01:
                sim.fail()
        sim.assert_drained()
    last = sim.add(make_request("last", [1, 2, 3], 5))
    sim.run()
    assert last.finish_reason == "length"
    sim.assert_outputs(allow_failed=True)
    reasons = sim.scheduler.stats.requests_finished
    assert min(reasons[r] for r in ("abort", "error", "length", "stop")) > 5
    assert sim.scheduler.stats.preemptions > 20

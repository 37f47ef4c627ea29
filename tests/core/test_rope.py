"""Rotary frequencies that follow from the length: regimes, restarts, and what may be shared."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpaged.core.prefix_hash import block_extra, hash_block
from jaxpaged.core.request import Request, RequestStatus
from tests.core.harness import Sim, expected_output, make_config, make_request

WINDOWS = [(None,), (None, 8), (6,)]


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def longrope(depth: int = 2, **changes: Any) -> Sim:
    settings = {"rope_rule": "longrope", "rope_threshold": 12, **changes}
    return Sim(make_config(**settings), depth=depth)


def dynamic(**changes: Any) -> Sim:
    return Sim(make_config(rope_rule="dynamic", rope_threshold=12, **changes))


def served(sim: Sim, tokens: list[int], max_tokens: int = 1) -> Request:
    request = sim.add(make_request(str(len(sim.requests)), tokens, max_tokens))
    sim.run()
    return request


# ---------------------------------------------------------------- longrope


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_one_that_crosses_starts_over_exactly_once(windows: Any, depth: int) -> None:
    sim = longrope(depth, windows=windows)
    request = sim.add(make_request("r", prompt(8), 20))
    sim.run()
    sim.assert_outputs()
    # 12 positions in the short regime, none of them of use in the long one.
    assert sim.hits[request] == [0, 0]
    assert sim.computed[request] == 12 + 8 + 20 - 1
    stats = sim.scheduler.stats
    assert (stats.rope_restarts, stats.preemptions, request.num_preemptions) == (1, 0, 0)
    assert stats.recomputed_tokens == 12
    assert request.rope_length == 13


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("outputs", "restarts"), [(4, 0), (5, 0), (6, 1)])
def test_only_a_row_beyond_the_threshold_restarts(outputs: int, restarts: int, depth: int) -> None:
    """8 + 5 tokens are more than 12, but nobody reads the KV of the last one."""
    sim = longrope(depth)
    request = sim.add(make_request("r", prompt(8), outputs))
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.rope_restarts == restarts
    assert len(sim.hits[request]) == 1 + restarts


def test_the_token_in_flight_at_the_crossing_arrives_once_and_is_awaited() -> None:
    sim = longrope(depth=100)  # read nothing by itself
    request = sim.add(make_request("r", prompt(11), 9))
    other = sim.add(make_request("other", prompt(3, 100), 9))
    for _ in range(2):
        sim.launch()
    assert request.num_computed_tokens == 12
    step = sim.launch()
    assert step is not None
    assert step.preempted == [request]
    assert [row.request for row in step.rows] == [other]
    assert (request.status, request.num_inflight) == (RequestStatus.PREEMPTED, 2)
    step = sim.launch()
    assert step is not None
    assert [row.request for row in step.rows] == [other]
    while sim.queue:
        sim.read()
    assert (request.num_tokens, request.num_inflight) == (13, 0)
    step = sim.launch()
    assert step is not None
    assert [(r.start, r.num_tokens) for r in step.rows if r.request is request] == [(0, 13)]
    assert request.rope_length == 13
    sim.depth = 2
    sim.run()
    sim.assert_outputs()


@pytest.mark.parametrize("depth", [2, 3])
def test_the_token_in_flight_at_the_crossing_may_be_the_last(depth: int) -> None:
    found = 0
    for first in range(0, 4000, 40):
        request = make_request("r", prompt(10, first), 20, eos_token_ids=range(12))
        outputs, reason = expected_output(request, longrope().scheduler.config)
        if reason != "stop" or len(outputs) != 3:
            continue
        found += 1
        sim = longrope(depth)
        sim.add(request)
        sim.run()
        sim.assert_outputs()
        assert sim.scheduler.stats.rope_restarts == 1  # nobody could know
        assert sim.hits[request] == [0]
    assert found > 5


def test_those_that_cross_in_one_step_keep_their_order_and_are_not_overtaken() -> None:
    sim = longrope(depth=1, max_num_seqs=3)
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        sim.add(make_request(name, prompt(10, first), 9))
    late = sim.add(make_request("late", [1], 2))
    step = sim.until(lambda: sim.scheduler.stats.rope_restarts)
    assert sim.scheduler.stats.rope_restarts == 3
    assert step is not None  # nothing else ran, so they came back in the same call
    assert [row.request.request_id for row in step.rows] == ["a", "b", "c"]
    assert list(sim.scheduler.waiting) == [late]
    sim.run()
    sim.assert_outputs()


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_long_prompts_share_with_long_ones_only(windows: Any) -> None:
    sim = longrope(windows=windows)
    assert served(sim, prompt(12)).num_cached_tokens == 0
    long = served(sim, prompt(20))
    assert (long.num_cached_tokens, long.rope_length) == (0, 20)
    assert served(sim, [*prompt(16), *prompt(9, 70)]).num_cached_tokens == 16
    assert served(sim, [*prompt(8), 99]).num_cached_tokens == 8  # from the first
    short = served(sim, [*prompt(11), 98])
    assert short.num_cached_tokens == 8
    assert short.rope_length == 12
    assert sim.scheduler.stats.rope_restarts == 0
    sim.assert_outputs()


def test_a_next_turn_shares_with_what_was_computed_again_beyond_the_threshold() -> None:
    sim = longrope()
    first = served(sim, prompt(8), 20)
    assert sim.scheduler.stats.rope_restarts == 1
    second = served(sim, [*first.token_ids, 5])
    assert second.num_cached_tokens == 24
    sim.assert_outputs()


def test_chunks_of_one_prompt_are_all_in_one_regime() -> None:
    sim = longrope(max_num_batched_tokens=8, max_num_seqs=2)
    request = sim.add(make_request("r", prompt(40), 2))
    sim.launch()
    assert (request.num_computed_tokens, request.rope_length) == (8, 40)
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.rope_restarts == 0


def test_a_preemption_for_blocks_beyond_the_threshold_is_no_restart() -> None:
    sim = longrope(num_blocks=11)
    for i in range(3):
        sim.add(make_request(str(i), prompt(10 + i, 100 * i), 18))
    sim.run()
    sim.assert_outputs()
    stats = sim.scheduler.stats
    assert stats.preemptions > 0
    assert stats.rope_restarts <= 3
    for request in sim.requests:
        assert len(sim.hits[request]) <= 2 + request.num_preemptions


def test_without_caching_the_regimes_work_too() -> None:
    sim = longrope(enable_prefix_caching=False)
    for i in range(3):
        sim.add(make_request(str(i), prompt(10 + i), 18))
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.rope_restarts == 3


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_failure_or_abort_between_crossing_and_return_leaves_nothing(windows: Any) -> None:
    for how in ("fail", "abort"):
        sim = longrope(depth=100, windows=windows)
        request = sim.add(make_request("r", prompt(11), 9))
        for _ in range(2):
            sim.launch()
        assert sim.launch() is None
        assert sim.scheduler.stats.rope_restarts == 1
        if how == "fail":
            assert sim.fail() == [request]
        else:
            sim.scheduler.finish(request, "abort")
        sim.depth = 2
        served(sim, prompt(30), 3)
        sim.assert_outputs(allow_failed=True)


def test_by_priority_the_urgent_may_come_before_one_that_starts_over() -> None:
    sim = longrope(depth=1, policy="priority", max_num_seqs=1)
    slow = sim.add(make_request("slow", prompt(10), 9, priority=5))
    sim.turn()
    urgent = sim.add(make_request("urgent", prompt(4, 50), 2, priority=0))
    sim.run()
    sim.assert_outputs()
    assert sim.admitted == [slow, urgent, slow]
    assert sim.scheduler.stats.rope_restarts == 1


# ---------------------------------------------------------------- dynamic


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_long_prompts_share_only_with_those_of_their_length(windows: Any) -> None:
    sim = dynamic(windows=windows)
    served(sim, prompt(20))
    other = served(sim, [*prompt(16), 80, 81, 82, 83])
    assert (other.num_cached_tokens, other.rope_length) == (16, 20)
    longer = served(sim, prompt(21))
    assert (longer.num_cached_tokens, longer.rope_length) == (0, 21)
    assert served(sim, prompt(12)).num_cached_tokens == 0
    assert served(sim, [*prompt(8), 99]).num_cached_tokens == 8
    assert served(sim, prompt(13)).num_cached_tokens == 0
    sim.assert_outputs()


def test_growing_beyond_the_threshold_changes_nothing() -> None:
    sim = dynamic()
    request = served(sim, prompt(8), 30)
    sim.assert_outputs()
    assert sim.scheduler.stats.rope_restarts == 0
    assert sim.hits[request] == [0]
    assert request.rope_length == 8


def test_a_preempted_one_finds_its_own_blocks_again() -> None:
    sim = dynamic(num_blocks=13)
    for i in range(2):
        sim.add(make_request(str(i), prompt(14 + i, 100 * i), 20))
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.preemptions > 0
    assert sim.scheduler.stats.preempted_hit_tokens > 0
    assert [r.rope_length for r in sim.requests] == [14, 15]


# ---------------------------------------------------------------- hashes


def test_a_regime_enters_the_first_block_beside_the_salt() -> None:
    assert block_extra(0, cache_salt=None) is None
    assert block_extra(0, cache_salt="s", rope_regime="long") == ("cache_salt", "s", "rope", "long")
    assert block_extra(0, cache_salt=None, rope_regime=20) == ("rope", 20)
    assert block_extra(1, cache_salt="s", rope_regime=20) is None
    regimes: list[int | str | None] = [None, "long", 20, 21, "20"]
    hashes = {
        hash_block(None, [1, 2], block_extra(0, cache_salt=None, rope_regime=r)) for r in regimes
    }
    assert len(hashes) == len(regimes)


def test_fixed_frequencies_have_no_regime() -> None:
    sim = Sim(make_config())
    request = served(sim, prompt(50), 20)
    assert (request.rope_length, request.rope_regime) == (0, None)

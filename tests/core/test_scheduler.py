"""What the scheduler picks in each step, admission, stop and abort, reset; roomy pools."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.core.scheduler import ScheduledStep, Scheduler, SchedulerConfig
from jaxpaged.errors import ConfigError, InvalidRequestError
from tests.core.harness import Sim, expected_output, make_config, make_request


def planned(step: ScheduledStep | None) -> dict[str, int]:
    assert step is not None
    return {row.request.request_id: row.num_tokens for row in step.rows}


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def big(**changes: object) -> SchedulerConfig:
    settings: dict[str, object] = {
        "num_blocks": 2000,
        "block_size": 16,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
    }
    return make_config(**{**settings, **changes})


def test_fitting_prompts_all_start_in_one_step_in_order() -> None:
    sim = Sim(big())
    for i in range(10):
        sim.add(make_request(str(i), prompt(30, 100 * i)))
    step = sim.launch()
    assert planned(step) == {str(i): 30 for i in range(10)}
    assert step is not None
    assert all(row.samples and row.admitted and row.start == 0 for row in step.rows)
    assert sorted(row.request.slot for row in step.rows) == list(range(10))
    sim.run()
    sim.assert_outputs()
    assert sim.admitted == sim.requests


def test_long_prompts_are_cut_by_threshold_and_budget() -> None:
    sim = Sim(big(long_prefill_token_threshold=400), depth=1)
    for i in range(3):
        sim.add(make_request("abc"[i], prompt(800, 1000 * i)))
    assert planned(sim.launch()) == {"a": 400, "b": 400, "c": 224}
    assert not any(row.samples for row in sim.steps[-1].rows)
    assert sim.read() == []
    assert planned(sim.launch()) == {"a": 400, "b": 400, "c": 224}
    assert len(sim.read()) == 2
    assert planned(sim.launch()) == {"a": 1, "b": 1, "c": 352}
    assert all(row.samples for row in sim.steps[-1].rows)
    sim.run()
    sim.assert_outputs()


def test_short_prompts_may_not_overtake_a_long_one() -> None:
    lengths = {"a": 800, "b": 800, "c": 10, "d": 10}
    chunked, whole = Sim(big()), Sim(big(enable_chunked_prefill=False))
    for sim in (chunked, whole):
        for i, (name, length) in enumerate(lengths.items()):
            sim.add(make_request(name, prompt(length, 1000 * i)))
    assert planned(chunked.launch()) == {"a": 800, "b": 224}
    assert planned(whole.launch()) == {"a": 800}
    for sim in (chunked, whole):
        sim.run()
        sim.assert_outputs()
        assert sim.admitted == sim.requests


def test_prompts_in_one_step_that_begin_alike_share_their_blocks_at_once() -> None:
    sim = Sim(big())
    sim.add(make_request("a", prompt(100)))
    sim.add(make_request("b", [*prompt(99), 7]))
    assert planned(sim.launch()) == {"a": 100, "b": 4}
    a, b = sim.requests
    assert a.block_ids[:6] == b.block_ids[:6]
    assert a.block_ids[6] != b.block_ids[6]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 96)
    assert sim.scheduler.stats.prefix_hit_tokens == 96
    sim.run()
    sim.assert_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_of_a_chat_computes_only_what_is_new(depth: int) -> None:
    sim = Sim(big(), depth=depth)
    first = sim.add(make_request("1", prompt(50), 30))
    sim.run()
    history = first.token_ids  # the KV of the last token was never computed
    second = sim.add(make_request("2", [*history, *prompt(20, 500)]))
    step = sim.launch()
    assert second.num_cached_tokens == 79 // 16 * 16 == 64
    assert planned(step) == {"2": len(history) + 20 - 64}
    sim.run()
    sim.assert_outputs()


@pytest.mark.parametrize("extra", range(10))
def test_any_rest_after_a_hit_is_a_proper_chunk(extra: int) -> None:
    """Small budget: a hit must never leave an empty chunk or one at a wrong place."""
    sim = Sim(make_config(max_num_batched_tokens=8))
    sim.add(make_request("warm", prompt(16)))
    sim.run()
    request = sim.add(make_request("again", prompt(16 + extra)))
    sim.run()
    assert request.num_cached_tokens == (16 if extra else 15)
    sim.assert_outputs()


def test_a_step_may_follow_before_the_last_is_read() -> None:
    sim = Sim(big(max_num_seqs=2))
    a = sim.add(make_request("a", prompt(512)))
    assert planned(sim.launch()) == {"a": 512}
    b = sim.add(make_request("b", prompt(512, 2000)))
    step = sim.launch()
    assert planned(step) == {"a": 1, "b": 512}
    assert a.num_inflight == 2
    assert step is not None
    assert step.rows[0].start == 512
    assert a.num_output_tokens == 0
    first = sim.read()
    assert [(r.request, r.finished) for r in first] == [(a, False)]
    assert planned(sim.launch()) == {"a": 1, "b": 1}
    assert len(sim.read()) == 2
    sim.run()
    sim.assert_outputs()
    assert b.is_finished


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_computed_past_the_certain_end(depth: int) -> None:
    sim = Sim(make_config(), depth=depth)
    for i in range(12):
        sim.add(make_request(str(i), prompt(3 + 2 * i, 100 * i), 1 + i % 5))
    sim.add(make_request("long", prompt(250, 5000), 50))
    sim.run()
    sim.assert_outputs()
    for request in sim.requests:
        assert sim.computed[request] == request.num_prompt_tokens + request.num_output_tokens - 1
    assert sim.requests[-1].num_output_tokens == 6
    assert sim.scheduler.stats.generation_tokens == sum(map(len, sim.delivered.values()))


def test_an_end_that_nobody_could_know_costs_one_token() -> None:
    found = 0
    for start in range(40):
        request = make_request("r", prompt(5, start), 20, eos_token_ids=range(10))
        tokens, reason = expected_output(request, make_config())
        if reason == "stop" and len(tokens) < 20:
            found += 1
            sim = Sim(make_config())
            sim.add(request)
            sim.run()
            sim.assert_outputs()
            assert sim.computed[request] == 5 + len(tokens)
    assert found > 20


def test_scoring_a_prompt_draws_nothing_and_ends_with_its_last_chunk() -> None:
    sim = Sim(make_config(max_model_len=100, max_num_batched_tokens=40))
    request = sim.add(make_request("s", prompt(100), 0, skip_prefix_cache=True))
    sim.launch()
    sim.launch()
    assert sim.read() == []
    sim.launch()
    assert sim.launch() is None
    assert not any(row.samples for step in sim.steps for row in step.rows)
    assert sim.read() == []
    (result,) = sim.read()
    assert (result.request, result.token, result.finished) == (request, None, True)
    assert (request.finish_reason, request.num_output_tokens) == ("length", 0)
    sim.assert_drained()


def test_first_come_first_served() -> None:
    sim = Sim(make_config(max_num_seqs=3, num_blocks=40))
    for i in range(30):
        sim.add(make_request(str(i), prompt(4 + i * 7 % 30, 100 * i), 6))
    sim.run()
    sim.assert_outputs()
    assert sim.admitted == sim.requests
    assert [r.admission_order for r in sim.requests] == list(range(30))


# ---------------------------------------------------------------- priority


def served(requests: list[Request], **changes: object) -> list[str]:
    sim = Sim(make_config(policy="priority", max_num_seqs=1, **changes))
    for request in requests:
        sim.add(request)
    sim.run()
    sim.assert_outputs()
    return [r.request_id for r in sim.admitted]


def ranked(name: str, priority: int, arrival: float) -> Request:
    tokens = prompt(6, 100 * ord(name))
    return make_request(name, tokens, 3, priority=priority, arrival_time=arrival)


def test_smaller_priority_is_served_first_then_earlier_arrival() -> None:
    assert served([ranked("a", 2, 0), ranked("b", 0, 1), ranked("c", 1, 2)]) == ["b", "c", "a"]
    assert served([ranked("a", 1, 5), ranked("b", 1, 3), ranked("c", 1, 4)]) == ["b", "c", "a"]
    mixed = [ranked("a", 2, 1), ranked("b", 1, 3), ranked("c", 1, 2), ranked("d", -1, 9)]
    assert served(mixed) == ["d", "c", "b", "a"]
    assert served([ranked(n, 0, 1.0) for n in "abcd"]) == ["a", "b", "c", "d"]


def test_the_waiting_queue_shows_the_order_of_admission() -> None:
    scheduler = Scheduler(make_config(policy="priority"))
    requests = [ranked(chr(65 + i), i * 7 % 5, i * 3 % 4) for i in range(20)]
    for request in requests:
        scheduler.add(request)
    expected = sorted(requests, key=lambda r: (r.priority, r.arrival_time, r.queue_order))
    assert list(scheduler.waiting) == expected


def test_a_more_urgent_newcomer_takes_nothing_from_those_that_run() -> None:
    sim = Sim(make_config(policy="priority", num_blocks=5, max_num_seqs=4))
    low = sim.add(ranked("l", 9, 0))
    sim.launch()
    high = sim.add(ranked("h", 0, 1))
    sim.add(make_request("x", prompt(12, 900), 3, priority=0, arrival_time=2.0))
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.preemptions == 0
    assert sim.admitted[:2] == [low, high]


# ---------------------------------------------------------------- ends and aborts


def test_what_the_engine_reads_of_ended_requests() -> None:
    request = make_request("r", prompt(5), 20, stop_token_ids=range(25), min_tokens=2)
    sim = Sim(make_config())
    sim.add(request)
    sim.run()
    sim.assert_outputs()
    assert request.finish_reason == "stop"
    assert request.stop_reason == request.token_ids[-1] < 25
    assert sim.scheduler.stats.requests_finished == {"stop": 1}


def test_min_tokens_beyond_the_context_ends_by_length() -> None:
    sim = Sim(make_config(max_model_len=16))
    request = sim.add(make_request("r", prompt(10), 500, min_tokens=500, eos_token_ids=range(50)))
    sim.run()
    sim.assert_outputs()
    assert (request.finish_reason, request.num_output_tokens) == ("length", 6)


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode", "in flight", "preempted", "end"])
def test_abort_in_every_phase_gives_everything_back(phase: str) -> None:
    sim = Sim(make_config(num_blocks=40, max_num_batched_tokens=16, max_num_seqs=2))
    request = sim.add(make_request("r", prompt(20), 10))
    other = sim.add(make_request("other", prompt(30, 300), 10))
    turns = {"waiting": 0, "prefill": 1, "decode": 4, "in flight": 3, "preempted": 3, "end": 40}
    for _ in range(turns[phase]):
        sim.launch()
        if phase != "in flight" and sim.queue:
            sim.read()
    if phase == "preempted":
        sim.scheduler.reset_prefix_cache(preempt_running=True)
        assert request.status is RequestStatus.PREEMPTED
    if phase == "in flight":
        assert request.num_inflight > 0
    before = list(sim.delivered[request])
    sim.scheduler.finish(request, "abort")
    sim.scheduler.finish(request, "error", error="never seen")
    sim.scheduler.check_integrity()
    sim.run()
    assert sim.delivered[request] == before
    assert request.finish_reason == ("length" if phase == "end" else "abort")
    assert request.error is None
    assert other.finish_reason == "length"
    sim.assert_outputs()


def test_a_slot_used_again_gets_nothing_from_its_former_owner() -> None:
    """The late token of an aborted request must reach neither it nor the next in its slot."""
    sim = Sim(make_config(max_num_seqs=1))
    old = sim.add(make_request("old", prompt(6), 10))
    new = sim.add(make_request("new", prompt(6, 50), 10))
    sim.launch()
    sim.launch()
    slot = old.slot
    sim.scheduler.finish(old, "stop", stop_reason="a text")
    sim.launch()
    assert new.slot == slot
    assert sim.read() == []
    assert sim.read() == []
    assert sim.read()[0].request is new
    sim.run()
    assert old.stop_reason == "a text"
    assert sim.delivered[new] == expected_output(new, sim.scheduler.config)[0]
    sim.assert_drained()


def test_ids_can_be_used_again_but_not_at_the_same_time() -> None:
    sim = Sim(make_config())
    sim.add(make_request("r", prompt(5)))
    with pytest.raises(InvalidRequestError, match="in use") as caught:
        sim.scheduler.add(make_request("r", prompt(5)))
    assert caught.value.param == "request_id"
    sim.run()
    sim.add(make_request("r", prompt(5)))
    sim.run()
    sim.assert_outputs()


def test_requests_that_can_never_run_are_refused_with_numbers() -> None:
    scheduler = Scheduler(make_config(num_blocks=9, max_model_len=64))
    for length, words in ((0, ["no tokens"]), (64, ["64 tokens", "max_model_len is 64"])):
        with pytest.raises(InvalidRequestError) as caught:
            scheduler.add(make_request("r", prompt(length)))
        assert all(word in str(caught.value) for word in words)
        assert caught.value.param == "prompt"
    with pytest.raises(
        InvalidRequestError, match=r"33 tokens.* needs 9 KV blocks.* has 8"
    ) as caught:
        scheduler.add(make_request("r", prompt(33)))
    assert "--num-gpu-blocks-override" in str(caught.value)
    assert not scheduler.has_unfinished
    scheduler.add(make_request("r", prompt(32), 1))
    step = scheduler.schedule()
    assert step is not None
    assert scheduler.update(step, [1])[0].finished
    assert scheduler.take_failed() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_blocks": 1}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"policy": "lifo"}, "fcfs, priority"),
        ({"watermark": 1.0}, "watermark"),
        ({"max_num_seqs": 100}, "max_num_seqs=100"),
        ({"enable_chunked_prefill": False}, "max_model_len=256"),
        (
            {
                "enable_chunked_prefill": False,
                "max_model_len": 64,
                "long_prefill_token_threshold": 9,
            },
            "threshold=9",
        ),
        ({"windows": ()}, "windows"),
        ({"windows": (None, 0)}, "windows must be .* got 0"),
        ({"rope_rule": "yarn"}, "fixed, longrope, dynamic"),
        ({"rope_rule": "longrope"}, "rope_threshold"),
        ({"rope_rule": "dynamic", "rope_threshold": -1}, "rope_threshold .* got -1"),
    ],
)
def test_contradictory_settings_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(**changes)


# ---------------------------------------------------------------- cache reset and statistics


def test_reset_needs_an_idle_pool_or_a_preemption_that_keeps_the_order() -> None:
    sim = Sim(make_config())
    for i in range(4):
        sim.add(make_request(str(i), prompt(9, 100 * i), 12))
    sim.launch()
    sim.launch()
    assert not sim.scheduler.reset_prefix_cache()
    assert sim.scheduler.num_running == 4
    assert sim.scheduler.reset_prefix_cache(preempt_running=True)
    assert list(sim.scheduler.waiting) == sim.requests
    assert sim.scheduler.kv.pool.num_cached == 0
    assert sim.scheduler.schedule() is None  # their tokens in flight come first
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.preemptions == 4
    assert sim.scheduler.reset_prefix_cache()


def test_a_refused_request_is_counted_once_when_it_is_admitted() -> None:
    sim = Sim(make_config(num_blocks=9))
    sim.add(make_request("a", prompt(20), 4))
    sim.launch()
    sim.add(make_request("b", prompt(30), 2))
    for _ in range(3):
        sim.turn()
    assert sim.scheduler.num_waiting == 1
    assert sim.scheduler.stats.prefix_query_tokens == 20
    sim.run()
    sim.assert_outputs()
    stats = sim.scheduler.stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (50, 20)
    assert stats.window.hit_rate == 0.4


@pytest.mark.parametrize("how", ["caching off", "skipped"])
def test_no_lookup_no_count(how: str) -> None:
    sim = Sim(make_config(enable_prefix_caching=how != "caching off"))
    for name in "ab":
        sim.add(make_request(name, prompt(20), skip_prefix_cache=how == "skipped"))
        sim.run()
    sim.assert_outputs()
    stats = sim.scheduler.stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (0, 0)
    assert stats.prompt_tokens == 40


def test_staggered_arrivals_leave_nothing_behind() -> None:
    sim = Sim(make_config(max_num_seqs=5, num_blocks=60))
    for i in range(60):
        sim.add(make_request(str(i), prompt(2 + i % 13, i), 1 + i % 9))
        sim.turn()
    sim.run()
    sim.assert_outputs()


def test_kv_waste_counts_empty_slots_of_held_blocks_once() -> None:
    sim = Sim(big(), depth=1)
    sim.add(make_request("a", prompt(100), 1))
    sim.add(make_request("b", [*prompt(99), 7], 1))
    sim.launch()
    # 6 shared full blocks and two last blocks with 4 of 16 slots used.
    assert sim.scheduler.stats.kv_waste == pytest.approx(24 / (8 * 16))
    assert sim.scheduler.kv_usage == pytest.approx(8 / 1999)
    # Three groups of layers hold three times that, in three times the blocks.
    sim = Sim(big(windows=(None, 8, 64)), depth=1)
    sim.add(make_request("a", prompt(100), 1))
    sim.launch()
    assert sim.scheduler.stats.kv_waste == pytest.approx(3 * 12 / (3 * 7 * 16))
    assert sim.scheduler.stats.peak_blocks_used == 21


# ---------------------------------------------------------------- size


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """What the collector costs depends on everything else that lives in the process."""
    gc.disable()
    yield
    gc.enable()


def seconds_to_serve(count: int) -> float:
    start = time.process_time()
    scheduler = Scheduler(make_config(num_blocks=200, max_num_seqs=64))
    for i in range(count):
        scheduler.add(make_request(str(i), [1, 2, 3], 1))
    while (step := scheduler.schedule()) is not None:
        scheduler.update(step, [0] * len(step.rows))
    assert not scheduler.has_unfinished
    return time.process_time() - start


@pytest.mark.usefixtures("_no_collector")
def test_time_grows_linearly_with_the_number_of_requests() -> None:
    few = min(seconds_to_serve(2_000) for _ in range(3))
    many = min(seconds_to_serve(20_000) for _ in range(3))
    assert many < 20 * few


def seconds_per_step(num_waiting: int) -> float:
    scheduler = Scheduler(make_config(max_num_seqs=8, max_model_len=2000, num_blocks=5000))
    for i in range(8 + num_waiting):
        scheduler.add(make_request(str(i), [i, 2, 3], 1900))
    start = 0.0
    for turn in range(220):
        if turn == 20:
            start = time.process_time()
        step = scheduler.schedule()
        assert step is not None
        assert len(step.rows) == 8
        scheduler.update(step, [0] * 8)
    return time.process_time() - start


def test_a_step_costs_the_same_however_many_requests_wait() -> None:
    few = min(seconds_per_step(10) for _ in range(3))
    many = min(seconds_per_step(10_000) for _ in range(3))
    assert many < 3 * few


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_aborting_all_of_many_waiting_requests_is_linear(policy: str) -> None:
    scheduler = Scheduler(make_config(policy=policy, max_num_seqs=1))
    requests = [make_request(str(i), [1, 2, 3], 9) for i in range(20_000)]
    for request in requests:
        scheduler.add(request)
    assert scheduler.schedule() is not None
    start = time.process_time()
    for request in reversed(requests[2:]):
        scheduler.finish(request, "abort")
    assert time.process_time() - start < 2.0  # a scan each would take minutes
    assert list(scheduler.waiting) == requests[1:2]
    assert scheduler.num_waiting == 1
    assert len(scheduler._waiting._items) < 200  # nor does their memory stay
    scheduler.check_integrity()

"""A prompt that is cached as a whole costs one token, through a copy of its last block."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpaged.core.kv_manager import KVManager
from jaxpaged.core.request import Request
from tests.core.harness import Sim, make_request, small_config

WINDOWS = [(None,), (None, 8), (3, 9), (6,)]


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def served(sim: Sim, tokens: list[int], max_tokens: int = 3, **more: object) -> Request:
    request = sim.add(make_request(str(len(sim.requests)), tokens, max_tokens, **more))
    sim.run()
    return request


def computed_of_prompt(sim: Sim, request: Request) -> int:
    return sim.computed[request] - request.num_output_tokens + 1


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 4, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_second_run_computes_one_token(depth: int, block_size: int, windows: Any) -> None:
    for length in range(1, 11):
        sim = Sim(small_config(block_size=block_size, windows=windows), depth=depth)
        first, second, third = (served(sim, prompt(length), 6) for _ in range(3))
        sim.assert_outputs()
        assert first.output_token_ids == second.output_token_ids == third.output_token_ids
        assert [r.num_cached_tokens for r in sim.requests] == [0, length - 1, length - 1]
        assert [computed_of_prompt(sim, r) for r in sim.requests] == [length, 1, 1]
        # Where only one token lies beyond the full blocks there is nothing to copy.
        once = len(windows) if (length - 1) % block_size else 0
        assert sim.scheduler.stats.copied_blocks == 2 * once


@pytest.mark.parametrize("length", [64, 1000, 4000])
def test_a_long_prompt_costs_no_more(length: int) -> None:
    sim = Sim(small_config(num_blocks=1100, max_model_len=4096, max_num_batched_tokens=512))
    for _ in range(2):
        served(sim, prompt(length))
    sim.assert_outputs()
    assert computed_of_prompt(sim, sim.requests[1]) == 1


def test_the_life_of_a_last_block() -> None:
    kv = KVManager(9, 4, enable_caching=True)
    pool = kv.pool

    def admit(tokens: list[int]) -> Request:
        request = make_request("r", tokens)
        kv.begin_plan()
        kv.extend_hashes(request)
        hits, num_hit = kv.get_computed_blocks(request)
        tail = kv.get_tail(request, num_hit, request.num_tokens)
        start = num_hit + (tail.num_tokens if tail else 0)
        assert kv.allocate_slots(request, len(tokens) - start, hit_tables=hits, tail=tail)
        request.num_cached_tokens = start
        request.num_computed_tokens = len(tokens)
        kv.register(request)
        kv.register_tail(request)
        return request

    a = admit(prompt(10))
    assert kv.take_copies() == []
    assert pool.get_tail(a.tail_hash) == 3  # type: ignore[arg-type]
    kv.free(a)
    # Block 3 can be found, so it is not the next to be given out.
    assert pool.free_order() == [4, 5, 6, 7, 8, 3, 2, 1]
    assert pool.num_cached == 3
    b = admit(prompt(10))
    assert (b.num_cached_tokens, list(b.block_ids)) == (9, [1, 2, 4])
    assert pool.ref_count(3) == 1  # pinned
    assert pool.free_order() == [5, 6, 7, 8]
    assert kv.take_copies() == [(3, 4)]
    assert (pool.ref_count(3), pool.free_order()) == (0, [5, 6, 7, 8, 3])
    c = admit(prompt(8))  # ends with block 2, which stays as it is
    assert (c.num_cached_tokens, list(c.block_ids)) == (7, [1, 5])
    assert kv.take_copies() == [(2, 5)]
    assert pool.block_hash(5) == pool.block_hash(2)
    kv.free(b)
    kv.free(c)
    d = admit(prompt(24, 500))
    assert list(d.block_ids) == [4, 6, 7, 8, 3, 2]
    assert pool.get_tail(a.tail_hash) is None  # type: ignore[arg-type]
    assert kv.get_tail(make_again(kv, prompt(10)), 8, 10) is None
    pool.check([d.block_ids])


def make_again(kv: KVManager, tokens: list[int]) -> Request:
    request = make_request("again", tokens)
    kv.extend_hashes(request)
    return request


# ---------------------------------------------------------------- what is no exact hit


@pytest.mark.parametrize("length", [6, 8])
def test_nothing_is_copied_in_the_step_that_writes_it(length: int) -> None:
    sim = Sim(small_config())
    a = sim.add(make_request("a", prompt(length), 0))  # draws nothing that b could draw as well
    b = sim.add(make_request("b", prompt(length), 3))
    step = sim.launch()
    assert step is not None
    assert step.copies == []
    assert [(row.start, row.num_tokens) for row in step.rows] == [(0, length), (4, length - 4)]
    c = sim.add(make_request("c", prompt(length), 3))
    step = sim.launch()  # before the first one is read
    assert step is not None
    assert [source for source, _ in step.copies] == [a.block_ids[1]]
    assert [(row.start, row.num_tokens) for row in step.rows if row.request is c] == [
        (length - 1, 1)
    ]
    sim.run()
    sim.assert_outputs()
    assert not b.is_beam


def test_only_the_whole_prompt_is_an_exact_hit() -> None:
    """7 tokens that begin with 6 cached ones, or 5 of them, hit only the full block."""
    sim = Sim(small_config())
    served(sim, prompt(6))
    assert served(sim, [*prompt(6), 99]).num_cached_tokens == 4
    assert served(sim, prompt(5)).num_cached_tokens == 4
    assert served(sim, [*prompt(5), 99]).num_cached_tokens == 4
    assert served(sim, [7, *prompt(6)[1:]]).num_cached_tokens == 0
    assert served(sim, prompt(6)).num_cached_tokens == 5
    sim.assert_outputs()


@pytest.mark.parametrize("length", [3, 6, 8])
def test_salts_and_those_who_need_every_position_are_kept_apart(length: int) -> None:
    sim = Sim(small_config())
    served(sim, prompt(length), cache_salt="one")
    assert served(sim, prompt(length), cache_salt="one").num_cached_tokens == length - 1
    assert served(sim, prompt(length), cache_salt="two").num_cached_tokens == 0
    assert served(sim, prompt(length)).num_cached_tokens == 0
    assert served(sim, prompt(length), skip_prefix_cache=True).num_cached_tokens == 0
    assert served(sim, prompt(length)).num_cached_tokens == length - 1
    sim.assert_outputs()


def test_without_caching_every_run_computes_everything() -> None:
    sim = Sim(small_config(enable_prefix_caching=False))
    assert [served(sim, prompt(6)).num_cached_tokens for _ in range(2)] == [0, 0]
    assert sim.scheduler.stats.copied_blocks == 0


@pytest.mark.parametrize("length", [3, 6, 8])
def test_what_is_evicted_or_forgotten_is_no_hit(length: int) -> None:
    sim = Sim(small_config(num_blocks=9))
    served(sim, prompt(length))
    served(sim, prompt(29, 500), 1)
    assert served(sim, prompt(length)).num_cached_tokens == 0
    assert sim.scheduler.reset_prefix_cache()
    assert sim.scheduler.kv.pool.num_cached == 0
    assert served(sim, prompt(length)).num_cached_tokens == 0
    running = sim.add(make_request("running", prompt(5, 900), 9))
    sim.launch()
    assert sim.fail() == [running]
    assert served(sim, prompt(length)).num_cached_tokens == 0
    assert served(sim, prompt(length)).num_cached_tokens == length - 1
    sim.assert_outputs(allow_failed=True)


@pytest.mark.parametrize("rule", ["longrope", "dynamic"])
def test_frequencies_by_length_keep_prompts_apart(rule: str) -> None:
    sim = Sim(small_config(rope_rule=rule, rope_threshold=9, max_num_batched_tokens=64))
    for length in (6, 11, 14):
        assert served(sim, prompt(length), 2).num_cached_tokens < length - 1
        assert served(sim, prompt(length), 2).num_cached_tokens == length - 1
    # It crosses the threshold on its way, and then has other keys.
    crossing = served(sim, prompt(6), 9)
    assert crossing.num_cached_tokens == 5
    assert served(sim, prompt(6), 2).num_cached_tokens == 5
    sim.assert_outputs()


# ---------------------------------------------------------------- beside others


@pytest.mark.parametrize("length", [6, 8])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_first_one_may_still_write_to_the_block(depth: int, length: int) -> None:
    sim = Sim(small_config(), depth=depth)
    first = sim.add(make_request("first", prompt(length), 20))
    for turns in range(8):
        sim.turn()
        again = sim.add(make_request(f"again{turns}", prompt(length), 5))
        sim.turn()
        assert again.num_cached_tokens == length - 1
    assert not first.is_finished
    sim.run()
    sim.assert_outputs()


def test_many_hits_in_one_step_take_copies_of_one_block() -> None:
    sim = Sim(small_config(num_blocks=40))
    served(sim, prompt(6))
    again = [sim.add(make_request(f"again{i}", prompt(6), 5)) for i in range(5)]
    step = sim.launch()
    assert step is not None
    (first,) = step.copies
    assert [(row.start, row.num_tokens) for row in step.rows] == [(5, 1)] + [(6, 0)] * 4
    step = sim.launch()
    assert step is not None
    assert {source for source, _ in step.copies} == {first[1]}
    assert len({target for _, target in step.copies}) == 4
    sim.run()
    sim.assert_outputs()
    assert [r.num_cached_tokens for r in again] == [5, 6, 6, 6, 6]


def test_a_source_is_not_given_out_while_the_step_is_planned() -> None:
    """All other blocks are taken in the same step."""
    sim = Sim(small_config(num_blocks=10))
    served(sim, prompt(6), 1)
    source = sim.scheduler.kv.pool.free_order()[-2]
    again = sim.add(make_request("again", prompt(6), 2))
    sim.add(make_request("big", prompt(24, 500), 1))
    step = sim.launch()
    assert step is not None
    assert [row.request.request_id for row in step.rows] == ["again", "big"]
    assert step.copies == [(source, again.block_ids[1])]
    assert sim.scheduler.kv.pool.free_order() == [source]
    sim.run()
    sim.assert_outputs()


@pytest.mark.parametrize("length", [6, 7, 8])
def test_without_room_for_a_copy_the_block_is_computed(length: int) -> None:
    sim = Sim(small_config(num_blocks=3, max_model_len=8), depth=1)
    served(sim, prompt(length), 0 if length == 8 else 1)
    again = served(sim, prompt(length), 0 if length == 8 else 1)
    sim.assert_outputs()
    assert again.num_cached_tokens == 4
    assert sim.scheduler.stats.copied_blocks == 0


@pytest.mark.parametrize("num_blocks", range(4, 9))
@pytest.mark.parametrize("watermark", [0.0, 0.3])
def test_small_pools_never_stall(num_blocks: int, watermark: float) -> None:
    usable = num_blocks - 1
    sim = Sim(small_config(num_blocks=num_blocks, watermark=watermark, max_model_len=usable * 4))
    for number in range(12):
        sim.add(make_request(str(number), prompt(4 + number // 2), usable * 4 - 10 + number % 3))
    sim.run(limit=2000)
    sim.assert_outputs()
    assert sim.scheduler.stats.copied_blocks > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_who_resumes_on_a_full_block_finds_all_but_one_token(depth: int) -> None:
    sim = Sim(small_config(), depth=depth)
    request = sim.add(make_request("r", prompt(6), 12))
    sim.until(lambda: request.num_tokens == 10)
    while sim.queue:
        sim.read()
    assert request.num_tokens in (10, 11)
    sim.scheduler._preempt(request)
    sim.run()
    sim.assert_outputs()
    assert sim.hits[request] == [0, 8]

    other = sim.add(make_request("other", prompt(6, 50), 12))
    sim.until(lambda: other.num_computed_tokens == 12)
    while sim.queue:
        sim.read()
    while other.num_tokens > 12:  # as if the token of the last step had not come
        sim.delivered[other].remove(other.token_ids.pop())
    sim.scheduler._preempt(other)
    sim.run()
    sim.assert_outputs()
    assert sim.hits[other] == [0, 11]


def test_a_prompt_preempted_and_resumed_finds_its_own_last_block() -> None:
    sim = Sim(small_config(), depth=1)
    request = sim.add(make_request("r", prompt(11), 9))
    sim.launch()
    sim.scheduler._preempt(request)
    sim.read()
    sim.run()
    sim.assert_outputs()
    assert sim.hits[request] == [0, 8]  # with its first token it is no prompt any more
    again = served(sim, prompt(11))
    assert again.num_cached_tokens == 10

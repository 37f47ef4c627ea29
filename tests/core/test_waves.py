"""Requests that begin alike and come together: what they share is computed once, whoever does it.

The fake device of `Sim` proves besides that each of them reads what it would have computed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from jaxpaged.core.request import Request
from tests.core.harness import Sim, make_config, make_request, make_samples

SHARED, TAIL, SIZE = 96, 9, 4


def wave(count: int, group: int = 0) -> list[list[int]]:
    """Prompts that share all but their tails."""
    shared = [(7 * i + group) % 50 for i in range(SHARED)]
    return [[*shared, *range(100 * (n + 1), 100 * (n + 1) + TAIL)] for n in range(count)]


def wave_sim(depth: int = 2, **changes: object) -> Sim:
    return Sim(make_config(**{"num_blocks": 400, "max_num_seqs": 32, **changes}), depth=depth)


def served(sim: Sim, prompts: Sequence[list[int]], **more: object) -> list[Request]:
    """All of them, at once; what their prompts cost is in the scheduler's counters."""
    requests = [sim.add(make_request(str(i), p, 4, **more)) for i, p in enumerate(prompts)]
    sim.run()
    sim.assert_outputs()
    return requests


def computed(sim: Sim) -> int:
    """Prompt tokens, those computed again after a preemption included."""
    return sim.scheduler.stats.prompt_tokens + sim.scheduler.stats.recomputed_tokens


@pytest.mark.parametrize("budget", [32, 50, 64, 120, 1000])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_wave_costs_one_prefix_and_the_tails(depth: int, budget: int) -> None:
    """Also where the prefix takes several steps: the others wait for it."""
    sim = wave_sim(depth, max_num_batched_tokens=budget)
    requests = served(sim, wave(32))
    assert computed(sim) == SHARED + 32 * TAIL
    assert [r.num_cached_tokens for r in requests] == [0] + [SHARED] * 31
    assert len(sim.steps) <= -(-computed(sim) // (budget - 31)) + 5


@pytest.mark.parametrize("windows", [(None,), (None, 12), (30,)], ids=str)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_groups_of_other_prefixes_in_between(policy: str, windows: tuple[int | None, ...]) -> None:
    prompts = [
        prompt for four in zip(*(wave(6, g) for g in range(4)), strict=True) for prompt in four
    ]
    sim = wave_sim(max_num_batched_tokens=70, policy=policy, windows=windows, num_blocks=1000)
    for i, prompt in enumerate(prompts):
        sim.add(make_request(str(i), prompt, 4, priority=-i % 5))
    sim.run()
    sim.assert_outputs()
    assert computed(sim) == 4 * SHARED + 24 * TAIL


def test_samples() -> None:
    sim = wave_sim(max_num_batched_tokens=64)
    for i, prompt in enumerate(wave(8)):
        sim.add_group(make_samples(f"{i} ", prompt, 4, 4))
    sim.run()
    sim.assert_outputs()
    assert computed(sim) == SHARED + 8 * TAIL


def test_a_prompt_scored_in_front_of_the_others() -> None:
    """It takes nothing from the cache, but gives."""
    sim = wave_sim(max_num_batched_tokens=64)
    first, *others = wave(8)
    sim.add(make_request("scored", first, 4, skip_prefix_cache=True))
    requests = served(sim, others)
    assert computed(sim) == SHARED + 8 * TAIL
    assert {r.num_cached_tokens for r in requests} == {SHARED}


# ---------------------------------------------------------------- chunks side by side


@pytest.mark.parametrize("windows", [(None,), (None, 12), (30,)], ids=str)
@pytest.mark.parametrize("threshold", [4, 7, 16, 30])
def test_chunks_of_one_prefix_side_by_side(threshold: int, windows: tuple[int | None, ...]) -> None:
    """A threshold leaves budget to the others while the first computes: they go on where it has
    come to, and it skips what they have computed.
    """
    sim = wave_sim(long_prefill_token_threshold=threshold, windows=windows, num_blocks=1000)
    requests = served(sim, wave(16))
    assert computed(sim) == SHARED + 16 * TAIL
    cached = sum(r.num_cached_tokens for r in requests)
    assert cached == 15 * SHARED == sim.scheduler.stats.prefix_hit_tokens
    chunks = [row for step in sim.steps for row in step.rows if not row.samples]
    assert all(row.num_tokens <= threshold for row in chunks)
    assert requests[0].num_cached_tokens > 0, "the first has skipped what others computed"
    if threshold == 16:  # the prefix takes fewer steps than alone, and then come 3 more tokens
        assert len(sim.steps) < SHARED // threshold + 3


def test_two_that_have_come_equally_far_take_turns() -> None:
    sim = wave_sim(1, long_prefill_token_threshold=16)
    a, b = (sim.add(make_request(str(i), prompt, 2)) for i, prompt in enumerate(wave(2)))
    seen = []
    for _ in range(4):
        step = sim.turn()
        assert step is not None
        seen.append([(row.request.request_id, row.start, row.num_tokens) for row in step.rows])
    assert seen[:2] == [[("0", 0, 16), ("1", 16, 16)], [("0", 32, 16)]]
    assert seen[2:] == [[("0", 48, 16)], [("0", 64, 16)]]
    assert (b.num_computed_tokens, list(b.block_ids)) == (32, list(a.block_ids[:8]))
    sim.run()
    sim.assert_outputs()
    assert computed(sim) == SHARED + 2 * TAIL


def test_one_that_scores_its_prompt_skips_nothing_and_waits_for_nobody() -> None:
    sim = wave_sim(long_prefill_token_threshold=16)
    first, second = wave(2)
    sim.add(make_request("0", first, 2))
    scored = sim.add(make_request("scored", second, 2, skip_prefix_cache=True))
    sim.run()
    sim.assert_outputs()
    assert sim.computed[scored] == SHARED + TAIL + 1
    assert computed(sim) <= 2 * (SHARED + TAIL)


# ---------------------------------------------------------------- the first one goes


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("threshold", [0, 16])
def test_the_first_is_aborted_half_way(threshold: int, depth: int) -> None:
    """What it has computed stays in the cache; the others begin there."""
    sim = wave_sim(depth, max_num_batched_tokens=32, long_prefill_token_threshold=threshold)
    first, *others = (sim.add(make_request(str(i), p, 4)) for i, p in enumerate(wave(8)))
    sim.until(lambda: first.num_computed_tokens >= 32)
    assert first.num_computed_tokens < SHARED
    sim.scheduler.finish(first, "abort")
    sim.run()
    sim.assert_outputs()
    assert computed(sim) == SHARED + 7 * TAIL
    assert all(r.finish_reason == "length" for r in others)


def test_the_first_is_preempted_half_way() -> None:
    """By one that came before and grows. All find the blocks that it has computed."""
    sim = wave_sim(1, num_blocks=31, max_num_seqs=4, max_num_batched_tokens=16)
    sim.add(make_request("elder", range(300, 309), 12))
    first, *_ = (sim.add(make_request(str(i), p, 2)) for i, p in enumerate(wave(4)))
    sim.until(lambda: first.num_preemptions)
    assert first.recompute_until == SHARED + 1
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.preemptions == 1
    assert sim.scheduler.stats.prompt_tokens == 9 + SHARED + 4 * TAIL
    assert sim.scheduler.stats.recomputed_tokens == 1


# ---------------------------------------------------------------- equal prompts


@pytest.mark.parametrize("windows", [(None,), (None, 12), (30,)], ids=str)
@pytest.mark.parametrize("length", [3, 48, 50])
@pytest.mark.parametrize("depth", [1, 2])
def test_equal_prompts_in_one_step_are_computed_once(
    depth: int, length: int, windows: tuple[int | None, ...]
) -> None:
    """All of them draw from the logits of the first, each its own token, and then they part."""
    sim = wave_sim(depth, windows=windows)
    requests = [sim.add(make_request(str(i), range(length), 6, payload=i)) for i in range(8)]
    step = sim.launch()
    assert step is not None
    rows = [(row.start, row.num_tokens, row.source, row.samples) for row in step.rows]
    assert rows == [(0, length, -1, True)] + [(length, 0, 0, True)] * 7
    assert all(row.admitted for row in step.rows)
    assert step.copies == []
    sim.run()
    sim.assert_outputs()
    assert computed(sim) == length
    assert {r.num_cached_tokens for r in requests[1:]} == {length}
    assert len({tuple(r.output_token_ids) for r in requests}) > 1
    copied = 7 * len(windows) if length % SIZE else 0
    assert sim.scheduler.stats.copied_blocks == copied


@pytest.mark.parametrize("budget", [20, 50, 100])
def test_equal_prompts_cost_a_token_each_at_most(budget: int) -> None:
    """Whoever is admitted one step later finds the prompt in the cache and computes its end."""
    sim = wave_sim(max_num_batched_tokens=budget, max_num_seqs=20)
    served(sim, [list(range(50))] * 32)
    later = len({step.step_id for step in sim.steps for row in step.rows if row.admitted}) - 1
    assert 50 <= computed(sim) <= 50 + later <= 50 + 31
    if budget == 100:
        assert len([row for row in sim.steps[0].rows if row.source == 0]) == 19


def test_equal_prompts_of_other_salts_are_not_equal() -> None:
    sim = wave_sim(max_num_batched_tokens=1000)
    for i, salt in enumerate(("a", "b", None, "a")):
        sim.add(make_request(str(i), range(50), 4, cache_salt=salt))
    sim.run()
    sim.assert_outputs()
    assert computed(sim) == 3 * 50


def test_without_caching_everybody_computes_for_himself() -> None:
    sim = wave_sim(enable_prefix_caching=False)
    served(sim, [list(range(20))] * 3)
    assert computed(sim) == 60


def test_one_that_joins_leaves_room_for_the_copy() -> None:
    """Three blocks, of which the first one's prompt takes two: only one more can part from it."""
    sim = Sim(make_config(num_blocks=4, watermark=0.0))
    requests = [sim.add(make_request(str(i), range(6), 2, payload=i)) for i in range(3)]
    step = sim.launch()
    assert step is not None
    assert [row.request for row in step.rows] == requests[:2]
    sim.run()
    sim.assert_outputs()
    assert not sim.scheduler.stats.preemptions


def test_the_one_that_computed_ends_before_the_others_part() -> None:
    sim = wave_sim(2)
    first, *others = (sim.add(make_request(str(i), range(50), 6, payload=i)) for i in range(3))
    assert sim.launch() is not None
    sim.scheduler.finish(first, "abort")
    sim.run()
    sim.assert_outputs()
    assert sim.scheduler.stats.copied_blocks == 1, "the last holder writes in place"
    assert all(r.finish_reason == "length" for r in others)


# ---------------------------------------------------------------- anything


def fewest(prompts: Sequence[list[int]], size: int) -> int:
    """Tokens to compute: each full block once, but for the last token of each prompt and what
    stands with it in its block, once for equal prompts.
    """
    blocks: set[tuple[int, ...]] = set()
    tails: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        full = (len(prompt) - 1) // size
        blocks.update(tuple(prompt[: size * i]) for i in range(1, full + 1))
        tails[tuple(prompt)] = len(prompt) - size * full
    return size * len(blocks) + sum(tails.values())


@pytest.mark.parametrize("seed", range(40))
def test_any_wave(seed: int) -> None:
    rng = random.Random(seed)
    size, budget = rng.choice((2, 4, 8)), rng.choice((8, 16, 32, 64, 200))
    threshold = rng.choice((0, 0, 16, 64))
    sim = wave_sim(
        depth=rng.choice((1, 2, 3)),
        block_size=size,
        max_num_seqs=rng.choice((2, 4, 8)),
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=min(threshold, budget),
        windows=rng.choice(((None,), (None, 9), (7,))),
        policy=rng.choice(("fcfs", "priority")),
    )
    begins = [rng.choices(range(50), k=rng.randrange(1, 60)) for _ in range(rng.randrange(1, 4))]
    prompts: list[list[int]] = []
    for i in range(rng.randrange(2, 14)):
        prompt = [*rng.choice(begins), *range(100 * i + 100, 100 * i + 100 + rng.randrange(20))]
        if len(prompt) % size == 0:  # one that another one goes on from would be found by halves
            prompt.append(99)
        prompts.append(rng.choice(prompts) if i and rng.random() < 0.15 else prompt)
        more = {"priority": rng.randrange(3), "arrival_time": float(i)}
        samples = make_samples(
            f"{i} ", prompts[-1], rng.choice((1, 1, 1, 2)), rng.randrange(1, 4), **more
        )
        sim.add_group(samples)
        for _ in range(rng.choice((0, 0, 1))):
            sim.turn()
    sim.run()
    sim.assert_outputs()
    least = fewest(prompts, size)
    again = len(prompts) - len({tuple(prompt) for prompt in prompts})
    # Where the budget ends a chunk inside of a block, somebody else may compute that block.
    halves = (size - 1) * len(prompts) if threshold else 0
    assert least <= computed(sim) <= least + again + halves

"""Anything in any order: a hypothesis state machine, and long random runs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from jaxpaged.core.request import Request
from tests.core.harness import Sim, make_config, make_request
from tests.core.machine import SimMachine

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
"""Two token values only, so that prefixes are shared often."""
WINDOWS = [(None,), (None,), (8,), (None, 8), (None, 4, 4), (3, 9), (1, None)]
ROPES = [("fixed", 0), ("fixed", 0), ("longrope", 12), ("longrope", 25), ("dynamic", 10)]


class SchedulerMachine(SimMachine):
    """`Sim` proves every read of the KV and every invariant; here any order of calls is tried."""

    @initialize(
        num_blocks=st.integers(5, 14),
        block_size=st.integers(1, 5),
        budget=st.integers(3, 24),
        seqs=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        caching=st.sampled_from([True, True, False]),
        threshold=st.sampled_from([0, 0, 4]),
        windows=st.sampled_from(WINDOWS),
        rope=st.sampled_from(ROPES),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        seqs: int,
        policy: str,
        watermark: float,
        threshold: int,
        windows: Any,
        rope: tuple[str, int],
        *,
        caching: bool,
    ) -> None:
        config = make_config(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_model_len=40,
            policy=policy,
            watermark=watermark,
            enable_prefix_caching=caching,
            long_prefill_token_threshold=threshold,
            windows=windows,
            rope_rule=rope[0],
            rope_threshold=rope[1],
        )
        self.sim = Sim(config)

    @property
    def alive(self) -> list[Request]:
        return [r for r in self.sim.requests if not r.is_finished]

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(0, 12),
        min_tokens=st.integers(0, 4),
        stops=st.sampled_from([(), (), range(4), range(25)]),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "s"]),
        skip=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        stops: Any,
        priority: int,
        salt: str | None,
        *,
        skip: bool,
    ) -> None:
        config = self.sim.scheduler.config
        if config.blocks_for_sequence(len(prompt)) > config.num_blocks - 1:
            prompt = prompt[:1]
        number = len(self.sim.requests)
        request = make_request(
            str(number),
            prompt,
            max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            priority=priority,
            cache_salt=salt,
            skip_prefix_cache=skip or max_tokens == 0,
            arrival_time=float(number // 2),
        )
        self.sim.add(request)


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestSchedulerMachine = SchedulerMachine.TestCase


ROOMY, TIGHT = 400, 40
"""KV blocks: no preemptions, and very many."""


@pytest.mark.parametrize("num_blocks", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_twenty_thousand_random_steps(num_blocks: int, policy: str) -> None:
    """Two policies and two profiles; together 80,000 steps."""
    sim = random_run(20_000, num_blocks=num_blocks, policy=policy)
    stats = sim.scheduler.stats
    assert stats.prefix_hit_tokens > 1000
    if num_blocks == ROOMY:
        assert stats.preemptions == 0
        assert stats.peak_running == 12
    else:
        assert stats.preemptions > 1000
    first_admissions = list(dict.fromkeys(sim.admitted))
    if policy == "fcfs":
        gone = [r for r in sim.requests if r not in set(first_admissions)]
        assert all(r.finish_reason == "abort" for r in gone)
        assert first_admissions == [r for r in sim.requests if r not in set(gone)]


@pytest.mark.parametrize(
    ("windows", "tight"), [((None, 8), 50), ((8,), 18), ((None, 4, 4), 70)], ids=str
)
@pytest.mark.parametrize("rope", [("fixed", 0), ("longrope", 40), ("dynamic", 30)], ids=str)
@pytest.mark.parametrize("depth", [1, 3])
def test_random_steps_with_windows(
    windows: Any, tight: int, rope: tuple[str, int], depth: int
) -> None:
    sim = random_run(
        400,
        depth=depth,
        check_every=1,
        shared=0.3,
        num_blocks=tight if depth == 3 else ROOMY,
        windows=windows,
        rope_rule=rope[0],
        rope_threshold=rope[1],
    )
    stats = sim.scheduler.stats
    if None in windows:
        assert (stats.preemptions > 0) == (depth == 3)
    assert depth == 3 or stats.prefix_hit_tokens > 300
    assert (stats.rope_restarts > 10) == (rope[0] == "longrope")


def random_run(
    num_steps: int,
    *,
    depth: int = 2,
    check_every: int = 100,
    shared: float = 0.0,
    **changes: object,
) -> Sim:
    """Random requests and aborts, every step proven by `Sim`, then run dry."""
    settings = {
        "max_num_seqs": 12,
        "max_num_batched_tokens": 48,
        "max_model_len": 120,
        "watermark": 0.01,
        **changes,
    }
    rng = random.Random(str(settings))
    sim = Sim(make_config(**settings), depth=depth, check=False)
    alive: list[Request] = []
    while len(sim.steps) < num_steps:
        if sim.scheduler.num_waiting < 20 and rng.random() < 0.6:
            number = len(sim.requests)
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
            if rng.random() < shared:
                tokens[:20] = [number % 2] * 20
            request = make_request(
                str(number),
                tokens,
                rng.randrange(0, 40),
                stop_token_ids=range(rng.choice([0, 2])),
                priority=rng.randrange(3),
                arrival_time=float(number),
                cache_salt=rng.choice([None, None, None, "t"]),
                skip_prefix_cache=rng.random() < 0.05,
            )
            alive.append(sim.add(request))
        sim.turn()
        if rng.random() < 0.01 and alive:
            sim.scheduler.finish(rng.choice(alive), "abort")
        if len(sim.steps) % check_every == 0:
            sim.scheduler.check_integrity()
            alive = [r for r in alive if not r.is_finished]
    sim.run()
    sim.assert_outputs()
    stats = sim.scheduler.stats
    assert stats.scheduled_tokens == sum(sim.computed.values())
    assert stats.generation_tokens == sum(map(len, sim.delivered.values()))
    assert stats.peak_running <= 12
    assert sum(stats.requests_finished.values()) == len(sim.requests)
    return sim

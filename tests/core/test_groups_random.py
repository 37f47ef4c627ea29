"""Groups among single requests, anything in any order: a hypothesis state machine."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from jaxpaged.core.request import Request
from tests.core.harness import Sim, make_config, make_request, make_samples
from tests.core.machine import SimMachine

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
"""Two token values only, so that prefixes and whole prompts come again."""
WINDOWS = [(None,), (None,), (8,), (None, 8), (None, 4, 4), (3, 9), (1, None)]
ROPES = [("fixed", 0), ("fixed", 0), ("fixed", 0), ("longrope", 12), ("dynamic", 10)]


class GroupMachine(SimMachine):
    """`Sim` proves every read and write of the KV and every invariant; here any order of calls is
    tried.
    """

    @initialize(
        num_blocks=st.integers(5, 24),
        block_size=st.integers(1, 5),
        budget=st.integers(5, 30),
        seqs=st.integers(2, 5),
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        caching=st.booleans(),
        chunked=st.sampled_from([True, True, True, False]),
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
        chunked: bool,
    ) -> None:
        config = make_config(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget if chunked else 30,
            max_num_seqs=seqs,
            max_model_len=30,
            policy=policy,
            watermark=watermark,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=threshold if chunked else 0,
            windows=windows,
            rope_rule=rope[0],
            rope_threshold=rope[1],
        )
        self.sim = Sim(config)
        self.names = 0

    @property
    def alive(self) -> list[Request]:
        beams = [search.members[0] for search in self.sim.searches.values()]
        return [r for r in [*self.sim.requests, *beams] if not r.is_finished]

    def fitting(self, prompt: list[int]) -> list[int]:
        config = self.sim.scheduler.config
        self.names += 1
        fits = config.blocks_for_sequence(len(prompt)) < config.num_blocks
        return prompt if fits else prompt[:1]

    @rule(
        prompt=PROMPTS,
        count=st.integers(1, 6),
        max_tokens=st.sampled_from([0, 1, 2, 4, 8, 12]),
        min_tokens=st.integers(0, 4),
        stops=st.sampled_from([(), (), range(4), range(25)]),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, None, "s"]),
        skip=st.sampled_from([False, False, False, True]),
    )
    def add_samples(
        self,
        prompt: list[int],
        count: int,
        max_tokens: int,
        min_tokens: int,
        stops: Any,
        priority: int,
        salt: str | None,
        *,
        skip: bool,
    ) -> None:
        prompt = self.fitting(prompt)
        settings = {
            "min_tokens": min_tokens,
            "stop_token_ids": stops,
            "priority": priority,
            "cache_salt": salt,
            "skip_prefix_cache": skip or max_tokens == 0,
            "arrival_time": float(self.names // 2),
        }
        name = f"{self.names}."
        if count == 1:
            self.sim.add(make_request(name, prompt, max_tokens, **settings))
        else:
            self.sim.add_group(make_samples(name, prompt, count, max_tokens, **settings))

    @rule(
        prompt=PROMPTS,
        width=st.integers(1, 5),
        max_tokens=st.sampled_from([1, 2, 4, 8, 12]),
        ending=st.sampled_from([0, 0, 2, 5]),
        even=st.sampled_from([False, False, False, True]),
        priority=st.integers(0, 2),
    )
    def add_beams(
        self,
        prompt: list[int],
        width: int,
        max_tokens: int,
        ending: int,
        priority: int,
        *,
        even: bool,
    ) -> None:
        prompt = self.fitting(prompt)
        width = min(width, self.sim.scheduler.config.max_num_seqs)
        self.sim.add_beams(
            f"{self.names}.",
            prompt,
            width,
            max_tokens,
            ending=ending,
            even=even,
            priority=priority,
            arrival_time=float(self.names // 2),
        )


GroupMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestGroupMachine = GroupMachine.TestCase

"""What every engine is asked to do: prompts of token ids and how many tokens are to follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

LOWEST_ID = 100
"""Ids below it, and as many at the end of the vocabulary, may be special to some engine."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    output: int
    """New tokens; none of them ends the answer."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Requests that are timed together, at most `concurrency` of them under way."""

    requests: list[Request]
    concurrency: int

    @property
    def output_tokens(self) -> int:
        return sum(request.output for request in self.requests)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Token counts and numbers of requests, and the limits that every engine is given."""

    requests: int = 64
    prompt_mean: int = 120
    prompt_range: tuple[int, int] = (16, 512)
    output_mean: int = 64
    output_range: tuple[int, int] = (8, 256)
    short: int = 128
    """Prompt of the latency measurement."""
    decode: int = 64
    """Tokens that the latency is the mean of."""
    long: int = 512
    """Prompt of the prefill measurement."""
    prefix: int = 384
    tail: int = 32
    sharers: int = 32
    sharer_output: int = 16
    repeats: int = 5
    prefixes: int = 3
    hits: int = 5
    """Requests after the first one with the same prefix."""
    taken: tuple[tuple[int, int], ...] = ((32, 64), (8, 32), (1, 8))
    """How many of the requests run at each concurrency: fewer take long enough at a low one."""
    max_model_len: int = 1024
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    kv_bytes: int = 768 * 2**20


QUICK = Sizes(
    requests=4,
    prompt_mean=12,
    prompt_range=(4, 24),
    output_mean=4,
    output_range=(2, 6),
    short=8,
    decode=4,
    long=24,
    prefix=16,
    tail=4,
    sharers=4,
    sharer_output=2,
    repeats=1,
    prefixes=1,
    hits=1,
    taken=((32, 4), (8, 2), (1, 1)),
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    kv_bytes=64 * 2**20,
)
"""To try the script: these figures say nothing of an engine."""

GROUPS = ("latency", "prefill", "prefix", "wave", "c32", "c8", "c1")
"""What can be measured, in the order in which it is; `start` and `rss` come with each."""
START = "start"
"""A single token, with which a start ends."""
WARM_UP = "warm-up"
SAMPLE = "sample"
SAMPLE_TOKENS = 16

Plan = Mapping[str, list[Pass]]
"""By group, and with the work that is not timed."""


def make_plan(sizes: Sizes, vocabulary: int, seed: int, turn: int) -> dict[str, list[Pass]]:
    """The work of one round. Lengths are the same in all rounds, token ids only in the sample: an
    engine that kept something from an earlier round would gain nothing.
    """
    ids = _Ids(np.random.default_rng([seed, 1, turn]), vocabulary)
    lengths = draw_lengths(sizes, seed)

    def one(prompt: int, output: int = 1) -> Pass:
        return Pass([Request(ids(prompt), output)], 1)

    plan = {
        START: [one(sizes.prompt_range[0])],
        SAMPLE: [_sample(sizes, vocabulary, seed)],
        WARM_UP: [
            one(sizes.long, 8),
            Pass([Request(ids(sizes.short // 2), 8) for _ in range(sizes.sharers)], 32),
            one(sizes.short, 24),
        ],
        "latency": [
            one(sizes.short, output)
            for _ in range(sizes.repeats)
            for output in (1, 1 + sizes.decode)
        ],
        "prefill": [one(sizes.long) for _ in range(sizes.repeats)],
        "prefix": [],
        "wave": [],
    }
    for _ in range(sizes.prefixes):
        prefix = ids(sizes.prefix)
        for _ in range(1 + sizes.hits):
            plan["prefix"].append(Pass([Request(prefix + ids(sizes.tail), 1)], 1))
        prefix = ids(sizes.prefix)
        sharers = [
            Request(prefix + ids(sizes.tail), sizes.sharer_output) for _ in range(sizes.sharers)
        ]
        plan["wave"].append(Pass(sharers, 32))
    for concurrency, count in sizes.taken:
        requests = [Request(ids(prompt), output) for prompt, output in lengths[:count]]
        plan[f"c{concurrency}"] = [Pass(requests, concurrency)]
    return plan


def draw_lengths(sizes: Sizes, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) token counts, lognormal: many short ones and a long tail."""
    rng = np.random.default_rng([seed, 0])

    def draw(mean: int, sigma: float, bounds: tuple[int, int]) -> list[int]:
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, sizes.requests)
        return [int(count) for count in np.clip(np.rint(drawn), *bounds)]

    prompts = draw(sizes.prompt_mean, 0.8, sizes.prompt_range)
    return list(zip(prompts, draw(sizes.output_mean, 0.7, sizes.output_range), strict=True))


def _sample(sizes: Sizes, vocabulary: int, seed: int) -> Pass:
    """One prompt for all rounds and engines, whose answers should begin alike."""
    ids = _Ids(np.random.default_rng([seed, 2]), vocabulary)
    return Pass([Request(ids(sizes.short), min(SAMPLE_TOKENS, sizes.decode))], 1)


@dataclass(frozen=True, slots=True)
class _Ids:
    """Random token ids."""

    rng: np.random.Generator
    vocabulary: int

    def __call__(self, count: int) -> list[int]:
        drawn: list[int] = self.rng.integers(
            LOWEST_ID, self.vocabulary - LOWEST_ID, size=count
        ).tolist()
        return drawn


def to_json(plan: Plan) -> dict[str, list[list[Any]]]:
    return {
        name: [[p.concurrency, [[r.prompt, r.output] for r in p.requests]] for p in passes]
        for name, passes in plan.items()
    }


def from_json(plan: Mapping[str, list[list[Any]]]) -> dict[str, list[Pass]]:
    return {
        name: [
            Pass([Request(prompt, output) for prompt, output in requests], concurrency)
            for concurrency, requests in passes
        ]
        for name, passes in plan.items()
    }

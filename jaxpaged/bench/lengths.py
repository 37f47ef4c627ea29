"""How long the prompts and outputs of a workload are, and which prompts begin alike."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MEANS = {"sharegpt": (161, 338), "alpaca": (19, 58)}
"""Mean prompt and output tokens of two data sets of conversations."""
SIGMA = 1.0
"""Of the lognormal distribution: the long tail that both have."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Token counts of one request."""

    body: int
    """Prompt tokens that are this request's own."""
    output: int
    prefix: int = 0
    """Prompt tokens before them, shared by all requests of the same group."""
    group: int = 0

    @property
    def prompt(self) -> int:
        return self.prefix + self.body


def draw_lengths(
    name: str, count: int, max_model_len: int, seed: int, *, output_sigma: float = SIGMA
) -> list[tuple[int, int]]:
    """(prompt, output) token counts, clipped so that both together fit into `max_model_len`.

    `name` is a key of `MEANS`; `output_sigma` spreads the outputs otherwise, about the same mean.
    """
    rng = random.Random(f"{name} {seed}")
    mean_prompt, mean_output = MEANS[name]

    def draw(mean: int, most: int, sigma: float = SIGMA) -> int:
        exponent = math.log(mean) - sigma**2 / 2
        return max(1, min(most, round(rng.lognormvariate(exponent, sigma))))

    shapes = []
    for _ in range(count):
        prompt = draw(mean_prompt, max_model_len - 1)
        shapes.append((prompt, draw(mean_output, max_model_len - prompt, output_sigma)))
    return shapes


def sharegpt_shapes(count: int, max_model_len: int, seed: int) -> list[Shape]:
    return [Shape(p, o) for p, o in draw_lengths("sharegpt", count, max_model_len, seed)]


def random_shapes(
    count: int, body: int, output: int, range_ratio: float, prefix: int, seed: int
) -> list[Shape]:
    """Uniform in [length (1 - range_ratio), length (1 + range_ratio)], one token at least; the
    prefix is one for all and always of the same length.
    """
    rng = random.Random(f"random {seed}")

    def draw(length: int) -> int:
        low, high = math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))
        return rng.randint(max(1, low), max(1, high))

    return [Shape(draw(body), draw(output), prefix) for _ in range(count)]


def prefix_shapes(
    count: int, prefix: int, suffix: int, num_prefixes: int, output: int, seed: int
) -> list[Shape]:
    """Every prefix is used equally often, or once more, in a random order."""
    shapes = [Shape(suffix, output, prefix, i % num_prefixes) for i in range(count)]
    random.Random(f"prefixes {seed}").shuffle(shapes)
    return shapes

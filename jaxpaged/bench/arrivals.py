"""When the requests of a benchmark are sent."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ramp:
    """A request rate that changes from the first request to the last."""

    strategy: str
    """linear or exponential."""
    start_rps: float
    end_rps: float

    def rate(self, progress: float) -> float:
        """Requests per second after this share, 0..1, of the requests."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return float(self.start_rps * (self.end_rps / self.start_rps) ** progress)


def send_times(
    count: int, rate: float, burstiness: float, seed: int, ramp: Ramp | None = None
) -> list[float]:
    """Seconds after the start at which each request is sent; the first at once.

    The gaps are gamma-distributed with shape `burstiness` and mean 1 / rate: 1 is a Poisson
    process, less is burstier, more is steadier. An infinite rate sends all at once. A `ramp` takes
    the place of the rate.
    """
    rng = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for index in range(count):
        times.append(now)
        current = rate if ramp is None else ramp.rate(index / max(1, count - 1))
        if math.isfinite(current):
            now += rng.gammavariate(burstiness, 1.0 / (current * burstiness))
    return times

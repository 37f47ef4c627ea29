"""How long a step would take, by bytes and operations: a model, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpaged.core.plan import ScheduledStep


@dataclass(frozen=True)
class StepCost:
    """Weights are read once a step, or its arithmetic takes longer; then the cached K and V of each
    row are read. Nothing else takes time: no host, no launch, no padding.
    """

    weight_bytes: float
    flops_per_token: float
    kv_bytes_per_token: float
    bytes_per_second: float
    flops_per_second: float

    def seconds(self, step: ScheduledStep) -> float:
        context = sum([row.start + row.num_tokens for row in step.rows])
        weights = self.weight_bytes / self.bytes_per_second
        arithmetic = step.num_tokens * self.flops_per_token / self.flops_per_second
        return max(weights, arithmetic) + context * self.kv_bytes_per_token / self.bytes_per_second


OPT_13B_A100 = StepCost(
    weight_bytes=26e9,
    flops_per_token=26e9,
    kv_bytes_per_token=2 * 40 * 5120 * 2,
    bytes_per_second=0.8 * 1.555e12,
    flops_per_second=0.6 * 312e12,
)
"""The paper's main case: OPT-13B in 16 bits on one A100 of 40 GB, at 80 % of its bandwidth and 60 %
of its arithmetic."""
OPT_13B_SLOTS = 15_696
"""KV slots that this leaves, in blocks of 16 (12 GB of 800 KB each)."""

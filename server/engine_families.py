"""The metric families of the engine: names, types and labels, and where each value comes from.

The names are vLLM's where vLLM has the same thing, so that dashboards made for it work; these exist
with the prefix `vllm:` and again with `jaxpaged:`. What only this engine has is `jaxpaged:` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from jaxpaged.metrics import EngineMetrics, Histogram
from jaxpaged.outputs import EngineStats

if TYPE_CHECKING:
    from jaxpaged.async_engine import AsyncEngine, EngineInfo

PREFIXES = {"both": ("vllm", "jaxpaged"), "vllm": ("vllm",), "jaxpaged": ("jaxpaged",)}
"""Setting `metrics_prefix` -> prefixes of the families that vLLM has too."""

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
ENGINE_STATUSES = ("loading", "ready", "draining", "dead", "closed")


class Moment:
    """What one scrape sees. Nothing in here waits for the engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.metrics: EngineMetrics = engine.metrics
        self.stats: EngineStats = engine.stats()
        self.blocks: dict[str, int] = engine.blocks_by_state()
        self.info: EngineInfo | None = engine.info if self.stats.num_blocks else None

    @property
    def longest(self) -> int | None:
        """The last bucket of token counts; None while nobody knows the model's length."""
        return None if self.info is None else self.info.max_model_len

    @cached_property
    def compiles(self) -> dict[str, int]:
        stats = self.stats
        lazy, after = stats.lazy_compiles, stats.compiles_after_warmup
        return {
            "warmup": max(0, stats.compiles - lazy - after),
            "after_warmup": after,
            "lazy": lazy,
        }


Values: TypeAlias = "float | dict[str, float] | dict[str, int] | Histogram | dict[str, Histogram]"
"""One value, or one for each value of the family's own label."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family, without its prefix and, if a counter, without `_total`."""

    name: str
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily] | type[HistogramMetricFamily]
    help: str
    values: Callable[[Moment], Values]
    label: str | None = None
    """Its own label, beside `model_name` and `engine`."""
    tokens: bool = False
    """A histogram of tokens of a request, whose buckets end at the model's length."""
    per_engine: bool = True
    """Carries the label `engine`."""


_GAUGE, _COUNTER, _HISTOGRAM = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily


def _by_source(moment: Moment) -> dict[str, int]:
    stats = moment.stats
    return {
        "local_compute": stats.prompt_tokens,
        "local_cache_hit": stats.prefix_hit_tokens,
        "external_kv_transfer": 0,
    }


SHARED: tuple[Family, ...] = (
    Family(
        "num_requests_running",
        _GAUGE,
        "Sequences that are being computed.",
        lambda now: now.stats.num_running,
    ),
    Family(
        "num_requests_waiting",
        _GAUGE,
        "Sequences that wait for admission.",
        lambda now: now.stats.num_waiting,
    ),
    Family(
        "num_requests_waiting_by_reason",
        _GAUGE,
        "Sequences that wait for admission, by what they wait for.",
        lambda now: {"capacity": now.stats.num_waiting, "deferred": 0},
        label="reason",
    ),
    Family(
        "kv_cache_usage_perc",
        _GAUGE,
        "Share of the KV blocks that requests hold, 0 to 1.",
        lambda now: now.stats.kv_usage,
    ),
    Family(
        "prefix_cache_queries",
        _COUNTER,
        "Tokens looked up in the prefix cache at first admissions.",
        lambda now: now.stats.prefix_query_tokens,
    ),
    Family(
        "prefix_cache_hits",
        _COUNTER,
        "Tokens found in the prefix cache at first admissions.",
        lambda now: now.stats.prefix_hit_tokens,
    ),
    Family(
        "num_preemptions",
        _COUNTER,
        "Sequences that gave up their blocks, to be recomputed later.",
        lambda now: now.stats.preemptions,
    ),
    Family(
        "prompt_tokens",
        _COUNTER,
        "Prompt tokens processed: computed, or taken from the prefix cache.",
        lambda now: now.stats.prompt_tokens + now.stats.prefix_hit_tokens,
    ),
    Family(
        "prompt_tokens_by_source",
        _COUNTER,
        "Prompt tokens processed, by where their KV came from.",
        _by_source,
        label="source",
    ),
    Family(
        "prompt_tokens_cached",
        _COUNTER,
        "Prompt tokens taken from the prefix cache.",
        lambda now: now.stats.prefix_hit_tokens,
    ),
    Family(
        "generation_tokens",
        _COUNTER,
        "Tokens generated.",
        lambda now: now.stats.generation_tokens,
    ),
    Family(
        "request_success",
        _COUNTER,
        "Requests that have ended, by how.",
        lambda now: {reason: now.metrics.finished.get(reason, 0) for reason in FINISH_REASONS},
        label="finished_reason",
    ),
    Family(
        "admission_rejections",
        _COUNTER,
        "Requests refused because a limit of the queue was reached.",
        lambda now: {"queue_full": 0, **now.metrics.rejections},
        label="reason",
        per_engine=False,
    ),
    Family(
        "request_prompt_tokens",
        _HISTOGRAM,
        "Prompt tokens of a request.",
        lambda now: now.metrics.prompt_tokens,
        tokens=True,
    ),
    Family(
        "request_generation_tokens",
        _HISTOGRAM,
        "Tokens generated for a request, all its samples together.",
        lambda now: now.metrics.generation_tokens,
        tokens=True,
    ),
    Family(
        "request_max_num_generation_tokens",
        _HISTOGRAM,
        "Tokens generated for a request's longest sample.",
        lambda now: now.metrics.max_generation_tokens,
        tokens=True,
    ),
    Family(
        "request_params_max_tokens",
        _HISTOGRAM,
        "What requests asked for as max_tokens.",
        lambda now: now.metrics.params_max_tokens,
        tokens=True,
    ),
    Family(
        "request_params_n",
        _HISTOGRAM,
        "What requests asked for as n.",
        lambda now: now.metrics.params_n,
    ),
    Family(
        "request_prefill_kv_computed_tokens",
        _HISTOGRAM,
        "Prompt tokens of a request that the prefix cache did not have.",
        lambda now: now.metrics.prefill_computed_tokens,
        tokens=True,
    ),
    Family(
        "request_num_preemptions",
        _HISTOGRAM,
        "How often a request was preempted.",
        lambda now: now.metrics.preemptions,
    ),
    Family(
        "iteration_tokens_total",
        _HISTOGRAM,
        "Tokens computed in a step.",
        lambda now: now.metrics.iteration_tokens,
    ),
    Family(
        "time_to_first_token_seconds",
        _HISTOGRAM,
        "From a request's arrival to its first token.",
        lambda now: now.metrics.time_to_first_token,
    ),
    Family(
        "inter_token_latency_seconds",
        _HISTOGRAM,
        "From one token of a sample to its next.",
        lambda now: now.metrics.inter_token_latency,
    ),
    Family(
        "request_time_per_output_token_seconds",
        _HISTOGRAM,
        "Mean time between the tokens of a request, the first one left out.",
        lambda now: now.metrics.time_per_output_token,
    ),
    Family(
        "e2e_request_latency_seconds",
        _HISTOGRAM,
        "From a request's arrival to its end.",
        lambda now: now.metrics.e2e_latency,
    ),
    Family(
        "request_queue_time_seconds",
        _HISTOGRAM,
        "From a request's arrival to its first admission.",
        lambda now: now.metrics.queue_time,
    ),
    Family(
        "request_inference_time_seconds",
        _HISTOGRAM,
        "From a request's first admission to its last token.",
        lambda now: now.metrics.inference_time,
    ),
    Family(
        "request_prefill_time_seconds",
        _HISTOGRAM,
        "From a request's first admission to its first token.",
        lambda now: now.metrics.prefill_time,
    ),
    Family(
        "request_decode_time_seconds",
        _HISTOGRAM,
        "From a request's first token to its last.",
        lambda now: now.metrics.decode_time,
    ),
)
"""What vLLM has too."""

OLD_NAMES: tuple[Family, ...] = (
    Family(
        "gpu_cache_usage_perc",
        _GAUGE,
        "The old name of kv_cache_usage_perc.",
        lambda now: now.stats.kv_usage,
    ),
    Family(
        "time_per_output_token_seconds",
        _HISTOGRAM,
        "The old name of inter_token_latency_seconds.",
        lambda now: now.metrics.inter_token_latency,
    ),
)
"""What older dashboards read; with the prefix `vllm:` only."""

OWN: tuple[Family, ...] = (
    Family(
        "engine_status",
        _GAUGE,
        "1 for the engine's status, 0 for the others.",
        lambda now: {status: float(status == now.engine.status) for status in ENGINE_STATUSES},
        label="status",
    ),
    Family(
        "kv_blocks",
        _GAUGE,
        "KV blocks: free and empty, cached (free, but findable), held by one request, shared by "
        "several, and the null block.",
        lambda now: now.blocks,
        label="state",
    ),
    Family(
        "kv_blocks_used_peak",
        _GAUGE,
        "Most KV blocks ever held at once.",
        lambda now: now.stats.peak_blocks_used,
    ),
    Family(
        "kv_waste_ratio",
        _GAUGE,
        "Share of the held KV slots without a token, averaged over all steps.",
        lambda now: now.stats.kv_waste,
    ),
    Family(
        "hbm_bytes",
        _GAUGE,
        "Bytes on the first device: weights, KV cache, sampling state, and on accelerators what "
        "JAX has in use, its peak and its limit.",
        lambda now: dict(now.engine.memory_bytes()),
        label="kind",
    ),
    Family("steps", _COUNTER, "Steps planned.", lambda now: now.stats.steps),
    Family(
        "failed_steps",
        _COUNTER,
        "Steps that failed, after which everything else was recomputed.",
        lambda now: now.stats.failed_steps,
    ),
    Family(
        "recomputed_tokens",
        _COUNTER,
        "Tokens computed again after a preemption.",
        lambda now: now.stats.recomputed_tokens,
    ),
    Family(
        "sequence_forks",
        _COUNTER,
        "Sequences that began by sharing the KV blocks of another one: samples and beams.",
        lambda now: now.stats.forks,
    ),
    Family(
        "kv_blocks_copied",
        _COUNTER,
        "KV blocks copied on write, because others held them or could find them.",
        lambda now: now.stats.copied_blocks,
    ),
    Family(
        "compiles",
        _COUNTER,
        "Programs compiled: at warm-up, after it (a fault), and lazily (enforce_eager).",
        lambda now: now.compiles,
        label="kind",
    ),
    Family(
        "compile_seconds",
        _COUNTER,
        "Seconds spent on tracing and compiling.",
        lambda now: now.stats.compile_seconds,
    ),
    Family(
        "bucket_padding_tokens",
        _COUNTER,
        "Rows that steps computed for nobody, to fill their bucket.",
        lambda now: dict(now.metrics.padding_tokens),
        label="bucket",
    ),
    Family(
        "step_seconds",
        _HISTOGRAM,
        "Parts of a step: its launch, and the host's wait for its results.",
        lambda now: {"launch": now.metrics.launch_time, "wait": now.metrics.wait_time},
        label="phase",
    ),
    Family(
        "host_gap_seconds",
        _HISTOGRAM,
        "How long the device had nothing to do before a step, while there was work.",
        lambda now: now.metrics.host_gap,
    ),
    Family(
        "step_running_seconds",
        _GAUGE,
        "How long the step that is running has taken so far; 0 between steps.",
        lambda now: now.engine.seconds_in_step,
    ),
)
"""What only this engine has; always with the prefix `jaxpaged:`."""

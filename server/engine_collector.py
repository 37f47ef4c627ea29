"""Renders the engine's metric families, from what the engine counts, when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxpaged import __version__
from jaxpaged.metrics import Histogram
from server.engine_families import OLD_NAMES, OWN, SHARED, Family, Moment

if TYPE_CHECKING:
    from jaxpaged.async_engine import AsyncEngine


def buckets_of(histogram: Histogram, largest: float | None = None) -> list[tuple[str, float]]:
    """What `HistogramMetricFamily.add_metric` takes; bounds above `largest` are left out."""
    return [
        ("+Inf" if bound == float("inf") else repr(bound), count)
        for bound, count in histogram.cumulative(largest)
    ]


class EngineCollector(Collector):
    """Renders the engine's families at this moment. `prefixes`: those of the shared families."""

    def __init__(self, engine: AsyncEngine, model_name: str, prefixes: Iterable[str]) -> None:
        self._engine = engine
        self._common = {"model_name": model_name, "engine": "0"}
        self._prefixes = tuple(prefixes)

    def collect(self) -> Iterator[Metric]:
        moment = Moment(self._engine)
        for prefix in self._prefixes:
            for family in SHARED:
                yield from self._render(prefix, family, moment)
        if "vllm" in self._prefixes:
            for family in OLD_NAMES:
                yield from self._render("vllm", family, moment)
        for family in OWN:
            yield from self._render("jaxpaged", family, moment)
        for prefix in self._prefixes:
            yield from self._about_cache(prefix, moment)
        yield from self._about_engine(moment)

    def _render(self, prefix: str, family: Family, moment: Moment) -> Iterator[Metric]:
        """The family, unless there is nothing to tell yet."""
        if family.tokens and moment.longest is None:
            return
        values = family.values(moment)
        by_label = values if isinstance(values, dict) else {"": values}
        labels = dict(self._common)
        if not family.per_engine:
            del labels["engine"]
        names = [*labels, *([family.label] if family.label else [])]
        metric = family.kind(f"{prefix}:{family.name}", family.help, labels=names)
        for own, value in by_label.items():
            chosen = [*labels.values(), *([own] if family.label else [])]
            if isinstance(metric, HistogramMetricFamily):
                assert isinstance(value, Histogram)
                largest = moment.longest if family.tokens else None
                metric.add_metric(chosen, buckets_of(value, largest), value.sum)
            else:
                assert not isinstance(value, Histogram)
                metric.add_metric(chosen, value)
        if by_label:
            yield metric

    def _about_cache(self, prefix: str, moment: Moment) -> Iterator[Metric]:
        info, config = moment.info, self._engine.config
        if info is None:
            return
        facts = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "num_gpu_blocks_override": config.num_gpu_blocks_override,
            "cache_dtype": info.cache_dtype,
            "enable_prefix_caching": info.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        }
        yield self._facts(f"{prefix}:cache_config_info", "Settings of the KV cache.", facts)

    def _about_engine(self, moment: Moment) -> Iterator[Metric]:
        info = moment.info
        if info is None:
            return
        facts = {
            "version": __version__,
            "dtype": info.dtype,
            "attention_backend": info.attention_backend,
            "deterministic": str(info.deterministic).lower(),
            "tensor_parallel_size": info.tensor_parallel_size,
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
        }
        yield self._facts("jaxpaged:engine_info", "What is running.", facts)

    def _facts(self, name: str, help: str, facts: Mapping[str, object]) -> Metric:
        labels = self._common | {key: str(value) for key, value in facts.items()}
        metric = GaugeMetricFamily(name, help, labels=list(labels))
        metric.add_metric(list(labels.values()), 1)
        return metric

"""/metrics: what the HTTP side has answered, what the engine has computed, and the process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpaged.async_engine import AsyncEngine
from jaxpaged.metrics import Histogram
from server.context import Context, context_of
from server.engine_collector import EngineCollector, buckets_of
from server.engine_families import PREFIXES

NOT_COUNTED = frozenset({"/metrics", "/health", "/ping", "/ready", "/version", "/load"})
"""Asked for by machines, all the time."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BOUNDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
    600.0,
)
"""Seconds from the first byte of a request to the last of its response."""


class HttpMetrics(Collector):
    """What was answered, by route. Record and render on the event loop.

    The names are those that prometheus-fastapi-instrumentator gives, which other servers use.
    """

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = {}
        """(handler, method, status code) -> requests."""
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._request_bytes: dict[str, tuple[int, int]] = {}
        """Handler -> requests, and the bytes of their bodies."""
        self._response_bytes: dict[str, tuple[int, int]] = {}

    @cached_property
    def registry(self) -> CollectorRegistry:
        """These families and those of the process. Nothing is in prometheus_client's own one."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(self)
        return registry

    def observe(
        self,
        handler: str | None,
        method: str,
        status: int,
        seconds: float,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """One request was answered. `handler` is the route's template, None where none matched:
        each name is kept for good, so neither it nor the method may be the client's to choose.
        """
        handler = "none" if handler is None else handler.rstrip("/") or "/"
        if handler in NOT_COUNTED:
            return
        if method not in _METHODS:
            method = "OTHER"
        key = (handler, method, str(status))
        self._requests[key] = self._requests.get(key, 0) + 1
        self._seconds.setdefault((handler, method), Histogram(_BOUNDS)).observe(seconds)
        for sizes, size in (
            (self._request_bytes, request_bytes),
            (self._response_bytes, response_bytes),
        ):
            count, total = sizes.get(handler, (0, 0))
            sizes[handler] = (count + 1, total + size)

    def collect(self) -> Iterator[Metric]:
        by_class: dict[tuple[str, str, str], int] = {}
        exact = CounterMetricFamily(
            "jaxpaged:http_responses",
            "Requests answered, by their exact status code.",
            labels=["handler", "method", "code"],
        )
        for (handler, method, code), count in self._requests.items():
            exact.add_metric([handler, method, code], count)
            key = (handler, method, f"{code[0]}xx")
            by_class[key] = by_class.get(key, 0) + count
        grouped = CounterMetricFamily(
            "http_requests",
            "Requests answered, by the class of their status (2xx, 4xx, ...).",
            labels=["handler", "method", "status"],
        )
        for labels, count in by_class.items():
            grouped.add_metric(labels, count)
        yield grouped
        yield exact
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From a request's first byte to its response's last.",
            labels=["handler", "method"],
        )
        for pair, histogram in self._seconds.items():
            seconds.add_metric(pair, buckets_of(histogram), histogram.sum)
        yield seconds
        yield _sizes("http_request_size_bytes", "Bodies of requests.", self._request_bytes)
        yield _sizes("http_response_size_bytes", "Bodies of responses.", self._response_bytes)


def _sizes(name: str, help: str, sizes: dict[str, tuple[int, int]]) -> Metric:
    metric = SummaryMetricFamily(name, help, labels=["handler"])
    for handler, (count, total) in sizes.items():
        metric.add_metric([handler], count, total)
    return metric


def render(context: Context) -> bytes:
    """Everything, in Prometheus' text format 0.0.4. Never waits for the engine."""
    engine = EngineCollector(
        context.engine, context.served_names[0], PREFIXES[context.settings.metrics_prefix]
    )
    return generate_latest(engine) + generate_latest(context.http.registry)


def load_header(engine: AsyncEngine, wanted: str) -> str | None:
    """The response header `endpoint-load-metrics`, for gateways that balance by it (ORCA).

    `wanted` is what the request said in `endpoint-load-metrics-format`: TEXT or JSON; None for
    anything else.
    """
    stats = engine.stats()
    loads = {
        "kv_cache_usage_perc": round(stats.kv_usage, 6),
        "num_requests_waiting": stats.num_waiting,
    }
    if wanted.upper() == "JSON":
        return f"JSON {msgspec.json.encode({'named_metrics': loads}).decode()}"
    if wanted.upper() == "TEXT":
        return "TEXT " + ", ".join(f"named_metrics.{name}={load}" for name, load in loads.items())
    return None


async def metrics(request: Request) -> Response:
    return Response(render(context_of(request)), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


# With the slash too, since some scrapers ask so and do not follow redirects.
ROUTES = [Route("/metrics", metrics), Route("/metrics/", metrics)]

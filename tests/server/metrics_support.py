"""A scrape of /metrics as tests look at it."""

from __future__ import annotations

from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.async_engine import AsyncEngine
from jaxpaged.sampling_params import SamplingParams
from server.context import Context
from server.metrics import HttpMetrics, render
from server.settings import ServerConfig


def context_for(engine: AsyncEngine, **settings: Any) -> Context:
    names: dict[str, Any] = {"served_model_name": ("m", "alias"), **settings}
    return Context(engine, ServerConfig(**names), HttpMetrics())


def parsed(text: bytes) -> dict[str, Metric]:
    """Families by their name in the text: counters with `_total`."""
    families = list(text_string_to_metric_families(text.decode()))
    found = {f.name + ("_total" if f.type == "counter" else ""): f for f in families}
    assert len(found) == len(families), "a family appears twice"
    return found


def scraped(context: Context) -> dict[str, Metric]:
    return parsed(render(context))


def value(families: dict[str, Metric], name: str, /, **labels: str) -> float:
    """The one sample with this name and these labels, beside the common ones."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{name}{labels}: {found}"
    return found[0]


async def generate(engine: AsyncEngine, request_id: str, prompt: str, **params: Any) -> None:
    stream = await engine.submit(request_id, prompt, SamplingParams(**params))
    try:
        async for _ in stream:
            pass
    finally:
        stream.close()

"""/metrics over a scripted engine: families, labels, values, and the ten-second line."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette

from jaxpaged.async_engine import AsyncEngine
from jaxpaged.core.snapshot import take_snapshot
from jaxpaged.engine import Engine
from jaxpaged.metrics import (
    REQUEST_LATENCY_BOUNDS,
    TIME_TO_FIRST_TOKEN_BOUNDS,
    TOKEN_LATENCY_BOUNDS,
)
from jaxpaged.outputs import EngineStats
from jaxpaged.sampling_params import SamplingParams
from server.context import Context
from server.engine_families import OLD_NAMES, OWN, SHARED
from server.log_line import LogLine, log_stats
from server.metrics import ROUTES, HttpMetrics, load_header, render
from tests.server.metrics_support import context_for, generate, parsed, scraped, value
from tests.server.scripted import Script, running, scripted_async_engine, settled

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
LABELS = {"model_name": "m", "engine": "0"}

DASHBOARD: dict[str, tuple[str, set[str]]] = {
    "num_requests_running": ("gauge", set()),
    "num_requests_waiting": ("gauge", set()),
    "kv_cache_usage_perc": ("gauge", set()),
    "prompt_tokens_total": ("counter", set()),
    "generation_tokens_total": ("counter", set()),
    "request_success_total": ("counter", {"finished_reason"}),
    "request_prompt_tokens": ("histogram", set()),
    "request_generation_tokens": ("histogram", set()),
    "request_max_num_generation_tokens": ("histogram", set()),
    "time_to_first_token_seconds": ("histogram", set()),
    "inter_token_latency_seconds": ("histogram", set()),
    "request_time_per_output_token_seconds": ("histogram", set()),
    "time_per_output_token_seconds": ("histogram", set()),
    "e2e_request_latency_seconds": ("histogram", set()),
    "request_queue_time_seconds": ("histogram", set()),
    "request_prefill_time_seconds": ("histogram", set()),
    "request_decode_time_seconds": ("histogram", set()),
    # Beyond the dashboard of vLLM itself: what other dashboards, gateways and autoscalers read.
    "gpu_cache_usage_perc": ("gauge", set()),
    "num_requests_waiting_by_reason": ("gauge", {"reason"}),
    "num_preemptions_total": ("counter", set()),
    "prefix_cache_queries_total": ("counter", set()),
    "prefix_cache_hits_total": ("counter", set()),
    "prompt_tokens_by_source_total": ("counter", {"source"}),
    "prompt_tokens_cached_total": ("counter", set()),
    "request_params_max_tokens": ("histogram", set()),
    "request_params_n": ("histogram", set()),
    "request_prefill_kv_computed_tokens": ("histogram", set()),
    "request_inference_time_seconds": ("histogram", set()),
    "request_num_preemptions": ("histogram", set()),
    "iteration_tokens_total": ("histogram", set()),
}
"""What is read under `vllm:`, as it stands in the text, with its type and labels of its own."""


def with_engine(
    test: Callable[[AsyncEngine], Awaitable[None]], script: Script | None = None, **options: object
) -> None:
    async def run() -> None:
        async with running(script, **options) as engine:
            await asyncio.wait_for(test(engine), 60)

    asyncio.run(run())


async def polled(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


# ---------------------------------------------------------------------- families


def test_what_dashboards_read_is_there_with_its_type_and_labels() -> None:
    async def test(engine: AsyncEngine) -> None:
        families = scraped(context_for(engine))
        for name, (kind, own) in DASHBOARD.items():
            family = families[f"vllm:{name}"]
            assert family.type == kind, name
            assert family.samples, name
            for sample in family.samples:
                assert sample.labels.items() >= LABELS.items(), name
                assert set(sample.labels) - {"model_name", "engine", "le"} == own, name

    with_engine(test)


def test_the_text_names_counters_as_prometheus_wants_them() -> None:
    async def test(engine: AsyncEngine) -> None:
        lines = render(context_for(engine)).decode().splitlines()
        assert "# TYPE vllm:prompt_tokens_total counter" in lines
        assert 'vllm:prompt_tokens_total{engine="0",model_name="m"} 0.0' in lines
        assert "# TYPE vllm:iteration_tokens_total histogram" in lines
        assert 'vllm:iteration_tokens_total_count{engine="0",model_name="m"} 0.0' in lines
        assert not any("_created" in line for line in lines)

    with_engine(test)


def bounds_of(family: Metric) -> list[float]:
    return [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]


def test_buckets() -> None:
    async def test(engine: AsyncEngine) -> None:
        families = scraped(context_for(engine))

        def bounds(name: str) -> tuple[float, ...]:
            *finite, last = bounds_of(families[f"vllm:{name}"])
            assert last == float("inf")
            return tuple(finite)

        assert bounds("request_prompt_tokens") == (1, 2, 5, 10, 20, 50, 100, 200)  # of 256
        assert bounds("request_generation_tokens") == bounds("request_prompt_tokens")
        assert bounds("request_params_n") == (1, 2, 5, 10, 20)
        assert bounds("request_num_preemptions") == (1, 2, 3, 4, 5, 10, 20)
        assert bounds("iteration_tokens_total")[:3] == (1, 8, 16)
        assert bounds("time_to_first_token_seconds") == TIME_TO_FIRST_TOKEN_BOUNDS
        for name in ("inter_token_latency", "time_per_output_token"):
            assert bounds(f"{name}_seconds") == TOKEN_LATENCY_BOUNDS
        for name in ("queue", "prefill", "decode", "inference"):
            assert bounds(f"request_{name}_time_seconds") == REQUEST_LATENCY_BOUNDS

    with_engine(test)


@pytest.mark.parametrize(
    ("prefix", "shared_under"),
    [("both", {"vllm", "jaxpaged"}), ("vllm", {"vllm"}), ("jaxpaged", {"jaxpaged"})],
)
def test_prefixes(prefix: str, shared_under: set[str]) -> None:
    async def test(engine: AsyncEngine) -> None:
        names = set(scraped(context_for(engine, metrics_prefix=prefix)))
        bare = {name.partition(":")[::2] for name in names if ":" in name}
        for family in SHARED:
            under = {p for p, name in bare if name.removesuffix("_total") == family.name}
            if not family.name.endswith("_total"):
                assert under == shared_under, family.name
        assert {p for p, name in bare if name == "iteration_tokens_total"} == shared_under
        assert {p for p, name in bare if name == "cache_config_info"} == shared_under
        for family in OLD_NAMES:
            assert ("vllm", family.name) in bare or "vllm" not in shared_under
            assert ("jaxpaged", family.name) not in bare
        for name in ("kv_blocks", "step_seconds", "compiles_total", "engine_info"):
            assert ("jaxpaged", name) in bare
            assert ("vllm", name) not in bare

    with_engine(test)


def test_every_family_is_in_the_documentation_and_nothing_else() -> None:
    async def test(engine: AsyncEngine) -> None:
        await generate(engine, "a", "hello", max_tokens=2)  # so that there is a bucket with padding
        context = context_for(engine)
        context.http.observe("/v1/models", "GET", 200, 0.01, 0, 100)
        documented = dict(
            re.findall(
                r"^\| `([\w:]+)` \| (gauge|counter|histogram|summary) \|",
                DOCS.read_text(encoding="utf-8"),
                re.M,
            )
        )
        shared = {f.name for f in SHARED} | {f"{f.name}_total" for f in SHARED}
        found = {}
        for name, family in scraped(context).items():
            prefix, _, bare = name.rpartition(":")
            process = name.startswith(("process_", "python_"))
            if process or (prefix == "jaxpaged" and bare in shared | {"cache_config_info"}):
                continue
            found[name] = family.type
        assert documented == found

    with_engine(test)


def test_help_is_a_sentence() -> None:
    for family in (*SHARED, *OLD_NAMES, *OWN):
        assert re.fullmatch(r"\S.*[a-z0-9)]\.", family.help), family.name


# ---------------------------------------------------------------------- values


def test_values_after_some_requests() -> None:
    async def test(engine: AsyncEngine) -> None:
        prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]  # two full blocks, and one token more
        for i in range(3):
            stream = await engine.submit(
                f"r{i}", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=4)
            )
            async for _ in stream:
                pass
        families = scraped(context_for(engine))
        assert value(families, "vllm:prompt_tokens_total") == 27
        assert value(families, "vllm:prompt_tokens_cached_total") == 16
        by_source = {
            source: value(families, "vllm:prompt_tokens_by_source_total", source=source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        }
        assert by_source == {
            "local_compute": 11,
            "local_cache_hit": 16,
            "external_kv_transfer": 0,
        }
        assert value(families, "vllm:prefix_cache_queries_total") == 27
        assert value(families, "vllm:prefix_cache_hits_total") == 16
        assert value(families, "vllm:generation_tokens_total") == 12
        ends = {
            reason: value(families, "vllm:request_success_total", finished_reason=reason)
            for reason in ("stop", "length", "abort", "error", "repetition")
        }
        assert ends == {"stop": 0, "length": 3, "abort": 0, "error": 0, "repetition": 0}
        assert value(families, "vllm:request_prompt_tokens_bucket", le="10.0") == 3
        assert value(families, "vllm:request_prompt_tokens_sum") == 27
        assert value(families, "vllm:request_prefill_kv_computed_tokens_sum") == 11
        assert value(families, "vllm:request_max_num_generation_tokens_sum") == 12
        assert value(families, "vllm:request_params_max_tokens_sum") == 12
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert value(families, f"vllm:{name}_seconds_count") == 3
        for name in ("inter_token_latency", "time_per_output_token"):
            assert value(families, f"vllm:{name}_seconds_count") == 9
        steps = value(families, "jaxpaged:steps_total")
        assert value(families, "vllm:iteration_tokens_total_count") == steps
        assert value(families, "vllm:iteration_tokens_total_sum") >= 11 + 9
        for phase in ("launch", "wait"):
            assert value(families, "jaxpaged:step_seconds_count", phase=phase) == steps
        assert value(families, "jaxpaged:bucket_padding_tokens_total", bucket="decode[8]") >= 63

    with_engine(test)


def test_gauges_while_something_runs_and_waits() -> None:
    gate = threading.Event()
    gate.set()
    script = Script(gate=gate, end=False, step_seconds=0.002)

    async def test(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=200)
        streams = [
            await engine.submit(f"r{i}", {"prompt_token_ids": [7] * 9}, params) for i in range(2)
        ]
        await polled(lambda: engine.stats().num_running == 1 and engine.stats().num_waiting == 1)
        gate.clear()
        context = context_for(engine)
        families = scraped(context)
        for prefix in ("vllm", "jaxpaged"):
            assert value(families, f"{prefix}:num_requests_running") == 1
            assert value(families, f"{prefix}:num_requests_waiting") == 1
            waiting = f"{prefix}:num_requests_waiting_by_reason"
            assert value(families, waiting, reason="capacity") == 1
            assert value(families, waiting, reason="deferred") == 0
            assert 0 < value(families, f"{prefix}:kv_cache_usage_perc") <= 1
        assert value(families, "vllm:gpu_cache_usage_perc") > 0
        gate.set()
        for stream in streams:
            stream.close()
        await settled(engine)
        families = scraped(context)
        assert value(families, "vllm:request_success_total", finished_reason="abort") == 2
        assert value(families, "vllm:kv_cache_usage_perc") == 0

    with_engine(test, script, max_num_seqs=1)


def test_kv_blocks_are_those_of_the_snapshot_and_add_up() -> None:
    gate = threading.Event()
    gate.set()

    async def test(engine: AsyncEngine) -> None:
        context = context_for(engine)
        prompt = {"prompt_token_ids": list(range(5, 17))}
        stream = await engine.submit("done", prompt, SamplingParams(max_tokens=2))
        async for _ in stream:
            pass

        def blocks(families: dict[str, Metric]) -> dict[str, float]:
            samples = families["jaxpaged:kv_blocks"].samples
            return {sample.labels["state"]: sample.value for sample in samples}

        idle = blocks(scraped(context))
        assert idle == {"free": 252, "cached": 3, "held": 0, "shared": 0, "null": 1}

        def both(engine_: Engine) -> tuple[dict[str, int], dict[str, float]]:
            return take_snapshot(engine_.scheduler).counts, blocks(scraped(context))

        streams = [
            await engine.submit(f"r{i}", prompt, SamplingParams(max_tokens=100)) for i in range(2)
        ]
        await polled(lambda: engine.stats().num_running == 2)
        counts, seen = await engine.call(both)
        assert counts == seen
        assert seen["shared"] >= 2
        assert sum(seen.values()) == 256
        for stream in streams:
            stream.close()

    with_engine(test, Script(gate=gate, end=False, step_seconds=0.002))


def test_forks_and_copied_blocks() -> None:
    async def test(engine: AsyncEngine) -> None:
        context = context_for(engine)

        def told() -> tuple[float, float]:
            families = scraped(context)
            names = ("jaxpaged:sequence_forks_total", "jaxpaged:kv_blocks_copied_total")
            forks, copies = (value(families, name) for name in names)
            return forks, copies

        assert told() == (0, 0)
        for request_id, n in (("samples", 3), ("again", 1)):
            stream = await engine.submit(request_id, [5] * 6, SamplingParams(max_tokens=5, n=n))
            async for _ in stream:
                pass
        # Two of three leave the block that the prompt does not fill; then it is found again.
        assert told() == (2, 2 + 1)

    with_engine(test, Script(end=False))


def test_config_and_engine_info() -> None:
    async def test(engine: AsyncEngine) -> None:
        families = scraped(context_for(engine))
        (sample,) = families["vllm:cache_config_info"].samples
        assert sample.value == 1
        assert (
            sample.labels.items()
            >= {
                **LABELS,
                "block_size": "4",
                "num_gpu_blocks": "256",
                "cache_dtype": "float32",
                "enable_prefix_caching": "True",
                "gpu_memory_utilization": "0.92",
                "num_gpu_blocks_override": "None",
            }.items()
        )
        (sample,) = families["jaxpaged:engine_info"].samples
        assert sample.labels["max_model_len"] == "256"
        assert sample.labels["tensor_parallel_size"] == "1"
        assert sample.labels["attention_backend"] == "reference"
        assert sample.labels["deterministic"] == "true"
        assert value(families, "jaxpaged:hbm_bytes", kind="weights") == 4096

    with_engine(test)


def test_rejections_have_no_engine_label() -> None:
    gate = threading.Event()

    async def test(engine: AsyncEngine) -> None:
        context = context_for(engine)
        assert value(scraped(context), "vllm:admission_rejections_total", reason="queue_full") == 0
        engine.metrics.rejected("queue_full")
        engine.metrics.rejected("too_hot")
        samples = scraped(context)["vllm:admission_rejections_total"].samples
        assert {s.labels["reason"]: s.value for s in samples} == {"queue_full": 1, "too_hot": 1}
        assert all(set(s.labels) == {"model_name", "reason"} for s in samples)

    with_engine(test, Script(gate=gate))


def test_failed_steps_and_compiles() -> None:
    errors = iter([RuntimeError("the device fell over")])
    script = Script(fail_launch=lambda step: next(errors, None) if step == 1 else None)

    async def test(engine: AsyncEngine) -> None:
        await generate(engine, "a", "hello", max_tokens=4)
        families = scraped(context_for(engine))
        assert value(families, "jaxpaged:failed_steps_total") == 1
        assert value(families, "vllm:request_success_total", finished_reason="error") == 1
        for kind in ("warmup", "after_warmup", "lazy"):
            assert value(families, "jaxpaged:compiles_total", kind=kind) == 0

        def compile_something(engine_: Engine) -> None:
            ledger = engine_.runner.ledger
            with ledger.watch("decode[8]"):
                ledger.traced()

        await engine.call(compile_something)
        families = scraped(context_for(engine))
        assert value(families, "jaxpaged:compiles_total", kind="after_warmup") == 1
        assert value(families, "jaxpaged:compile_seconds_total") > 0

    with_engine(test, script)


def test_a_strange_model_name_is_escaped() -> None:
    async def test(engine: AsyncEngine) -> None:
        name = 'a "b"\\c\nd'
        families = scraped(context_for(engine, served_model_name=(name,)))
        (sample,) = families["vllm:num_requests_running"].samples
        assert sample.labels["model_name"] == name

    with_engine(test)


def test_nothing_of_ours_is_in_the_process_wide_registry() -> None:
    async def test(engine: AsyncEngine) -> None:
        render(context_for(engine))
        names = {family.name for family in REGISTRY.collect()}
        assert all(name.startswith(("process_", "python_")) for name in names)
        ours = set(scraped(context_for(engine)))
        assert "process_resident_memory_bytes" in ours
        assert "python_info" in ours

    with_engine(test)


# ---------------------------------------------------------------------- the endpoint


def get(context: Context, path: str) -> httpx.Response:
    async def run() -> httpx.Response:
        app = Starlette(routes=ROUTES)
        app.state.context = context
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
def test_while_loading_the_scrape_answers_with_what_there_is(path: str) -> None:
    engine = scripted_async_engine(Script())  # not even started
    context = context_for(engine)
    context.http.observe("/v1/models", "GET", 503, 0.01, 0, 90)
    response = get(context, path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = parsed(response.content)
    assert value(families, "jaxpaged:engine_status", status="loading") == 1
    assert value(families, "jaxpaged:engine_status", status="ready") == 0
    assert value(families, "http_requests_total", handler="/v1/models", status="5xx") == 1
    assert value(families, "vllm:num_requests_running") == 0
    for name in ("vllm:cache_config_info", "vllm:request_prompt_tokens", "jaxpaged:kv_blocks"):
        assert name not in families


def test_a_scrape_does_not_wait_for_a_step() -> None:
    gate = threading.Event()

    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit("a", "hello", SamplingParams(max_tokens=4))
        await polled(lambda: engine.seconds_in_step > 0.01)
        families = scraped(context_for(engine))  # the step cannot end before the gate opens
        assert value(families, "jaxpaged:step_running_seconds") > 0.01
        gate.set()
        stream.close()
        await settled(engine)
        assert value(scraped(context_for(engine)), "jaxpaged:step_running_seconds") == 0

    with_engine(test, Script(gate=gate))


def test_a_dead_engine_can_be_scraped() -> None:
    async def test(engine: AsyncEngine) -> None:
        def die(engine_: Engine) -> None:
            raise SystemExit(1)

        with pytest.raises(Exception, match=".*"):
            await engine.call(die)
        await polled(lambda: engine.status == "dead")
        families = scraped(context_for(engine))
        assert value(families, "jaxpaged:engine_status", status="dead") == 1
        assert value(families, "jaxpaged:engine_status", status="ready") == 0

    with_engine(test)


# ---------------------------------------------------------------------- HTTP


def http_families(*observations: tuple[object, ...]) -> dict[str, Metric]:
    http = HttpMetrics()
    for observation in observations:
        http.observe(*observation)
    return {f.name + ("_total" if f.type == "counter" else ""): f for f in http.collect()}


def test_http_requests_by_class_and_by_code() -> None:
    families = http_families(
        ("/v1/completions", "POST", 200, 0.2, 10, 300),
        ("/v1/completions", "POST", 503, 0.01, 20, 100),
        ("/v1/completions", "POST", 500, 0.01, 30, 100),
        ("/v1/models/", "GET", 200, 0.001, 0, 50),
    )
    post = {"handler": "/v1/completions", "method": "POST"}
    assert value(families, "http_requests_total", **post, status="2xx") == 1
    assert value(families, "http_requests_total", **post, status="5xx") == 2
    assert value(families, "jaxpaged:http_responses_total", **post, code="503") == 1
    assert value(families, "http_requests_total", handler="/v1/models") == 1
    assert value(families, "http_request_duration_seconds_count", **post) == 3
    assert value(families, "http_request_duration_seconds_bucket", **post, le="0.025") == 2
    assert value(families, "http_request_size_bytes_sum", handler="/v1/completions") == 60
    assert value(families, "http_request_size_bytes_count", handler="/v1/completions") == 3
    assert value(families, "http_response_size_bytes_sum", handler="/v1/completions") == 500


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/health", "/ping", "/ready", "/load"])
def test_what_machines_ask_for_all_the_time_is_not_counted(path: str) -> None:
    families = http_families((path, "GET", 200, 0.1, 0, 10))
    assert not any(family.samples for family in families.values())


def test_clients_cannot_make_up_names() -> None:
    families = http_families(
        (None, "GET", 404, 0.1, 0, 10), (None, "BREW", 405, 0.1, 0, 10), ("/", "GET", 200, 0, 0, 1)
    )
    labels = [sample.labels for sample in families["http_requests_total"].samples]
    assert [(own["handler"], own["method"]) for own in labels] == [
        ("none", "GET"),
        ("none", "OTHER"),
        ("/", "GET"),
    ]


def test_load_header() -> None:
    async def test(engine: AsyncEngine) -> None:
        text = load_header(engine, "TEXT")
        assert text == (
            "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0"
        )
        kind, _, told = (load_header(engine, "json") or "").partition(" ")
        assert kind == "JSON"
        loads = {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0}
        assert json.loads(told) == {"named_metrics": loads}
        assert load_header(engine, "BINARY") is None
        assert load_header(engine, "") is None

    with_engine(test)


# ---------------------------------------------------------------------- the log line


def stats(**changes: object) -> EngineStats:
    return EngineStats(**changes)


def test_the_words_of_the_line() -> None:
    line = LogLine(stats(), 100.0)
    level, text = line.next(
        stats(
            prompt_tokens=1234,
            generation_tokens=5678,
            num_running=3,
            num_waiting=1,
            kv_usage=0.123,
            prefix_query_tokens=1000,
            prefix_hit_tokens=456,
        ),
        110.0,
    )
    assert level == logging.INFO
    assert text == (
        "Engine 000: Avg prompt throughput: 123.4 tokens/s, Avg generation throughput: 567.8 "
        "tokens/s, Running: 3 reqs, Waiting: 1 reqs, GPU KV cache usage: 12.3%, Prefix cache hit "
        "rate: 45.6%"
    )


def test_rates_are_of_the_time_since_the_last_line() -> None:
    line = LogLine(stats(generation_tokens=100, prefix_query_tokens=50), 0.0)
    now = stats(generation_tokens=300, prefix_query_tokens=150, prefix_hit_tokens=50)
    _, text = line.next(now, 5.0)
    assert "Avg generation throughput: 40.0 tokens/s" in text
    assert "Prefix cache hit rate: 50.0%" in text
    _, text = line.next(now, 10.0)
    assert "Avg generation throughput: 0.0 tokens/s" in text
    assert "Prefix cache hit rate: 50.0%" in text  # nothing was looked up since


def test_idle_lines_are_for_debugging_after_one_last_line() -> None:
    line = LogLine(stats(), 0.0)
    assert line.next(stats(), 10.0)[0] == logging.DEBUG
    busy = stats(prompt_tokens=5)
    assert line.next(busy, 20.0)[0] == logging.INFO
    assert line.next(busy, 30.0)[0] == logging.INFO
    assert line.next(busy, 40.0)[0] == logging.DEBUG
    assert line.next(stats(prompt_tokens=5, num_waiting=1), 50.0)[0] == logging.INFO


def test_the_task_logs_and_can_be_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server.log_line")

    async def test(engine: AsyncEngine) -> None:
        task = asyncio.create_task(log_stats(engine, interval=0.01))
        try:
            await generate(engine, "a", "hello", max_tokens=5)
            await polled(lambda: "Avg generation throughput" in caplog.text)
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert caplog.records[0].getMessage().startswith("Engine 000: Avg prompt throughput: ")

    with_engine(test)


def test_the_task_ends_with_the_engine() -> None:
    async def run() -> None:
        async with running() as engine:
            task = asyncio.create_task(log_stats(engine, interval=0.005))
            await asyncio.sleep(0)
        await asyncio.wait_for(task, 20)

    asyncio.run(run())

"""The host's work for a step: how much of it there is, whatever the clock says; and the scripts
that measure it.
"""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from jaxpaged.core import groups
from jaxpaged.engine import Engine
from jaxpaged.sampling_params import SamplingParams

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
NAMES = ("bench_host", "soak", "host.cases", "host.null_device", "host.phases", "host.timeline")
LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """Modules by name, imported as the scripts import them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield {name: importlib.import_module(name) for name in NAMES}


def calls_of(function: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, while this runs."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what other tests have left calls back when it is collected
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def decoding(null: ModuleType, rows: int, waiting: int = 0, **options: Any) -> Engine:
    """An engine in which so many requests have decoded for some steps."""
    sizes = null.Sizes(max_num_seqs=rows, max_num_batched_tokens=256, max_model_len=512)
    engine: Engine = null.null_engine(sizes, tokenizer=null.null_tokenizer(), **options)
    for index in range(rows):
        engine.add_request(str(index), [9 + index] * 20, LONG, delta_interval=1)
    while engine.scheduler.num_running < rows or engine.scheduler.stats.steps < 20:
        engine.step()
    for index in range(waiting):
        engine.add_request(f"w{index}", [9] * 20, LONG, delta_interval=1)
    return engine


def steps(engine: Engine, count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            engine.step()

    return run


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("cause", ["slots", "blocks"])
def test_a_step_does_the_same_however_many_wait(
    scripts: dict[str, ModuleType], policy: str, cause: str
) -> None:
    """They wait for a slot; or for blocks, so that the first is looked at in every step."""
    counts = set()
    for waiting in (10, 1000):
        engine = decoding(scripts["host.null_device"], 8, policy=policy)
        if cause == "blocks":
            engine.abort("7")
            engine.step()
            held = engine.scheduler.kv.pool.get_new_blocks(engine.scheduler.kv.pool.num_free - 8)
            assert held
        for index in range(waiting):
            engine.add_request(f"w{index}", [9] * 400, LONG, delta_interval=1)
        engine.step()
        counts.add(calls_of(steps(engine, 10)))
        assert engine.scheduler.num_waiting == waiting
    assert len(counts) == 1, counts


def test_a_running_row_takes_few_calls(scripts: dict[str, ModuleType]) -> None:
    """What a step calls grows with its rows, and by no more than now."""
    null = scripts["host.null_device"]
    few, many = (calls_of(steps(decoding(null, rows), 16)) for rows in (8, 40))
    assert (many - few) / (32 * 16) < 36


def test_a_waiting_group_is_compared_once(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequences are long, and are looked at in every step while there is no room for them."""
    compared = []
    original = groups.common_length

    def counting(*args: Any) -> int:
        compared.append(args)
        return original(*args)

    monkeypatch.setattr(groups, "common_length", counting)
    bench = scripts["host.cases"].Bench(30)
    bench.waiting_beams(width=4, length=320)
    assert 0 < len(compared) < 10


# ---------------------------------------------------------------------------- the scripts


def test_bench_host(scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows", "2", "--steps", "2", "--only", "decode 2", "prefill 16", "samples"]
    assert scripts["bench_host"].main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report) >= {"decode 2", "decode 2, 10 waiting", "prefill 16 x 128", "samples 4 x 8"}
    found = report["decode 2"]
    phases = scripts["host.phases"].PHASES
    assert all(found[phase] >= 0 for phase in phases)
    assert found["plan"] > 0 and found["pack"] > 0 and found["total"] > 0
    assert found["target"] == 158


def test_the_soak_finds_nothing_in_a_short_run(
    scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tokens", "1500", "--intervals", "3", "--heap-kib", "2000"]
    assert scripts["soak"].main(arguments) == 0
    assert not tracemalloc.is_tracing()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = report["looks"][-1]
    assert last["tokens"] >= 1500 and last["forks"] > 0
    assert report["kinds"]["plain"] > 0


def test_the_soak_sees_what_grows(scripts: dict[str, ModuleType]) -> None:
    class Leaky:
        def __init__(self) -> None:
            self.kept: dict[int, int] = {}
            self.steady = [0] * 5

    Leaky.__module__ = "jaxpaged.leaky"
    leaky, looks = Leaky(), []
    for turn in range(9):
        leaky.kept.update({turn * 100 + i: i for i in range(100)})
        found = dict(scripts["soak"].containers(leaky))
        assert set(found) == {"engine.kept", "engine.steady"}
        looks.append({"rss_mib": 100.0 + 10 * turn, "heap_kib": 50.0, "containers": found})

    class Limits:
        rss_mib, heap_kib = 24.0, 512.0

    problems = scripts["soak"].growth(looks, Limits)
    assert [text.split()[0] for text in problems] == ["rss_mib", "engine.kept"]


def test_a_timeline_is_drawn(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    timeline = scripts["host.timeline"]
    spans = []
    for number in range(8):
        at = 0.04 * number
        spans += [
            timeline.Span("device", number, at, at + 0.04),
            timeline.Span("read", number, at + 0.001, at + 0.04),
            timeline.Span("finish", -1, at + 0.04, at + 0.0401),
            timeline.Span("plan", -1, at + 0.0401, at + 0.0402),
            timeline.Span("pack", -1, at + 0.0402, at + 0.0404),
            timeline.Span("launch", number + 1, at + 0.0404, at + 0.041),
        ]
    path = tmp_path / "picture.svg"
    timeline.draw(path, spans, "two & two", first=2, count=3)
    root = ElementTree.parse(path).getroot()
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "two & two" in words
    assert {"step 2", "step 3", "step 4"} <= set(words)


def test_bench_server() -> None:
    arguments = ["--streams", "2", "--tokens", "6", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_server.py"), *arguments],
        env={"PYTHONPATH": str(SCRIPTS.parent), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    # Each of the texts, and its end.
    assert 2 * 2 <= report["rounds"][0]["chunks"] <= 2 * 7

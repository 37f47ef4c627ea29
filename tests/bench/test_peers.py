"""`scripts/bench_peers.py`: the work, the figures, and what happens when an engine fails."""

from __future__ import annotations

import importlib
import json
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tiny_models import tiny_config, tiny_llama

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
NAMES = ("engines", "launch", "machine", "metrics", "summary", "worker", "workload")


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, ModuleType]]:
    """Its modules by name, imported as the script imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield {name: importlib.import_module(f"peers.{name}") for name in NAMES}


# ------------------------------------------------------------------ the work


def test_rounds_have_the_same_lengths_and_other_tokens(peers: dict[str, ModuleType]) -> None:
    workload = peers["workload"]
    sizes = workload.Sizes()
    first, again, other = (workload.make_plan(sizes, 49152, 0, turn) for turn in (1, 1, 2))
    assert first == again
    assert first["sample"] == other["sample"]
    for group in workload.GROUPS:
        for one, two in zip(first[group], other[group], strict=True):
            assert one.concurrency == two.concurrency
            for a, b in zip(one.requests, two.requests, strict=True):
                assert (len(a.prompt), a.output) == (len(b.prompt), b.output)
                assert a.prompt != b.prompt
    assert workload.from_json(json.loads(json.dumps(workload.to_json(first)))) == first


def test_the_work_is_what_the_help_says(peers: dict[str, ModuleType]) -> None:
    plan = peers["workload"].make_plan(peers["workload"].Sizes(), 49152, 0, 1)
    counts = {c: len(plan[f"c{c}"][0].requests) for c in (32, 8, 1)}
    assert counts == {32: 64, 8: 32, 1: 8}
    requests = plan["c32"][0].requests
    prompts, outputs = [len(r.prompt) for r in requests], [r.output for r in requests]
    assert 16 <= min(prompts) < 40 < 250 < max(prompts) <= 512
    assert 8 <= min(outputs) < 20 < 130 < max(outputs) <= 256
    assert 90 < sum(prompts) / 64 < 150 and 48 < sum(outputs) / 64 < 80
    wave = plan["wave"][0]
    assert wave.concurrency == len(wave.requests) == 32
    assert len({tuple(r.prompt[:384]) for r in wave.requests}) == 1
    assert len({tuple(r.prompt) for r in wave.requests}) == 32
    prefix = [work.requests[0].prompt for work in plan["prefix"]]
    assert len({tuple(p[:384]) for p in prefix}) == 3 and len({tuple(p) for p in prefix}) == 18
    ids = [
        token for works in plan.values() for w in works for r in w.requests for token in r.prompt
    ]
    assert min(ids) >= 100 and max(ids) < 49152 - 100


def test_stepped_engines_get_no_more_requests_than_allowed(peers: dict[str, ModuleType]) -> None:
    request = peers["workload"].Request

    class Countdown(peers["engines"].SteppedEngine):  # type: ignore[misc,name-defined]
        """Each request ends after as many steps as it wants tokens."""

        def __init__(self) -> None:
            super().__init__(None)
            self.left: dict[int, int] = {}
            self.wanted: dict[int, Any] = {}
            self.most = 0

        def versions(self) -> dict[str, str]:
            return {}

        def add(self, key: int, request: Any) -> None:
            self.left[key], self.wanted[key] = request.output, request
            self.most = max(self.most, len(self.left))

        def step(self) -> list[tuple[int, list[int]]]:
            self.left = {key: count - 1 for key, count in self.left.items()}
            ended = [key for key, count in self.left.items() if not count]
            for key in ended:
                del self.left[key]
            return [(key, self.wanted[key].prompt * self.wanted[key].output) for key in ended]

    engine = Countdown()
    wanted = [request([10 + i], output) for i, output in enumerate((5, 1, 2, 7, 1, 1))]
    assert engine.run(wanted, 3) == [r.prompt * r.output for r in wanted]
    assert engine.most == 3
    assert engine.run(wanted[:1], 8) == [[10] * 5]


def test_an_answer_of_another_length_is_an_error(peers: dict[str, ModuleType]) -> None:
    workload, worker = peers["workload"], peers["worker"]

    class Short:
        def run(self, requests: Sequence[Any], concurrency: int) -> list[list[int]]:
            return [[0] * min(request.output, 4) for request in requests]

    work = workload.Pass([workload.Request([1], 4), workload.Request([1], 5)], 2)
    with pytest.raises(worker.WrongAnswerError, match="4 tokens came for 5"):
        worker.run(Short(), work)
    fine = workload.Pass(work.requests[:1], 2)
    assert worker.run(Short(), fine)[1] == [[0] * 4]


def test_kv_bytes_of_a_token(peers: dict[str, ModuleType]) -> None:
    setup = peers["engines"].Setup(Path(), tiny_config(), 2, peers["workload"].QUICK)
    assert setup.kv_bytes_per_token() == 2 * 2 * 2 * 2 * 16  # k and v, layers, heads, size, bytes


# ------------------------------------------------------------------ the figures


def test_figures(peers: dict[str, ModuleType]) -> None:
    workload = peers["workload"]
    sizes = workload.Sizes(repeats=3, decode=10, long=500, prefixes=2, hits=2)
    plan = workload.make_plan(sizes, 49152, 0, 1)
    seconds = {
        "latency": [0.1, 0.3, 0.1, 0.2, 0.1, 1.1],
        "prefill": [0.2, 0.25, 9.0],
        "prefix": [0.5, 0.1, 0.2, 0.7, 0.3, 0.4],
        "wave": [3.0, 1.0],
        "c8": [4.0],
    }
    found = peers["metrics"].figures(seconds, plan, sizes)
    output = sum(request.output for request in plan["c8"][0].requests)
    assert found == pytest.approx(
        {
            "latency": 20.0,
            "prefill": 2000.0,
            "ttft_cold": 600.0,
            "ttft_hit": 250.0,
            "wave": 2.0,
            "c8": output / 4,
        }
    )


def record(turn: int, engine: str, error: str | None = None, **figures: float) -> dict[str, Any]:
    return {
        "kind": "measurement",
        "round": turn,
        "engine": engine,
        "figures": figures,
        "sample": None,
        "versions": {engine: "1.0"},
        "load": 0.0,
        "others": 0.25,
        "error": error,
    }


RUN = {
    "kind": "run",
    "command": "python scripts/bench_peers.py",
    "date": "2026-01-02",
    "commit": "abc",
    "machine": "A processor, 4 cores",
    "model": "tiny",
    "cpus": 2,
    "cpu_features": ["avx2"],
    "load": 0.5,
    "quick": False,
    "missing": {"transformers": "torch is not installed here"},
}


def test_ratios_are_to_the_best_peer_of_the_same_round(peers: dict[str, ModuleType]) -> None:
    records = [
        RUN,
        record(1, "jaxpaged", c32=150.0, latency=8.0),
        record(1, "vllm", c32=100.0, latency=10.0),
        record(1, "openvino", c32=50.0, latency=4.0),
        record(2, "jaxpaged", c32=300.0, latency=8.0),
        record(2, "vllm", c32=100.0, latency=10.0),
        record(2, "openvino", c32=150.0, latency=16.0),
        record(3, "jaxpaged", "its process ended with status -9"),
        record(3, "vllm", c32=900.0),
        record(4, "jaxpaged", c32=160.0, latency=9.0),
        record(4, "openvino", c32=100.0, latency=10.0),
    ]
    rows = {row.metric.name: row for row in peers["summary"].rows(records)}
    assert rows["c32"].ratios == [1.5, 2.0, 1.6]
    assert rows["c32"].best == "openvino"
    assert rows["c32"].median("vllm") == 100.0
    assert rows["c32"].reached() is True
    assert rows["latency"].ratios == [2.0, 0.8, 0.9]
    assert rows["latency"].reached() is True  # a median of 0.9, and less is better
    assert rows["latency"].median("transformers") is None


@pytest.mark.parametrize(
    ("name", "ours", "best", "reached"),
    [
        ("c32", 1.5, 1.0, True),
        ("c32", 1.49, 1.0, False),
        ("latency", 1.0, 1.0, True),
        ("latency", 1.01, 1.0, False),
        ("prefill", 0.9, 1.0, True),
        ("ttft_cold", 9.0, 1.0, None),
        ("wave", 0.81, 1.0, False),
        ("rss", 2000.0, 1.0, True),  # a limit of its own, whatever the peers take
        ("rss", 2001.0, 9000.0, False),
        ("start", 5.1, 80.0, False),
    ],
)
def test_aims(
    peers: dict[str, ModuleType], name: str, ours: float, best: float, reached: bool | None
) -> None:
    records = [RUN, record(1, "jaxpaged", **{name: ours}), record(1, "vllm", **{name: best})]
    (row,) = peers["summary"].rows(records)
    assert row.reached() is reached
    text = peers["summary"].markdown(records)
    verdict = {True: "| reached |", False: "| not reached |", None: "|  |"}[reached]
    assert verdict in text.splitlines()[2]


def test_the_table_says_what_is_missing_and_what_failed(peers: dict[str, ModuleType]) -> None:
    ours = record(1, "jaxpaged", c8=2.0) | {"sample": [5, 6, 7, 8]}
    theirs = record(1, "vllm", c8=1.0) | {"sample": [5, 6, 9, 8]}
    failed = record(0, "openvino", "its process ended with status 1")
    text = peers["summary"].markdown([RUN, failed, ours, theirs])
    head, _, row, *notes = text.splitlines()
    assert head == "|  | jaxpaged | vllm | ratio to the best peer | best peer | aim |  |"
    assert row == "| 8 at once, output tokens/s | 2 | 1 | 2.00 | vllm | ≥ 1.2 x | reached |"
    assert "- Not measured: transformers: torch is not installed here" in notes
    assert "- Failed: openvino, round 0: its process ended with status 1" in notes
    assert any("(of 4): vllm 2." in note for note in notes)
    assert any("2026-01-02, commit abc" in note for note in notes)


def test_without_peers_nothing_is_compared(peers: dict[str, ModuleType]) -> None:
    (row,) = peers["summary"].rows([RUN, record(1, "jaxpaged", c1=50.0)])
    assert row.ratios == [] and row.reached() is None


RUN_OF_THE_README = SCRIPTS.parent / "docs" / "benchmarks" / "cpu" / "peers.jsonl"


@pytest.mark.skipif(not RUN_OF_THE_README.exists(), reason="no run has been committed")
def test_the_readme_has_the_table_of_the_committed_run(peers: dict[str, ModuleType]) -> None:
    records = [json.loads(line) for line in RUN_OF_THE_README.read_text().splitlines()]
    text = peers["summary"].markdown(records)
    assert RUN_OF_THE_README.with_suffix(".md").read_text() == text
    table = text.split("\n\n")[0]
    assert table in (SCRIPTS.parent / "README.md").read_text()


# ------------------------------------------------------------------ processes


def launcher(peers: dict[str, ModuleType], folder: Path, timeout: float = 60) -> Any:
    sizes = peers["workload"].QUICK
    return peers["launch"].Launcher(sizes, tiny_config(), [0], folder, timeout)


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, "cannot be run: No such file or directory"),
        ("echo what went wrong; exit 3", "its process ended with status 3\nwhat went wrong"),
        ("kill -9 $$", "its process ended with status -9"),
        ("exit 0", "it ended early, without an error"),
        ("sleep 60 & sleep 60", "stopped: it took more than 0.5 s"),
    ],
)
def test_an_interpreter_that_fails_is_an_error_that_says_how(
    peers: dict[str, ModuleType], tmp_path: Path, text: str | None, error: str
) -> None:
    python = tmp_path / "python"
    if text is not None:
        program(python, text)
    timeout = 0.5 if text and "sleep" in text else 60
    candidate = peers["launch"].Candidate("transformers", python, tmp_path)
    plan = peers["workload"].make_plan(peers["workload"].QUICK, 512, 0, 1)
    lines, said = launcher(peers, tmp_path / "cache", timeout).measure(candidate, plan, ["c8"])
    assert lines == []
    assert error in said


def test_published_commands_name_no_folders(peers: dict[str, ModuleType]) -> None:
    words = ["--peer", "vllm=/home/me/venv/bin/python", "--model", "/m", "--rounds", "3"]
    shown = peers["machine"].without_folders(words)
    assert shown == "--peer vllm=.../python --model .../m --rounds 3"


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_peers.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_arguments_that_make_no_sense() -> None:
    for arguments, said in (
        (["--peer", "other=python"], "is not NAME=PATH with one of"),
        (["--peer", "openvino=python"], "--peer-model openvino=DIR"),
        (["--set", "dtype"], "is not NAME=VALUE"),
    ):
        run = script(*arguments)
        assert run.returncode == 2
        assert said in run.stderr


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "tiny", torch_dtype="bfloat16")
    # Every token would end an answer, if an engine let it.
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(512))}))
    out = tmp_path / "out"
    run = script(
        *("--quick", "--model", str(model), "--out", str(out), "--metrics", "c8", "wave"),
        *("--set", "attention_backend=reference", "--peer", f"vllm={tmp_path / 'no-python'}"),
    )
    assert run.returncode == 0, run.stderr
    first, *measured = [json.loads(line) for line in (out / "peers.jsonl").read_text().splitlines()]
    assert first["missing"]["openvino"] == "no --peer openvino=PYTHON was given"
    assert str(tmp_path) not in (out / "peers.jsonl").read_text()
    turns = [(record["round"], record["engine"]) for record in measured]
    have_torch = "transformers" not in first["missing"]
    others = ["transformers"] if have_torch else []
    assert turns == [(0, "jaxpaged"), (0, "vllm"), *((0, name) for name in others)] + [
        (1, name) for name in ("jaxpaged", *others)
    ]
    ours = next(record for record in measured if record["round"] == 1)
    assert set(ours["figures"]) == {"c8", "wave", "start", "rss"}
    assert ours["facts"]["options"] == {"attention_backend": "reference"}
    assert 1e8 < 1e6 * ours["figures"]["rss"] < 8e9
    table = (out / "peers.md").read_text()
    assert table in run.stdout
    assert "Failed: vllm, round 0" in table
    if have_torch:
        theirs = measured[-1]
        assert theirs["sample"] == ours["sample"]  # the same model, in both
        assert "transformers 4." in table
    again = script("--report", str(out))
    assert again.returncode == 0
    assert table in again.stdout
    if find_spec("matplotlib") is None:
        assert "no plot" in run.stderr
    else:
        assert (out / "peers.png").read_bytes()[:4] == b"\x89PNG"

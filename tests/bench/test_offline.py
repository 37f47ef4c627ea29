"""`jaxpaged bench throughput | latency` over the scripted engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import jaxpaged.llm
from jaxpaged.bench.offline import latency, throughput
from jaxpaged.cli import main
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.outputs import CompletionOutput, RequestOutput
from tests.server.scripted import Script, scripted_engine

FEW = ("--disable-progress", "--max-model-len", "128")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Engines that were made, in place of real ones."""
    made: list[Engine] = []

    def build(config: EngineConfig) -> Engine:
        made.append(scripted_engine(Script(), config, num_blocks=1024))
        return made[-1]

    monkeypatch.setattr(jaxpaged.llm, "build_engine", build)
    return made


def test_the_figures_of_throughput() -> None:
    def output(prompt: int, *outputs: int) -> RequestOutput:
        made = [CompletionOutput(i, "", [0] * n) for i, n in enumerate(outputs)]
        return RequestOutput("r", None, [0] * prompt, made, finished=True)

    found = throughput([output(10, 2, 4), output(20, 4)], 2.0)
    assert found == {
        "elapsed_time": 2.0,
        "num_requests": 2,
        "total_num_tokens": 40,
        "requests_per_second": 1.0,
        "tokens_per_second": 20.0,
        "total_prompt_tokens": 30,
        "total_output_tokens": 10,
        "output_tokens_per_second": 5.0,
    }


def test_the_figures_of_latency() -> None:
    found = latency([1.0, 2.0, 3.0, 6.0])
    assert found["avg_latency"] == 3.0
    assert found["latencies"] == [1.0, 2.0, 3.0, 6.0]
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert found["percentiles"]["50"] == 2.5


def test_throughput(
    engines: list[Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    status = main(
        [
            *("bench", "throughput", "--num-prompts", "6", "--input-len", "9", "--output-len", "5"),
            *("--n", "2", "--output-json", str(path), *FEW),
        ]
    )
    assert status == 0
    first, *rest = capsys.readouterr().out.splitlines()
    number = r"[0-9]+\.[0-9]{2}"
    wanted = rf"Throughput: {number} requests/s, {number} total tokens/s, {number} output tokens/s"
    assert re.fullmatch(wanted, first)
    assert rest == ["Total num prompt tokens:  54", "Total num output tokens:  60"]
    result = json.loads(path.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (6, 114)
    assert result["requests_per_second"] == pytest.approx(6 / result["elapsed_time"])
    (engine,) = engines
    assert engine.stats().requests_finished == {"length": 12}  # EOS was ignored
    with pytest.raises(jaxpaged.errors.EngineDeadError):
        engine.step()  # it was closed


def test_shared_prefixes_are_reused(engines: list[Engine]) -> None:
    flags = ["--dataset-name", "prefix_repetition", "--num-prompts", "8"]
    flags += ["--prefix-repetition-prefix-len", "40", "--prefix-repetition-suffix-len", "4"]
    flags += ["--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "2"]
    assert main(["bench", "throughput", *flags, "--max-num-seqs", "2", *FEW]) == 0
    assert engines[0].stats().prefix_hit_tokens >= 40 * 4


def test_a_file(engines: list[Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    lines = [
        {"prompt": "a b c"},
        {"prompt": [5, 6, 7, 8], "output_tokens": 3},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", "2"]
    assert main(["bench", "throughput", *flags, *FEW]) == 0
    assert "Total num output tokens:  7" in capsys.readouterr().out


def test_latency(engines: list[Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    status = main(
        [
            *(
                "bench",
                "latency",
                "--batch-size",
                "3",
                "--num-iters",
                "4",
                "--num-iters-warmup",
                "2",
            ),
            *("--output-len", "6", "--output-json", str(path), *FEW),
        ]
    )
    assert status == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Avg latency: [0-9.e-]+ seconds", lines[0])
    assert [line.split(":")[0] for line in lines[1:]] == [
        f"{p}% percentile latency" for p in (10, 25, 50, 75, 90, 99)
    ]
    assert len(json.loads(path.read_text())["latencies"]) == 4
    stats = engines[0].stats()
    assert stats.requests_finished == {"length": 3 * 6}
    assert stats.prefix_hit_tokens == 0  # the prompts are new ones in every round


def test_prompts_that_do_not_fit(engines: list[Engine], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "--num-prompts", "1", *FEW]) == 2
    assert "128" in capsys.readouterr().err


def test_settings_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--block-size", "0"]) == 2
    assert "block_size must be" in capsys.readouterr().err


def test_a_result_that_cannot_be_saved(
    engines: list[Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    flags = ["--num-prompts", "1", "--input-len", "4", "--output-len", "2"]
    out = f"{tmp_path}/file/r.json"
    assert main(["bench", "throughput", *flags, "--output-json", out, *FEW]) == 1
    out_text, err = capsys.readouterr()
    assert out_text.startswith("Throughput: ")
    assert "--output-json" in err


def test_failed_requests_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(fail_read=lambda step: RuntimeError("hot") if step == 1 else None)
    monkeypatch.setattr(
        jaxpaged.llm, "build_engine", lambda config: scripted_engine(script, config)
    )
    flags = ["--num-prompts", "2", "--input-len", "4", "--output-len", "3"]
    assert main(["bench", "throughput", *flags, *FEW]) == 1
    assert "failed, 2 x: " in capsys.readouterr().err

"""The benchmarks of paging and of waves, on a tiny model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.tiny_models import tiny_llama

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("bench") / "llama"))


def test_a_wave_costs_one_prefix_and_the_tails(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    module, out = script("bench_waves", monkeypatch), tmp_path / "waves.json"
    sizes = ("--requests", "8", "--shared", "50", "--tail", "9", "--output", "3")
    limits = ("--budget", "32", "--block-size", "4", "--rounds", "1", "--eager")
    assert module.main(["--model", model, *sizes, *limits, "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text()) == report
    counts = {case: report[case]["prompt_tokens"] for case in module.CASES}
    assert counts.pop("equal") in range(59, 59 + 8)
    # The last two shared tokens stand in a block with what is a request's own.
    assert counts == {"wave": 48 + 8 * 11, "bound": 50 + 8 * 11, "apart": 8 * 59}
    assert report["wave"]["all_tokens"] == 48 + 8 * 11 + 8 * 2
    assert report["ratios"]["wave / apart"]["cpu"] > 0


def test_a_wave_that_costs_more_is_an_error(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("bench_waves", monkeypatch)
    monkeypatch.setattr(module.Bench, "_waves", lambda self, case: [([[1, 2, 3]] * 2, 1)])
    sizes = ("--requests", "2", "--shared", "8", "--tail", "2", "--output", "1", "--rounds", "1")
    assert module.main(["--model", model, *sizes, "--block-size", "4", "--eager"]) == 1
    assert "wave computes" in capsys.readouterr().out


def test_all_systems_generate_the_same_on_a_device(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    module = script("bench_paging", monkeypatch)
    sizes = ("--max-model-len", "1024", "--scale", "16", "--device-requests", "24")
    limits = ("--device-pool-tokens", "192", "--device-seqs", "16", "--rounds", "1", "--eager")
    arguments = ["--sections", "device", "--model", model, *sizes, *limits, "--out", str(tmp_path)]
    assert module.main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])["device"]
    chat = report["results"]["sharegpt"]
    assert chat["reserve max"]["running"] == 192 // 64
    assert chat["static batches"]["steps"] > chat["reserve max"]["steps"] > chat["paged"]["steps"]
    assert chat["paged"]["waste"] < chat["reserve max"]["waste"]
    assert "## Memory managers, on a real model" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("name", ["bench_paging", "bench_waves"])
def test_every_script_says_how_it_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script(name, monkeypatch).main(["--help"])
    assert ended.value.code == 0
    assert f"python scripts/{name}.py" in capsys.readouterr().out

"""The benchmarks of beam search and exact hits, on a tiny model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxpaged.beam_search import Candidates
from tests.tiny_models import tiny_llama

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(name)


def run(module: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert module.main(list(arguments)) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("bench") / "llama"))


BEAMS = ("--block-size", "4", "--widths", "2", "3", "--prompt", "8", "--output", "9")


def test_a_beam_step_inside_computes_one_token_and_outside_half_a_block(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    module, out = script("bench_beams", monkeypatch), tmp_path / "beams.json"
    report = run(module, capsys, "--model", model, *BEAMS, "--rounds", "1", "--out", str(out))
    assert json.loads(out.read_text()) == report
    for width in (2, 3):
        each = report[f"width {width}"]["tokens_per_beam_step"]
        assert each == {"inside": 1.0, "outside": 2.5}  # (1 + 2 + 3 + 4) / 4
        assert report[f"width {width}"]["time_ratio"] > 0


def test_other_hypotheses_outside_are_an_error(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("bench_beams", monkeypatch)
    honest = module._candidates

    def turned(output: Any) -> Candidates:
        found = honest(output)
        return Candidates(found.token_ids[::-1], found.logprobs)

    monkeypatch.setattr(module, "_candidates", turned)
    with pytest.raises(RuntimeError, match="prompt 0: inside found"):
        module.main(["--model", model, *BEAMS, "--rounds", "0"])


def test_an_exact_hit_computes_one_token_and_another_one_its_last_block(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    module, out = script("bench_hits", monkeypatch), tmp_path / "hits.json"
    report = run(
        module,
        capsys,
        *("--model", model, "--block-size", "4", "--lengths", "8", "30", "--repeats", "2"),
        *("--eager", "--out", str(out)),
    )
    assert json.loads(out.read_text()) == report
    computed = {
        length: {case: figures["computed"] for case, figures in report[f"prompt {length}"].items()}
        for length in (8, 30)
    }
    assert computed[8] == {"cold": 8, "exact": 1, "blocks": 4, "decode": 1}
    assert computed[30] == {"cold": 30, "exact": 1, "blocks": 2, "decode": 1}


def test_recorded_parents_are_those_of_the_searches(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    module, out = script("record_beam_parents", monkeypatch), tmp_path / "parents.json"
    arguments = ("--model", model, "--widths", "2", "3", "--tokens", "6", "--questions", "2")
    run(module, capsys, *arguments, "--out", str(out))
    recorded = json.loads(out.read_text())["parents"]
    assert set(recorded) == {"2", "3"}
    for width in (2, 3):
        assert len(recorded[str(width)]) == 2
        for search in recorded[str(width)]:
            steps = search.split()
            assert len(steps) == 6 and steps[0] == "0" * width
            assert all(len(step) == width and set(step) <= set("012"[:width]) for step in steps)


def test_the_age_of_the_last_common_ancestor(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("record_beam_parents", monkeypatch)
    # One beam; both go on; the first takes all; both go on, crosswise; the second takes all.
    assert module.ancestor_ages(["00", "01", "00", "10", "11"]) == [1, 2, 1, 2, 1]
    with pytest.raises(SystemExit):
        module.main(["--widths", "11"])


@pytest.mark.parametrize(
    "name", ["bench_beams", "bench_hits", "bench_sharing", "record_beam_parents"]
)
def test_every_script_says_how_it_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script(name, monkeypatch).main(["--help"])
    assert ended.value.code == 0
    assert f"python scripts/{name}.py" in capsys.readouterr().out

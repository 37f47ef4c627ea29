"""The sharing benchmark runs, and what it claims holds on a small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_sharing.py"


def run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={"PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """20 requests of each kind, with the recorded beams that the repository has."""
    out = tmp_path_factory.mktemp("sharing") / "made" / "sharing.json"
    printed = run("--requests", "20", "--sigma", "0.7", "--out", str(out))
    assert json.loads(out.read_text()) == printed
    return printed


@pytest.mark.parametrize("kind", ["sharegpt", "alpaca"])
def test_more_sequences_share_more_and_beams_more_than_samples(
    report: dict[str, Any], kind: str
) -> None:
    saved = {
        method: [results[width]["saved"] for width in ("2", "4", "6")]
        for method, results in report[f"{kind}, sigma 0.7"].items()
    }
    for method, (two, four, six) in saved.items():
        assert 0 < two < four < six < 5 / 6, method
        assert two < 1 / 2 and four < 3 / 4, method
    for width in range(3):
        least, most = saved["beams, none"][width], saved["beams, best"][width]
        assert least < saved["beams, recorded"][width] <= most
        assert least < saved["beams, uniform"][width] <= most
        assert least == pytest.approx(saved["samples"][width], rel=0.1)


def test_everything_is_computed_once(report: dict[str, Any]) -> None:
    """The script itself compares the count with P + n (outputs - 1)."""
    for kind in ("sharegpt", "alpaca"):
        runs = report[f"{kind}, sigma 0.7"]
        counts = {width: {m: r[width]["computed"] for m, r in runs.items()} for width in ("2", "6")}
        for of_width in counts.values():
            assert len(set(of_width.values())) == 1
        assert counts["2"]["samples"] < counts["6"]["samples"] < 3 * counts["2"]["samples"]


def test_a_recorded_search_that_ends_is_followed_by_the_next(tmp_path: Path) -> None:
    """Requests are longer than what was recorded: four steps of which the first is no choice."""
    searches = {
        str(width): ["0" * width + (" " + "".join(map(str, range(width)))) * 3]
        for width in (2, 4, 6)
    }
    parents = tmp_path / "parents.json"
    parents.write_text(json.dumps({"parents": searches}))
    report = run("--requests", "5", "--sigma", "0.7", "--parents", str(parents))
    for kind in ("sharegpt", "alpaca"):  # what was recorded is that no beam ends
        results = report[f"{kind}, sigma 0.7"]
        assert results["beams, recorded"] == results["beams, none"]


def test_a_small_pool_preempts_and_all_the_same_computes_what_it_must() -> None:
    small = ("--max-model-len", "512", "--pool-tokens", "3200")
    report = run("--requests", "12", "--sigma", "0.7", *small)
    results = report["sharegpt, sigma 0.7"]
    assert results["samples"]["6"]["preemptions"] > 0

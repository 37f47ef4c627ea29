"""The paging benchmark runs, and what it claims holds on a small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_paging.py"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paging") / "made"
    subprocess.run(
        [sys.executable, str(SCRIPT), "--requests", "250", "--out", str(folder)],
        env={"PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    return folder


def results(out: Path, section: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((out / f"{section}.json").read_text())["results"]
    return found


ORDER = ("static batches", "reserve max", "reserve power of two", "reserve oracle", "paged")


def test_each_system_runs_more_than_the_one_before(out: Path) -> None:
    chat = results(out, "systems")["sharegpt"]
    assert tuple(chat) == ORDER
    running = [chat[system]["running"] for system in ORDER]
    speed = [chat[system]["output_per_second"] for system in ORDER]
    waste = [chat[system]["waste"] for system in ORDER[1:]]
    assert running == sorted(running) and speed == sorted(speed)
    assert waste == sorted(waste, reverse=True)
    assert 0 < waste[-1] < 0.04
    assert running[-1] > 1.5 * running[-2]
    assert running[1] == 15_696 // 2048
    assert all(chat[system]["preemptions"] == 0 for system in ORDER[:-1])
    short = results(out, "systems")["alpaca"]
    assert short["paged"]["waste"] < 0.5 * short["reserve oracle"]["waste"]


def test_small_blocks_waste_less(out: Path) -> None:
    for figures in results(out, "blocks").values():
        waste = [figures[size]["waste"] for size in ("8", "16", "32", "64", "128")]
        assert waste == sorted(waste) and waste[0] > 0


def test_a_watermark_saves_work(out: Path) -> None:
    chat = results(out, "watermark")["sharegpt"]
    assert list(chat) == ["0%", "1%", "2%", "3%", "4%", "5%"]
    assert chat["0%"]["preemptions"] > chat["2%"]["preemptions"] > chat["5%"]["preemptions"]
    assert chat["0%"]["recomputed_tokens"] > chat["5%"]["recomputed_tokens"] > 0


def test_the_tables_have_all_sections(out: Path) -> None:
    text = (out / "README.md").read_text()
    assert text.count("## ") == 3 and text.count("| ShareGPT-like |") == 3
    assert "python scripts/bench_paging.py --requests 250" in text

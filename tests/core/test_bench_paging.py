"""The paging benchmark runs, and what it claims holds on a small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_paging.py"


def test_paging_wastes_little_and_a_watermark_saves_work() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--requests", "150"],
        env={"PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    chat = report["sharegpt"]
    waste = {system: result["waste"] for system, result in chat.items()}
    assert 0 < waste["paged 16"] < 0.04
    assert waste["paged 8"] < waste["paged 16"] < waste["paged 32"] < waste["paged 64"]
    assert waste["paged 64"] < waste["contiguous pow2"] < waste["contiguous max"]
    assert chat["paged 16"]["batch"] > 1.5 * chat["contiguous pow2"]["batch"]
    assert chat["watermark 0%"]["preemptions"] > chat["watermark 10%"]["preemptions"]
    assert chat["watermark 0%"]["recompute_tax"] > chat["watermark 10%"]["recompute_tax"]
    assert report["alpaca"]["paged 16"]["waste"] < report["alpaca"]["paged 64"]["waste"]

from __future__ import annotations

import subprocess
import sys


def test_the_core_needs_neither_jax_nor_numpy() -> None:
    code = (
        "import sys, jaxpaged.core.scheduler, jaxpaged.core.stats;"
        "print([m for m in ('jax', 'jaxlib', 'numpy', 'flax', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"

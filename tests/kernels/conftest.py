from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _programs_are_dropped() -> Iterator[None]:
    """An interpreted kernel is a large program. Thousands of them in one process reach the number
    of memory mappings that Linux allows, and XLA crashes.
    """
    jax.clear_caches()
    yield
    jax.clear_caches()

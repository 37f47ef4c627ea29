"""How the tests of the Mosaic GPU kernels run them on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from pallas_kernels import mosaic_compat

interpreted = pytest.mark.skipif(
    not mosaic_compat.can_interpret(), reason="this jax cannot interpret Mosaic GPU kernels"
)


def run(function: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
    """Compiled with little effort: the interpreter costs more compiling than running."""
    quickly = {"xla_backend_optimization_level": 0}
    result: jax.Array = jax.jit(function, compiler_options=quickly)(*arrays)
    return result

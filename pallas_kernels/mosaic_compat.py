"""The few places where Pallas Mosaic GPU differs between jax 0.10 and 0.12."""

from __future__ import annotations

from typing import Any

import jax

plgpu: Any
_import_error: ImportError | None
try:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    _import_error = None
except ImportError as error:  # jax 0.10 needs absl-py for it, which it does not depend on
    plgpu, _import_error = None, error


def require_mosaic(*, interpret: bool) -> None:
    """Raise NotImplementedError with the reason where this jax cannot run such kernels."""
    if _import_error is not None:
        raise NotImplementedError(
            f"Pallas Mosaic GPU does not import here ({_import_error}); install what is missing "
            "(jax 0.10 needs `pip install absl-py`) or use the attention backend 'pallas_triton'"
        )
    if interpret and not can_interpret():
        raise NotImplementedError(
            "this jax cannot interpret Mosaic GPU kernels on a CPU; use jax 0.11 or later, "
            "or the attention backend 'pallas_interpret'"
        )


def can_interpret() -> bool:
    return plgpu is not None and hasattr(plgpu, "InterpretGPUParams")


def interpreter(*, detect_races: bool) -> Any:
    """What `plgpu.kernel(interpret=...)` takes."""
    return plgpu.InterpretGPUParams(detect_races=detect_races)


def transposed(ref: Any) -> Any:
    """A 2-D reference with its axes swapped, without moving data."""
    if jax.__version_info__ < (0, 11):
        return plgpu.transpose_ref(ref, (1, 0))
    return ref.transpose((1, 0))

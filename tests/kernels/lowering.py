"""Kernels lowered for GPUs that are not there, with nothing but jax from PyPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.export import DisabledSafetyCheck
from jax.sharding import AbstractDevice, AbstractMesh

H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
_CORES = {H200: 132, A100: 108}
TRITON_CALL = "__gpu$xla.gpu.triton"


def export_for_cuda(function: Callable[..., Any], *args: Any, device: str = H200) -> str:
    """The module of a function or jitted function for arguments (or their shapes), as it is handed
    to a GPU of that kind.

    What a backend refuses (element types, array extents, memory of a kernel) shows here; what the
    compilers behind it make of the kernel does not.
    """
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    exporter = jax.export.export(
        jitted, platforms=["cuda"], disabled_checks=[DisabledSafetyCheck.custom_call(TRITON_CALL)]
    )
    kind = AbstractDevice(device_kind=device, num_cores=_CORES[device], platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        return exporter(*args).mlir_module()

"""Whether a request's bits depend on what runs beside it, and what it takes that they do not.

On CPU nothing is needed: the reference attention sums in an absolute order, and XLA:CPU gives the
row of a matmul of 8 rows or more the same bits whatever stands beside it. On GPUs libraries choose
another algorithm for other numbers of rows, so a deterministic engine takes products, row sums and
attention kernels of one fixed size; see docs/determinism.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxpaged.errors import ConfigError
from jaxpaged.models.order import FixedOrder

COMPILER_OPTIONS: dict[str, bool | int] = {
    "xla_gpu_deterministic_ops": True,  # no additions in the order in which threads come
    "xla_gpu_autotune_level": 0,  # an algorithm that is not chosen by a stopwatch
    "xla_gpu_enable_triton_gemm": False,  # what products are left: the library, with its default
    "xla_allow_excess_precision": False,  # a rounding to 16 bits is never fused away
}
"""Of the step's programs on GPUs. jaxlib refuses options that it does not have."""
CONFIG_TOKENS, CONFIG_CONTEXT = 2048, 8192
"""The step that attention kernels are sized for, whatever the true one is."""


@dataclass(frozen=True, slots=True)
class Determinism:
    """What an engine promises, and how. `promised`: bits do not depend on the company."""

    promised: bool
    order: FixedOrder | None
    """Routines of a fixed order; None where XLA's own order will do."""
    compiler_options: dict[str, bool | int] | None
    reason: str

    @property
    def fixed_sizes(self) -> bool:
        """Whether attention and buckets have to keep to one size."""
        return self.order is not None


UNDECIDED = Determinism(False, None, None, "nobody asked")


@dataclass(frozen=True, slots=True)
class KernelOrder:
    """The order of the Pallas kernels, which are imported where they are used."""

    interpret: bool

    def product(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        from pallas_kernels import fixed_order

        return fixed_order.product(x, weight, interpret=self.interpret)

    def row_sums(self, x: jax.Array) -> jax.Array:
        from pallas_kernels import fixed_order

        return fixed_order.row_sums(x, interpret=self.interpret)


def decide(setting: bool | None, attention_backend: str, device: jax.Device) -> Determinism:
    """For the settings `deterministic` and `attention_backend` on `device`.

    Raises `ConfigError` where it is asked for and there is no way to it.
    """
    platform = device.platform
    if platform == "cpu" and attention_backend != "pallas_interpret":
        also = "; deterministic=False changes nothing" if setting is False else ""
        return Determinism(True, None, None, f"free on CPU{also}")
    if not setting:
        why = "off by default here" if setting is None else "asked for"
        return Determinism(False, None, None, why)
    if platform == "cpu":
        return Determinism(True, KernelOrder(interpret=True), None, "interpreted kernels")
    if platform not in ("gpu", "cuda") or "." not in str(getattr(device, "compute_capability", "")):
        raise ConfigError(
            f"deterministic=True needs a CUDA device or a CPU, and there are no kernels with a "
            f"fixed order for {platform} devices such as {device.device_kind}. Leave it out."
        )
    order = KernelOrder(interpret=False)
    return Determinism(True, order, COMPILER_OPTIONS, "kernels of one fixed size")


def tell(chosen: Determinism) -> str:
    """A line for the log."""
    state = "does not depend" if chosen.promised else "may depend"
    return f"Deterministic: what a request gets {state} on what runs beside it ({chosen.reason})."

"""What is known of a compiled program. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

from tests.kernels.aot.assembly import KernelFacts


@dataclass(frozen=True)
class ProgramFacts:
    """Bytes are of one device."""

    kernels: list[KernelFacts]
    """The Pallas kernels."""
    launches: int
    """Kernels that XLA launches in all."""
    pool_copies: int
    """Copies of something with a KV pool's shape and type."""
    temp_bytes: int
    alias_bytes: int
    """Of arguments that come back as results, in place."""
    seconds: float
    """To compile."""
    kind: str
    pool_bytes: int
    shape: str
    config: str
    library_products: int = 0
    """Matrix products that are not our kernels'."""
    joined_sums: int = 0
    """See `hlo_text.parted_sums`."""
    parted_sums: int = 0

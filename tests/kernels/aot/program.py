"""A program that can be compiled for a GPU, and how it is lowered for one that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.tuning import Entry
from tests.kernels.aot.toolchain import TARGET

DEVICE_KIND = "NVIDIA H200"
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Program:
    """`lower` gives it for the device of a mesh, under `h200`."""

    name: str
    kind: str
    """decode, prefill, write, step or copy."""
    lower: Callable[[Mesh], Any]
    pools: list[jax.ShapeDtypeStruct]
    """The KV pools among its arguments, scales included."""
    in_place: bool
    """Whether the pools are donated, and come back changed."""
    shape: str = ""
    """What it is compiled for, to be read by people."""
    config: str = ""
    """What its kernel is compiled with."""
    entry: Entry | None = None
    """Of the tuning table, that it stands for."""


@contextlib.contextmanager
def h200() -> Iterator[Mesh]:
    """A mesh of one H200 that is not there."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
    )
    device = AbstractDevice(device_kind=DEVICE_KIND, num_cores=MULTIPROCESSORS, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield topologies.make_mesh(topology, (1,), ("device",))


def lower_function(
    mesh: Mesh, function: Callable[..., Any], arguments: list[Any], donated: tuple[int, ...] = ()
) -> Any:
    """`arguments` are trees of shapes, without shardings."""
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )
    traced = jax.jit(function, donate_argnums=donated).trace(*placed)
    return traced.lower(lowering_platforms=("cuda",))

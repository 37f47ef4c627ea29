"""The device mesh, and the one table from logical axis names to mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.errors import ConfigError

TENSOR_AXIS = "tensor"
MESH_AXES = ("data", TENSOR_AXIS)

RULES: Mapping[str, str | None] = {
    "kv_heads": "tensor",  # with each KV head go the query heads of its group
    "heads": "tensor",
    "mlp": "tensor",
    "experts": "tensor",
    "vocab": "tensor",
    "embed": None,
    "latent": None,
    "head_dim": None,
    "heads_of_group": None,
    "gate_up": None,
    "slots": None,
}
"""Logical axis name -> mesh axis (None: replicated)."""

LogicalAxes = tuple[str | None, ...]


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A (data, tensor) mesh over `devices`, the default device alone if None."""
    chosen = [jax.local_devices()[0]] if devices is None else list(devices)
    return Mesh(np.asarray(chosen).reshape(1, len(chosen)), MESH_AXES)


def partition_spec(axes: LogicalAxes) -> PartitionSpec:
    """Translate logical names.

    Raises `ConfigError` for an unknown name, or if two of them would share one mesh axis.
    """
    mesh_axes: list[str | None] = []
    for name in axes:
        if name is not None and name not in RULES:
            raise ConfigError(f"unknown logical axis {name!r}; known: {', '.join(RULES)}.")
        mesh_axes.append(None if name is None else RULES[name])
    used = [axis for axis in mesh_axes if axis is not None]
    if len(used) != len(set(used)):
        raise ConfigError(f"logical axes {axes} collide on the mesh: {mesh_axes}.")
    return PartitionSpec(*mesh_axes)


def named_sharding(mesh: Mesh, axes: LogicalAxes) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes))

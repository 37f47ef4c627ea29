from __future__ import annotations

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.errors import ConfigError
from jaxpaged.sharding import MESH_AXES, RULES, make_mesh, named_sharding, partition_spec


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((), PartitionSpec()),
        (("vocab", "embed"), PartitionSpec("tensor", None)),
        (("embed", "mlp"), PartitionSpec(None, "tensor")),
        (("slots", "kv_heads", "head_dim"), PartitionSpec(None, "tensor", None)),
        (
            ("kv_heads", "heads_of_group", "head_dim", "embed"),
            PartitionSpec("tensor", None, None, None),
        ),
        ((None, "vocab"), PartitionSpec(None, "tensor")),
        (("embed", "embed"), PartitionSpec(None, None)),
    ],
)
def test_names_become_mesh_axes(axes: tuple[str | None, ...], expected: PartitionSpec) -> None:
    assert partition_spec(axes) == expected


@pytest.mark.parametrize("axes", [("vocab", "mlp"), ("kv_heads", "kv_heads")])
def test_two_names_on_one_mesh_axis_collide(axes: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        partition_spec(axes)
    assert all(part in str(error.value) for part in (*axes, "tensor", "collide"))


@pytest.mark.parametrize("name", ["expert", "", "tensor", "Vocab"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        partition_spec(("embed", name))
    assert repr(name) in str(error.value)
    assert all(known in str(error.value) for known in RULES)


def test_the_table_names_only_mesh_axes() -> None:
    assert {axis for axis in RULES.values() if axis is not None} <= set(MESH_AXES)


def test_meshes() -> None:
    mesh = make_mesh()
    assert dict(mesh.shape) == {"data": 1, "tensor": 1}
    assert mesh.devices.flat[0] == jax.local_devices()[0]
    assert make_mesh(jax.local_devices()[:1]) == mesh
    sharding = named_sharding(mesh, ("embed", "vocab"))
    assert sharding == NamedSharding(mesh, PartitionSpec(None, "tensor"))

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpaged.device.step import take_apart
from jaxpaged.errors import ModelLoadError
from jaxpaged.models.loading import DummyReader, load_parameters
from jaxpaged.models.registry import find_model
from jaxpaged.models.sources import GroupedQKV, Interleaved, ParamSource, Stacked, Tensor, whole
from jaxpaged.sharding import make_mesh, partition_spec
from jaxpaged.weights.safetensors_reader import SafetensorsReader
from tests.tiny_models import tiny_config, tiny_llama, tiny_weights


class DictReader:
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.reads: list[str] = []

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype_name(self, name: str) -> str:
        return self.tensors[name].dtype.name

    def read(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self.tensors[name]

    def read_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        self.reads.append(name)
        return self.tensors[name][index]

    def close(self) -> None: ...


def load(
    tensors: dict[str, np.ndarray], dtype: str = "float32", **config: Any
) -> tuple[dict[str, jax.Array], DictReader, list[int]]:
    model, model_config = find_model(tiny_config(**config), "here")
    shapes = take_apart(model, model_config, jnp.dtype(dtype)).shapes
    reader, sizes = DictReader(tensors), []
    params = load_parameters(reader, model, model_config, shapes, make_mesh(), sizes.append)
    assert {path: (p.shape, p.dtype) for path, p in params.items()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in shapes.items()
    }
    return params, reader, sizes


def test_every_tensor_is_read_once() -> None:
    tensors = tiny_weights(tiny_config())
    params, reader, sizes = load(tensors)
    assert sorted(reader.reads) == sorted(tensors)
    assert sum(sizes) == sum(p.nbytes for p in params.values())
    assert sum(sizes) == sum(t.nbytes for t in tensors.values())


def test_each_weight_lands_where_the_layers_read_it() -> None:
    tensors = tiny_weights(tiny_config())
    params = {path: np.asarray(value) for path, value in load(tensors)[0].items()}
    layer = "model.layers.1."
    qkv = params["layers.1.attention.qkv"]  # [K, G + 2, H, E]
    q, k, v = (tensors[f"{layer}self_attn.{n}_proj.weight"].reshape(-1, 16, 64) for n in "qkv")
    for head in range(4):
        assert (qkv[head // 2, head % 2] == q[head]).all()
    for head in range(2):
        assert (qkv[head, 2] == k[head]).all() and (qkv[head, 3] == v[head]).all()
    gate, up = np.unstack(np.asarray(params["layers.1.mlp.gate_up"]), axis=1)
    assert (gate == tensors[f"{layer}mlp.gate_proj.weight"]).all()
    assert (up == tensors[f"{layer}mlp.up_proj.weight"]).all()
    plain = {
        "embedding": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "norm.weight": "model.norm.weight",
        "layers.1.attention.out": f"{layer}self_attn.o_proj.weight",
        "layers.1.mlp.down": f"{layer}mlp.down_proj.weight",
        "layers.1.attention_norm.weight": f"{layer}input_layernorm.weight",
        "layers.1.mlp_norm.weight": f"{layer}post_attention_layernorm.weight",
    }
    for path, name in plain.items():
        assert (params[path] == tensors[name]).all()


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_types_are_converted_with_one_rounding(stored: str, wanted: str) -> None:
    tensors = tiny_weights(tiny_config(torch_dtype=stored))
    params, _, _ = load(tensors, wanted)
    for path, name in (
        ("embedding", "model.embed_tokens.weight"),
        ("layers.0.mlp.down", "model.layers.0.mlp.down_proj.weight"),
    ):
        expected = tensors[name].astype(np.float32).astype(jnp.dtype(wanted))
        assert np.asarray(params[path]).tobytes() == expected.tobytes()
    k = tensors["model.layers.0.self_attn.k_proj.weight"].astype(np.float32)
    expected = k.astype(jnp.dtype(wanted)).reshape(2, 16, 64)
    assert np.asarray(params["layers.0.attention.qkv"])[:, 2].tobytes() == expected.tobytes()


@pytest.mark.parametrize("other", [np.float16, ml_dtypes.bfloat16])
def test_a_checkpoint_of_mixed_types(other: Any) -> None:
    tensors = tiny_weights(tiny_config())
    exact = {name: t.astype(other).astype(np.float32) for name, t in tensors.items()}
    half = {
        name: t.astype(other) if ("k_proj" in name or "up_proj" in name) else t
        for name, t in exact.items()
    }
    params, wanted = load(half)[0], load(exact)[0]
    assert all((np.asarray(params[p]) == np.asarray(wanted[p])).all() for p in wanted)


# ---------------------------------------------------------------- tied embeddings


@pytest.mark.parametrize("present", [False, True])
def test_tied_embeddings_need_no_head_and_bear_one(present: bool) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_weights(config)
    assert "lm_head.weight" not in tensors
    if present:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    params, reader, _ = load(tensors, tie_word_embeddings=True)
    assert "head" not in params
    assert "lm_head.weight" not in reader.reads


def test_an_untied_model_needs_its_head() -> None:
    tensors = tiny_weights(tiny_config())
    del tensors["lm_head.weight"]
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensors .*: lm_head\.weight\."):
        load(tensors)


# ---------------------------------------------------------------- strictness


def test_missing_tensors_are_named() -> None:
    tensors = tiny_weights(tiny_config())
    gone = [name for name in tensors if ".layers.1." in name]
    for name in gone:
        del tensors[name]
    with pytest.raises(ModelLoadError) as error:
        load(tensors)
    assert f"lacks {len(gone)} tensors of LlamaForCausalLM" in str(error.value)
    assert all(name in str(error.value) for name in sorted(gone)[:5])
    assert f"and {len(gone) - 5} more" in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.input_layernorm.weight",
        "adapter.weight",
    ],
)
def test_left_over_tensors_are_named(name: str) -> None:
    tensors = tiny_weights(tiny_config()) | {name: np.zeros(64, np.float32)}
    with pytest.raises(ModelLoadError, match="has 1 tensors .* does not use") as error:
        load(tensors)
    assert name in str(error.value)


def test_stored_rope_tables_are_passed_over() -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = tiny_weights(tiny_config()) | {name: np.zeros(8, np.float32)}
    assert name not in load(tensors)[1].reads


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.embed_tokens.weight", (511, 64), (512, 64)),
        ("model.layers.1.self_attn.q_proj.weight", (32, 64), (64, 64)),
        ("model.layers.1.self_attn.k_proj.weight", (64, 64), (32, 64)),
        ("model.layers.0.self_attn.o_proj.weight", (64, 32), (64, 64)),
        ("model.layers.0.mlp.up_proj.weight", (64, 128), (128, 64)),
        ("model.norm.weight", (64, 1), (64,)),
    ],
)
def test_shapes_must_be_those_of_the_config(
    name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    tensors = tiny_weights(tiny_config()) | {name: np.zeros(shape, np.float32)}
    with pytest.raises(ModelLoadError) as error:
        load(tensors)
    for part in (repr(name), str(shape), str(expected)):
        assert part in str(error.value)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.bool_, ml_dtypes.float8_e4m3fn])
def test_weights_must_be_floats(dtype: Any) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = tiny_weights(tiny_config()) | {name: np.zeros((64, 128), dtype)}
    with pytest.raises(ModelLoadError) as error:
        load(tensors)
    for part in (repr(name), np.dtype(dtype).name, "float32, float16, bfloat16"):
        assert part in str(error.value)


# ---------------------------------------------------------------- dummy weights


def dummies(seed: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    model, config = find_model(tiny_config(), "here")
    shapes = take_apart(model, config, jnp.dtype(dtype)).shapes
    reader = DummyReader(model.sources(config), seed)
    params = load_parameters(reader, model, config, shapes, make_mesh(), lambda _: None)
    assert {p: (v.shape, v.dtype) for p, v in params.items()} == {
        p: (leaf.shape, leaf.dtype) for p, leaf in shapes.items()
    }
    return {path: np.asarray(value) for path, value in params.items()}


def test_dummy_weights_follow_the_seed() -> None:
    first, again, other = dummies(1), dummies(1), dummies(2)
    for path, value in first.items():
        assert value.tobytes() == again[path].tobytes()
        if value.ndim == 1:
            assert (value == 1).all()
        else:
            assert (value != other[path]).mean() > 0.99
            assert abs(value.std() - 0.02) < 0.001 and abs(value.mean()) < 0.001
    assert (first["layers.0.mlp.down"] != first["layers.1.mlp.down"]).mean() > 0.99


def test_dummy_weights_are_the_same_in_every_type() -> None:
    wide, narrow = dummies(1), dummies(1, "bfloat16")
    for path, value in wide.items():
        assert value.astype(ml_dtypes.bfloat16).tobytes() == narrow[path].tobytes()


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_has_one_source_and_fitting_axes(tied: bool) -> None:
    model, config = find_model(tiny_config(tie_word_embeddings=tied), "here")
    shapes = take_apart(model, config, jnp.dtype(jnp.float32)).shapes
    sources = model.sources(config)
    assert sources.keys() == shapes.keys()
    for path, source in sources.items():
        if source.axes is not None:
            assert len(source.axes) == len(shapes[path].shape), path
            assert len(partition_spec(source.axes)) == len(source.axes)
        elif len(shapes[path].shape) > 1:
            raise AssertionError(f"{path} is a matrix on every device")


# ---------------------------------------------------------------- slices and memory


def test_host_memory_stays_below_two_tensors(tmp_path: Path) -> None:
    """What loading holds beside the parameters that are done, at any moment."""
    folder = tiny_llama(
        tmp_path / "m", hidden_size=512, head_dim=128, intermediate_size=2048, num_hidden_layers=3
    )
    model, config = find_model(json.loads((folder / "config.json").read_text()), "here")
    shapes = take_apart(model, config, jnp.dtype(jnp.bfloat16)).shapes
    reader = SafetensorsReader(folder)
    largest = max(math.prod(reader.shape(name)) * 4 for name in reader.names())
    peaks: list[int] = []
    done = 0

    def measure(size: int) -> None:
        nonlocal done
        peaks.append(tracemalloc.get_traced_memory()[1] - done)
        done = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()

    tracemalloc.start()
    try:
        load_parameters(reader, model, config, shapes, make_mesh(), measure)
    finally:
        tracemalloc.stop()
    assert len(peaks) == len(shapes)
    assert largest / 2 < max(peaks) < 2 * largest, (peaks, largest)


QKV = (Tensor("q/16x3", (16, 3)), Tensor("k/4x3", (4, 3)), Tensor("v/4x3", (4, 3)))


def shares(source: ParamSource, shape: tuple[int, ...], axis: int, count: int) -> np.ndarray:
    """The parameter, put together from what each of `count` devices reads."""
    size = shape[axis] // count
    whole = (slice(None),) * axis
    parts = [
        source.read(read_numbered, shape, (*whole, slice(i * size, (i + 1) * size)))
        for i in range(count)
    ]
    return np.concatenate(parts, axis=axis)


def read_numbered(name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A tensor "rowsxcolumns" whose elements are numbers of their own."""
    shape = [int(n) for n in name.split("/")[1].split("x")]
    start = 1000.0 * (1 + ord(name[0]))
    return (start + np.arange(math.prod(shape), dtype=np.float32).reshape(shape))[index]


@pytest.mark.parametrize(
    ("source", "shape", "axis", "count"),
    [
        (whole("a/7x4", (7, 4)), (8, 4), 0, 4),
        (whole("a/4x7", (4, 7)), (4, 8), 1, 2),
        (
            Interleaved(tensors=(Tensor("a/5x3", (5, 3)), Tensor("b/5x3", (5, 3)))),
            (8, 2, 3),
            0,
            4,
        ),
        (
            Interleaved(tensors=(Tensor("a/10x3", (5, 3), 0, 10), Tensor("a/10x3", (5, 3), 5, 10))),
            (6, 2, 3),
            0,
            3,
        ),
        (GroupedQKV(tensors=QKV), (2, 6, 2, 3), 0, 2),
        (GroupedQKV(tensors=QKV, repeat=2), (4, 4, 2, 3), 0, 4),
        (Stacked(parts=tuple(whole(f"{n}/2x3", (2, 3)) for n in "abc")), (4, 2, 3), 0, 4),
    ],
)
def test_a_device_reads_its_slice_of_the_whole(
    source: ParamSource, shape: tuple[int, ...], axis: int, count: int
) -> None:
    together = source.read(read_numbered, shape, ())
    assert together.shape == shape
    assert (shares(source, shape, axis, count) == together).all()
    names = {tensor.name for tensor in source.tensors}
    stored = {x for name in names for x in read_numbered(name, ()).ravel().tolist()}
    assert {x for x in together.ravel().tolist() if x != 0.0} == stored, "everything, and padding"


def test_copies_of_a_kv_head_stand_beside_their_query_heads() -> None:
    joined = GroupedQKV(tensors=QKV, repeat=2).read(read_numbered, (4, 4, 2, 3), ())
    q, k, v = (read_numbered(tensor.name, ()).reshape(-1, 2, 3) for tensor in QKV)
    for place in range(4):
        assert (joined[place, :2] == q[2 * place : 2 * place + 2]).all()
        assert (joined[place, 2] == k[place // 2]).all()
        assert (joined[place, 3] == v[place // 2]).all()

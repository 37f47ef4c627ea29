"""Orbax checkpoints, as Orbax itself saves them, are read exactly; damaged ones are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.orbax_reader import OrbaxReader
from jaxpaged.weights.reader import open_reader
from jaxpaged.weights.source import ModelSource, resolve_source
from tests.tiny_models import tiny_config, tiny_llama, tiny_weights

TENSORS: dict[str, np.ndarray] = {
    "model.a.weight": np.arange(40 * 60, dtype=np.float32).reshape(40, 60),
    "model.a.bias": np.linspace(-2, 2, 12).astype(ml_dtypes.bfloat16),
    "half": np.linspace(-2, 2, 24).astype(np.float16).reshape(2, 3, 4),
    "zeros": np.zeros((3, 5), np.float32),
    "whole": np.arange(6, dtype=np.int8),
}
INDEXES: list[tuple[slice, ...]] = [
    (),
    (slice(3, 7),),
    (slice(None), slice(10, 20)),
    (slice(30, 99), slice(None, 1)),
    (slice(5, 5), slice(0, 2)),
]


def _save(path: Path, tree: Any, **options: Any) -> Path:
    """With the saver that people use, or with others of its options."""
    if not options:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
    else:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("orbax") / "saved", TENSORS)


@pytest.fixture
def saved(pristine: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "saved"))


def _assert_reads(reader: OrbaxReader, tensors: dict[str, np.ndarray]) -> None:
    assert reader.names() == sorted(tensors)
    for name, value in tensors.items():
        assert reader.shape(name) == value.shape
        assert reader.dtype_name(name) == value.dtype.name
        if value.dtype == np.int8:
            continue
        np.testing.assert_array_equal(reader.read(name), value, strict=True)
        for index in INDEXES:
            if len(index) <= value.ndim:
                np.testing.assert_array_equal(
                    reader.read_slice(name, index), value[index], strict=True
                )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_ocdbt": False},
        {"use_zarr3": True},
        {"use_ocdbt": False, "use_zarr3": True},
        {"use_compression": False},
    ],
    ids=str,
)
def test_every_layout_of_a_flat_dictionary(tmp_path: Path, options: dict[str, Any]) -> None:
    _assert_reads(OrbaxReader(_save(tmp_path / "saved", TENSORS, **options)), TENSORS)


def test_jax_arrays_and_nested_names(tmp_path: Path) -> None:
    tree = {"model": {"a": {"weight": jnp.asarray(TENSORS["model.a.weight"])}}, "unused": {}}
    reader = OrbaxReader(_save(tmp_path / "saved", tree))
    _assert_reads(reader, {"model.a.weight": TENSORS["model.a.weight"]})


def test_other_dtypes_and_names_are_refused(pristine: Path) -> None:
    reader = OrbaxReader(pristine)
    with pytest.raises(ModelLoadError, match="'whole' has dtype int8, which is not supported"):
        reader.read("whole")
    with pytest.raises(ModelLoadError, match="no tensor 'other'"):
        reader.shape("other")


def test_values_outlive_the_reader(pristine: Path) -> None:
    reader = OrbaxReader(pristine)
    kept = reader.read("half")
    reader.close()
    np.testing.assert_array_equal(kept, TENSORS["half"], strict=True)
    np.testing.assert_array_equal(reader.read("half"), TENSORS["half"], strict=True)


def test_no_jax_and_no_orbax_is_needed(pristine: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from jaxpaged.weights.orbax_reader import OrbaxReader\n"
        f"print(OrbaxReader(Path({str(pristine)!r})).read('half').shape)\n"
        "print({'jax', 'orbax'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout == "(2, 3, 4)\nset()\n", run.stderr


def _edit_tree(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tree = json.loads((path / "_METADATA").read_text())
    change(tree)
    (path / "_METADATA").write_text(json.dumps(tree))


def _entry(tree: dict[str, Any], name: str) -> dict[str, Any]:
    entry: dict[str, Any] = tree["tree_metadata"][str((name,))]
    return entry


def _database(path: Path) -> Any:
    base = {"driver": "file", "path": f"{path}/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


def _remove_keys(path: Path, first: str, last: str) -> None:
    _database(path).delete_range(ts.KvStore.KeyRange(first, last)).result()


def test_pieces_that_are_not_there_are_named_on_opening(saved: Path) -> None:
    _remove_keys(saved, "half/", "half0")
    with pytest.raises(ModelLoadError, match="lacks 1 arrays that its _METADATA names: half"):
        OrbaxReader(saved)


def test_a_missing_chunk_is_not_read_as_zeros(saved: Path) -> None:
    _remove_keys(saved, "zeros/0", "zeros/1")
    assert b"zeros/.zarray" in _database(saved).list().result()
    reader = OrbaxReader(saved)
    np.testing.assert_array_equal(reader.read("half"), TENSORS["half"])
    with pytest.raises(ModelLoadError, match="'zeros' cannot be read; the checkpoint is damaged"):
        reader.read("zeros")


def test_chunks_of_zeros_may_be_absent_where_the_saver_left_them_out(saved: Path) -> None:
    _remove_keys(saved, "zeros/0", "zeros/1")
    _edit_tree(saved, lambda tree: tree.update(store_array_data_equal_to_fill_value=False))
    np.testing.assert_array_equal(OrbaxReader(saved).read("zeros"), TENSORS["zeros"], strict=True)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("compressed", [True, False])
def test_truncated_and_lost_data_files(tmp_path: Path, keep: float, compressed: bool) -> None:
    tensors = {"w": np.arange(1 << 16, dtype=np.float32), "x": TENSORS["half"]}
    saved = _save(tmp_path / "saved", tensors, use_compression=compressed)
    data = max(saved.rglob("d/*"), key=lambda path: path.stat().st_size)
    if keep:
        with data.open("r+b") as stream:
            stream.truncate(int(data.stat().st_size * keep))
    else:
        data.unlink()
    with pytest.raises(ModelLoadError, match="tensor 'w' cannot be read"):
        OrbaxReader(saved).read("w")


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_METADATA", "d/*"])
@pytest.mark.parametrize("size", [-1, 1, 0, None])
def test_truncated_and_lost_indexes(saved: Path, name: str, size: int | None) -> None:
    (path,) = saved.glob(name)
    if size is None:
        path.unlink()
    else:
        with path.open("r+b") as stream:
            stream.truncate(size % path.stat().st_size if size else 0)
    with pytest.raises(ModelLoadError, match=str(saved)):
        OrbaxReader(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(tree_metadata={}), "lists no arrays"),
        (lambda t: t.update(tree_metadata=[1]), "lists no arrays"),
        (lambda t: t["tree_metadata"].update(x=1), "_METADATA is damaged: entry 1"),
        (
            lambda t: _entry(t, "half")["value_metadata"].update(value_type="string"),
            "leaf 'half' is a string, not an array",
        ),
        (
            lambda t: _entry(t, "half")["key_metadata"][0].update(key="../half"),
            "leaf '../half' is not the name of a tensor",
        ),
        (
            lambda t: _entry(t, "half")["key_metadata"][0].update(key="zeros"),
            "two leaves called 'zeros'",
        ),
    ],
)
def test_trees_that_make_no_sense(saved: Path, change: Any, message: str) -> None:
    _edit_tree(saved, change)
    with pytest.raises(ModelLoadError, match=message):
        OrbaxReader(saved)


def test_links_cannot_leave_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    data = max(saved.rglob("d/*"), key=lambda path: path.stat().st_size)
    shutil.move(data, tmp_path / "secret")
    data.symlink_to(tmp_path / "secret")
    with pytest.raises(ModelLoadError, match="is a link to .*secret, outside"):
        OrbaxReader(saved)


def _model(folder: Path, **settings: Any) -> ModelSource:
    return resolve_source(EngineConfig(model=str(folder), **settings))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """config.json with a plain Orbax checkpoint in a subfolder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    _save(folder / "params", tiny_weights(tiny_config()))
    return folder


@pytest.mark.parametrize("where", ["", "params"])
def test_a_plain_checkpoint_beside_a_config(model: Path, where: str) -> None:
    source = _model(model / where)
    assert (source.kind, source.path, source.checkpoint) == ("orbax", model, model / "params")
    reader = open_reader(source)
    for name, value in tiny_weights(tiny_config()).items():
        np.testing.assert_array_equal(reader.read(name), value, strict=True)


def test_a_config_inside_the_checkpoint(model: Path) -> None:
    shutil.move(model / "config.json", model / "params")
    assert _model(model / "params").checkpoint == model / "params"


def test_savers_of_several_items(model: Path) -> None:
    shutil.move(model / "params", model / "params0")
    with ocp.CheckpointManager(model / "params") as manager:
        manager.save(3, args=ocp.args.StandardSave(tiny_weights(tiny_config())))
        manager.wait_until_finished()
    shutil.rmtree(model / "params0")
    shutil.move(model / "params" / "3", model / "step")
    shutil.rmtree(model / "params")
    assert _model(model).checkpoint == model / "step" / "default"


def test_which_weights_count(model: Path, tmp_path: Path) -> None:
    tiny_llama(model)  # writes safetensors beside the checkpoint
    assert _model(model).kind == "hf"
    assert _model(model, load_format="orbax").kind == "orbax"
    assert _model(model, load_format="dummy").kind == "dummy"
    folder = tiny_llama(tmp_path / "other")
    with pytest.raises(ModelLoadError, match="load_format='orbax', but .*other holds no Orbax"):
        _model(folder, load_format="orbax")


def test_several_and_unfinished_checkpoints(model: Path) -> None:
    unfinished = model / "again.orbax-checkpoint-tmp-12"
    shutil.copytree(model / "params", unfinished)
    assert _model(model).checkpoint == model / "params"
    shutil.copytree(model / "params", model / "again")
    with pytest.raises(ModelLoadError, match=r"several Orbax checkpoints \(again, params\)"):
        _model(model)
    for name in ("params", "again"):
        shutil.rmtree(model / name)
    with pytest.raises(ModelLoadError, match="tmp-12 is an Orbax checkpoint that was not finished"):
        _model(model)

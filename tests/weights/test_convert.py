"""Converted models hold the same values, load the same, and appear whole or not at all."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxpaged import convert as convert_module
from jaxpaged.config import EngineConfig
from jaxpaged.convert import ConvertError, convert
from jaxpaged.errors import ConfigError, ModelLoadError
from jaxpaged.text.tokenizer import load_tokenizer
from jaxpaged.weights import writers
from jaxpaged.weights.reader import TensorReader, open_reader
from jaxpaged.weights.safetensors_reader import INDEX_NAME
from jaxpaged.weights.source import ModelSource, resolve_source
from jaxpaged.weights.writers import LazyTensor, write_orbax, write_safetensors
from tests.tiny_models import CHAT_TEMPLATE, tiny_config, tiny_gguf, tiny_llama, tiny_weights

NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def _source(path: Path) -> ModelSource:
    return resolve_source(EngineConfig(model=str(path)))


def _tensors(path: Path) -> dict[str, np.ndarray]:
    reader = open_reader(_source(path))
    return {name: reader.read(name) for name in reader.names()}


def _assert_same(got: dict[str, np.ndarray], expected: dict[str, Any]) -> None:
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, strict=True)


def _make(kind: str, path: Path) -> Path:
    if kind in NUMPY:
        return tiny_llama(path, torch_dtype=kind)
    return tiny_gguf(path.with_suffix(".gguf"), quant=kind)


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "F32", "BF16", "Q8_0", "Q4_1"])
def test_values_and_config_are_kept(tmp_path: Path, kind: str, to: str) -> None:
    src = _make(kind, tmp_path / "src")
    dst = convert(str(src), tmp_path / "dst", to=to, progress=False)
    before, after = _source(src), _source(dst)
    assert after.kind == {"orbax": "orbax", "safetensors": "hf"}[to]
    _assert_same(_tensors(dst), _tensors(src))
    main = {"F32": "float32", "BF16": "bfloat16"}.get(kind, kind if kind in NUMPY else "float32")
    assert after.dtype_name == main
    assert after.hf_config == before.hf_config | {"torch_dtype": main}
    assert after.generation_config == before.generation_config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_dtype_is_cast(tmp_path: Path, dtype: str, to: str) -> None:
    src = tiny_llama(tmp_path / "src", dtype="float32")
    dst = convert(str(src), tmp_path / "dst", dtype=dtype, to=to, progress=False)
    weights = tiny_weights(tiny_config())
    _assert_same(_tensors(dst), {n: v.astype(NUMPY[dtype]) for n, v in weights.items()})
    config = json.loads((dst / "config.json").read_text())
    assert config["torch_dtype"] == dtype and "dtype" not in config


def test_a_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    src = tiny_llama(tmp_path / "src")
    weights = tiny_weights(tiny_config())
    weights["model.norm.weight"][3] = 1e5
    save_file(weights, src / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"'model.norm.weight' .*float16 cannot hold"):
        convert(str(src), tmp_path / "dst", dtype="float16", progress=False)
    assert os.listdir(tmp_path) == ["src"]


def test_back_and_forth(tmp_path: Path) -> None:
    src = tiny_llama(tmp_path / "src", torch_dtype="bfloat16")
    one = convert(str(src), tmp_path / "one", to="safetensors", progress=False)
    two = convert(str(one), tmp_path / "two", progress=False)  # safetensors to Orbax by default
    three = convert(str(two), tmp_path / "three", progress=False)  # and back
    assert _source(two).kind == "orbax"
    files = sorted(p.name for p in one.iterdir())
    assert files == sorted(p.name for p in three.iterdir())
    for name in files:
        assert (one / name).read_bytes() == (three / name).read_bytes(), name


def test_orbax_restores_it_on_any_mesh(tmp_path: Path) -> None:
    src = tiny_llama(tmp_path / "src", torch_dtype="bfloat16")
    dst = convert(str(src), tmp_path / "dst", progress=False)
    expected = _tensors(src)
    mesh = jax.make_mesh((1,), ("tensor",))
    sharding = NamedSharding(mesh, PartitionSpec("tensor"))
    target = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        for name, value in expected.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        plain = checkpointer.restore(dst / "orbax")
        sharded = checkpointer.restore(dst / "orbax", target)
    _assert_same(plain, expected)
    _assert_same({n: np.asarray(value) for n, value in sharded.items()}, expected)
    assert all(value.sharding == sharding for value in sharded.values())


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    src = tiny_llama(tmp_path / "src")
    dst = convert(
        str(src), tmp_path / "dst", to="safetensors", max_shard_size="100kB", progress=False
    )
    expected = tiny_weights(tiny_config())
    files = sorted(dst.glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    for file in files:
        stored = load_file(file)  # the format's own package
        _assert_same(stored, {name: expected[name] for name in stored})
        assert sum(v.nbytes for v in stored.values()) <= 100_000 or len(stored) == 1
    index = json.loads((dst / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in expected.values())
    _assert_same(_tensors(dst), expected)


def test_mixed_types_are_kept_aligned(tmp_path: Path) -> None:
    src = tiny_llama(tmp_path / "src", torch_dtype="bfloat16", architectures=["Other"])
    weights = tiny_weights(tiny_config(torch_dtype="bfloat16"))
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float32)
    weights["odd"] = np.ones(3, ml_dtypes.bfloat16)
    weights["wide"] = np.arange(3, dtype=np.float64)
    save_file(weights, src / "model.safetensors")
    dst = convert(str(src), tmp_path / "dst", to="safetensors", progress=False)
    weights["wide"] = weights["wide"].astype(np.float32)
    _assert_same(_tensors(dst), weights)
    assert _source(dst).dtype_name == "bfloat16"
    raw = (dst / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for entry in header.values():
        width = {"F32": 4, "BF16": 2}.get(entry.get("dtype"), 1)
        assert (8 + length + entry.get("data_offsets", [0])[0]) % width == 0


def test_zeros_are_stored_like_other_values(tmp_path: Path) -> None:
    """A chunk that the writer left out would count as missing."""
    src = tiny_llama(tmp_path / "src")
    weights = tiny_weights(tiny_config())
    weights["model.norm.weight"][:] = 0
    weights["lm_head.weight"][:] = -0.0
    save_file(weights, src / "model.safetensors")
    dst = convert(str(src), tmp_path / "dst", to="orbax", progress=False)
    got = _tensors(dst)
    _assert_same(got, weights)
    assert np.signbit(got["lm_head.weight"]).all()


def test_unreadable_types_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    src = tiny_llama(tmp_path / "src", architectures=["Other"])
    weights = tiny_weights(tiny_config())
    save_file(weights | {"strange": np.ones(4, np.int8)}, src / "model.safetensors")
    for to in ("orbax", "safetensors"):
        with pytest.raises(ModelLoadError, match="'strange' has dtype I8"):
            convert(str(src), tmp_path / "dst", to=to, progress=False)
        assert os.listdir(tmp_path) == ["src"]


@pytest.mark.parametrize("kind", ["float32", "Q8_0"])
def test_tensors_of_another_config_are_refused(tmp_path: Path, kind: str) -> None:
    name = "blk.1.attn_norm.weight" if kind == "Q8_0" else "model.layers.1.input_layernorm.weight"
    src = _make(kind, tmp_path / "src")
    if kind == "float32":
        weights = tiny_weights(tiny_config())
        del weights[name]
        save_file(weights, src / "model.safetensors")
    else:
        src.write_bytes(src.read_bytes().replace(name.encode(), b"blk.9.attn_norm.weight"))
    with pytest.raises(ModelLoadError):
        convert(str(src), tmp_path / "dst", progress=False)
    assert os.listdir(tmp_path) == [src.name]


def test_shapes_of_another_config_are_refused(tmp_path: Path) -> None:
    src = tiny_llama(tmp_path / "src")
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ModelLoadError, match=r"shape \(.*128.*\), the config asks for \(.*64.*\)"):
        convert(str(src), tmp_path / "dst", progress=False)
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"architectures": ["Other"]}, "'Other'"), ({"clip_qkv": 8.0}, "clip_qkv=8.0")],
)
def test_models_that_the_engine_lacks_are_converted_unchecked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], part: str
) -> None:
    src = tiny_llama(tmp_path / "src", **changes)
    with caplog.at_level(logging.WARNING):
        dst = convert(str(src), tmp_path / "dst", progress=False)
    _assert_same(_tensors(dst), tiny_weights(tiny_config()))
    (message,) = [r.getMessage() for r in caplog.records if "not checked" in r.getMessage()]
    assert part in message


class _Watched:
    """A `TensorReader` of one array that remembers the largest piece asked for."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value
        self.largest = 0

    def read(self, name: str) -> np.ndarray:
        return self.read_slice(name, ())

    def read_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        part = self.value[index]
        self.largest = max(self.largest, part.nbytes)
        return part


@pytest.mark.parametrize("shape", [(1000, 50), (97, 3, 64), (70000,), (1, 20000), (), (0, 4)])
@pytest.mark.parametrize("write", [write_orbax, write_safetensors])
def test_large_tensors_pass_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], write: Any
) -> None:
    monkeypatch.setattr(writers, "_PART_BYTES", 1 << 14)
    monkeypatch.setattr(writers, "_GROUP_BYTES", 1 << 15)
    monkeypatch.setattr(writers, "_CHUNK_BYTES", 1 << 11)
    value = np.random.default_rng(0).standard_normal(shape, np.float32)
    reader = _Watched(value)
    source: TensorReader = reader  # type: ignore[assignment]
    small = LazyTensor(source, "b", shape, np.dtype(ml_dtypes.bfloat16))
    tensors = [LazyTensor(source, "a", shape, np.dtype(np.float32)), small]
    seen: list[int] = []
    options = {"max_shard_bytes": 1 << 40} if write is write_safetensors else {}
    write(
        tmp_path / "out" if write is write_orbax else tmp_path,
        tensors,
        **options,
        progress=seen.append,
    )
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    _assert_same(_tensors(tmp_path), {"a": value, "b": value.astype(ml_dtypes.bfloat16)})
    assert sum(seen) == sum(t.nbytes for t in tensors)
    assert reader.largest <= max(1 << 14, value[:1].nbytes if shape else 4)


def _bytes_read() -> int:
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def test_a_slice_reads_little_more_than_itself(tmp_path: Path) -> None:
    value = np.random.default_rng(0).standard_normal((4096, 2048), np.float32)
    source: TensorReader = _Watched(value)  # type: ignore[assignment]
    tensor = LazyTensor(source, "w", value.shape, value.dtype)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    write_orbax(tmp_path / "orbax", [tensor], progress=lambda _: None)
    reader = open_reader(_source(tmp_path))
    assert reader.shape("w") == value.shape  # what is read once for an array
    for index in [(slice(512, 1024),), (slice(None), slice(1024, 1536))]:
        before = _bytes_read()
        got = reader.read_slice("w", index)
        np.testing.assert_array_equal(got, value[index])
        assert got.nbytes <= _bytes_read() - before < 2.1 * got.nbytes


class TestTarget:
    def test_new_nested_and_empty_folders(self, tmp_path: Path) -> None:
        src = str(tiny_llama(tmp_path / "src"))
        (tmp_path / "empty").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        (tmp_path / "real").mkdir()
        for name in ("new", "a/b/c", "empty", "link"):
            convert(src, tmp_path / name, progress=False)
            assert _source(tmp_path / name).kind == "orbax"
        assert not list(tmp_path.rglob("*.partial"))

    def test_what_is_there_is_not_touched(self, tmp_path: Path) -> None:
        src = str(tiny_llama(tmp_path / "src"))
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "note").write_text("mine")
        (tmp_path / "file").write_text("mine")
        with pytest.raises(ConfigError, match="full exists and is not empty"):
            convert(src, tmp_path / "full", progress=False)
        with pytest.raises(ConfigError, match="file exists and is not a folder"):
            convert(src, tmp_path / "file", progress=False)
        with pytest.raises(ConfigError, match="src exists and is not empty"):
            convert(src, src, progress=False)
        assert (tmp_path / "full" / "note").read_text() == "mine"

    def test_a_folder_within_the_model_is_refused(self, tmp_path: Path) -> None:
        src = tiny_llama(tmp_path / "src")
        before = sorted(os.listdir(src))
        (tmp_path / "link").symlink_to(src)
        for inside in (src / "new", src / "a" / "b", tmp_path / "link" / "new"):
            with pytest.raises(ConfigError, match=r"src/.* is inside .*src, the model to convert"):
                convert(str(src), inside, progress=False)
        assert sorted(os.listdir(src)) == before
        file = tiny_gguf(tmp_path / "file.gguf")  # beside a file is where files are
        assert convert(str(file), tmp_path / "new", progress=False).is_dir()

    @pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "~no-such-user/x"])
    def test_names_that_cannot_be(self, tmp_path: Path, name: str) -> None:
        folder = name if name.startswith("~") else tmp_path / name
        with pytest.raises(ConfigError, match="cannot be the new folder"):
            convert(str(tmp_path / "src"), folder)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"dtype": "int8"}, "dtype must be one of auto, .*'int8'"),
            ({"to": "gguf"}, "to must be one of orbax, safetensors, got 'gguf'"),
            ({"max_shard_size": "many"}, "such as 5GB, got 'many'"),
            ({"max_shard_size": "0GB"}, "max_shard_size must be positive"),
        ],
    )
    def test_arguments(self, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            convert(str(tmp_path / "src"), tmp_path / "dst", **settings)

    @pytest.mark.parametrize(
        ("size", "expected"), [("5GB", 5 * 10**9), ("1GiB", 2**30), ("100MB", 10**8), (7, 7)]
    )
    def test_sizes(self, size: Any, expected: int) -> None:
        assert convert_module._check_arguments("auto", None, size) == expected

    @pytest.mark.parametrize("to", ["orbax", "safetensors"])
    @pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
    def test_interrupted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, error: BaseException
    ) -> None:
        src = tiny_llama(tmp_path / "src")
        names: set[str] = set()

        class Bar:
            def __init__(self, **_: Any) -> None: ...
            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_: object) -> None: ...
            def update(self, _: int) -> None:
                (partial,) = tmp_path.glob(".dst.*.partial")
                names.update(p.name for p in partial.rglob("*"))
                raise error

        monkeypatch.setattr(convert_module, "progress_bar", Bar)
        wanted = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConvertError
        with pytest.raises(wanted) as caught:
            convert(str(src), tmp_path / "dst", to=to)
        if wanted is ConvertError:
            assert "the disk is full" in str(caught.value)
        # A process that is killed cannot tidy up: until the end there is no config.json.
        assert names and "config.json" not in names and "_METADATA" not in names
        assert os.listdir(tmp_path) == ["src"]

    def test_a_full_disk_is_foreseen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        src = tiny_llama(tmp_path / "src")
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ConvertError, match=r"not enough room in .*: the weights need 0.00 GB"):
            convert(str(src), tmp_path / "dst", progress=False)
        assert os.listdir(tmp_path) == ["src"]

    def test_tensorstore_says_that_the_disk_is_full(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        src = tiny_llama(tmp_path / "src")

        def full(*_: Any, **__: Any) -> None:
            raise ValueError("RESOURCE_EXHAUSTED: ... No space left on device [os_error_code='28']")

        monkeypatch.setattr(convert_module, "write_orbax", full)
        with pytest.raises(ConvertError, match="Cannot write .*dst: the disk is full"):
            convert(str(src), tmp_path / "dst", progress=False)


TEXTS = [
    "The quick brown fox, it's 1984!  Two  spaces\n\nand lines\t.",
    "<|user|>\nnaïve 中文 🙂<|end|>",
    "   leading and trailing   ",
    "",
]


def _assert_same_tokenizer(src: Path, dst: Path) -> None:
    old, new = (load_tokenizer(_source(p), EngineConfig(model=str(p))) for p in (src, dst))
    assert new.vocab_size == old.vocab_size
    assert new.special_ids == old.special_ids
    assert (new.bos_token_id, new.eos_token_id) == (old.bos_token_id, old.eos_token_id)
    for text in TEXTS:
        for special in (True, False):
            ids = old.encode(text, add_special_tokens=special)
            assert new.encode(text, add_special_tokens=special) == ids
            assert new.decode(ids) == old.decode(ids)
    for i in range(old.vocab_size):
        assert new.token_bytes(i) == old.token_bytes(i)
    chat = [{"role": "user", "content": "Hello"}]
    assert new.encode_chat(chat) == old.encode_chat(chat)
    assert new.chat_template == old.chat_template


@pytest.mark.parametrize("kind", ["float32", "Q8_0"])
def test_the_tokenizer_comes_along(tmp_path: Path, kind: str) -> None:
    src = _make(kind, tmp_path / "src")
    _assert_same_tokenizer(src, convert(str(src), tmp_path / "dst", progress=False))


def test_the_real_tokenizer_comes_along(smollm2_path: Path, tmp_path: Path) -> None:
    # Without the weights, which take longer: only what belongs to the tokenizer.
    source = _source(smollm2_path)
    dst = tiny_llama(tmp_path / "dst")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (dst / name).unlink()
    convert_module._write_tokenizer(dst, source)
    _assert_same_tokenizer(smollm2_path, dst)


def test_named_templates_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = tiny_gguf(tmp_path / "src.gguf")
    source = _source(src)
    assert source.gguf is not None
    source.gguf.metadata["tokenizer.chat_templates"] = ["tool_use"]
    source.gguf.metadata["tokenizer.chat_template.tool_use"] = "tools: {{ tools | length }}"
    dst = tiny_llama(tmp_path / "dst")
    convert_module._write_tokenizer(dst, source)
    tokenizer = load_tokenizer(_source(dst), EngineConfig(model=str(dst)))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=[{"a": 1}])
    assert rendered == "tools: 1"


def test_files_beside_the_weights(tmp_path: Path) -> None:
    src = tiny_llama(tmp_path / "src")
    (src / "LICENSE.txt").write_text("free")
    (src / "chat_template.jinja").write_text("{{ 1 }}")
    (src / "additional_chat_templates").mkdir()
    (src / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 2 }}")
    (src / "pytorch_model.bin").write_bytes(b"pickle")
    weights = tiny_weights(tiny_config())
    save_file(weights, src / "model.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (src / INDEX_NAME).write_text(json.dumps(index))
    dst = convert(str(src), tmp_path / "dst", progress=False)
    assert sorted(str(p.relative_to(dst)) for p in dst.rglob("*") if "orbax" not in p.parts) == [
        "LICENSE.txt",
        "additional_chat_templates",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_files_are_not_copied_from_elsewhere(tmp_path: Path) -> None:
    src = tiny_llama(tmp_path / "src")
    (tmp_path / "secret").write_text("{}")
    (src / "extra.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelLoadError, match="extra.json is a link to .*secret, outside"):
        convert(str(src), tmp_path / "dst", progress=False)
    assert not (tmp_path / "dst").exists()


def test_a_model_without_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    src = tiny_llama(tmp_path / "src")
    for path in src.glob("tokenizer*"):
        path.unlink()
    with caplog.at_level(logging.WARNING):
        dst = convert(str(src), tmp_path / "dst", progress=False)
    assert "src has no tokenizer, so neither has its conversion" in caplog.text
    _assert_same(_tensors(dst), tiny_weights(tiny_config()))


def test_a_vocabulary_that_is_not_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    src = tiny_gguf(tmp_path / "src.gguf")

    def refuse(_: Any) -> Any:
        raise ModelLoadError("tokenizer.ggml.pre 'x' is not known.")

    monkeypatch.setattr(convert_module, "build_gguf_tokenizer", refuse)
    with caplog.at_level(logging.WARNING):
        dst = convert(str(src), tmp_path / "dst", progress=False)
    assert "not the tokenizer. tokenizer.ggml.pre 'x'" in caplog.text
    assert _source(dst).kind == "orbax" and not (dst / "tokenizer.json").exists()


def test_what_was_done_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    src = tiny_llama(tmp_path / "src")
    with caplog.at_level(logging.INFO):
        convert(str(src), tmp_path / "dst", progress=False)
    (message,) = [r.getMessage() for r in caplog.records if "Converted" in r.getMessage()]
    assert f"to orbax in {tmp_path / 'dst'}: 21 tensors, 0.00 GB" in message
    assert message.endswith("GB/s.")

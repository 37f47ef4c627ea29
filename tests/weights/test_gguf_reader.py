"""GGUF tensors equal the safetensors ones; damaged and foreign files are refused by name."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.weights.gguf_config import hf_config_of
from jaxpaged.weights.gguf_file import READABLE_TYPES, GGUFFile
from jaxpaged.weights.gguf_reader import GGUFTensorReader
from tests.tiny_models import tiny_config, tiny_gguf, tiny_weights

QUANTS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


def _reader(path: Path) -> GGUFTensorReader:
    return GGUFTensorReader(GGUFFile.open(path))


def test_type_table_agrees_with_the_gguf_package() -> None:
    for number, (name, block, size) in READABLE_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, block, size)


@pytest.mark.parametrize("tied", [False, True])
def test_f32_is_exact(tmp_path: Path, tied: bool) -> None:
    expected = tiny_weights(tiny_config(tie_word_embeddings=tied, attention_bias=True), 3)
    reader = _reader(
        tiny_gguf(tmp_path / "m.gguf", seed=3, tie_word_embeddings=tied, attention_bias=True)
    )
    assert reader.names() == sorted(expected)
    for name, value in expected.items():
        assert reader.shape(name) == value.shape
        np.testing.assert_array_equal(reader.read(name), value, err_msg=name, strict=True)


@pytest.mark.parametrize("quant", QUANTS)
def test_other_types_stay_near(tmp_path: Path, quant: str) -> None:
    reader = _reader(tiny_gguf(tmp_path / "m.gguf", quant=quant))
    bits = {"F32": 24, "F16": 10, "BF16": 7, "Q8_0": 7, "Q4_0": 3, "Q4_1": 3}[quant]
    for name, value in tiny_weights(tiny_config()).items():
        got = reader.read(name)
        limit = np.abs(value).max() * 2.0**-bits
        np.testing.assert_allclose(got.astype(np.float32), value, atol=limit, err_msg=name)
    name = "model.layers.1.self_attn.q_proj.weight"
    plain = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    assert reader.read(name).dtype == plain.get(quant, np.float32)
    assert reader.dtype_name(name) == (np.dtype(plain[quant]).name if quant in plain else quant)
    assert reader.dtype_name("model.norm.weight") == "float32"


@pytest.mark.parametrize("quant", ["F32", "Q4_1"])
def test_slices_equal_the_whole(tmp_path: Path, quant: str) -> None:
    reader = _reader(tiny_gguf(tmp_path / "m.gguf", quant=quant, attention_bias=True))
    indices: list[tuple[slice, ...]] = [
        (),
        (slice(None),),
        (slice(3, 21),),
        (slice(None), slice(5, 40)),
        (slice(16, 32), slice(0, 33)),
    ]
    for name in reader.names():
        whole = reader.read(name)
        for index in indices:
            cut = index[: whole.ndim]
            np.testing.assert_array_equal(
                reader.read_slice(name, cut), whole[cut], err_msg=f"{name} {cut}", strict=True
            )


def test_arrays_outlive_the_reader(tmp_path: Path) -> None:
    reader = _reader(tiny_gguf(tmp_path / "m.gguf"))
    kept = reader.read("lm_head.weight")
    reader.close()
    np.testing.assert_array_equal(kept, tiny_weights(tiny_config())["lm_head.weight"])
    with pytest.raises(ModelLoadError, match="no tensor 'x'"):
        _reader(tmp_path / "m.gguf").read("x")


def test_real_model_equals_the_gguf_package(smollm2_path: Path) -> None:
    reader = _reader(smollm2_path)
    theirs = {t.name: t for t in gguf.GGUFReader(smollm2_path).tensors}
    assert len(reader.names()) == len(theirs) == 272
    assert sum(math.prod(reader.shape(name)) for name in reader.names()) == 134_515_008
    for name, stored_name in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
    ):
        tensor = theirs[stored_name]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(reader.read(name), expected)
    tensor = theirs["blk.29.attn_k.weight"]
    stored = gguf.dequantize(tensor.data, tensor.tensor_type)
    got = reader.read("model.layers.29.self_attn.k_proj.weight")
    for head in range(3):
        for j in range(2):
            for i in range(32):
                wanted = stored[head * 64 + 2 * i + j]
                np.testing.assert_array_equal(got[head * 64 + j * 32 + i], wanted)


def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    path = tiny_gguf(tmp_path / "m.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    reader = _reader(path)
    state = model.state_dict()
    assert set(reader.names()) == set(state)
    for name in reader.names():
        np.testing.assert_array_equal(reader.read(name), state[name].numpy(), err_msg=name)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    whole = tiny_gguf(tmp_path / "m.gguf", num_hidden_layers=1).read_bytes()
    path = tmp_path / "cut.gguf"
    header = whole.index(b"output_norm.weight")
    points = [*range(0, 200), *range(200, header, 997), *range(header, len(whole), 20011)]
    for keep in [*points, len(whole) - 1]:
        path.write_bytes(whole[:keep])
        with pytest.raises(ModelLoadError, match="cut.gguf"):
            GGUFFile.open(path)
    with pytest.raises(ModelLoadError, match=r"truncated.*\(1 missing\)"):
        GGUFFile.open(path)


def _damage(data: bytearray, at: int, form: str, value: int) -> bytes:
    struct.pack_into("<" + form, data, at, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"GGML" + d[4:], "wrong magic"),
        (lambda d: _damage(d, 4, "I", 1), "version 1"),
        (lambda d: _damage(d, 8, "Q", 2**60), "announces 1152921504606846976 tensors"),
        (lambda d: _damage(d, 16, "Q", 2**62), "metadata keys, more than fit"),
        (lambda d: _damage(d, 24, "Q", 2**63), "characters, more than fit"),
        (lambda d: d.replace(b"general.architecture", b"\xff" * 20), "not UTF-8"),
        (lambda d: d.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"), "appears twice"),
    ],
)
def test_damaged_headers(
    tmp_path: Path, change: Callable[[bytearray], bytes], message: str
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(change(bytearray(path.read_bytes())))
    with pytest.raises(ModelLoadError, match=message):
        GGUFFile.open(path)


def test_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 42\n")
    with pytest.raises(ModelLoadError, match="git-LFS pointer"):
        GGUFFile.open(path)


def _metadata_file(path: Path, add: Callable[[gguf.GGUFWriter], None], arch: str = "llama") -> Path:
    """A file without weights, but with all metadata a config needs, plus what `add` writes."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(131072)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _llama3_divisors(factor: float, head_dim: int = 16, *, high: float = 4.0) -> np.ndarray:
    """The divisors of Llama 3.1's rope scaling, one frequency at a time, as its paper's code."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * 500000.0 ** (i / head_dim)
        if wavelength < 8192 / high:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (high - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_rope_freqs_become_llama3_scaling(tmp_path: Path) -> None:
    divisors = _llama3_divisors(32.0)
    assert len(set(divisors.tolist())) > 2, "the blended range must be covered"
    path = _metadata_file(
        tmp_path / "m.gguf", lambda w: w.add_tensor("rope_freqs.weight", divisors)
    )
    file = GGUFFile.open(path)
    assert hf_config_of(file)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert GGUFTensorReader(file).names() == ["model.embed_tokens.weight"]


def test_other_rope_freqs_are_refused(tmp_path: Path) -> None:
    other = _llama3_divisors(8.0, high=2.0)
    path = _metadata_file(tmp_path / "m.gguf", lambda w: w.add_tensor("rope_freqs.weight", other))
    with pytest.raises(UnsupportedModelError, match="rope_freqs.weight does not follow"):
        hf_config_of(GGUFFile.open(path))


def test_rope_scaling_metadata(tmp_path: Path) -> None:
    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)

    config = hf_config_of(GGUFFile.open(_metadata_file(tmp_path / "y.gguf", yarn)))
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    config = hf_config_of(GGUFFile.open(_metadata_file(tmp_path / "l.gguf", linear)))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count=8"),
        (lambda w: w.add_value_length(32), "value_length=32"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope'"),
    ],
)
def test_other_mathematics_is_refused(
    tmp_path: Path, add: Callable[[Any], None], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        hf_config_of(GGUFFile.open(_metadata_file(tmp_path / "m.gguf", add)))


def test_sliding_window_means_mistral(tmp_path: Path) -> None:
    path = _metadata_file(tmp_path / "m.gguf", lambda w: w.add_sliding_window(4096))
    config = hf_config_of(GGUFFile.open(path))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 4096)


def test_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    path = _metadata_file(tmp_path / "a.gguf", lambda w: None, arch="rwkv7")
    with pytest.raises(UnsupportedModelError, match="architecture 'rwkv7'.*gemma2.*qwen3moe"):
        hf_config_of(GGUFFile.open(path))

    def ternary(writer: gguf.GGUFWriter) -> None:
        kind = gguf.GGMLQuantizationType.TQ1_0
        writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 54), np.uint8), raw_dtype=kind)

    with pytest.raises(ModelLoadError, match=r"'blk.0.attn_q.weight' has type TQ1_0.*Q4_0.*Q6_K"):
        GGUFFile.open(_metadata_file(tmp_path / "k.gguf", ternary))

    def shared_expert(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_up_shexp.weight", np.zeros((8, 64), np.float32))

    file = GGUFFile.open(_metadata_file(tmp_path / "e.gguf", shared_expert))
    with pytest.raises(ModelLoadError, match="'llama' does not use: blk.0.ffn_up_shexp.weight"):
        GGUFTensorReader(file)

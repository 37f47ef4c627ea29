"""What the small files beside the weights say, how much of it counts, and how it is refused."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.device.model_loader import choose_dtype
from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.startup import default_params
from jaxpaged.text.tokenizer import load_tokenizer
from jaxpaged.weights.source import ModelSource, resolve_source
from tests.tiny_models import tiny_llama


def _source(folder: Path, **settings: Any) -> ModelSource:
    return resolve_source(EngineConfig(model=str(folder), **settings))


class TestDtype:
    """The key `dtype` counts before `torch_dtype`; "auto" and null are as if absent."""

    @pytest.mark.parametrize(
        ("keys", "on_gpu"),
        [
            ({"torch_dtype": "bfloat16"}, jnp.bfloat16),
            ({"torch_dtype": None, "dtype": "float16"}, jnp.float16),
            ({"torch_dtype": "float16", "dtype": "bfloat16"}, jnp.bfloat16),
            ({"torch_dtype": "torch.float16", "dtype": "auto"}, jnp.float16),
            ({"torch_dtype": "float32"}, jnp.bfloat16),
            ({"torch_dtype": None}, jnp.bfloat16),
        ],
    )
    def test_auto(self, tmp_path: Path, keys: dict[str, Any], on_gpu: Any) -> None:
        folder = tiny_llama(tmp_path)
        config = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps(config))
        source = _source(folder)
        assert choose_dtype(EngineConfig(), source, "gpu") == on_gpu
        assert choose_dtype(EngineConfig(), source, "cpu") in (jnp.float32, jnp.bfloat16)
        assert choose_dtype(EngineConfig(dtype="float32"), source, "gpu") == jnp.float32

    def test_keys_that_differ_are_told(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        _source(tiny_llama(tmp_path / "a", dtype="float32"))
        _source(tiny_llama(tmp_path / "b", dtype="torch.float32"))
        assert caplog.text == ""
        _source(tiny_llama(tmp_path / "c", dtype="bfloat16"))
        assert "'dtype': 'bfloat16', 'torch_dtype': 'float32'}; dtype counts" in caplog.text

    def test_float16_for_a_bfloat16_checkpoint(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = _source(tiny_llama(tmp_path / "bf16", torch_dtype="bfloat16"))
        caplog.set_level(logging.WARNING)
        for dtype in ("bfloat16", "float32", "auto"):
            choose_dtype(EngineConfig(dtype=dtype), source, "gpu")
        other = _source(tiny_llama(tmp_path / "f16", torch_dtype="float16"))
        choose_dtype(EngineConfig(dtype="float16"), other, "gpu")
        assert caplog.text == ""
        assert choose_dtype(EngineConfig(dtype="float16"), source, "gpu") == jnp.float16
        assert "bf16 is in bfloat16, whose values may exceed float16's largest" in caplog.text


class TestGenerationConfig:
    GIVEN: dict[str, Any] = {  # noqa: RUF012
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_new_tokens": 5,
    }

    def _folder(self, path: Path) -> Path:
        folder = tiny_llama(path)
        (folder / "generation_config.json").write_text(json.dumps(self.GIVEN))
        return folder

    def test_defaults_are_used_and_told(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        params = default_params(EngineConfig(), _source(self._folder(tmp_path)))
        fields = {name: self.GIVEN[name] for name in self.GIVEN if name != "max_new_tokens"}
        assert params == SamplingParams(**fields, max_tokens=5)
        # The length limit is among what is told: it does not cap silently.
        (message,) = [r.getMessage() for r in caplog.records]
        for part in ("temperature=0.6", "top_k=20", "max_tokens=5", 'generation_config="none"'):
            assert part in message

    def test_the_switch(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        for value in ("none", "vllm"):
            config = EngineConfig(generation_config=value)
            assert default_params(config, _source(self._folder(tmp_path))) == SamplingParams()
        assert caplog.text == ""

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_a_broken_file_is_named(self, tmp_path: Path, text: str) -> None:
        folder = tiny_llama(tmp_path)
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(ModelLoadError, match="generation_config.json"):
            _source(folder)


class TestMissingAndBrokenFiles:
    """Each message names the path, and what was looked for."""

    def _tokenizer_error(self, folder: Path) -> str:
        config = EngineConfig(model=str(folder))
        with pytest.raises(ModelLoadError) as caught:
            load_tokenizer(resolve_source(config), config)
        assert str(folder) in str(caught.value)
        return str(caught.value)

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        folder = tiny_llama(tmp_path)
        for path in folder.glob("tokenizer*"):
            path.unlink()
        message = self._tokenizer_error(folder)
        assert "looked for tokenizer.json, tokenizer.model, vocab.json" in message
        assert "skip_tokenizer_init" in message

    def test_only_a_tokenizer_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tiny_llama(tmp_path)
        for path in folder.glob("tokenizer*"):
            path.unlink()
        (folder / "tokenizer.model").write_bytes(b"a SentencePiece model")
        found = importlib.util.find_spec

        def without(name: str, *rest: Any) -> Any:
            return None if name == "sentencepiece" else found(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", without)
        message = self._tokenizer_error(folder)
        assert "has a tokenizer.model but no tokenizer.json" in message
        assert "pip install sentencepiece" in message

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_broken_json(self, tmp_path: Path, name: str) -> None:
        folder = tiny_llama(tmp_path)
        (folder / name).write_text("{")
        assert "Cannot load the tokenizer in" in self._tokenizer_error(folder)

    def test_more_ids_than_the_embedding_has(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = tiny_llama(tmp_path)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        for i in range(512, 520):
            extra = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            tokenizer["added_tokens"].append(
                {"id": i, "content": f"<|extra{i}|>", "special": True, **extra}
            )
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        config = EngineConfig(model=str(folder))
        with caplog.at_level(logging.WARNING):
            assert load_tokenizer(resolve_source(config), config).vocab_size == 520
        assert "tokenizer has 520 ids but the model only 512" in caplog.text

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"architectures": None}, "names no architecture .architectures=None"),
            ({"architectures": []}, "names no architecture"),
            ({"architectures": "Llama"}, "names no architecture"),
            (
                {"architectures": ["NewForCausalLM"], "model_type": "new"},
                "architecture 'NewForCausalLM' .model_type 'new'. is not supported. Supported: Ll",
            ),
        ],
    )
    def test_architecture(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        path = tiny_llama(tmp_path) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        config = EngineConfig(model=str(tmp_path))
        with pytest.raises(UnsupportedModelError, match=message) as caught:
            resolve_source(config, supported_architectures=["LlamaForCausalLM"])
        assert str(tmp_path) in str(caught.value)

    def test_no_config(self, tmp_path: Path) -> None:
        folder = tiny_llama(tmp_path)
        (folder / "config.json").unlink()
        with pytest.raises(ModelLoadError, match=f"{tmp_path} has no config.json: looked for"):
            _source(folder)

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_files_that_lie_elsewhere(self, tmp_path: Path, name: str) -> None:
        folder = tiny_llama(tmp_path / "model")
        (folder / name).rename(tmp_path / "secret")
        (folder / name).symlink_to(tmp_path / "secret")
        with pytest.raises(ModelLoadError, match=f"{name} is a link to .*secret, outside"):
            _source(folder)

    def test_an_adapter(self, tmp_path: Path) -> None:
        (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
        with pytest.raises(ModelLoadError, match="is an adapter .*adapter_config.json.*'org/base'"):
            _source(tmp_path)

"""What happens before the first program is compiled."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpaged.blueprint import use_compile_cache
from jaxpaged.config import EngineConfig
from jaxpaged.device.host_memory import give_back_freed
from jaxpaged.device.model_loader import OpenedModel
from jaxpaged.device.program_set import ProgramSet
from jaxpaged.device.runner import Runner
from jaxpaged.errors import ModelLoadError
from jaxpaged.startup import build_engine, default_params, eos_token_ids
from jaxpaged.text.tokenizer import load_tokenizer
from jaxpaged.weights.source import ModelSource, resolve_source
from tests.tiny_models import tiny_llama


@pytest.fixture
def jax_config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings made through a stand-in for `jax.config`, which has no cache folder yet."""
    made: dict[str, Any] = {}
    config = SimpleNamespace(update=made.__setitem__, jax_compilation_cache_dir=None)
    monkeypatch.setattr("jaxpaged.blueprint.jax", SimpleNamespace(config=config))
    return made


def test_a_new_cache_folder_is_private(jax_config: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    use_compile_cache(EngineConfig(compile_cache_dir=str(folder)))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert jax_config["jax_compilation_cache_dir"] == str(folder)


def test_an_existing_folder_keeps_its_mode(jax_config: dict[str, Any], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    use_compile_cache(EngineConfig(compile_cache_dir=str(tmp_path)))
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert jax_config["jax_compilation_cache_dir"] == str(tmp_path)


def test_the_cache_can_be_off_or_unusable(
    jax_config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use_compile_cache(EngineConfig(compile_cache_dir=""))
    (tmp_path / "file").write_text("")
    use_compile_cache(EngineConfig(compile_cache_dir=str(tmp_path / "file" / "cache")))
    assert jax_config == {}
    assert "No compilation cache" in caplog.text


def test_a_second_cache_folder_is_not_ignored_silently(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = SimpleNamespace(jax_compilation_cache_dir="/first")
    monkeypatch.setattr("jaxpaged.blueprint.jax", SimpleNamespace(config=config))
    use_compile_cache(EngineConfig())
    assert caplog.text == ""
    use_compile_cache(EngineConfig(compile_cache_dir="/second"))
    assert "'/second' has no effect: this process uses /first already" in caplog.text


def source(**generation_config: Any) -> ModelSource:
    return ModelSource(
        name="m", kind="dummy", path=Path("m"), hf_config={}, generation_config=generation_config
    )


def test_one_bad_default_does_not_take_the_others_along(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    params = default_params(EngineConfig(), source(temperature=5.0, top_k=20, max_new_tokens=7))
    assert (params.temperature, params.top_k, params.max_tokens) == (1.0, 20, 7)
    assert "temperature must be a number in [0, 2], got 5.0" in caplog.text


def test_eos_ids_come_from_everywhere_and_must_exist(caplog: pytest.LogCaptureFixture) -> None:
    made = source(eos_token_id=[3, 5, 600, "x"])
    made.hf_config["eos_token_id"] = 3
    assert eos_token_ids(made, None, 512) == (3, 5)
    assert "[600, 'x']" in caplog.text


def test_a_chat_template_that_is_no_jinja_is_refused_at_start(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tiny_llama(tmp_path)), chat_template="{% if %}")
    with pytest.raises(ModelLoadError, match="chat_template: The chat template is not valid Jinja"):
        load_tokenizer(resolve_source(config), config)


def test_a_broken_config_is_not_blamed_on_the_tokenizer(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, num_attention_heads=3)
    with pytest.raises(ModelLoadError, match="num_attention_heads=3 is not a multiple"):
        build_engine(EngineConfig(model=str(folder)))


def test_a_start_imports_nothing_that_it_does_not_need() -> None:
    """Each of these takes seconds; a start to the first token has five."""
    code = (
        "import sys, jaxpaged.startup, jaxpaged.llm; "
        "print(*({'torch', 'orbax', 'transformers', 'tensorstore'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_eager_starts_skip_the_programs_and_others_prepare_them_before_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with the weights still ends a start, whatever else is going on."""
    settings: dict[str, Any] = {
        "model": str(tiny_llama(tmp_path)),
        "max_model_len": 64,
        "num_gpu_blocks_override": 9,
        "skip_tokenizer_init": True,
        "disable_progress": True,
    }

    def broken(self: OpenedModel) -> None:
        raise ModelLoadError("the disk is gone")

    lowered: list[str] = []

    def lower(self: ProgramSet, name: str) -> Any:
        lowered.append(name)
        return SimpleNamespace(compile=lambda: None)

    monkeypatch.setattr(OpenedModel, "load", broken)
    monkeypatch.setattr(ProgramSet, "lower", lower)
    for eager in (True, False):
        assert lowered == []
        with pytest.raises(ModelLoadError, match="the disk is gone"):
            build_engine(EngineConfig(**settings, enforce_eager=eager))
    assert lowered[:2] == ["init", "decode[8]"]


def test_a_start_ends_with_freed_memory_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading and compiling leave holes all over the heap."""
    happened: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = function(*args)
            happened.append(name)
            return result

        return run

    monkeypatch.setattr(OpenedModel, "load", noted("weights", OpenedModel.load))
    monkeypatch.setattr(Runner, "warm_up", noted("programs", Runner.warm_up))
    monkeypatch.setattr("jaxpaged.startup.give_back_freed", noted("trim", give_back_freed))
    settings: dict[str, Any] = {
        "model": str(tiny_llama(tmp_path, num_hidden_layers=1)),
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 9,
        "skip_tokenizer_init": True,
        "disable_progress": True,
    }
    build_engine(EngineConfig(**settings)).close()
    assert happened == ["weights", "programs", "trim"]

"""Artefacts: what is in them, whom they fit, and that a start with one compiles nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import LLM, ConfigError, EngineConfig, SamplingParams, ahead_of_time
from jaxpaged.blueprint import draw_up
from jaxpaged.compile_model import check_out, compile_into
from jaxpaged.device import executables, manifest
from jaxpaged.device.executables import Executables, UnusableExecutables
from tests.tiny_models import tiny_llama

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "block_size": 4,
    "disable_progress": True,
}
BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 40}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)
PROMPTS = [[5, 6, 7], list(range(100, 140))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def artefact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled") / "artefact"
    told = compile_into(folder, EngineConfig(model=str(model), **SETTINGS, **BLOCKS))
    assert "Wrote 5 programs" in told and f"--compiled {folder}" in told
    return folder


@pytest.fixture
def copy(artefact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artefact, tmp_path / "copy"))


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_a_start_with_an_artefact_traces_and_compiles_nothing(model: Path, artefact: Path) -> None:
    with LLM(str(model), compiled=str(artefact), **SETTINGS) as llm:  # blocks: as compiled for
        ledger = llm.engine.runner.ledger
        found = tokens_of(llm)
        assert found == tokens_of(llm), "the second time from the cache, with a block copied"
        llm.engine.runner.reset()
        assert llm.engine.runner.num_blocks == 40
        assert ledger.traces == 0
        names = ["init", "decode[8]", "prefill[16]", "copy[8]", "admit"]
        assert [record.program for record in ledger.records] == names
        assert all(record.cache_hit for record in ledger.records)
        assert llm.stats().compiles_after_warmup == 0
    with LLM(str(model), **SETTINGS, **BLOCKS) as llm:
        assert llm.engine.runner.ledger.traces == 5
        assert tokens_of(llm) == found


def test_the_folder_is_private(artefact: Path) -> None:
    assert artefact.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in artefact.iterdir())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_num_seqs": 16}, r"max_num_seqs=8, and here it is 16"),
        ({"max_model_len": 32}, "max_model_len=64, and here it is 32"),
        ({"dtype": "bfloat16"}, "dtype='float32', and here it is 'bfloat16'"),
        ({"num_gpu_blocks_override": 50}, "num_gpu_blocks_override=40, and here it is 50"),
        ({"attention_backend": "pallas_interpret"}, "attention_backend="),
    ],
)
def test_other_settings_are_refused_by_name(
    model: Path, artefact: Path, change: dict[str, Any], told: str
) -> None:
    config = EngineConfig(model=str(model), compiled=str(artefact), **{**SETTINGS, **change})
    with pytest.raises(ConfigError, match=f"(?s)does not fit.*{told}.*make it again"):
        draw_up(config)


def test_another_model_is_refused(artefact: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="other model configuration"):
        draw_up(EngineConfig(model=str(other), compiled=str(artefact), **SETTINGS))


@pytest.mark.parametrize("name", ["jaxlib", "source", "cpu_features", "attention_variant"])
def test_what_the_machine_has_is_compared_before_anything_is_loaded(
    model: Path, copy: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(executables.serialize_executable, "deserialize_and_load", never)
    content = json.loads((copy / "manifest.json").read_text())
    content["manifest"][name] = "another"
    (copy / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"does not fit.*{name}"):
        LLM(str(model), compiled=str(copy), **SETTINGS)


def test_a_damaged_file_is_named_and_not_loaded(model: Path, copy: Path) -> None:
    path = copy / "prefill-16.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="prefill-16.bin is not what manifest.json says"):
        LLM(str(model), compiled=str(copy), **SETTINGS)


def test_folders_that_others_can_write_to_are_refused(copy: Path) -> None:
    (copy / "manifest.json").chmod(0o666)
    with pytest.raises(ConfigError, match="manifest.json can be written by other users"):
        ahead_of_time.open_artefact(str(copy))
    (copy / "manifest.json").chmod(0o600)
    copy.chmod(0o770)
    with pytest.raises(ConfigError, match="can be written by other users; `chmod go-w` it"):
        ahead_of_time.open_artefact(str(copy))


def test_folders_of_others_are_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = copy.stat().st_uid
    if owner == 0:
        if not hasattr(os, "chown"):
            pytest.skip("needs chown")
        os.chown(copy, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        ahead_of_time.open_artefact(str(copy))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        ("{", "manifest.json is damaged"),
        ('{"format": 99, "manifest": {}, "files": {}}', "format 99, not 1"),
        ("[]", "manifest.json is damaged"),
    ],
)
def test_what_is_no_artefact_is_refused(tmp_path: Path, content: str | None, told: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
        (tmp_path / "manifest.json").chmod(0o600)
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match=f"{told}.*jaxpaged compile MODEL --out DIR"):
        ahead_of_time.open_artefact(str(tmp_path))


def test_eager_engines_have_no_use_for_one() -> None:
    with pytest.raises(ConfigError, match="no use with enforce_eager=True"):
        EngineConfig(compiled="x", enforce_eager=True)


def test_only_own_folders_are_replaced(tmp_path: Path) -> None:
    check_out(tmp_path / "new")
    check_out(tmp_path)
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(ConfigError, match="is no folder of this command's"):
        check_out(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    check_out(tmp_path)


# ------------------------------------------------------------------ kept by earlier starts


def test_what_a_start_keeps_the_next_one_finds(artefact: Path, tmp_path: Path) -> None:
    """With the programs of the artefact, which need not be compiled again here."""
    said = Executables.open(artefact).manifest
    assert ahead_of_time.find(tmp_path, said) is None
    folder = tmp_path / manifest.digest(said)
    shutil.copytree(artefact, folder)
    found = ahead_of_time.find(tmp_path, said)
    assert found is not None and set(found.files) == set(Executables.open(artefact).files)
    assert ahead_of_time.find(tmp_path, {**said, "source": "edited"}) is None
    folder.chmod(0o777)
    assert ahead_of_time.find(tmp_path, said) is None, "others could have written it"


def test_old_executables_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time, "MOST_KEPT", 2)
    written: list[Path] = []

    def write(folder: Path, *_: object) -> int:
        folder.mkdir()
        os.utime(folder, (len(written), len(written)))
        written.append(folder)
        return 0

    monkeypatch.setattr(ahead_of_time.executables, "write", write)
    programs: Any = {"init": None}
    for number in range(4):
        ahead_of_time.keep(tmp_path, {"number": number}, programs)
    ahead_of_time.keep(tmp_path, {"number": 4}, {})  # nothing was compiled here
    assert sorted(tmp_path.iterdir()) == sorted(written[2:])


def test_the_bytes_of_a_step_are_measured_once(tmp_path: Path) -> None:
    measured: list[int] = []

    def measure() -> int:
        measured.append(0)
        return 7

    root = tmp_path / "executables"
    said = [ahead_of_time.remembered_bytes(root, {"a": 1}, measure) for _ in range(3)]
    assert (said, len(measured)) == ([7, 7, 7], 1)
    ahead_of_time.remembered_bytes(root, {"a": 2}, measure)
    ahead_of_time.remembered_bytes(None, {"a": 1}, measure)
    assert len(measured) == 3


def test_unusable_says_why(tmp_path: Path) -> None:
    with pytest.raises(UnusableExecutables, match="No such file"):
        Executables.open(tmp_path / "none")

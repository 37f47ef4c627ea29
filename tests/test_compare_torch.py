"""The comparison with transformers: what it finds, what it says, and how it ends."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.errors import UnsupportedModelError
from tests.tiny_models import tiny_gguf, tiny_llama
from tests.zoo.case import write_case

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch, what is compared with")
LAYERS = 3
BAD = 1


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The script and its arithmetic. They import each other as siblings, as Python finds them when
    the script is run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("compare_torch"), importlib.import_module("compare_numbers")


@pytest.fixture(scope="module")
def script(modules: tuple[ModuleType, ModuleType]) -> ModuleType:
    return modules[0]


@pytest.fixture(scope="module")
def numbers(modules: tuple[ModuleType, ModuleType]) -> ModuleType:
    return modules[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(Path(tmp_path_factory.mktemp("model")), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def changed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with one weight of layer 1 five per cent too large."""
    folder = Path(tmp_path_factory.mktemp("changed"))
    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.{BAD}.mlp.down_proj.weight"] *= np.float32(1.05)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


# ------------------------------------------------------------------ whole runs


@needs_torch
def test_a_model_equals_itself(
    script: ModuleType, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "prompts.jsonl"
    long = np.random.default_rng(0).integers(3, 512, 150).tolist()
    lines.write_text(
        '{"prompt": "The quick brown fox"}\n{"messages": [{"role": "user", "content": "It is."}]}\n'
        f'{{"prompt_token_ids": {long}}}\n{{"prompt_token_ids": [7]}}\n'
    )
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["--model", str(model), "--prompts-file", str(lines), "--max-tokens", "8"]
    arguments += ["--layers", "--out", str(out)]
    if HAS_MATPLOTLIB:
        arguments += ["--plot", str(picture)]
    assert script.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "equal within 1e-4"
    assert text.count("all 8 tokens equal") == 4
    assert "No layer's error jumps" in text
    assert picture.exists() == HAS_MATPLOTLIB

    facts = json.loads(out.read_text())
    assert facts["equal"] is True
    assert facts["verdict"] == "equal within 1e-4"
    assert facts["first_bad_layer"] is None
    assert facts["versions"].keys() == {"jax", "torch", "transformers"}
    assert [len(prompt["token_ids"]) for prompt in facts["prompts"]][2:] == [150, 1]
    for prompt in facts["prompts"]:
        count = len(prompt["token_ids"])
        for name in ("error", "logit_error", "logprob_error", "kl", "top1"):
            assert len(prompt[name]) == count
        assert max(prompt["error"]) <= max(prompt["logit_error"]) < 1e-4
        assert max(prompt["logprob_error"]) < 1e-4
        assert max(map(abs, prompt["kl"])) < 1e-8
        assert all(prompt["top1"])
        assert len(prompt["greedy"]["ours"]) == 8
        assert prompt["greedy"]["ours"] == prompt["greedy"]["torch"]
        assert prompt["parting"] is None
        assert [layer["layer"] for layer in prompt["layers"]] == ["embedding", "0", "1", "2"]
        assert all(layer["relative"] < 1e-5 for layer in prompt["layers"])
        ours, torch = prompt["perplexity"]["ours"], prompt["perplexity"]["torch"]
        if count == 1:
            assert ours is torch is None
        else:
            assert ours == pytest.approx(torch, rel=1e-4)
            assert 1 < ours < 1e6


@needs_torch
def test_the_layer_that_is_wrong_is_named(
    script: ModuleType,
    model: Path,
    changed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.json"
    arguments = ["--model", str(changed), "--torch-model", str(model), "--layers"]
    arguments += ["--prompt-ids", "5,6,7,8", "--max-tokens", "4", "--out", str(out)]
    assert script.main(arguments) == 1
    text = capsys.readouterr().out
    assert f"Layer {BAD} is the first whose error jumps" in text
    assert "DIFFERENT: first at prompt 0, position 0: a logit is off by " in text.splitlines()[-1]
    facts = json.loads(out.read_text())
    assert facts["equal"] is False
    assert facts["first_bad_layer"] == str(BAD)
    relative = [layer["relative"] for layer in facts["prompts"][0]["layers"]]
    assert max(relative[: BAD + 1]) < 1e-5
    assert min(relative[BAD + 1 :]) > 1e-3
    # With a tolerance that holds the difference, it is equal.
    tolerance = str(2 * max(facts["prompts"][0]["error"]))
    arguments += ["--tolerance", tolerance, "--max-tokens", "0"]
    assert script.main(arguments) == 0


@needs_torch
@pytest.mark.slow
def test_a_gguf_file_on_two_devices(model: Path, tmp_path: Path) -> None:
    """In a process of its own, as the number of devices is chosen before JAX starts."""
    file = tiny_gguf(tmp_path / "tiny.gguf", quant="Q8_0", num_hidden_layers=LAYERS)
    command = [sys.executable, str(SCRIPTS / "compare_torch.py"), "--model", str(file)]
    command += ["--tensor-parallel-size", "2", "--prompt", "It's what we'd expect", "--layers"]
    run = subprocess.run(
        [*command, "--max-tokens", "4"],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "equal within 1e-4"
    assert "all 4 tokens equal" in run.stdout


@needs_torch
def test_the_example_of_the_documentation_works(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """docs/add_a_model.md: its family, registered as it says, on its own cases."""
    from jaxpaged.models import registry

    text = (SCRIPTS.parent / "docs" / "add_a_model.md").read_text(encoding="utf-8")
    found = []
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ):
        module = ModuleType(f"documented_{number}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, module.__name__, "exec"), module.__dict__)
        found.append(module)
    granite, zoo = found
    for name in granite.ARCHITECTURES:
        family = registry.Family(granite.GraniteForCausalLM, granite.read_config)
        monkeypatch.setitem(registry._FAMILIES, name, family)
    for case in zoo.CASES:
        folder = write_case(tmp_path / case.name, case)
        arguments = ["--model", str(folder), "--layers", "--max-tokens", "4"]
        assert script.main([*arguments, "--prompt-ids", "5,6,7,8,9,10"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "equal within 1e-4"
    with pytest.raises(UnsupportedModelError, match="num_experts=4"):
        registry.find_model({**zoo.CONFIG, "architectures": [name], "num_experts": 4}, "here")


# ------------------------------------------------------------------ what cannot be compared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model"),
        (["--model", "m", "--prompt-ids", "1,x"], "expected integers separated by commas"),
        (["--model", "m", "--prompt", "a", "--prompt-ids", "1"], "not allowed with"),
        (["--model", "m", "--max-tokens", "-1"], "at least 0"),
        (["--model", "m", "--tolerance", "nan"], "at least 0"),
        (["--model", "m", "--tensor-parallel-size", "0"], "at least 1"),
        (["--model", "m", "--dtype", "float64"], "invalid choice"),
        (["--model", "m", "--out", "no/such/folder/x.json"], "there is no folder no/such/folder"),
        (["--model", "m", "--plot", "x.foo"], "must end in one of .png, .svg, .pdf"),
        (["--model", "m", "--out", "tests"], "tests is a folder"),
    ],
)
def test_usage_errors(
    script: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@needs_torch
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such/model"], "neither an existing path nor a hub id|no/such/model"),
        (["--prompts-file", "no-such-file"], "--prompts-file no-such-file: No such file"),
        (["--prompt-ids", "5,512"], "512"),
        (["--prompt-ids", "5", "--max-tokens", "256"], "max_model_len=257"),
    ],
)
def test_what_cannot_be_run_is_an_error_of_its_own(
    script: ModuleType,
    model: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script.main(["--model", str(model), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert any(part in error for part in message.split("|"))


@pytest.mark.parametrize(
    ("missing", "advice"),
    [("torch", "pip install torch"), ("matplotlib", "pip install matplotlib")],
)
def test_missing_packages_are_named(
    script: ModuleType,
    missing: str,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if missing == "matplotlib" and not HAS_TORCH:
        pytest.skip("torch is missed first")
    monkeypatch.setitem(sys.modules, missing, None)
    # Found before the model is looked at.
    assert script.main(["--model", "no/such/model", "--plot", str(tmp_path / "p.png")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert f"`{advice}`" in error


# ------------------------------------------------------------------ arithmetic


def side(numbers: ModuleType, logits: Any, tokens: list[int], generated: Any = None) -> Any:
    logits = np.asarray(logits, np.float32)
    hidden = [np.ones((len(logits), 4), np.float32)] * 2
    rows = None if generated is None else np.asarray(generated, np.float32)
    return numbers.Side(logits, hidden, tokens, rows)


def report(numbers: ModuleType, ours: Any, torch: Any, ids: list[int]) -> Any:
    return numbers.compare(None, ids, ours, torch, tolerance=1e-3, with_layers=True)


def test_errors_of_a_small_case(numbers: ModuleType) -> None:
    torch = side(numbers, [[0.0, 0.0], [20.0, 0.0]], [0], [[1.0, 0.0]])
    ours = side(numbers, [[np.log(3.0), 0.0], [20.0, 1.0]], [0])
    found = report(numbers, ours, torch, [1, 0])
    assert found.logit_error == pytest.approx([np.log(3.0), 1.0])
    assert found.error == pytest.approx([np.log(3.0), 1.0 / 20.0])
    # Halves against three quarters and one quarter.
    assert found.logprob_error[0] == pytest.approx(np.log(2.0))
    assert found.kl[0] == pytest.approx(0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25))
    assert found.top1 == [True, True]
    assert found.perplexity == pytest.approx({"ours": 4.0 / 3.0, "torch": 2.0})
    assert found.parting is None
    assert numbers.faults([found], 1e-3) != []
    assert numbers.faults([found], 1.2) == []


def test_masked_tokens_are_equal_and_nan_is_not(numbers: ModuleType) -> None:
    masked = side(numbers, [[1.0, -np.inf, 0.5]], [0], [[1.0, 0.0, 0.0]])
    same = report(numbers, masked, masked, [0])
    assert same.logit_error == same.logprob_error == same.kl == [0.0]
    assert numbers.faults([same], 0.0) == []
    other = report(numbers, side(numbers, [[1.0, -np.inf, 0.6]], [0]), masked, [0])
    assert other.error == pytest.approx([0.1])
    unmasked = report(numbers, side(numbers, [[1.0, -9.0, 0.5]], [0]), masked, [0])
    assert unmasked.error == [np.inf]
    broken = side(numbers, [[np.nan, -np.inf, 0.5]], [0])
    assert numbers.faults([report(numbers, broken, masked, [0])], 1e9) != []


@pytest.mark.parametrize(
    ("row", "taken", "near_tie"),
    [
        ([5.0, 4.995, 0.0], 1, True),
        ([5.0, 4.5, 0.0], 1, False),
        ([5.0, 4.995, 0.0], 2, False),  # a tie, but of two others
    ],
)
def test_a_near_tie_is_told_from_a_bug(
    numbers: ModuleType, row: list[float], taken: int, near_tie: bool
) -> None:
    logits = [[1.0, 2.0, 3.0]]
    torch = side(numbers, logits, [2, 0, 1], [[0.0, 0.0, 9.0], row, [0.0, 9.0, 0.0]])
    found = report(numbers, side(numbers, logits, [2, taken, 2]), torch, [0])
    assert (found.parting.index, found.parting.ours, found.parting.torch) == (1, taken, 0)
    assert found.parting.gap == pytest.approx(row[0] - row[1], rel=1e-3)
    assert found.parting.near_tie is near_tie
    assert (numbers.faults([found], 1e-3) == []) is near_tie


def test_models_of_other_shapes_are_not_compared(numbers: ModuleType) -> None:
    a, b = side(numbers, [[1.0, 2.0]], []), side(numbers, [[1.0, 2.0, 3.0]], [])
    with pytest.raises(numbers.CompareError, match="vocabularies of 2 and 3 tokens"):
        report(numbers, a, b, [0])


@pytest.mark.parametrize(
    ("relative", "first"),
    [
        ([0.0, 1e-6, 2e-6, 4e-6], None),
        ([0.0, 1e-6, 2e-3, 4e-3], "1"),
        ([0.5, 0.5, 0.5, 0.5], "embedding"),
        ([0.0, 1e-4, 9e-4, 8e-3], None),  # grows, and never by ten
        ([0.0, 1e-6, float("nan"), float("nan")], "1"),
    ],
)
def test_the_first_layer_that_jumps(
    numbers: ModuleType, relative: list[float], first: str | None
) -> None:
    names = ["embedding", "0", "1", "2"]
    layers = [numbers.LayerError(n, r, r, 1.0) for n, r in zip(names, relative, strict=True)]
    assert numbers.first_jump(layers, 1e-3) == first


def test_the_worst_of_several_prompts(numbers: ModuleType) -> None:
    one = [numbers.LayerError("0", 1.0, 0.1, 0.9)]
    two = [numbers.LayerError("0", 0.5, 0.2, 0.8)]
    assert numbers.worst_of([one, two]) == [numbers.LayerError("0", 1.0, 0.2, 0.8)]


def test_json_has_no_nan(script: ModuleType) -> None:
    assert script.finite({"a": [float("nan"), 1.0, {"b": float("inf")}]}) == {
        "a": [None, 1.0, {"b": None}]
    }

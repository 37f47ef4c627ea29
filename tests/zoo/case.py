"""A tiny checkpoint of one architecture, and how to write it with and without torch.

With torch, transformers builds the model and says which tensors it saves; without it, the stored
description of the case does. The values come from a seed either way, so both give the same files.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.e2e.support import LONG
from tests.tiny_models import write_tokenizer

STORED = Path(__file__).resolve().parent.parent / "data" / "zoo"
HAS_TORCH = importlib.util.find_spec("torch") is not None
MATRIX_STD = 0.2
"""Wide enough that greedy outputs vary from step to step."""
VECTOR_STD = 0.1


@dataclass(frozen=True)
class Case:
    """`config` are fields of transformers' configuration class for `model_type`; `edit` changes
    config.json after it was saved, for spellings that transformers no longer writes.

    `one_pass` False: a forward pass over prompt and output is not the same as generating, since
    positions depend on the length; then only what transformers generates is compared.
    """

    name: str
    model_type: str
    architecture: str
    config: dict[str, Any]
    prompts: tuple[int, ...] = (1, 17, 130)
    """Lengths in tokens."""
    count: int = 20
    """Tokens to generate."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of EngineConfig that this case needs."""
    edit: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    one_pass: bool = True
    tolerance: float = 1e-4
    """Of logprobs, against transformers."""

    def prompt_ids(self) -> list[list[int]]:
        rng = np.random.default_rng(1)
        vocab = self.config.get("vocab_size", 512)
        return [rng.integers(3, vocab, length).tolist() for length in self.prompts]

    def job(self, model: Path, **settings: Any) -> dict[str, Any]:
        """Arguments of a job of `tests.e2e.mesh_worker` for a checkpoint of this case."""
        return {
            "folder": str(model),
            "prompts": self.prompt_ids(),
            "count": self.count,
            "engine": {**LONG, **self.engine, **settings},
        }


def all_cases() -> list[Case]:
    """Of every module beside this one."""
    package = importlib.import_module("tests.zoo")
    found: list[Case] = []
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        found += getattr(importlib.import_module(f"tests.zoo.{module}"), "CASES", [])
    assert len({case.name for case in found}) == len(found), "two cases of one name"
    return found


def write_case(folder: Path, case: Case, dtype: Any = np.float32) -> Path:
    """A folder that the engine and transformers can load."""
    about = describe(case) if HAS_TORCH else stored(case)
    folder.mkdir(parents=True, exist_ok=True)
    config = about["config"]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file(fill(about["tensors"], dtype), folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, min(512, config["vocab_size"]))
    return folder


def fill(tensors: dict[str, list[Any]], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Values for a description: name -> [shape, mean]."""
    rng = np.random.default_rng(0)
    values = {}
    for name in sorted(tensors):
        shape, mean = tensors[name]
        std = MATRIX_STD if len(shape) > 1 else VECTOR_STD
        values[name] = rng.normal(mean, std, shape).astype(dtype)
    return values


def stored(case: Case) -> dict[str, Any]:
    """The stored description and outputs of a case (scripts/make_reference.py writes them)."""
    about: dict[str, Any] = json.loads((STORED / f"{case.name}.json").read_text())
    return about


def describe(case: Case) -> dict[str, Any]:
    """config.json and the tensors (name -> [shape, mean]) that transformers saves. Needs torch."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, **case.config}
    config = AutoConfig.for_model(case.model_type, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert type(model).__name__ == case.architecture
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        fields = json.loads((Path(folder) / "config.json").read_text())
        tensors: dict[str, list[Any]] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118
                    value = file.get_tensor(name)
                    # A norm's weight starts at 1, or at 0 where it is added to 1.
                    mean = float(value.mean()) if value.ndim == 1 else 0.0
                    tensors[name] = [list(value.shape), mean if mean in (0.0, 1.0) else 0.0]
    fields.pop("transformers_version", None)
    return {"config": case.edit(fields) if case.edit else fields, "tensors": tensors}

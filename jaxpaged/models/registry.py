"""Architecture name -> model class and config reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.models import llama
from jaxpaged.models.base import CausalLM
from jaxpaged.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    model: type[CausalLM]
    read_config: Callable[[Mapping[str, Any], str, str], ModelConfig]


_FAMILIES: dict[str, Family] = {
    name: Family(llama.LlamaForCausalLM, llama.read_config) for name in llama.ARCHITECTURES
}


def supported_architectures() -> list[str]:
    return sorted(_FAMILIES)


def find_model(hf_config: Mapping[str, Any], where: str) -> tuple[type[CausalLM], ModelConfig]:
    """The class and configuration for a checkpoint.

    Raises `UnsupportedModelError` if none of its `architectures` is known.
    """
    names = hf_config.get("architectures") or []
    for name in names:
        family = _FAMILIES.get(name)
        if family is not None:
            return family.model, family.read_config(hf_config, name, where)
    raise UnsupportedModelError(
        f"{where}: architectures {names!r} (model_type {hf_config.get('model_type')!r}) are not "
        f"supported; supported: {', '.join(supported_architectures())}."
    )

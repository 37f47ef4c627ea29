"""Architecture name -> model class and config reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.models import deepseek, gemma, llama, mixtral, opt, phi3, qwen, qwen_moe
from jaxpaged.models.base import CausalLM
from jaxpaged.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    model: type[CausalLM]
    read_config: Callable[[Mapping[str, Any], str, str], ModelConfig]


_FAMILIES: dict[str, Family] = {
    name: family
    for names, family in (
        (llama.ARCHITECTURES, Family(llama.LlamaForCausalLM, llama.read_config)),
        (qwen.ARCHITECTURES, Family(llama.LlamaForCausalLM, qwen.read_config)),
        (deepseek.ARCHITECTURES, Family(deepseek.DeepseekForCausalLM, deepseek.read_config)),
        (gemma.ARCHITECTURES, Family(gemma.GemmaForCausalLM, gemma.read_config)),
        (mixtral.ARCHITECTURES, Family(mixtral.MixtralForCausalLM, mixtral.read_config)),
        (opt.ARCHITECTURES, Family(opt.OPTForCausalLM, opt.read_config)),
        (phi3.ARCHITECTURES, Family(phi3.Phi3ForCausalLM, phi3.read_config)),
        (qwen_moe.ARCHITECTURES, Family(qwen_moe.QwenMoeForCausalLM, qwen_moe.read_config)),
    )
    for name in names
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

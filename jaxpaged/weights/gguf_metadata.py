"""Typed access to one architecture's metadata, which remembers what was never asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.weights.gguf_file import GGUFFile

# Keys that say nothing about the mathematics, whatever their value.
_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")

# Keys that change what a model computes -> the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # 1 is softmax, 0 is "not said"
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.factor": (1.0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}


class Metadata:
    """The keys under `<architecture>.` of one file. Errors name the file, the key and its value."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self._prefix = f"{architecture}."
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return self.file.get(self._prefix + key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises `ModelLoadError` for anything else, or none at all."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number. Raises `ModelLoadError` for anything else, or none at all."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self._wrong(key, "a positive number", value)
        return shortest(value)

    def optional_number(self, key: str) -> float | None:
        """As `number`, with None where the key is missing or 0 (how files say "off")."""
        return self.number(key) if self.get(key) else None

    def optional_integer(self, key: str) -> int | None:
        """As `integer`, with None where the key is missing or 0 (how files say "off")."""
        return self.integer(key) if self.get(key) else None

    def require(self, key: str, expected: Any, why: str) -> None:
        """Refuse a key whose value, where given, is not `expected`."""
        value = self.get(key, expected)
        if value != expected:
            raise self.refusal(f"{self._prefix}{key}={value!r} ({why})")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def vector(self, tensor: str, size: int) -> npt.NDArray[np.float32]:
        """A small float32 tensor that belongs to the config.

        Raises `UnsupportedModelError` if it is of another type or shape.
        """
        found = self.file.tensors[tensor]
        if found.type_name != "F32" or found.shape != (size,):
            raise self.refusal(
                f"{tensor} as {found.type_name} {found.shape} (expected F32 ({size},))"
            )
        return np.fromfile(self.file.path, np.float32, size, offset=found.offset)

    def refusal(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.file.path}: {what} is not supported.")

    def refuse_unread(self) -> None:
        """Refuse keys that nothing asked for, unless they are harmless or hold a neutral value.

        Raises `UnsupportedModelError` naming the first.
        """
        for key, value in self.file.metadata.items():
            name = key.removeprefix(self._prefix)
            if name == key or name in self._asked or name in _HARMLESS:
                continue
            neutral = _NEUTRAL.get(name)
            if neutral is None:
                raise UnsupportedModelError(
                    f"{self.file.path}: metadata {key}={value!r:.80} is not known for this "
                    "architecture and may change what the model computes. Load the safetensors "
                    "checkpoint of this model instead."
                )
            if value not in neutral:
                raise self.refusal(f"{key}={value!r:.80}")

    def _wrong(self, key: str, what: str, value: Any) -> ModelLoadError:
        return ModelLoadError(
            f"{self.file.path}: metadata {self._prefix + key!r} must be {what}, got {value!r:.80}."
        )


def shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))

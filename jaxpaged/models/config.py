"""What the layers need to know of a model, read strictly from a Hugging Face style config."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import ModelLoadError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `kind` is default, linear or llama3."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    sliding_window: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Elements of K and V that one token takes over all layers (times the type's size)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


CHANGES_MATHS: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "scale_emb": (None, 1.0),
    "scale_depth": (None,),
    "dim_model_base": (None,),
    "clip_qkv": (None,),
    "qk_norm": (None, False),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "use_sliding_window": (None, True),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "kv_lora_rank": (None,),
    "parallel_attn": (None, False),
    "alibi": (None, False),
}
"""Settings of other families that change what a layer computes -> the values that do not. One that
stands in a config and is not understood must not be ignored."""


class ConfigReader:
    """Typed access to a config dict; errors name the key and its value."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields = fields
        self.where = where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.fields.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelLoadError(
                f"{self.where}: config {key!r} must be a positive integer, got {value!r}."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return self.number_in(self.fields, key, default)

    def number_in(self, fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = fields.get(key)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or value <= 0
        ):
            raise ModelLoadError(
                f"{self.where}: config {key!r} must be a positive number, got {value!r}."
            )
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean, false where the config leaves it out."""
        value = self.fields.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelLoadError(
                f"{self.where}: config {key!r} must be true or false, got {value!r}."
            )
        return bool(value)

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a setting that changes the mathematics in a way that is not implemented."""
        if key in self.fields and self.fields[key] not in allowed:
            raise UnsupportedModelError(
                f"{self.where}: config {key}={self.fields[key]!r} is not supported for this "
                f"architecture; supported: {', '.join(repr(a) for a in allowed)}."
            )

    def refuse_other_maths(self, understood: Collection[str] = ()) -> None:
        """Refuse every setting of `CHANGES_MATHS` that is neither `understood` nor neutral.

        Raises `UnsupportedModelError` naming it.
        """
        for key, neutral in CHANGES_MATHS.items():
            if key not in understood:
                self.require(key, neutral)

    def rope(self) -> RopeConfig:
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older)."""
        key = "rope_parameters" if self.fields.get("rope_parameters") else "rope_scaling"
        scaling = self.fields.get(key) or {}
        if not isinstance(scaling, Mapping):
            raise ModelLoadError(f"{self.where}: config {key}={scaling!r} must be a mapping.")
        theta = self.number("rope_theta", 10000.0)
        theta = self.number_in(scaling, "rope_theta", theta)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if not isinstance(kind, str) or any(isinstance(v, Mapping) for v in scaling.values()):
            raise UnsupportedModelError(
                f"{self.where}: rope settings per layer type are not supported: {scaling!r}."
            )
        for fields in (self.fields, scaling):
            rotated = fields.get("partial_rotary_factor")
            if rotated not in (None, 1.0):
                raise UnsupportedModelError(
                    f"{self.where}: config partial_rotary_factor={rotated!r} is not supported, "
                    "only 1.0."
                )
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, kind, factor=self.number_in(scaling, "factor"))
        if kind == "llama3":
            low = self.number_in(scaling, "low_freq_factor")
            high = self.number_in(scaling, "high_freq_factor")
            if high <= low:
                raise ModelLoadError(
                    f"{self.where}: config high_freq_factor={high} must be above "
                    f"low_freq_factor={low}."
                )
            return RopeConfig(
                theta,
                kind,
                factor=self.number_in(scaling, "factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position=int(
                    self.number_in(scaling, "original_max_position_embeddings")
                ),
            )
        raise UnsupportedModelError(
            f"{self.where}: rope_type {kind!r} is not supported; supported: default, linear, "
            "llama3."
        )

    def head_dim(self, hidden: int, heads: int) -> int:
        """`head_dim`, or hidden_size / num_attention_heads where the config leaves it out."""
        if self.fields.get("head_dim") is not None:
            return self.integer("head_dim")
        if hidden % heads:
            raise ModelLoadError(
                f"{self.where}: config hidden_size={hidden} is not a multiple of "
                f"num_attention_heads={heads} and there is no head_dim."
            )
        return hidden // heads

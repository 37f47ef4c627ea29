"""Typed, strict access to a Hugging Face style config."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxpaged.errors import ModelLoadError, UnsupportedModelError

_log = logging.getLogger(__name__)

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
    "use_sliding_window": (None, True, False),  # `ConfigReader.windows` looks at it again
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
FULL, SLIDING = "full_attention", "sliding_attention"
"""What `layer_types` may hold."""
LARGEST_INTEGER = 2**31 - 1
"""Sizes and positions are 32-bit integers on devices."""
LARGEST_NUMBER, SMALLEST_NUMBER = 3.4e38, 1.2e-38
"""What float32 holds at full precision."""
MOST_LAYERS, MOST_HEADS, MOST_EXPERTS = 10_000, 100_000, 100_000
"""Beyond all models there are: a config is not to make lists that fill the memory."""


def is_positive_number(value: Any) -> bool:
    """True for what float32 holds; a boolean is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return SMALLEST_NUMBER <= value <= LARGEST_NUMBER


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless it was logged before: a config is read several times."""
    _log.warning("%s", message)


class ConfigReader:
    """Typed access to a config dict; errors name the key and its value."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields = fields
        self.where = where

    def integer(
        self,
        key: str,
        default: int | None = None,
        *,
        least: int = 1,
        most: int | None = LARGEST_INTEGER,
    ) -> int:
        value = self.fields.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        elif most is not None and value > most:
            wanted = f"an integer of at most {most}"
        else:
            return value
        raise ModelLoadError(f"{self.where}: config {key!r} must be {wanted}, got {value!r:.80}.")

    def layers(self) -> int:
        return self.integer("num_hidden_layers", most=MOST_LAYERS)

    def heads(self) -> int:
        """Query heads."""
        return self.integer("num_attention_heads", most=MOST_HEADS)

    def number(self, key: str, default: float | None = None) -> float:
        return self.number_in(self.fields, key, default)

    def number_in(self, fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = fields.get(key)
        value = default if value is None else value
        if value is None or not is_positive_number(value):
            raise ModelLoadError(
                f"{self.where}: config {key!r} must be a positive number, from {SMALLEST_NUMBER} "
                f"to {LARGEST_NUMBER}, got {value!r:.80}."
            )
        return float(value)

    def number_or_none(self, key: str, default: float | None = None) -> float | None:
        """A positive number that null switches off."""
        return None if self.fields.get(key, default) is None else self.number(key, default)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A boolean, `default` where the config leaves it out."""
        value = self.fields.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelLoadError(
                f"{self.where}: config {key!r} must be true or false, got {value!r}."
            )
        return value

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a setting that changes the mathematics in a way that is not implemented."""
        if key in self.fields and self.fields[key] not in allowed:
            raise UnsupportedModelError(
                f"{self.where}: config {key}={self.fields[key]!r} is not supported for this "
                f"architecture; supported: {', '.join(repr(a) for a in allowed)}."
            )

    def refuse_other_maths(self, understood: Collection[str] = ()) -> None:
        """Refuse every setting of `CHANGES_MATHS` that is neither `understood` nor neutral.

        Raises `UnsupportedModelError` naming it. Dual chunk attention, which changes nothing within
        the context that a model was trained for, is warned of instead.
        """
        if self.fields.get("dual_chunk_attention_config"):
            warn_once(
                f"{self.where}: config dual_chunk_attention_config is not used, as in "
                "transformers: beyond the context that the model was trained for, results differ "
                "from its publisher's."
            )
        for key, neutral in CHANGES_MATHS.items():
            if key not in understood:
                self.require(key, neutral)

    def layer_kinds(self, default_types: Sequence[str]) -> Sequence[str]:
        """`layer_types`, or `default_types` where the config leaves it out: FULL or SLIDING."""
        types = self.fields.get("layer_types")
        types = default_types if types is None else types
        if not isinstance(types, Sequence) or len(types) != len(default_types):
            raise ModelLoadError(
                f"{self.where}: config layer_types={types!r} must name the kind of each of the "
                f"{len(default_types)} layers."
            )
        unknown = [kind for kind in types if kind not in (FULL, SLIDING)]
        if unknown:
            raise UnsupportedModelError(
                f"{self.where}: config layer_types has {unknown[0]!r}, which is not supported; "
                f"supported: {FULL}, {SLIDING}."
            )
        return types

    def windows(
        self, default_types: Sequence[str], window: int | None, max_position: int
    ) -> tuple[int | None, ...]:
        """The attention window of each layer in tokens; () where none has one.

        `layer_kinds` are the layers that have one. `window` is what the config and the family's
        default make of `sliding_window`; None is no window, and so is one as long as the context,
        `max_position` tokens: its mask hides nothing.
        """
        types = self.layer_kinds(default_types)
        if SLIDING not in types:
            return ()
        off = self.fields.get("use_sliding_window")
        if window is None:
            listed = self.fields.get("layer_types") is not None
            raise UnsupportedModelError(
                f"{self.where}: config {'layer_types has' if listed else 'is of a model with'} "
                f"{SLIDING!r}, but there is no window: "
                f"sliding_window={self.fields.get('sliding_window')!r}, use_sliding_window={off!r}."
            )
        size = self.integer("sliding_window", window, most=None)
        if size >= max_position:
            return ()
        if off is False:
            raise UnsupportedModelError(
                f"{self.where}: config use_sliding_window=False contradicts sliding_window={size}, "
                "which this architecture uses in any case; without a window, sliding_window is "
                "null."
            )
        return tuple(size if kind == SLIDING else None for kind in types)

    def windows_alike(
        self, layers: int, window: int | None, max_position: int
    ) -> tuple[int | None, ...]:
        """`windows` where all layers have the window, unless the config lists their types."""
        kind = FULL if window is None else SLIDING
        return self.windows([kind] * layers, window, max_position)

    def head_dim(self, hidden: int, heads: int, default: int | None = None) -> int:
        """`head_dim`; where the config leaves it out, the family's default, or hidden_size /
        num_attention_heads for a family without one.
        """
        if default is not None or self.fields.get("head_dim") is not None:
            return self.integer("head_dim", default)
        if hidden % heads:
            raise ModelLoadError(
                f"{self.where}: config hidden_size={hidden} is not a multiple of "
                f"num_attention_heads={heads} and there is no head_dim."
            )
        return hidden // heads

    def dimensions(
        self, *, kv_heads: int | None = None, head_dim: int | None = None
    ) -> dict[str, Any]:
        """The sizes that nearly every family has, as fields of `ModelConfig`.

        `kv_heads` and `head_dim` are the family's defaults where the config leaves them out. For
        `kv_heads`, as for null in the config, None is one for each query head.

        Raises `ModelLoadError` for missing or impossible ones.
        """
        hidden, heads = self.integer("hidden_size"), self.heads()
        if "num_key_value_heads" in self.fields or kv_heads is None:
            kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelLoadError(
                f"{self.where}: num_attention_heads={heads} is not a multiple of "
                f"num_key_value_heads={kv_heads}."
            )
        head_dim = self.head_dim(hidden, heads, head_dim)
        if head_dim % 2:
            raise ModelLoadError(
                f"{self.where}: head_dim={head_dim} must be even for rotary positions."
            )
        return {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_layers": self.layers(),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
        }

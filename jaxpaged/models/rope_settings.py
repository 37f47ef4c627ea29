"""Settings of rotary positions as configs spell them, checked; no arithmetic on arrays.

`read_rope(reader)` is what a family calls, then `read_max_position`. Settings that transformers
reads but does not use are refused where a user would expect them to act.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.models.config_reader import (
    LARGEST_INTEGER,
    ConfigReader,
    is_positive_number,
    warn_once,
)

KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}
"""Kind -> the settings that it has."""

_OLD_NAMES = {"su": "longrope"}

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "factor": (None, 1.0),
    "attention_factor": (None, 1.0),
    "low_freq_factor": (None,),
    "high_freq_factor": (None,),
    "beta_fast": (None,),
    "beta_slow": (None,),
    "mscale": (None,),
    "mscale_all_dim": (None,),
    "truncate": (None,),
    "short_factor": (None,),
    "long_factor": (None,),
    # Of variants that no kind here has.
    "alpha": (None,),
    "attn_factor": (None, 1.0),
    "extrapolation_factor": (None, 1.0),
    "short_mscale": (None,),
    "long_mscale": (None,),
    "llama_4_scaling_beta": (None,),
    "apply_yarn_scaling": (None, True),
    "mrope_section": (None,),
}
"""Settings that change the rotation -> the values that do not, for kinds that do not have them."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`kind` is one of `KINDS`, or "none" for models without rotary positions."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    """Tokens of the context before it was stretched; 0 for kinds that do not ask."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0
    attention_factor: float = 1.0
    """Multiplies cosines and sines, whether the config gave it or it followed from the factor."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial: float = 1.0
    """Share of a head's dimensions that is rotated: the first ones."""

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial)

    @property
    def rule(self) -> str:
        """How the frequencies of a sequence depend on its length: "fixed", "longrope" or "dynamic"
        (see `rope_table`).
        """
        return self.kind if self.kind in ("longrope", "dynamic") else "fixed"

    @property
    def threshold(self) -> int:
        """Tokens beyond which they do; 0 where the rule is "fixed"."""
        return 0 if self.rule == "fixed" else self.original_max_position


NO_ROPE = RopeConfig(1.0, "none")


def context_length(rope: RopeConfig, max_position_embeddings: int) -> int:
    """Tokens that a model takes: the default of `max_model_len`, and its limit.

    "linear", "dynamic" and "yarn" may have been set on a model that was published for less, so
    theirs is the original context, where the config has it, times the factor if that is more. All
    other kinds are as the config says: published configs have counted the scaling in.
    """
    if rope.kind in ("linear", "dynamic", "yarn"):
        return max(max_position_embeddings, int(rope.original_max_position * rope.factor))
    return max_position_embeddings


def read_max_position(reader: ConfigReader, rope: RopeConfig, default: int) -> int:
    """`context_length` of `max_position_embeddings`, `default` where the config leaves that out.

    Older models that were trained further with "linear" or "dynamic" (vicuna-16k) have their
    context in `max_sequence_length` or `seq_length`, and in `max_position_embeddings` the one from
    before.
    """
    longest = context_length(rope, reader.integer("max_position_embeddings", default))
    if rope.kind in ("linear", "dynamic"):
        for key in ("max_sequence_length", "seq_length"):
            if type(reader.fields.get(key)) is int:
                longest = max(longest, reader.integer(key))
    return longest


def read_rope(
    reader: ConfigReader,
    *,
    head_dim: int | None = None,
    partial: bool = False,
    default_theta: float = 10000.0,
) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older).

    `partial`: the family rotates the share `partial_rotary_factor` of a head; for others any but 1
    is refused. `head_dim` is for families whose rotated part is not in the field of that name.

    Raises `ModelLoadError` for impossible values and contradictions, `UnsupportedModelError` for
    kinds and settings that are not there.
    """
    fields, where = reader.fields, reader.where
    found: dict[str, RopeConfig] = {}
    for key in ("rope_parameters", "rope_scaling"):
        scaling = fields.get(key)
        if not scaling:
            continue
        if not isinstance(scaling, Mapping):
            raise ModelLoadError(f"{where}: config {key}={scaling!r} must be a mapping.")
        found[key] = read_rope_settings(
            reader, scaling, head_dim=head_dim, partial=partial, default_theta=default_theta
        )
    if len(set(found.values())) > 1:
        raise ModelLoadError(
            f"{where}: config has rope_parameters={fields['rope_parameters']!r} and "
            f"rope_scaling={fields['rope_scaling']!r}, which differ; leave one out."
        )
    for rope in found.values():
        return rope
    return read_rope_settings(
        reader, {}, head_dim=head_dim, partial=partial, default_theta=default_theta
    )


def read_rope_settings(
    reader: ConfigReader,
    scaling: Mapping[str, Any],
    *,
    head_dim: int | None = None,
    partial: bool = False,
    default_theta: float = 10000.0,
) -> RopeConfig:
    """One set of rope settings: that of the model, or of one of its layer types."""
    rope = _read_settings(reader, scaling, head_dim, partial, default_theta)
    if rope.original_max_position * rope.factor > LARGEST_INTEGER:
        raise ModelLoadError(
            f"{reader.where}: config factor={rope.factor} times the original context of "
            f"{rope.original_max_position} tokens must be at most {LARGEST_INTEGER}."
        )
    return rope


def _read_settings(
    reader: ConfigReader,
    scaling: Mapping[str, Any],
    head_dim: int | None,
    partial: bool,
    default_theta: float,
) -> RopeConfig:
    where = reader.where
    kind = _kind(scaling, where)
    _refuse_settings_of_others(scaling, kind, where)
    theta = reader.number_in(scaling, "rope_theta", reader.number("rope_theta", default_theta))
    share = _partial(reader, scaling, partial)
    if kind == "default":
        return RopeConfig(theta, partial=share)
    inner = ConfigReader(scaling, where)
    if kind == "linear":
        original = _original(reader, inner, 0)
        factor = inner.number("factor")
        return RopeConfig(theta, kind, factor, original_max_position=original, partial=share)
    if kind == "dynamic":
        return _dynamic(reader, inner, theta, share)
    original = _original(reader, inner)
    if kind == "llama3":
        return _llama3(inner, theta, original, share)
    if kind == "yarn":
        return _yarn(reader, inner, theta, original, share)
    if head_dim is None:
        heads = reader.heads()
        head_dim = reader.head_dim(reader.integer("hidden_size"), heads)
    return _longrope(reader, inner, theta, original, share, head_dim)


def _kind(scaling: Mapping[str, Any], where: str) -> str:
    kind = scaling.get("rope_type")
    if kind is None:
        kind = scaling.get("type")
    if kind is None:
        kind = "default"
    if not isinstance(kind, str) or any(isinstance(v, Mapping) for v in scaling.values()):
        raise UnsupportedModelError(
            f"{where}: rope settings per layer type (or a rope_type that is not a word) are not "
            f"supported for this architecture: {dict(scaling)!r}."
        )
    kind = _OLD_NAMES.get(kind, kind)
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"{where}: rope_type {kind!r} is not supported; supported: {', '.join(KINDS)}."
        )
    return kind


def _refuse_settings_of_others(scaling: Mapping[str, Any], kind: str, where: str) -> None:
    for key, neutral in _NEUTRAL.items():
        if key in KINDS[kind] or scaling.get(key) in neutral:
            continue
        if kind == "yarn" and key == "attn_factor":  # in DeepSeek-R1-0528-Qwen3-8B
            warn_once(
                f"{where}: rope setting attn_factor={scaling[key]!r} is not used with rope_type "
                "'yarn', as in transformers; the setting with an effect is attention_factor."
            )
            continue
        raise UnsupportedModelError(
            f"{where}: rope setting {key}={scaling[key]!r} has no meaning for rope_type {kind!r}, "
            f"whose settings are: {', '.join(KINDS[kind]) or 'none'}. Leave it out, or name the "
            "rope_type that it belongs to."
        )


def _partial(reader: ConfigReader, scaling: Mapping[str, Any], allowed: bool) -> float:
    key = "partial_rotary_factor"
    outer = reader.number_in(reader.fields, key, 1.0)
    share = reader.number_in(scaling, key, outer)
    if reader.fields.get(key) is not None and share != outer:
        raise ModelLoadError(
            f"{reader.where}: config {key}={outer!r} contradicts the {share!r} in the rope "
            "settings; leave one out."
        )
    if share != 1.0 and not allowed:
        raise UnsupportedModelError(
            f"{reader.where}: config partial_rotary_factor={share!r} is not supported for this "
            "architecture, only 1.0."
        )
    if share > 1.0:
        raise ModelLoadError(
            f"{reader.where}: config partial_rotary_factor={share!r} must be at most 1."
        )
    return share


def _original(reader: ConfigReader, inner: ConfigReader, default: int | None = None) -> int:
    """`original_max_position_embeddings`: beside the rope settings, else in them, else `default`,
    and where that is None all positions.
    """
    for each in (reader, inner):
        if each.fields.get("original_max_position_embeddings") is not None:
            return each.integer("original_max_position_embeddings")
    return reader.integer("max_position_embeddings") if default is None else default


def _ratio(reader: ConfigReader, original: int) -> float:
    return reader.integer("max_position_embeddings") / original


def _dynamic(reader: ConfigReader, inner: ConfigReader, theta: float, share: float) -> RopeConfig:
    limit = reader.integer("max_position_embeddings")
    original = inner.integer("original_max_position_embeddings", limit)
    if original != limit:
        raise UnsupportedModelError(
            f"{reader.where}: rope setting original_max_position_embeddings={original} is not "
            "supported for rope_type 'dynamic', which stretches what goes beyond "
            f"max_position_embeddings={limit}; leave it out, or make them equal."
        )
    return RopeConfig(
        theta, "dynamic", inner.number("factor"), original_max_position=limit, partial=share
    )


def _llama3(inner: ConfigReader, theta: float, original: int, share: float) -> RopeConfig:
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        raise ModelLoadError(
            f"{inner.where}: config high_freq_factor={high} must be above low_freq_factor={low}."
        )
    return RopeConfig(
        theta,
        "llama3",
        inner.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
        partial=share,
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Growth of attention's temperature with the context (Peng et al., 2023), before squaring."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(
    reader: ConfigReader, inner: ConfigReader, theta: float, original: int, share: float
) -> RopeConfig:
    if theta <= 1.0:
        raise ModelLoadError(
            f"{inner.where}: config rope_theta={theta} must be above 1 for rope_type 'yarn'."
        )
    fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
    if fast < slow:
        raise ModelLoadError(
            f"{inner.where}: config beta_fast={fast} must not be below beta_slow={slow}."
        )
    stretched = original != reader.fields.get("max_position_embeddings")
    factor = inner.number("factor", _ratio(reader, original) if stretched else None)
    mscale, all_dim = (
        inner.number(key) if inner.fields.get(key) else 0.0 for key in ("mscale", "mscale_all_dim")
    )
    if mscale and all_dim:
        implied = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    else:
        implied = yarn_mscale(factor)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=inner.fields.get("truncate") is None or inner.flag("truncate"),
        mscale_all_dim=all_dim,
        attention_factor=inner.number("attention_factor", implied),
        partial=share,
    )


def _longrope(
    reader: ConfigReader,
    inner: ConfigReader,
    theta: float,
    original: int,
    share: float,
    head_dim: int,
) -> RopeConfig:
    factor = inner.number("factor", _ratio(reader, original))
    implied = 1.0
    if factor > 1.0 and original > 1:
        implied = math.sqrt(1.0 + math.log(factor) / math.log(original))
    dim = int(head_dim * share)
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original_max_position=original,
        attention_factor=inner.number("attention_factor", implied),
        short_factor=_factors(inner, "short_factor", dim // 2),
        long_factor=_factors(inner, "long_factor", dim // 2),
        partial=share,
    )


def _factors(inner: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """A divisor for each rotated pair of dimensions."""
    values = inner.fields.get(key)
    if not isinstance(values, list) or not all(map(is_positive_number, values)):
        raise ModelLoadError(
            f"{inner.where}: config {key!r} must be a list of positive numbers, got {values!r:.80}."
        )
    if len(values) != count:
        raise ModelLoadError(
            f"{inner.where}: config {key!r} must have {count} numbers, one for each pair of "
            f"rotated dimensions, got {len(values)}."
        )
    return tuple(map(float, values))

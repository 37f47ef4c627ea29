"""What a user may ask of one beam search."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxpaged import checks
from jaxpaged.errors import InvalidRequestError
from jaxpaged.sampling_params import GREEDY_EPS, MAX_STOP_TOKEN_IDS, MIN_TEMPERATURE

MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 5.0
"""A context of a million tokens to this power still fits a float32."""

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """Parameters of one beam search. Names follow vLLM's, meanings transformers'.

    The score of a hypothesis is the sum of its tokens' log-probabilities, divided by the number of
    its generated tokens (EOS counts, the prompt does not) to the power of `length_penalty`.

    Raises `InvalidRequestError` (a `ValueError`) on construction for any value out of range;
    limits that depend on the model or the engine are checked when the request is added.
    """

    beam_width: int
    """Beams that are kept at each step, and hypotheses that are returned; 1..64."""
    max_tokens: int | None = 16
    """Most tokens of a hypothesis; None means up to max_model_len."""
    length_penalty: float = 1.0
    """[-5, 5]. 0 compares sums of log-probabilities, which favours short hypotheses; more favours
    longer ones."""
    early_stopping: EarlyStopping = False
    """When the search ends, once `beam_width` hypotheses have ended. True: at once. False: when the
    best live beam, scored as if it ended where it is, is no better than the worst of them. "never":
    when even its best possible score, at the length that `length_penalty` favours, is not."""
    temperature: float = 0.0
    """0..2. 0 and 1 score by the model's own log-probabilities, any other T by those of the logits
    divided by T."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    stop_token_ids: list[int] | None = None
    """Token ids that end a hypothesis as EOS does; they stay in token_ids."""
    include_stop_str_in_output: bool = False
    """Keep the text of the token that ended a hypothesis."""
    detokenize: bool = True
    """Turn tokens into text; False leaves the text empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        checks.normalise(self, _CHECKS, InvalidRequestError)
        if self.temperature < MIN_TEMPERATURE:
            kept = 0.0 if self.temperature < GREEDY_EPS else MIN_TEMPERATURE
            object.__setattr__(self, "temperature", kept)

    @property
    def divisor(self) -> float:
        """What logits are divided by before their log-probabilities are taken."""
        return self.temperature or 1.0

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> BeamSearchParams:
        """Build from a mapping. An unknown name, or no beam_width, raises `InvalidRequestError`."""
        name, noun = "beam_search_params", "beam search parameter"
        checks.check_names(fields, cls, name, noun, InvalidRequestError)
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in fields:
                raise InvalidRequestError(f"{name} needs {field.name}.", param=field.name)
        return cls(**fields)


def _early_stopping(value: Any) -> EarlyStopping:
    if isinstance(value, str) and value == "never":
        return "never"
    try:
        return bool(checks.boolean(value))
    except checks.Broken:
        raise checks.Broken('true, false or "never"') from None


_PENALTY_RULE = f"a number in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
_IDS = checks.list_of(
    checks.integer(0), "a list of token ids (integers >= 0)", MAX_STOP_TOKEN_IDS, "ids"
)
_CHECKS: dict[str, checks.Check] = {
    "beam_width": checks.integer(1, MAX_BEAM_WIDTH),
    "max_tokens": checks.optional(checks.integer(1)),
    "length_penalty": checks.number(_PENALTY_RULE, lambda x: abs(x) <= MAX_LENGTH_PENALTY),
    "early_stopping": _early_stopping,
    "temperature": checks.number("a number in [0, 2]", lambda x: 0 <= x <= 2),
    "ignore_eos": checks.boolean,
    "stop_token_ids": checks.optional(_IDS, empty=list),
    "include_stop_str_in_output": checks.boolean,
    "detokenize": checks.boolean,
    "skip_special_tokens": checks.boolean,
}

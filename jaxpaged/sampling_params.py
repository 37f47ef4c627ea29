"""What a user may ask of one request: decoding rules, stop rules and what to return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged import checks
from jaxpaged.errors import InvalidRequestError

GREEDY_EPS = 1e-5
"""Temperatures below this are greedy."""
MIN_TEMPERATURE = 1e-2
"""Sampling temperatures are raised to this; smaller ones only produce infinities."""
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 64
MAX_N = 16384
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters of one request. Names and meanings follow vLLM's.

    Raises `InvalidRequestError` (a `ValueError`) on construction for any value out of range;
    limits that depend on the model (vocabulary, context) are checked when the request is added.
    The semantic order is: allowed_token_ids, bad_words, min_tokens, logit_bias, repetition then
    frequency then presence penalty, temperature, min_p, top_k, top_p.
    """

    n: int = 1
    """Independent completions of the prompt."""
    temperature: float = 1.0
    """0..2; below 1e-5 is greedy."""
    top_k: int = 0
    """Keep the k largest logits, ties included; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set with this mass, after top_k is renormalised; (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest; [0, 1]."""
    repetition_penalty: float = 1.0
    """> 0; divides (multiplies, where negative) the logits of tokens in prompt or output."""
    frequency_penalty: float = 0.0
    """[-2, 2]; subtracted once per occurrence in the output."""
    presence_penalty: float = 0.0
    """[-2, 2]; subtracted once if the token is in the output."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these ids; values are clamped to ±100."""
    allowed_token_ids: list[int] | None = None
    """Only these ids can be drawn."""
    bad_words: list[str] | None = None
    """Texts that are never completed in the output."""
    max_tokens: int | None = 16
    """Output cap; None means up to max_model_len."""
    min_tokens: int = 0
    """No EOS, stop id or stop string ends the request before this many output tokens."""
    stop: list[str] | str | None = None
    """Stop strings; the text is cut before the earliest match."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output; they stay in token_ids."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    seed: int | None = None
    """64 bits are used; None (or -1) draws a seed from the engine's generator."""
    logprobs: int | None = None
    """Log-probabilities of the drawn token and of this many of the likeliest; -1 is all."""
    logprobs_mode: str = "raw"
    """"raw": of the model, before every rule and temperature. "processed": of what the token is
    drawn from, after all of them; minus infinity for what was cut."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, always raw."""
    detokenize: bool = True
    """Turn tokens into text; False leaves the text empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Accepted for compatibility; texts are joined as the tokenizer does."""

    def __post_init__(self) -> None:
        checks.normalise(self, _CHECKS, InvalidRequestError)
        set_ = object.__setattr__  # normalising a frozen dataclass, once, here only
        if self.temperature < GREEDY_EPS:
            set_(self, "temperature", 0.0)
        elif self.temperature < MIN_TEMPERATURE:
            set_(self, "temperature", MIN_TEMPERATURE)
        if self.seed is not None:
            set_(self, "seed", None if self.seed == -1 else self.seed & MAX_SEED)
        bias = {token: max(-100.0, min(100.0, b)) for token, b in (self.logit_bias or {}).items()}
        set_(self, "logit_bias", bias or None)
        self._check_together()

    def _check_together(self) -> None:
        """Fields that are right by themselves may not go together."""
        if self.max_tokens is not None:
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise InvalidRequestError(
                    f"max_tokens must be {_MAX_TOKENS_RULE}, or None, got 0.", param="max_tokens"
                )
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens must be at most max_tokens={checks.shorten(self.max_tokens)}, "
                    f"got {checks.shorten(self.min_tokens)}.",
                    param="min_tokens",
                )
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True.", param="stop")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPS

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown name raises `InvalidRequestError`."""
        name, noun = "sampling_params", "sampling parameter"
        checks.check_names(fields, cls, name, noun, InvalidRequestError)
        return cls(**fields)


def _stop(value: Any) -> list[str]:
    rule = "a non-empty string, or a list of non-empty strings"
    check = checks.list_of(checks.text(), rule, MAX_STOP_STRINGS, "strings")
    return list(check([value] if isinstance(value, str) else value))


def _ids(most: int) -> checks.Check:
    rule = "a list of token ids (integers >= 0)"
    return checks.list_of(checks.integer(0), rule, most, "ids")


def _allowed(value: Any) -> list[int]:
    ids: list[int] = _ids(MAX_ALLOWED_TOKEN_IDS)(value)
    if not ids:
        raise checks.Broken("a non-empty list of token ids")
    return ids


_MAX_TOKENS_RULE = "an integer >= 1 (0 only with prompt_logprobs)"
_LOGPROBS = checks.optional(checks.integer(-1, rule="an integer >= 0, -1 for all"))
_PENALTY = checks.number("a number in [-2, 2]", lambda x: -2 <= x <= 2)
_CHECKS: dict[str, checks.Check] = {
    "n": checks.integer(1, MAX_N),
    "temperature": checks.number("a number in [0, 2]", lambda x: 0 <= x <= 2),
    "top_k": checks.integer(-1, rule="an integer >= -1 (0 and -1 turn it off)"),
    "top_p": checks.number("a number in (0, 1]", lambda x: 0 < x <= 1),
    "min_p": checks.number("a number in [0, 1]", lambda x: 0 <= x <= 1),
    "repetition_penalty": checks.number("a number in (0, 1e30]", lambda x: 0 < x <= 1e30),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "logit_bias": checks.optional(
        checks.mapping_of(
            checks.token_id_key,
            checks.number("a finite number", lambda _: True),
            "a mapping from token ids (integers >= 0) to finite numbers",
            MAX_LOGIT_BIAS,
            "entries",
        )
    ),
    "allowed_token_ids": checks.optional(_allowed),
    "bad_words": checks.optional(
        checks.list_of(checks.text(), "a list of non-empty strings", MAX_BAD_WORDS, "words"),
        empty=list,
    ),
    "max_tokens": checks.optional(checks.integer(0, rule=_MAX_TOKENS_RULE)),
    "min_tokens": checks.integer(0),
    "stop": checks.optional(_stop, empty=list),
    "stop_token_ids": checks.optional(_ids(MAX_STOP_TOKEN_IDS), empty=list),
    "include_stop_str_in_output": checks.boolean,
    "ignore_eos": checks.boolean,
    "seed": checks.optional(
        checks.integer(-(2**63), MAX_SEED, rule="an integer in [-2**63, 2**64)")
    ),
    "logprobs": _LOGPROBS,
    "logprobs_mode": checks.choice("raw", "processed"),
    "prompt_logprobs": _LOGPROBS,
    "detokenize": checks.boolean,
    "skip_special_tokens": checks.boolean,
    "spaces_between_special_tokens": checks.boolean,
}

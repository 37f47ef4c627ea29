"""What a user may ask of one request: decoding rules, stop rules and what to return."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def _fail(name: str, value: object, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {rule}, got {_shorten(value)}.", param=name)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _check_number(name: str, value: Any, low: float, high: float, rule: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _fail(name, value, rule)
    number = float(value) if abs(value) < 1e300 else math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise _fail(name, value, rule)
    return number


def _check_int(name: str, value: Any, low: int, rule: str, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _fail(name, value, rule)
    if value < low or (high is not None and value > high):
        raise _fail(name, value, rule)
    return int(value)


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
    """Raw log-probabilities of the drawn token and of this many of the likeliest; -1 is all."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    detokenize: bool = True
    """Turn tokens into text; False leaves the text empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Accepted for compatibility; texts are joined as the tokenizer does."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # normalising a frozen dataclass, once, here only
        _check_int("n", self.n, 1, f"an integer in [1, {MAX_N}]", MAX_N)
        temperature = _check_number("temperature", self.temperature, 0.0, 2.0, "a number in [0, 2]")
        if temperature < GREEDY_EPS:
            temperature = 0.0
        elif temperature < MIN_TEMPERATURE:
            temperature = MIN_TEMPERATURE
        set_(self, "temperature", temperature)
        _check_int("top_k", self.top_k, -1, "an integer >= -1 (0 and -1 turn it off)")
        rule = "a number in (0, 1]"
        if _check_number("top_p", self.top_p, 0.0, 1.0, rule) <= 0.0:
            raise _fail("top_p", self.top_p, rule)
        _check_number("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        rule = "a finite number > 0"
        if _check_number("repetition_penalty", self.repetition_penalty, 0.0, 1e30, rule) <= 0.0:
            raise _fail("repetition_penalty", self.repetition_penalty, rule)
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(name, getattr(self, name), -2.0, 2.0, "a number in [-2, 2]")
        if self.max_tokens is not None:
            rule = "an integer >= 1 (0 only with prompt_logprobs), or None"
            _check_int("max_tokens", self.max_tokens, 0, rule)
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise _fail("max_tokens", self.max_tokens, rule)
        _check_int("min_tokens", self.min_tokens, 0, "an integer >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _fail("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        self._normalise_lists()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), -1, "an integer >= 0, -1 for all, or None")
        if self.seed is not None:
            rule = "an integer in [-2**63, 2**64), or None"
            _check_int("seed", self.seed, -(2**63), rule, 2**64 - 1)
            set_(self, "seed", None if self.seed == -1 else self.seed & (2**64 - 1))
        for name in ("ignore_eos", "detokenize", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, getattr(self, name), "true or false")

    def _normalise_lists(self) -> None:
        set_ = object.__setattr__
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        if len(stop) > MAX_STOP_STRINGS:
            raise _fail("stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        if not all(isinstance(s, str) and s for s in stop):
            raise _fail("stop", stop, "a non-empty string, or a list of non-empty strings")
        if stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True.", param="stop")
        set_(self, "stop", stop)
        set_(self, "stop_token_ids", self._ids("stop_token_ids", MAX_STOP_TOKEN_IDS) or [])
        set_(self, "allowed_token_ids", self._ids("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS))
        if self.allowed_token_ids == []:
            raise _fail("allowed_token_ids", [], "a non-empty list of token ids, or None")
        words = list(self.bad_words or [])
        if len(words) > MAX_BAD_WORDS:
            raise _fail("bad_words", f"{len(words)} words", f"at most {MAX_BAD_WORDS} words")
        if isinstance(self.bad_words, str) or not all(isinstance(w, str) and w for w in words):
            raise _fail("bad_words", self.bad_words, "a list of non-empty strings")
        set_(self, "bad_words", words)
        set_(self, "logit_bias", self._bias())

    def _ids(self, name: str, limit: int) -> list[int] | None:
        value = getattr(self, name)
        if value is None:
            return None
        if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
            raise _fail(name, value, "a list of token ids")
        ids = list(value)
        if len(ids) > limit:
            raise _fail(name, f"{len(ids)} ids", f"at most {limit} ids")
        return [_check_int(name, i, 0, "a list of token ids (integers >= 0)") for i in ids]

    def _bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        if not isinstance(self.logit_bias, Mapping):
            raise _fail("logit_bias", self.logit_bias, "a mapping of token id to bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            count = f"{len(self.logit_bias)} entries"
            raise _fail("logit_bias", count, f"at most {MAX_LOGIT_BIAS} entries")
        bias: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            if isinstance(key, str) and key.strip().isdecimal():
                key = int(key)  # JSON object keys are strings
            token = _check_int("logit_bias", key, 0, "keyed by token ids (integers >= 0)")
            number = _check_number("logit_bias", value, -1e30, 1e30, "a finite number per token")
            bias[token] = max(-100.0, min(100.0, number))
        return bias

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPS

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown name raises `InvalidRequestError`."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise InvalidRequestError(f"Unknown sampling parameter {name!r}.{hint}", param=name)
        return cls(**fields)

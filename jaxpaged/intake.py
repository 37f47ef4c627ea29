"""Checks a new request against the model and the engine's limits, and builds its state. Nothing is
scheduled here.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.beam_request import Beam, BeamState
from jaxpaged.beam_search import BeamSearch
from jaxpaged.completion import Completion, RequestState, SlotRecipe
from jaxpaged.core.request import Request
from jaxpaged.device.packing import RowRequest
from jaxpaged.device.sampling_state import BEAM, needs_slot, row_fields
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import RequestTimes
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.text.bad_words import bad_word_sequences
from jaxpaged.text.detokenizer import IncrementalDetokenizer
from jaxpaged.text.stop import StopChecker
from jaxpaged.text.tokenizer import Tokenizer

MAX_SALT_CHARS = 1024
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str | None


Prompt = str | Sequence[int] | Mapping[str, Any] | ParsedPrompt
"""Text, token ids, {"prompt" or "prompt_token_ids": ..., "cache_salt": ...}, or what `Intake.parse`
made of one of these."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]
    num_candidates: int = 2
    """Next tokens of each beam that a search can look at."""


class Intake:
    """Turns prompts and parameters into requests. Raises `InvalidRequestError` and changes nothing
    on bad input.
    """

    def __init__(self, limits: Limits, tokenizer: Tokenizer | None, seed: int) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self._rng = random.Random(seed)

    def build(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int,
        arrival_time: float,
        cache_salt: str | None = None,
    ) -> RequestState | BeamState:
        """The state of a request with its scheduler requests, one a sample or beam, ready to be
        added.
        """
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(
                f"request_id must be a non-empty string, got {request_id!r}.", param="request_id"
            )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(
                f"priority must be an integer, got {priority!r}.", param="priority"
            )
        if (
            isinstance(arrival_time, bool)
            or not isinstance(arrival_time, (int, float))
            or not math.isfinite(arrival_time)
        ):
            raise InvalidRequestError(
                f"arrival_time must be a finite number of seconds, got {arrival_time!r}.",
                param="arrival_time",
            )
        if not isinstance(params, (SamplingParams, BeamSearchParams)):
            raise InvalidRequestError(
                "sampling_params must be SamplingParams or BeamSearchParams, got "
                f"{type(params).__name__}; from a mapping make one with their from_dict.",
                param="sampling_params",
            )
        parsed = prompt if isinstance(prompt, ParsedPrompt) else self.parse(prompt, cache_salt)
        if isinstance(params, BeamSearchParams):
            return self._build_beams(request_id, parsed, params, priority, arrival_time)
        self._check_length(parsed.token_ids, params)
        self._check_params(params)
        slot = self._slot_recipe(params)
        # Last of all, so that a refused request leaves the generator as it was.
        seed = params.seed if params.seed is not None else self._rng.getrandbits(64)
        fields = row_fields(params, seed, vocab_size=self.limits.vocab_size)
        state = RequestState(
            request_id,
            parsed.text,
            parsed.token_ids,
            params,
            self.tokenizer,
            slot,
            RequestTimes(arrival_time),
        )
        wants_prompt = params.prompt_logprobs is not None
        if wants_prompt:
            state.prompt_logprobs = [None] * len(parsed.token_ids)
        for index in range(params.n):
            # The prompt is scored once, by the first sample.
            row = RowRequest(fields, index, wants_prompt and index == 0)
            completion = self._completion(state, index, row)
            completion.core = self._core(
                params, request_id, completion, parsed, priority, arrival_time
            )
            state.completions.append(completion)
        return state

    def _build_beams(
        self,
        request_id: str,
        parsed: ParsedPrompt,
        asked: BeamSearchParams,
        priority: int,
        arrival_time: float,
    ) -> BeamState:
        params = SamplingParams(
            n=asked.beam_width,
            temperature=0.0,
            max_tokens=asked.max_tokens,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=asked.ignore_eos,
        )
        self._check_length(parsed.token_ids, params)
        self._check_params(params)
        limits = self.limits
        search = BeamSearch(
            asked,
            eos_token_ids=limits.eos_token_ids,
            prompt_len=len(parsed.token_ids),
            max_model_len=limits.max_model_len,
        )
        enough = min(search.num_candidates, limits.vocab_size)
        if 2 * asked.beam_width <= limits.num_candidates < enough:
            raise InvalidRequestError(
                f"stop_token_ids and the model's EOS ids are too many for a search of beam_width="
                f"{asked.beam_width}: it would have to look at {search.num_candidates} next tokens "
                f"of each beam, and this engine at {limits.num_candidates}; pass fewer "
                "stop_token_ids.",
                param="stop_token_ids",
            )
        fields = dataclasses.replace(
            row_fields(params, 0, vocab_size=limits.vocab_size),
            flags=BEAM,
            temperature=asked.divisor,
        )
        state = BeamState(
            request_id,
            parsed.text,
            parsed.token_ids,
            params,
            asked,
            self.tokenizer,
            search,
            RequestTimes(arrival_time),
        )
        for index in range(asked.beam_width):
            beam = Beam(state, RowRequest(fields, index, wants_prompt_logprobs=False))
            beam.core = self._core(state.params, request_id, beam, parsed, priority, arrival_time)
            state.beams.append(beam)
        return state

    def parse(self, prompt: Prompt, cache_salt: str | None = None) -> ParsedPrompt:
        """Token ids of a prompt in any of its forms, checked against the vocabulary.

        Safe to call from any thread.
        """
        if isinstance(prompt, ParsedPrompt):
            return prompt
        text: str | None = None
        if isinstance(prompt, Mapping):
            unknown = [key for key in prompt if key not in _PROMPT_KEYS]
            if unknown:
                raise InvalidRequestError(
                    f"A prompt has no field {unknown[0]!r}; known: {', '.join(_PROMPT_KEYS)}.",
                    param="prompt",
                )
            given = prompt.get("cache_salt")
            cache_salt = given if given is not None else cache_salt
            ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
            if (ids is None) == (text is None):
                raise InvalidRequestError(
                    "A prompt needs exactly one of 'prompt' and 'prompt_token_ids'.", param="prompt"
                )
            prompt = text if text is not None else cast("Prompt", ids)
        self._check_salt(cache_salt)
        if isinstance(prompt, str):
            return ParsedPrompt(prompt, self._encode(prompt), cache_salt)
        return ParsedPrompt(None, self._check_ids(prompt), cache_salt)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "Text prompts need a tokenizer, and this engine has none (skip_tokenizer_init); "
                "give token ids.",
                param="prompt",
            )
        ids = self.tokenizer.encode(text, limit=self.limits.max_model_len)
        self._check_range("prompt", ids)  # a tokenizer may know more ids than the model
        return ids

    def _check_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, np.ndarray) and ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer):
            ids = ids.tolist()
        if isinstance(ids, (bytes, Mapping)) or not isinstance(ids, Sequence):
            kind = type(ids).__name__
            raise InvalidRequestError(
                f"A prompt must be text, a list of token ids or a mapping, got {kind}.",
                param="prompt",
            )
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise InvalidRequestError(
                    f"Token ids must be integers, got {token!r} at position {i}.", param="prompt"
                )
        plain = [int(token) for token in ids]
        self._check_range("prompt", plain)
        return plain

    def _check_range(self, name: str, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self.limits.vocab_size:
                raise InvalidRequestError(
                    f"{name} has token id {token}, outside the model's vocabulary "
                    f"[0, {self.limits.vocab_size}).",
                    param=name,
                )

    def _check_salt(self, salt: Any) -> None:
        if salt is None:
            return
        if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_CHARS:
            shown = salt if not isinstance(salt, str) else f"{len(salt)} characters"
            raise InvalidRequestError(
                f"cache_salt must be a string of 1 to {MAX_SALT_CHARS} characters, got {shown!r}.",
                param="cache_salt",
            )

    def _check_length(self, ids: Sequence[int], params: SamplingParams) -> None:
        limit, count = self.limits.max_model_len, len(ids)
        if count == 0:
            raise InvalidRequestError("The prompt is empty; give at least one token.", "prompt")
        room = limit if params.max_tokens == 0 else limit - 1
        if count > room:
            excess = "which exceeds this limit even without any output tokens"
            if count == limit:
                excess = "which leaves no room for the output token that is asked for"
            raise InvalidRequestError(
                f"This model's maximum context length is {limit} tokens. However, your prompt "
                f"contains {count} input tokens, {excess}. Please reduce the length of the input "
                "prompt.",
                param="input_tokens",
            )
        if params.min_tokens > limit - count:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} cannot be reached: the prompt has {count} tokens "
                f"and the context {limit}, so at most {limit - count} can follow.",
                param="min_tokens",
            )

    def _check_params(self, params: SamplingParams) -> None:
        self._check_range("logit_bias", list(params.logit_bias or ()))
        self._check_range("allowed_token_ids", params.allowed_token_ids or ())
        self._check_range("stop_token_ids", params.stop_token_ids or ())
        for name in ("logprobs", "prompt_logprobs"):
            asked, limit = getattr(params, name), self.limits.max_logprobs
            if asked is None:
                continue
            asked = self.limits.vocab_size if asked == -1 else asked
            if asked > limit:
                raise InvalidRequestError(
                    f"{name}={getattr(params, name)} is more than max_logprobs={limit} allows; ask "
                    "for fewer, or start the engine with a larger max_logprobs.",
                    param=name,
                )
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InvalidRequestError(
                f"{name} needs a tokenizer, and this engine has none (skip_tokenizer_init).",
                param=name,
            )

    def _slot_recipe(self, params: SamplingParams) -> SlotRecipe | None:
        if not needs_slot(row_fields(params, 0, vocab_size=self.limits.vocab_size)):
            return None
        words: list[list[int]] = []
        if params.bad_words and self.tokenizer is not None:
            words = bad_word_sequences(params.bad_words, self.tokenizer)
        stop_ids = sorted({*self.limits.eos_token_ids, *(params.stop_token_ids or ())})
        recipe = SlotRecipe(
            params, tuple(stop_ids), tuple(map(tuple, words)), self.limits.max_model_len
        )
        recipe.pack(())  # refused now rather than when it is admitted
        return recipe

    def _completion(self, state: RequestState, index: int, row: RowRequest) -> Completion:
        params, tokenizer = state.params, self.tokenizer
        if tokenizer is None or not params.detokenize:
            return Completion(state, index, row, None, None)
        detokenizer = IncrementalDetokenizer(
            tokenizer, state.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        stop = StopChecker(
            params.stop or (),
            include=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        return Completion(state, index, row, detokenizer, stop if params.stop else None)

    def _core(
        self,
        params: SamplingParams,
        request_id: str,
        completion: Completion | Beam,
        parsed: ParsedPrompt,
        priority: int,
        arrival_time: float,
    ) -> Request:
        room = self.limits.max_model_len - len(parsed.token_ids)
        return Request(
            # The index is always there, so that no request's id is that of another's sample.
            f"{completion.row.sample_index}_{request_id}",
            parsed.token_ids,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            min_tokens=params.min_tokens,
            eos_token_ids=() if params.ignore_eos else self.limits.eos_token_ids,
            stop_token_ids=params.stop_token_ids or (),
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=parsed.cache_salt,
            skip_prefix_cache=completion.row.wants_prompt_logprobs,
            payload=completion,
        )

"""From what a client asked for to the engine's `SamplingParams`.

A value counts in this order: the request's, the model's generation_config, OpenAI's default. All
limits are checked before any work is done for a single prompt, choice or string. Everything here
raises `ApiError` or `InvalidRequestError`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from jaxpaged.checks import shorten
from jaxpaged.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from server import beams, bounded
from server.context import Context
from server.errors import ApiError
from server.neutral import Neutral, one_of
from server.protocol_common import GenerationRequest

_FROM_MODEL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Where the request says nothing, the model's generation_config may."""
_AS_GIVEN = (
    *_FROM_MODEL,
    "n",
    "seed",
    "min_tokens",
    "logprobs_mode",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_OPENAI_MAX_TOKENS = SamplingParams().max_tokens
_SALT = re.compile(r"[^@/\\\x00]{1,128}")


def _empty(value: Any) -> bool:
    return value is None or value == [] or value == {}


def _never(value: Any) -> bool:
    return value is None


def _no_constraint(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(v is None for v in value.values()))


def _plain_text(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


def _no_budget(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and value < 0)


UNSUPPORTED: dict[str, tuple[Neutral, str]] = {
    "response_format": (_plain_text, 'Only {"type": "text"} is.'),
    "structured_outputs": (_no_constraint, "Leave it out, and say in the prompt what you need."),
    "guided_json": (_never, ""),
    "guided_regex": (_never, ""),
    "guided_choice": (_empty, ""),
    "guided_grammar": (_never, ""),
    "suffix": (one_of(""), ""),
    "logprob_token_ids": (_empty, "Use logprobs."),
    "prompt_embeds": (_never, "Send the prompt as text or token ids."),
    "repetition_detection": (_never, ""),
    "thinking_token_budget": (_no_budget, "-1, no limit, is."),
    "kv_transfer_params": (_empty, ""),
    "vllm_xargs": (_empty, ""),
    "documents": (_empty, "Put their text into a message."),
    "media_io_kwargs": (_empty, ""),
    "mm_processor_kwargs": (_empty, ""),
    "modalities": (one_of([], ["text"]), 'Only ["text"] is.'),
    "audio": (_never, ""),
    "functions": (_empty, "Use tools."),
    "function_call": (one_of("none", "auto"), "Use tool_choice."),
}
"""Fields that would change the result and cannot yet -> is this value one that changes nothing, and
the way out.
"""


def check_supported(request: GenerationRequest) -> None:
    """Raises `ApiError` 400 for what this server cannot do yet: nothing is silently ignored."""
    for name, (is_neutral, way_out) in UNSUPPORTED.items():
        value = getattr(request, name, None)
        if not is_neutral(value):
            raise unsupported(name, value, way_out)
    if request.use_beam_search:
        return
    beams.check_no_search(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", request.best_of, "Only the value of n is.")


def unsupported(name: str, value: Any, way_out: str = "") -> ApiError:
    message = f"{name}={shorten(value)} is not supported yet. {way_out}".rstrip()
    return ApiError(400, message, param=name)


def check_stream(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            400, "Stream options can only be defined when `stream=True`.", param="stream_options"
        )
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError(
            400,
            "prompt_logprobs are not available when `stream=True`; with echo and logprobs a "
            "stream of completions has those of the prompt.",
            param="prompt_logprobs",
        )


def check_choices(context: Context, request: GenerationRequest, num_prompts: int = 1) -> None:
    """The number of completions, n of each prompt."""
    n, limits = 1 if request.n is None else request.n, context.settings
    if n > limits.max_n:
        raise ApiError(400, f"n must be at most {limits.max_n}, got {shorten(n)}.", param="n")
    width = max(n, beams.width_of(request))
    most = max(limits.max_prompts, limits.max_n)
    if width * num_prompts > most:
        raise ApiError(
            400,
            f"{num_prompts} prompts with n={width} are {width * num_prompts} completions; one "
            f"request may ask for {most}. Send several requests.",
            param="n",
        )


def check_logprobs(context: Context, name: str, asked: int | None) -> None:
    """A number of logprobs at each place; -1 is the whole vocabulary."""
    if asked is None:
        return
    if asked < -1:
        raise ApiError(
            400, f"{name} must be >= 0, or -1 for all, got {shorten(asked)}.", param=name
        )
    info = context.engine.info
    if (info.vocab_size if asked == -1 else asked) > info.max_logprobs:
        raise ApiError(
            400,
            f"{name}={shorten(asked)} is more than this server allows: at most "
            f"{info.max_logprobs} (--max-logprobs).",
            param=name,
        )


def check_max_tokens(
    context: Context, name: str, asked: int | None, *, scores_prompt: bool
) -> None:
    """`scores_prompt`: the request returns something of the prompt, so 0 makes sense."""
    if asked is None:
        return
    least, limit = 0 if scores_prompt else 1, context.engine.info.max_model_len
    if asked < least:
        hint = "" if asked else " 0 scores the prompt and needs echo or prompt_logprobs."
        raise ApiError(
            400, f"{name} must be at least {least}, got {shorten(asked)}.{hint}", param=name
        )
    if asked > limit:
        raise ApiError(
            400,
            f"{name}={shorten(asked)} cannot be greater than max_model_len={limit}. Please request "
            "fewer output tokens.",
            param=name,
        )


def check_priority(context: Context, request: GenerationRequest) -> int:
    priority = request.priority or 0
    if priority and context.engine.info.scheduling_policy != "priority":
        raise ApiError(
            400,
            f"priority={shorten(priority)} has no effect under this server's scheduling policy; "
            "start it with --scheduling-policy priority, or leave priority out.",
            param="priority",
        )
    if not -(2**63) <= priority < 2**63:
        raise ApiError(400, "priority must be a 64-bit integer.", param="priority")
    return priority


def check_salt(request: GenerationRequest) -> str | None:
    salt = request.cache_salt
    if salt is not None and not _SALT.fullmatch(salt):
        raise ApiError(
            400,
            "cache_salt must be a string of 1 to 128 characters without '@', '/', '\\' and NUL, "
            f"got {shorten(salt)}.",
            param="cache_salt",
        )
    return salt


def sampling_params(
    context: Context,
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The parameters of one prompt. The other arguments are what the endpoint makes of its own
    fields.
    """
    defaults = context.engine.default_params
    fields: dict[str, Any] = {name: getattr(defaults, name) for name in _FROM_MODEL}
    given = {name: getattr(request, name) for name in _AS_GIVEN}
    fields |= {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        **fields,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=_stop(context, request.stop),
        stop_token_ids=_ids("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKEN_IDS),
        allowed_token_ids=_ids(
            "allowed_token_ids", request.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS
        ),
        bad_words=_texts("bad_words", request.bad_words, MAX_BAD_WORDS),
        logit_bias=_bias(request.logit_bias),
    )


def default_max_tokens(context: Context) -> int | None:
    """The model's own max_new_tokens; None if it has none."""
    default = context.engine.default_params.max_tokens
    return None if default == _OPENAI_MAX_TOKENS else default


def _stop(context: Context, raw: msgspec.Raw) -> list[str] | None:
    if bounded.is_absent(raw):
        return None
    if bounded.is_text(raw):
        stop = [bounded.decode(raw, str, name="stop")]
    else:
        limit = context.settings.max_stop_strings
        stop = bounded.items(raw, str, name="stop", limit=limit, noun="strings")
    if not all(stop):
        raise ApiError(400, "stop cannot contain an empty string.", param="stop")
    return stop


def _ids(name: str, raw: msgspec.Raw, limit: int) -> list[int] | None:
    if bounded.is_absent(raw):
        return None
    return bounded.integers(raw, name=name, limit=limit, noun="token ids")


def _texts(name: str, raw: msgspec.Raw, limit: int) -> list[str] | None:
    if bounded.is_absent(raw):
        return None
    return bounded.items(raw, str, name=name, limit=limit, noun="strings")


def _bias(raw: msgspec.Raw) -> dict[Any, float] | None:
    if bounded.is_absent(raw):
        return None
    name = "logit_bias"
    return (
        dict(bounded.numbers_by_key(raw, name=name, limit=MAX_LOGIT_BIAS, noun="entries")) or None
    )

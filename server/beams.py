"""use_beam_search: from what a client asked for to the engine's `BeamSearchParams`.

The names are vLLM's: n answers come back, best first, of a search as wide as best_of, or n where
that is absent. What a search cannot heed is refused; fields that programs always send are fine as
long as their value changes nothing. All functions raise `ApiError` 400.
"""

from __future__ import annotations

from typing import Any

from jaxpaged.beam_params import MAX_BEAM_WIDTH, BeamSearchParams
from jaxpaged.checks import shorten
from jaxpaged.errors import InvalidRequestError
from jaxpaged.sampling_params import SamplingParams
from server.context import Context
from server.errors import ApiError
from server.neutral import Neutral, one_of
from server.protocol_common import GenerationRequest

_NO_DRAWS = "Leave it out: a search draws nothing, it follows the likeliest tokens."
_NO_CHANGES = "Leave it out: a search takes the model's probabilities as they are."
_NO_SCORES = "Leave it out: the answers of a search have no logprobs."
_OF_THE_REQUEST: dict[str, tuple[Neutral, str]] = {
    "top_p": (one_of(1.0), _NO_DRAWS),
    "top_k": (one_of(0, -1), _NO_DRAWS),
    "min_p": (one_of(0.0), _NO_DRAWS),
    "presence_penalty": (one_of(0.0), _NO_CHANGES),
    "frequency_penalty": (one_of(0.0), _NO_CHANGES),
    "repetition_penalty": (one_of(1.0), _NO_CHANGES),
    "min_tokens": (one_of(0), "Use length_penalty, or ignore_eos."),
    "logprobs": (one_of(False), _NO_SCORES),
    "top_logprobs": (one_of(0), _NO_SCORES),
    "prompt_logprobs": (one_of(), _NO_SCORES),
}
"""Field -> is this value one that changes nothing, and the way out."""
_OF_THE_PARAMS = {
    "stop": "Use stop_token_ids, or cut the answers.",
    "bad_words": _NO_CHANGES,
    "logit_bias": _NO_CHANGES,
    "allowed_token_ids": _NO_CHANGES,
}
"""Those that count what they hold: nothing is neutral."""
_NEEDS_SEARCH: dict[str, Neutral] = {
    "length_penalty": one_of(1.0),
    "early_stopping": one_of(False),
}


def width_of(request: GenerationRequest) -> int:
    """Sequences that are computed for each prompt: samples, or beams of a search."""
    n = 1 if request.n is None else request.n
    if not request.use_beam_search or request.best_of is None:
        return n
    return request.best_of


def check_no_search(request: GenerationRequest) -> None:
    """Of a request without use_beam_search: nothing that only a search heeds."""
    for name, is_neutral in _NEEDS_SEARCH.items():
        value = getattr(request, name)
        if not is_neutral(value):
            raise ApiError(
                400,
                f"{name}={shorten(value)} has no effect without use_beam_search; set that to true, "
                f"or leave {name} out.",
                param=name,
            )


def refuse_search(asked: Any) -> None:
    """For endpoints whose answer is one text: the value of use_beam_search must be none."""
    if asked is not None and asked is not False:
        raise ApiError(
            400,
            f"use_beam_search={shorten(asked)} is not supported at this endpoint; use "
            "/v1/chat/completions or /v1/completions.",
            param="use_beam_search",
        )


def search_params(
    context: Context, request: GenerationRequest, params: SamplingParams
) -> BeamSearchParams | None:
    """The search that a request asks for, if it does. `params` are what its fields say otherwise.

    The sampling defaults that come with a model do not count: nothing is drawn.
    """
    if not request.use_beam_search:
        return None
    _check_neutral(request, params)
    width = _checked_width(context, request)
    try:
        return BeamSearchParams(
            beam_width=width,
            max_tokens=params.max_tokens,
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            early_stopping=False if request.early_stopping is None else request.early_stopping,
            temperature=0.0 if request.temperature is None else request.temperature,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
    except InvalidRequestError as error:
        raise ApiError(400, f"use_beam_search: {error}", param=error.param) from error


def _check_neutral(request: GenerationRequest, params: SamplingParams) -> None:
    for name, (is_neutral, way_out) in _OF_THE_REQUEST.items():
        value = getattr(request, name, None)
        if not is_neutral(value):
            raise _not_with_search(name, value, way_out)
    for name, way_out in _OF_THE_PARAMS.items():
        value = getattr(params, name)
        if value:
            raise _not_with_search(name, value, way_out)


def _not_with_search(name: str, value: Any, way_out: str) -> ApiError:
    message = f"{name}={shorten(value)} cannot be combined with use_beam_search. {way_out}"
    return ApiError(400, message, param=name)


def _checked_width(context: Context, request: GenerationRequest) -> int:
    name = "n" if request.best_of is None else "best_of"
    width, n = width_of(request), request.n or 1
    if width < n:
        raise ApiError(
            400,
            f"best_of={shorten(width)} is less than n={n}: a search gives as many answers as it "
            "has beams.",
            param="best_of",
        )
    num_seqs = context.engine.info.max_num_seqs
    if width > min(num_seqs, MAX_BEAM_WIDTH):
        limit = f"{MAX_BEAM_WIDTH}" if num_seqs > MAX_BEAM_WIDTH else f"{num_seqs} (--max-num-seqs)"
        raise ApiError(
            400,
            f"{name}={shorten(width)} beams are too many: they run together, and on this server a "
            f"search may have at most {limit}.",
            param=name,
        )
    return width

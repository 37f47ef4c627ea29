"""Types that completions and chat completions share. Null means absent for every optional field.

Ranges are checked where the sampling parameters are made, with better words than a decoder has;
here they are told to readers of the OpenAPI document only.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from jaxpaged.beam_params import MAX_LENGTH_PENALTY
from server.bounded import absent


def documented(**schema: Any) -> Meta:
    return Meta(extra_json_schema=schema)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1}}
_NULL = {"type": "null"}
TEXT_FORMAT = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"const": "text"}},
}

StopField = Annotated[
    Raw,
    documented(
        anyOf=[{"type": "string", "minLength": 1}, _TEXTS, _NULL],
        description="Texts that end the output; cut from it.",
    ),
]
IdsField = Annotated[Raw, documented(anyOf=[_IDS, _NULL])]
SomeIdsField = Annotated[Raw, documented(anyOf=[{**_IDS, "minItems": 1}, _NULL])]
WordsField = Annotated[
    Raw, documented(anyOf=[_TEXTS, _NULL], description="Texts that are never completed.")
]
BiasField = Annotated[
    Raw,
    documented(
        anyOf=[
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]+$"},
                "additionalProperties": {"type": "number"},
            },
            _NULL,
        ],
        description="Token id (as text) -> what is added to its logit, -100..100.",
    ),
]


def number(low: float | None = None, high: float | None = None, text: str = "") -> Meta:
    """Documents a range, both ends included."""
    bounds: dict[str, Any] = {"minimum": low, "maximum": high, "description": text or None}
    return documented(**{key: value for key, value in bounds.items() if value is not None})


def neutral(*values: Any) -> Meta:
    """Documents a field that is not supported yet: null and these values change nothing."""
    return documented(enum=[None, *values], description="Not supported yet.")


SeedField = Annotated[int | None, number(-(2**63), 2**64 - 1, "-1 is none; 64 bits count.")]
RepetitionField = Annotated[float | None, documented(exclusiveMinimum=0, maximum=1e30)]
PriorityField = Annotated[
    int | None,
    number(-(2**63), 2**63 - 1, "Smaller is sooner. Only on servers that schedule by priority."),
]
SaltField = Annotated[
    str | None,
    documented(
        pattern=r"^[^@/\\\u0000]*$",
        minLength=1,
        maxLength=128,
        description="Cached prefixes are shared only with requests of the same salt.",
    ),
]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """One more chunk at the end, with the usage."""
    continuous_usage_stats: bool | None = None
    """With include_usage: the usage so far in every chunk."""


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    """None: the first model that is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, number(1, text="Completions of each prompt.")] = None
    best_of: Annotated[
        int | None,
        number(1, text="With use_beam_search: its width, n if absent. Else only the value of n."),
    ] = None
    use_beam_search: Annotated[
        bool | None,
        documented(description="The n best answers that a search finds; nothing is drawn."),
    ] = None
    length_penalty: Annotated[
        float | None,
        number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, "Of a search: more favours the longer."),
    ] = None
    early_stopping: Annotated[
        Any,
        documented(enum=[None, False, True, "never"], description="Of a search: when it ends."),
    ] = None

    temperature: Annotated[float | None, number(0, 2)] = None
    top_p: Annotated[float | None, documented(exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[int | None, number(-1, text="0 and -1 turn it off.")] = None
    min_p: Annotated[float | None, number(0, 1)] = None
    presence_penalty: Annotated[float | None, number(-2, 2)] = None
    frequency_penalty: Annotated[float | None, number(-2, 2)] = None
    repetition_penalty: RepetitionField = None
    seed: SeedField = None
    logit_bias: BiasField = msgspec.field(default_factory=absent)
    allowed_token_ids: SomeIdsField = msgspec.field(default_factory=absent)
    bad_words: WordsField = msgspec.field(default_factory=absent)

    stop: StopField = msgspec.field(default_factory=absent)
    stop_token_ids: IdsField = msgspec.field(default_factory=absent)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, number(0)] = None

    prompt_logprobs: Annotated[int | None, number(-1, text="Not with stream.")] = None
    logprobs_mode: Annotated[
        str | None,
        documented(
            enum=["raw", "processed", None],
            description="Logprobs of the model, or of what the tokens are drawn from.",
        ),
    ] = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[
        int | None,
        documented(
            **{"minimum": -1, "not": {"const": 0}},
            description="Most tokens of the prompt; -1 is what fits.",
        ),
    ] = None
    truncation_side: Annotated[
        str | None, documented(enum=["left", "right", None], description="Where to cut.")
    ] = None
    cache_salt: SaltField = None
    priority: PriorityField = None
    request_id: str | None = None
    """Tail of the answer's id, unless the header X-Request-Id gives one."""

    # What cannot be done yet; anything but a neutral value is refused. See sampling.UNSUPPORTED.
    response_format: Annotated[
        Any,
        documented(
            anyOf=[TEXT_FORMAT, _NULL],
            description="Only text yet.",
        ),
    ] = None
    structured_outputs: Annotated[Any, neutral({})] = None
    guided_json: Annotated[Any, neutral()] = None
    guided_regex: Annotated[Any, neutral()] = None
    guided_choice: Annotated[Any, neutral([], {})] = None
    guided_grammar: Annotated[Any, neutral()] = None
    logprob_token_ids: Annotated[Any, neutral([], {})] = None
    prompt_embeds: Annotated[Any, neutral()] = None
    repetition_detection: Annotated[Any, neutral()] = None
    thinking_token_budget: Annotated[
        Any,
        documented(
            anyOf=[{"type": "integer", "maximum": -1}, _NULL],
            description="Only -1, no limit, yet.",
        ),
    ] = None
    kv_transfer_params: Annotated[Any, neutral([], {})] = None
    vllm_xargs: Annotated[Any, neutral([], {})] = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Prompt tokens that were taken from the prefix cache."""


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageInfo(msgspec.Struct):
    """Tokens of a request. A prompt counts once, whatever its n; an EOS that was drawn counts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry a prompt token: token id -> its log-probability. The first is null."""
StopReason = int | str | None
"""The stop string or token id that was met; null for EOS and for a length limit."""


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(msgspec.Struct):
    error: ErrorInfo

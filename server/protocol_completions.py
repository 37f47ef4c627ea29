"""/v1/completions: what comes in and what goes out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Raw

from server.protocol_common import (
    GenerationRequest,
    PromptLogprobs,
    StopReason,
    UsageInfo,
    documented,
    neutral,
    number,
)

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}

PromptField = Annotated[
    Raw,
    documented(
        anyOf=[
            _TEXT,
            {"type": "array", "items": _TEXT, "minItems": 1},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1},
        ],
        description="A text, token ids, or a list of either.",
    ),
]


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: PromptField
    max_tokens: Annotated[
        int | None, number(0, text="16 if absent; 0 scores the prompt, with echo.")
    ] = None
    logprobs: Annotated[
        int | None, number(-1, text="This many of the likeliest tokens at each place; -1: all.")
    ] = None
    suffix: Annotated[Any, neutral("")] = None


class LegacyLogprobs(msgspec.Struct):
    """Four lists of the same length."""

    text_offset: list[int]
    """Where in `text` the token begins, in characters."""
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    """prompt_index * n + sample."""
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class CompletionResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None = None
    system_fingerprint: str
    usage: UsageInfo


class CompletionChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. Text comes before, and apart from, the finish_reason."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | None = None

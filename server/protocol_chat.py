"""/v1/chat/completions: what comes in and what goes out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Raw

from server.bounded import absent
from server.protocol_common import (
    CompletionTokensDetails,
    GenerationRequest,
    PromptLogprobs,
    PromptTokensDetails,
    StopReason,
    documented,
    neutral,
    number,
)

_TEXT = {"type": "string"}
_NULL = {"type": "null"}
_PART = {
    "anyOf": [
        _TEXT,
        {
            "type": "object",
            "required": ["type", "text"],
            "properties": {
                "type": {"enum": ["text", "input_text", "output_text"]},
                "text": _TEXT,
            },
        },
        {
            "type": "object",
            "required": ["type", "refusal"],
            "properties": {"type": {"const": "refusal"}, "refusal": _TEXT},
        },
    ]
}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "minLength": 1}},
        }
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}, _NULL]},
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, _NULL]},
    },
    "anyOf": [
        {"required": ["content"]},
        {"properties": {"role": {"enum": ["assistant", "tool", "function"]}}},
    ],
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
            },
        },
    },
}

MESSAGES_SCHEMA: dict[str, Any] = {"type": "array", "items": _MESSAGE, "minItems": 1}
MessagesField = Annotated[Raw, documented(**MESSAGES_SCHEMA, description="The conversation.")]
ToolsField = Annotated[
    Raw,
    documented(
        anyOf=[{"type": "array", "items": _TOOL}, _NULL],
        description="Functions that the template shows to the model; [] is none.",
    ),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: MessagesField
    max_tokens: Annotated[int | None, number(0, text="The older max_completion_tokens.")] = None
    max_completion_tokens: Annotated[
        int | None, number(0, text="Wins over max_tokens; both absent: all that fits.")
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[
        int | None, number(-1, text="Needs logprobs; this many of the likeliest, -1: all.")
    ] = None

    tools: ToolsField = msgspec.field(default_factory=absent)
    tool_choice: Annotated[
        Any,
        documented(
            enum=[None, "none", "auto"],
            description="Forced calls are not supported yet. auto needs tools.",
        ),
    ] = None
    reasoning_effort: Effort | None = None
    """Sets the template's enable_thinking, unless chat_template_kwargs does."""
    include_reasoning: bool | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    """Only on servers that trust their clients with it."""
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None

    # What cannot be done yet; see sampling.UNSUPPORTED.
    documents: Annotated[Any, neutral([], {})] = None
    media_io_kwargs: Annotated[Any, neutral([], {})] = None
    mm_processor_kwargs: Annotated[Any, neutral([], {})] = None
    modalities: Annotated[Any, neutral([], ["text"])] = None
    audio: Annotated[Any, neutral()] = None
    functions: Annotated[Any, neutral([], {})] = None
    function_call: Annotated[Any, neutral("none", "auto")] = None


class ChatUsage(msgspec.Struct):
    """Tokens of a request; the prompt counts once, whatever n; an EOS that was drawn counts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    """Null where the server has no tokenizer."""


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ContentLogprob]


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: StopReason
    token_ids: list[int] | None


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str
    usage: ChatUsage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason = None
    token_ids: list[int] | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream: per choice the role, the content, and apart from it the end."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: ChatUsage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None

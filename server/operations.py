"""What the server does, endpoint by endpoint, for the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.protocol_anthropic import CountTokensRequest, MessagesRequest
from server.protocol_chat import ChatChunk, ChatRequest, ChatResponse
from server.protocol_common import ErrorBody
from server.protocol_completions import CompletionChunk, CompletionRequest, CompletionResponse
from server.protocol_models import ModelCard, ModelList
from server.protocol_responses import ResponsesRequest
from server.protocol_tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)

Schema = dict[str, Any]
OBJECT: Schema = {"type": "object"}
TEXT: Schema = {"type": "string"}
_WITH_BODY = (400, 404, 413, 500, 503)
"""What may be wrong with every request that is given to the engine."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path. Types are msgspec Structs or JSON schemas."""

    method: str
    path: str
    summary: str
    tag: str
    body: type[Any] | None = None
    answer: type[Any] | Schema | None = None
    """None: an empty body."""
    media_type: str = "application/json"
    events: type[Any] | Schema | None = None
    """What each event holds, where the answer may be a stream."""
    errors: tuple[int, ...] = ()
    error: type[Any] | Schema = ErrorBody
    open: bool = False
    """Needs no key."""


def _post(path: str, summary: str, tag: str, **more: Any) -> Operation:
    return Operation(method="post", path=path, summary=summary, tag=tag, errors=_WITH_BODY, **more)


def _get(path: str, summary: str, tag: str, **more: Any) -> Operation:
    return Operation(method="get", path=path, summary=summary, tag=tag, **more)


_ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": TEXT, "message": TEXT},
        },
    },
}
_COUNT: Schema = {
    "type": "object",
    "required": ["input_tokens"],
    "properties": {"input_tokens": {"type": "integer", "minimum": 0}},
}
_READY: Schema = {
    "type": "object",
    "required": ["status", "detail"],
    "properties": {"status": TEXT, "detail": TEXT, "programs": TEXT},
}
_LOAD: Schema = {
    "type": "object",
    "required": ["server_load"],
    "properties": {"server_load": {"type": "integer", "minimum": 0}},
}
_VERSION: Schema = {"type": "object", "required": ["version"], "properties": {"version": TEXT}}

OPERATIONS: tuple[Operation, ...] = (
    _post(
        "/v1/completions",
        "Complete prompts: texts or token ids.",
        "OpenAI",
        body=CompletionRequest,
        answer=CompletionResponse,
        events=CompletionChunk,
    ),
    _post(
        "/v1/chat/completions",
        "Answer a conversation.",
        "OpenAI",
        body=ChatRequest,
        answer=ChatResponse,
        events=ChatChunk,
    ),
    _get(
        "/v1/models",
        "The names that the model is served under.",
        "OpenAI",
        answer=ModelList,
        errors=(503,),
    ),
    _get(
        "/v1/models/{id}",
        "One of these names; it may hold slashes.",
        "OpenAI",
        answer=ModelCard,
        errors=(404, 503),
    ),
    _post(
        "/v1/responses",
        "Answer a conversation in the manner of OpenAI's Responses API. Nothing is stored.",
        "OpenAI",
        body=ResponsesRequest,
        answer=OBJECT,
        events=OBJECT,
    ),
    _post(
        "/v1/messages",
        "Answer a conversation in the manner of Anthropic's Messages API.",
        "Anthropic",
        body=MessagesRequest,
        answer=OBJECT,
        events=OBJECT,
        error=_ANTHROPIC_ERROR,
    ),
    _post(
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        "Anthropic",
        body=CountTokensRequest,
        answer=_COUNT,
        error=_ANTHROPIC_ERROR,
    ),
    _post(
        "/tokenize",
        "Token ids of a text, or of a conversation as the model reads it.",
        "Tokens",
        body=TokenizeRequest,
        answer=TokenizeResponse,
    ),
    _post(
        "/detokenize",
        "The text of token ids.",
        "Tokens",
        body=DetokenizeRequest,
        answer=DetokenizeResponse,
    ),
    _get(
        "/tokenizer_info",
        "Special tokens and chat template.",
        "Tokens",
        answer=TokenizerInfo,
        errors=(400, 404, 503),
    ),
    _get(
        "/health", "200 unless this process must be restarted.", "State", errors=(503,), open=True
    ),
    _get("/ping", "As /health.", "State", errors=(503,), open=True),
    Operation(
        method="post", path="/ping", summary="As /health.", tag="State", errors=(503,), open=True
    ),
    _get(
        "/ready",
        "200 if requests are taken; 503 while loading, compiling or shutting down.",
        "State",
        answer=_READY,
        errors=(503,),
        error=_READY,
        open=True,
    ),
    _get("/version", "The version of the server.", "State", answer=_VERSION),
    _get("/load", "Requests that are being answered.", "State", answer=_LOAD),
    _get(
        "/metrics",
        "Metrics in Prometheus' text format.",
        "State",
        answer=TEXT,
        media_type="text/plain",
    ),
    _get(
        "/debug/blocks",
        "The blocks of the KV cache and the requests that hold them.",
        "State",
        answer=OBJECT,
        errors=(500, 503),
    ),
    _get("/openapi.json", "This document.", "State", answer=OBJECT),
)

"""/tokenize, /detokenize and /tokenizer_info: what comes in and what goes out."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from server.bounded import absent
from server.protocol_chat import MESSAGES_SCHEMA, ToolsField
from server.protocol_common import documented

TokenIds = Annotated[
    Raw, documented(type="array", items={"type": "integer", "minimum": 0}, description="Ids.")
]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Raw, documented(anyOf=[MESSAGES_SCHEMA, {"type": "null"}])] = msgspec.field(
        default_factory=absent
    )
    add_special_tokens: bool | None = None
    """True if absent; with messages, whose template writes them, false."""
    return_token_strs: bool | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ToolsField = msgspec.field(default_factory=absent)


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(msgspec.Struct):
    prompt: Annotated[str, Meta(description="Special tokens are shown.")]


class TokenizerInfo(msgspec.Struct):
    tokenizer_class: str
    vocab_size: int
    """One more than the largest id, added tokens included."""
    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token: str | None
    chat_template: str | None
    add_bos_token: bool
    """Texts get a BOS in front."""
    model_max_length: int

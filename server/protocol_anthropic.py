"""What a client may send to /v1/messages, after Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Raw

from server.bounded import absent
from server.protocol_common import (
    PriorityField,
    RepetitionField,
    SaltField,
    SeedField,
    WordsField,
    documented,
    neutral,
    number,
)

_TEXT = {"type": "string"}
_NULL = {"type": "null"}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_BLOCKS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {
                "enum": [
                    *("text", "document", "tool_use", "tool_result"),
                    *("thinking", "redacted_thinking"),
                ]
            }
        },
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [_TEXT, _BLOCKS]},
    },
}

MessagesField = Annotated[
    Raw,
    documented(type="array", items=_MESSAGE, minItems=1, description="The conversation."),
]
SystemField = Annotated[
    Raw, documented(anyOf=[_TEXT, _BLOCKS, _NULL], description="Text, or a list of text blocks.")
]
SchemaToolsField = Annotated[
    Raw,
    documented(
        anyOf=[_OBJECTS, _NULL],
        description="Tools with an input_schema are shown to the model; others are left out.",
    ),
]


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One turn. Content is text or a list of typed blocks."""

    role: str
    content: str | list[dict[str, Any]]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens: all of a request that becomes its prompt."""

    model: str | None = None
    """None: the first model that is served."""
    messages: MessagesField
    system: SystemField = msgspec.field(default_factory=absent)
    tools: SchemaToolsField = msgspec.field(default_factory=absent)
    tool_choice: Annotated[
        dict[str, Any] | None,
        documented(
            properties={"type": {"enum": ["auto", "none", None]}},
            description="Forced calls are not supported yet.",
        ),
    ] = None
    thinking: dict[str, Any] | None = None
    """`enabled` and `disabled` reach the chat template as `enable_thinking`."""
    output_config: Annotated[
        dict[str, Any] | None,
        documented(
            properties={"format": {"type": "null"}}, description="Formats are not supported yet."
        ),
    ] = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not Anthropic's: variables for the chat template."""


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages. Null means absent; fields that are not here are ignored."""

    max_tokens: Annotated[int, number(1, text="More than the context holds: all that fits.")]
    stream: bool | None = None
    stop_sequences: WordsField = msgspec.field(default_factory=absent)
    temperature: Annotated[float | None, number(0, 2)] = None
    top_p: Annotated[float | None, documented(exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[int | None, number(-1)] = None

    # Not Anthropic's: the same words as in chat completions.
    min_p: Annotated[float | None, number(0, 1)] = None
    seed: SeedField = None
    min_tokens: Annotated[int | None, number(0)] = None
    ignore_eos: bool | None = None
    repetition_penalty: RepetitionField = None
    priority: PriorityField = None
    cache_salt: SaltField = None
    request_id: str | None = None

    # Refused: an answer is one text here. See `server.beams`.
    use_beam_search: Annotated[Any, neutral(False)] = None


SHARED_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "ignore_eos",
    "repetition_penalty",
    "priority",
    "cache_salt",
    "request_id",
)
"""Fields that chat completions have under the same name and with the same meaning."""

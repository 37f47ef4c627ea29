"""What a client may send to /v1/responses, after OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Raw

from server.bounded import absent
from server.protocol_common import (
    TEXT_FORMAT,
    IdsField,
    PriorityField,
    RepetitionField,
    SaltField,
    SeedField,
    StopField,
    documented,
    neutral,
    number,
)

_OBJECTS = {"type": "array", "items": {"type": "object"}}
_NULL = {"type": "null"}
_ALLOWED_TOOLS = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["none", "auto"]},
        "tools": _OBJECTS,
    },
}
_NOTHING = documented(enum=[None, "", {}, []], description="Nothing is stored.")

InputField = Annotated[
    Raw,
    documented(
        anyOf=[{"type": "string"}, {**_OBJECTS, "minItems": 1}],
        description="The user's text, or the conversation as a list of items.",
    ),
]
FunctionToolsField = Annotated[
    Raw,
    documented(
        anyOf=[_OBJECTS, _NULL],
        description="Function tools are shown to the model; tools of other kinds are left out.",
    ),
]


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses. Null means absent; fields that are not here are ignored."""

    model: str | None = None
    """None: the first model that is served."""
    input: InputField
    instructions: str | None = None
    """A system message in front of `input`."""
    max_output_tokens: Annotated[int | None, number(1, text="Absent: all that fits.")] = None
    temperature: Annotated[float | None, number(0, 2)] = None
    top_p: Annotated[float | None, documented(exclusiveMinimum=0, maximum=1)] = None
    top_logprobs: Annotated[int | None, number(0)] = None
    include: list[str] | None = None
    """Only message.output_text.logprobs has an effect."""
    stream: bool | None = None
    text: Annotated[
        dict[str, Any] | None,
        documented(
            properties={"format": {"anyOf": [TEXT_FORMAT, _NULL]}},
            description="Formats but text are not supported yet.",
        ),
    ] = None
    tools: FunctionToolsField = msgspec.field(default_factory=absent)
    tool_choice: Annotated[
        Any,
        documented(
            anyOf=[{"enum": ["none", "auto", None]}, _ALLOWED_TOOLS],
            description="Forced calls are not supported yet.",
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None

    # Refused unless empty: nothing is stored between two requests.
    previous_response_id: Annotated[str | None, documented(enum=[None, ""])] = None
    conversation: Annotated[Any, _NOTHING] = None
    background: Annotated[bool | None, documented(enum=[None, False])] = None
    prompt: Annotated[Any, _NOTHING] = None

    # Come back as they were sent, or as what is so, and do nothing.
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None
    store: bool | None = None
    truncation: str | None = None
    service_tier: str | None = None
    stream_options: Any = None

    # Not OpenAI's: the same words as in chat completions.
    top_k: Annotated[int | None, number(-1)] = None
    min_p: Annotated[float | None, number(0, 1)] = None
    seed: SeedField = None
    stop: StopField = msgspec.field(default_factory=absent)
    stop_token_ids: IdsField = msgspec.field(default_factory=absent)
    min_tokens: Annotated[int | None, number(0)] = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Annotated[float | None, number(-2, 2)] = None
    frequency_penalty: Annotated[float | None, number(-2, 2)] = None
    repetition_penalty: RepetitionField = None
    priority: PriorityField = None
    cache_salt: SaltField = None
    request_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Refused: an answer is one text here. See `server.beams`.
    use_beam_search: Annotated[Any, neutral(False)] = None


SHARED_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "user",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "priority",
    "cache_salt",
    "request_id",
    "chat_template_kwargs",
)
"""Fields that chat completions have under the same name and with the same meaning."""

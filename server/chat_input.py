"""From the body of a chat completion to what the template gets. Nothing runs here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxpaged.checks import shorten
from jaxpaged.text.messages import PART_JOINER
from server import bounded
from server.context import Context
from server.errors import ApiError
from server.protocol_chat import ChatRequest
from server.sampling import unsupported

MAX_MESSAGES = 16384
_NO_FORCED_CALLS = "Use auto; the answer is text, whatever the model calls."


@dataclass(frozen=True, slots=True)
class Conversation:
    """Arguments of `AsyncEngine.render_chat`, and who speaks next."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    role: str
    """Of the answer."""
    continued: str
    """Text of the last message where the answer goes on in its role; "" otherwise."""


def read_conversation(context: Context, request: ChatRequest) -> Conversation:
    """Raises `ApiError` 400 for fields that do not fit together, or do not exist yet."""
    messages = bounded.items(
        request.messages, dict[str, Any], name="messages", limit=MAX_MESSAGES, noun="messages"
    )
    if not messages:
        raise ApiError(400, "messages must not be empty.", param="messages")
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise ApiError(
            400,
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            param="continue_final_message",
        )
    begins = not continues and request.add_generation_prompt is not False
    role, last = context.settings.response_role, messages[-1]
    if not begins and isinstance(last.get("role"), str):
        role = last["role"]
    template, variables = _template(context, request)
    options = {
        "add_generation_prompt": begins,
        "continue_final_message": continues,
        "tools": _tools(context, request),
        "chat_template": template,
        "chat_template_kwargs": variables,
        "add_special_tokens": bool(request.add_special_tokens),
        "untrusted": template is not None,
    }
    continued = _text_of(last.get("content")) if last.get("role") == role else ""
    return Conversation(messages, options, role, continued)


def _template(context: Context, request: ChatRequest) -> tuple[str | None, dict[str, Any]]:
    """The request's own template, if it may have one, and the template's variables."""
    settings = context.settings
    variables = {**(settings.default_chat_template_kwargs or {})}
    own = dict(request.chat_template_kwargs or {})
    hidden = own.pop("chat_template", None)
    template = request.chat_template if hidden is None else hidden
    if template is not None:
        name = "chat_template" if hidden is None else "chat_template_kwargs"
        if not settings.trust_request_chat_template:
            raise ApiError(
                400,
                "This server does not take chat templates from requests; start it with "
                "--trust-request-chat-template to allow them.",
                param=name,
            )
        if not isinstance(template, str):
            raise ApiError(400, f"chat_template must be a text, got {template!r:.80}.", param=name)
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        variables["enable_thinking"] = request.reasoning_effort != "none"
    return template, variables | own


def _tools(context: Context, request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools to be shown to the model; none at all where it must not call any."""
    tools = parse_tools(context, request.tools)
    choice = request.tool_choice
    if choice is None or choice == "none":
        return tools if choice is None else None
    if tools is None or (not tools and choice != "auto"):
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if choice == "auto":
        return tools
    if choice == "required":
        raise unsupported("tool_choice", choice, _NO_FORCED_CALLS)
    name = _named(choice)
    if name not in [tool["function"]["name"] for tool in tools]:
        raise ApiError(
            400, f"tool_choice names {shorten(name)}, which is not in tools.", param="tool_choice"
        )
    raise unsupported("tool_choice", choice, _NO_FORCED_CALLS)


def parse_tools(context: Context, raw: msgspec.Raw) -> list[dict[str, Any]] | None:
    """The checked tools; None for null. Raises `ApiError` 400."""
    if bounded.is_absent(raw):
        return None
    limit = context.settings.max_tools
    tools = bounded.items(raw, dict[str, Any], name="tools", limit=limit, noun="tools")
    for i, tool in enumerate(tools):
        _check_tool(i, tool)
    return tools


def _check_tool(i: int, tool: Mapping[str, Any]) -> None:
    if tool.get("type") != "function":
        shown = f"{tool.get('type')!r:.80}"
        raise ApiError(
            400, f"tools[{i}] has type {shown}; only function is supported.", param="tools"
        )
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ApiError(400, f"tools[{i}].function needs a name.", param="tools")
    assert isinstance(function, Mapping)
    for field, kind, noun in (("parameters", Mapping, "an object"), ("description", str, "text")):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise ApiError(
                400,
                f"tools[{i}].function.{field} must be {noun}, got {shorten(value)}.",
                param="tools",
            )


def _named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise ApiError(
            400,
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
            f'{{"name": ...}}}}, got {shorten(choice)}.',
            param="tool_choice",
        )
    return name


def _text_of(content: Any) -> str:
    """As the template gets it."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        return PART_JOINER.join(text for text in parts if isinstance(text, str))
    return content if isinstance(content, str) else ""

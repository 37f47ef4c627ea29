"""A request to /v1/responses as the chat completion it stands for."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import msgspec

from jaxpaged.errors import InvalidRequestError
from server.beams import refuse_search
from server.bounded import decode, is_absent
from server.errors import ApiError
from server.protocol_responses import SHARED_FIELDS, ResponsesRequest

_log = logging.getLogger(__name__)

LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_ITEMS = (
    "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, "
    "additional_tools and reasoning (which is left out)"
)

Item = dict[str, Any]
# Not typed as types, which unions are not for type checkers.
_INPUT: Any = str | list[Item] | None
_TOOLS: Any = list[Item] | None


def chat_fields(body: ResponsesRequest) -> Item:
    """The body of the chat completion, without what is absent.

    Walks the whole conversation, so call it beside the event loop. Raises `InvalidRequestError` and
    `ApiError` 400 for what this server does not do: anything that needs stored responses, output
    formats but text, forced tool calls, parts that are not text.
    """
    _refuse_stored(body)
    _refuse_format(body.text)
    refuse_search(body.use_beam_search)
    items: str | list[Item] | None = decode(body.input, _INPUT, name="input")
    tools: list[Item] = decode(body.tools, _TOOLS, name="tools") or []
    if isinstance(items, list):
        tools += [tool for i, item in enumerate(items) for tool in _more_tools(i, item)]
    functions = _functions(tools)
    fields: Item = {name: getattr(body, name) for name in SHARED_FIELDS}
    fields["messages"] = _messages(body.instructions, items)
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["stream"] = body.stream
    fields["reasoning_effort"] = (body.reasoning or {}).get("effort")
    choice = _tool_choice(body.tool_choice)
    if functions:
        fields["tools"] = _offered(functions, body.tool_choice)
        fields["tool_choice"] = choice
    if wants_logprobs(body):
        fields["logprobs"] = True
        fields["top_logprobs"] = body.top_logprobs or 0
    return {name: value for name, value in fields.items() if not _is_absent(value)}


def wants_logprobs(body: ResponsesRequest) -> bool:
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, msgspec.Raw) and is_absent(value))


def _functions(tools: list[Item]) -> list[Item]:
    """The function tools in chat's shape. Others are OpenAI's to run, and are left out."""
    found = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            warn_of_left_out(str(tool.get("type"))[:80])
            continue
        if not isinstance(tool.get("name"), str):
            raise InvalidRequestError(
                f"tools[{i}] is a function tool without a name.", param="tools"
            )
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


@lru_cache(maxsize=64)
def warn_of_left_out(kind: str) -> None:
    """Once a kind of tool."""
    _log.warning("Tools of type %r are not offered to the model: only functions are.", kind)


def _more_tools(i: int, item: Item) -> list[Item]:
    if item.get("type") != "additional_tools":
        return []
    tools = item.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _bad(f"input[{i}].tools must be a list of tools.")
    return tools


def _refuse_stored(body: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) not in (None, "", [], {}):
            raise InvalidRequestError(
                f"{name} is not supported: this server stores nothing between requests. Send the "
                "whole conversation in input.",
                param=name,
            )
    if body.background:
        raise InvalidRequestError(
            "background=true is not supported: this server stores no responses to be fetched "
            "later. Use stream=true instead.",
            param="background",
        )


def _refuse_format(text: dict[str, Any] | None) -> None:
    form = (text or {}).get("format")
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return
    kind = form.get("type") if isinstance(form, dict) else form
    raise InvalidRequestError(
        f"text.format of type {kind!r:.80} is not supported yet; only text is.", param="text.format"
    )


def _tool_choice(choice: str | Item | None) -> str | None:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools", [])
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InvalidRequestError(
                "tool_choice.tools must be a list of tools.", param="tool_choice"
            )
        choice = str(choice.get("mode", "auto"))
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto")):
        return choice
    raise InvalidRequestError(
        f"tool_choice={choice!r:.200} is not supported yet; only 'none' and 'auto' are.",
        param="tool_choice",
    )


def _offered(tools: list[Item], choice: str | Item | None) -> list[Item]:
    """The tools that `tool_choice` leaves, in chat's shape."""
    if isinstance(choice, dict) and "tools" in choice:
        allowed = [tool.get("name") for tool in choice["tools"]]
        return [tool for tool in tools if tool["function"].get("name") in allowed]
    return tools


def _messages(instructions: str | None, items: str | list[Item] | None) -> list[Item]:
    messages: list[Item] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if items is None:
        raise _bad("input must be a text or a list of items, got null.")
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
        return messages
    if not items:
        raise _bad("input must not be an empty list.")
    names: dict[str, str] = {}
    """Call id -> function: some templates print the name beside a tool's output."""
    for i, item in enumerate(items):
        kind = item.get("type") or "message"
        if kind in ("reasoning", "additional_tools"):
            continue
        if kind == "message":
            messages.append(_message(i, item))
        elif kind in ("function_call", "custom_tool_call"):
            _add_call(messages, _call(i, item, names))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(_output(i, item, names))
        elif kind == "item_reference":
            raise _bad(
                f"input[{i}] refers to a stored item, but this server stores nothing between "
                "requests. Send the item itself."
            )
        else:
            raise _bad(f"input[{i}] has type {kind!r:.80}; supported are {_ITEMS}.")
    return messages


def _message(i: int, item: Item) -> Item:
    role = item.get("role")
    if not isinstance(role, str) or role not in ("user", "assistant", "system", "developer"):
        raise _bad(
            f"input[{i}].role must be user, assistant, system or developer, got {role!r:.80}."
        )
    return {"role": role, "content": _content(f"input[{i}].content", item.get("content"))}


def _content(where: str, content: Any) -> str | list[Item]:
    """Text as it is; parts as chat knows them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"{where} must be text or a list of parts, got {content!r:.80}.")
    parts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_PARTS or kind == "refusal":
            text = part.get("refusal" if kind == "refusal" else "text")
        else:
            raise _bad(
                f"{where}[{j}] has type {kind!r:.80}; this server takes text only: "
                "input_text, output_text and refusal."
            )
        if not isinstance(text, str):
            raise _bad(f"{where}[{j}] must hold a string, got {text!r:.80}.")
        parts.append({"type": "text", "text": text})
    return parts


def _call(i: int, item: Item, names: dict[str, str]) -> Item:
    custom = item.get("type") == "custom_tool_call"
    name, call_id = item.get("name"), item.get("call_id")
    given = item.get("input" if custom else "arguments")
    if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(given, str):
        fields = "name, call_id and input" if custom else "name, call_id and arguments"
        raise _bad(f"input[{i}] is a tool call, which needs {fields} as strings.")
    names[call_id] = name
    arguments: Any = {"input": given} if custom else given
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _add_call(messages: list[Item], call: Item) -> None:
    """Text and calls of one turn are one message in chat."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _output(i: int, item: Item, names: dict[str, str]) -> Item:
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise _bad(f"input[{i}].call_id must be a string, got {call_id!r:.80}.")
    content = _content(f"input[{i}].output", item.get("output"))
    message: Item = {"role": "tool", "tool_call_id": call_id, "content": content}
    if call_id in names:
        message["name"] = names[call_id]
    return message


def in_words_of_responses(error: ApiError) -> ApiError:
    """The error with the names that /v1/responses has for chat's fields."""
    message, param = error.message, error.param
    if param == "messages":
        param = "input"
    elif param in ("max_completion_tokens", "max_tokens"):
        message, param = message.replace(param, "max_output_tokens"), "max_output_tokens"
    return ApiError(
        error.status,
        message,
        param=param,
        type=error.type,
        code=error.code,
        retry_after=error.retry_after,
    )


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="input")

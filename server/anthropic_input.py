"""A request to /v1/messages as the chat completion it stands for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from jaxpaged.errors import InvalidRequestError
from server.beams import refuse_search
from server.bounded import decode, is_absent, is_text, items
from server.chat_input import MAX_MESSAGES
from server.protocol_anthropic import (
    SHARED_FIELDS,
    AnthropicMessage,
    CountTokensRequest,
    MessagesRequest,
)

Item = dict[str, Any]
# Not typed as types, which unions are not for type checkers.
_SYSTEM: Any = str | list[Item] | None
_TOOLS: Any = list[Item] | None
_log = logging.getLogger(__name__)


def chat_fields(body: MessagesRequest, max_model_len: int) -> Item:
    """The body of the chat completion, without what is absent.

    `max_tokens` is required by this API, so clients make one up; one that is larger than any
    answer can be means all that fits. Walks the whole conversation, so call it beside the event
    loop. Raises `InvalidRequestError` and `ApiError` 400 for what this server does not do: images
    and files, forced tool calls, output formats but text.
    """
    if body.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens must be an integer >= 1, got {body.max_tokens}.", param="max_tokens"
        )
    refuse_search(body.use_beam_search)
    fields = prompt_fields(body)
    fields.update((name, getattr(body, name)) for name in SHARED_FIELDS)
    fields["max_tokens"] = min(body.max_tokens, max_model_len)
    fields["stream"] = body.stream
    if is_text(body.stop_sequences):  # chat would take it
        raise InvalidRequestError(
            "stop_sequences must be a list of texts, got a text.", param="stop_sequences"
        )
    fields["stop"] = None if is_absent(body.stop_sequences) else body.stop_sequences
    fields["reasoning_effort"] = (body.output_config or {}).get("effort")
    return {name: value for name, value in fields.items() if value is not None}


def prompt_fields(body: CountTokensRequest) -> Item:
    """The part of chat's body that becomes the prompt."""
    _refuse_format(body.output_config)
    messages = _messages(body)
    fields: Item = {"model": body.model, "messages": messages}
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        # The client has begun the answer; here the model goes on with its words.
        fields["continue_final_message"] = True
        fields["add_generation_prompt"] = False
    tools = _tools(decode(body.tools, _TOOLS, name="tools") or [])
    choice = _tool_choice(body.tool_choice)
    if tools:
        fields["tools"] = tools
        fields["tool_choice"] = choice
    thinking = (body.thinking or {}).get("type")
    kwargs = dict(body.chat_template_kwargs or {})
    if thinking in ("enabled", "disabled"):
        kwargs.setdefault("enable_thinking", thinking == "enabled")
    fields["chat_template_kwargs"] = kwargs or None
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_format(output: Item | None) -> None:
    form = (output or {}).get("format")
    if form is not None:
        kind = form.get("type") if isinstance(form, dict) else form
        raise InvalidRequestError(
            f"output_config.format of type {kind!r:.80} is not supported yet; leave it out.",
            param="output_config.format",
        )


def _tools(tools: list[Item]) -> list[Item]:
    """Chat's function tools. Those without a schema are known to Anthropic's models only."""
    found = []
    for i, tool in enumerate(tools):
        if "input_schema" not in tool:
            warn_of_left_out(str(tool.get("type"))[:80])
            continue
        if not isinstance(tool.get("name"), str) or not isinstance(tool["input_schema"], dict):
            raise InvalidRequestError(
                f"tools[{i}] needs a name (a string) and an input_schema (an object).",
                param="tools",
            )
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return found


@lru_cache(maxsize=64)
def warn_of_left_out(kind: str) -> None:
    """Once a kind of tool."""
    _log.warning("Tools of type %r have no input_schema; the model is not told of them.", kind)


def _tool_choice(choice: Item | None) -> str | None:
    kind = (choice or {}).get("type")
    if kind not in (None, "auto", "none"):
        raise InvalidRequestError(
            f"tool_choice of type {kind!r:.80} is not supported yet; only 'auto' and 'none' are.",
            param="tool_choice",
        )
    return kind


def _messages(body: CountTokensRequest) -> list[Item]:
    chat: list[Item] = []
    system: str | list[Item] | None = decode(body.system, _SYSTEM, name="system")
    if system:
        chat.append({"role": "system", "content": _texts("system", system)})
    messages = items(
        body.messages, AnthropicMessage, name="messages", limit=MAX_MESSAGES, noun="messages"
    )
    if not messages:
        raise _bad("messages must not be empty.")
    names: dict[str, str] = {}
    """Id of a tool's use -> the tool: some templates print the name beside a result."""
    for i, message in enumerate(messages):
        for turn in _turns(i, message, names):
            _add(chat, turn)
    return chat


def _add(chat: list[Item], turn: Item) -> None:
    """Turns of one role in a row are one turn, as Anthropic's API has it."""
    last: Item = chat[-1] if chat else {"role": None}
    if last["role"] != turn["role"] or turn["role"] == "tool":
        chat.append(turn)
        return
    # In place: there may be thousands of them.
    last["content"] = _parts(last["content"])
    last["content"] += _parts(turn["content"])
    if "tool_calls" in turn:
        last.setdefault("tool_calls", []).extend(turn["tool_calls"])


def _parts(content: str | list[Item]) -> list[Item]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _turns(i: int, message: AnthropicMessage, names: dict[str, str]) -> Iterator[Item]:
    where = f"messages[{i}].content"
    if message.role in ("user", "system"):
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        else:
            yield from _blocks(where, message.role, message.content, names)
    elif message.role == "assistant":
        yield _assistant(where, message.content, names)
    else:
        raise _bad(
            f"messages[{i}].role must be user, assistant or system, got {message.role!r:.80}."
        )


def _blocks(where: str, role: str, blocks: list[Item], names: dict[str, str]) -> Iterator[Item]:
    """A user's text, in the order it came, around the results of tools."""
    parts: list[Item] = []
    seen = False
    for j, block in enumerate(blocks):
        if block.get("type") == "tool_result" and role == "user":
            if parts:
                yield {"role": role, "content": parts}
            parts = []
            yield _tool_result(f"{where}[{j}]", block, names)
            seen = True
        else:
            parts += _text_parts(f"{where}[{j}]", block)
    if parts or not seen:
        yield {"role": role, "content": parts}


def _tool_result(where: str, block: Item, names: dict[str, str]) -> Item:
    use = block.get("tool_use_id")
    if not isinstance(use, str):
        raise _bad(f"{where}.tool_use_id must be a string, got {use!r:.80}.")
    content = block.get("content")
    message: Item = {
        "role": "tool",
        "tool_call_id": use,
        "content": _texts(f"{where}.content", "" if content is None else content),
    }
    if use in names:
        message["name"] = names[use]
    return message


def _assistant(where: str, content: str | list[Item], names: dict[str, str]) -> Item:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    parts: list[Item] = []
    calls = []
    for j, block in enumerate(content):
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_tool_use(f"{where}[{j}]", block, names))
        elif kind not in ("thinking", "redacted_thinking"):
            parts += _text_parts(f"{where}[{j}]", block)
    message: Item = {"role": "assistant", "content": parts}
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(where: str, block: Item, names: dict[str, str]) -> Item:
    use, name, given = block.get("id"), block.get("name"), block.get("input")
    if not isinstance(use, str) or not isinstance(name, str) or not isinstance(given, dict):
        raise _bad(f"{where} is a tool_use block, which needs id, name and an object as input.")
    names[use] = name
    arguments = json.dumps(given, ensure_ascii=False)
    return {"id": use, "type": "function", "function": {"name": name, "arguments": arguments}}


def _texts(where: str, content: Any) -> str | list[Item]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _bad(f"{where} must be text or a list of blocks, got {content!r:.80}.")
    return [part for j, block in enumerate(content) for part in _text_parts(f"{where}[{j}]", block)]


def _text_parts(where: str, block: Item) -> list[Item]:
    """The text of a text block, or of a document that is plain text, as chat's parts."""
    kind = block.get("type")
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        title = block.get("title")
        text = f"{title}\n\n{source.get('data')}" if title else source.get("data")
    elif kind == "text":
        text = block.get("text")
    else:
        raise _bad(
            f"{where} has type {kind!r:.80}, which this server cannot read; it takes text, "
            "documents of plain text, tool_use, tool_result and thinking (which is left out)."
        )
    if not isinstance(text, str):
        raise _bad(f"{where} must hold a string, got {text!r:.80}.")
    return [{"type": "text", "text": text}]


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")

"""Chat messages as clients send them, brought into the one form that chat templates know.

Clients disagree about nearly everything here, and templates forgive nothing, so each rule below
stands for requests that failed, or silently changed the prompt, before it was there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpaged.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PART_JOINER = "\n"
"""Between the text parts of one message."""
SYSTEM_JOINER = "\n\n"
"""Between several system messages: a blank line, as between paragraphs."""
MAX_DEPTH = 100
"""Lists and objects within each other, in a message, a tool or a template variable."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class Arguments(dict[str, Any]):
    """Arguments of a tool call: an object for templates that look inside or use `tojson`, and JSON
    text for those that print it or add it to a string, as if it were still what the client sent.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: object) -> str:
        return str(self) + text if isinstance(text, str) else NotImplemented

    def __radd__(self, text: object) -> str:
        return text + str(self) if isinstance(text, str) else NotImplemented


def normalise_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str = "",
    takes_parts: Callable[[str], bool] | None = None,
) -> list[dict[str, Any]]:
    """Copies of the messages, ready for the Jinja text `template`.

    Contents become strings, or lists of text parts in the roles for which `takes_parts` says so.
    Fields that are null count as absent. Raises `InvalidRequestError`, naming the place, for
    unknown roles, contents that are not text, and calls without a function's name.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _bad("messages must be a list of messages.")
    if not messages:
        raise _bad("messages must not be empty.")
    chat: list[dict[str, Any]] = []
    last_call: str | None = None
    """Id of the last call of a tool."""
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad(f"messages[{i}] must be an object with role and content.")
        role = _role(i, message.get("role"), template)
        texts = _texts(i, role, message)
        fields = {k: v for k, v in message.items() if v is not None and k not in _REPLACED}
        copy = plain(fields, f"messages[{i}]", "messages")
        copy |= {"role": role, "content": texts}
        _add_calls(i, message, copy)
        _add_reasoning(message, copy)
        if copy.get("tool_calls"):
            last_call = copy["tool_calls"][-1].get("id", "")
        if role == "function":
            _as_tool_message(copy, last_call)
        elif role == "developer" and "developer" not in template:
            copy["role"] = "system"
        chat.append(copy)
    chat = _one_system_message(chat)
    for message in chat:
        parts = takes_parts is not None and takes_parts(message["role"])
        texts = message["content"]
        message["content"] = text_parts(texts) if parts else PART_JOINER.join(texts)
    return chat


def text_parts(texts: Sequence[str]) -> list[dict[str, str]]:
    """The form of content that templates of multimodal models iterate over."""
    return [{"type": "text", "text": text} for text in texts]


def plain(value: Any, where: str, param: str, depth: int = 0) -> Any:
    """A copy made of nothing but JSON types, the only ones that templates may touch: methods of
    others could do anything. Raises `InvalidRequestError` naming what cannot be copied.
    """
    kind = type(value)
    if value is None or kind is str or kind is int or kind is float or kind is bool:
        return value
    if depth >= MAX_DEPTH:
        raise InvalidRequestError(
            f"{where} is nested more than {MAX_DEPTH} levels deep.", param=param
        )
    if isinstance(value, Mapping):
        return {str(k): plain(v, where, param, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where, param, depth + 1) for item in value]
    for base in (str, int, float):  # enums and the like
        if isinstance(value, base):
            return base(value) if base is not str else str.__str__(value)
    raise InvalidRequestError(
        f"{where} holds a {kind.__name__}; chat templates take JSON values only.", param=param
    )


_REPLACED = frozenset({"role", "content", "tool_calls", "function_call"})


def _role(i: int, role: Any, template: str) -> str:
    if not isinstance(role, str) or not role:
        raise _bad(f"messages[{i}].role must be a non-empty string, got {role!r:.80}.")
    # Some templates have roles of their own ('ipython', 'document'); they name them.
    if role not in ROLES and not re.search(rf"(['\"]){re.escape(role)}\1", template):
        raise _bad(f"messages[{i}].role must be one of {', '.join(ROLES)}; got {role!r:.80}.")
    return role


def _texts(i: int, role: str, message: Mapping[str, Any]) -> list[str]:
    """The message's text parts; none for null."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    if content is None:
        if "content" not in message and role not in ("assistant", "tool", "function"):
            raise _bad(f"messages[{i}].content is missing; {role} messages need text.")
        return []
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _bad(f"messages[{i}].content must be text or a list of parts, got {content!r:.80}.")
    texts = []
    for j, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise _bad(
                f"messages[{i}].content[{j}] has type {kind!r:.80}; this model takes only text "
                "parts."
            )
        text = part.get(key)
        if not isinstance(text, str):
            raise _bad(f"messages[{i}].content[{j}].{key} must be a string, got {text!r:.80}.")
        texts.append(text)
    return texts


def _add_calls(i: int, message: Mapping[str, Any], copy: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None and (isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence)):
        raise _bad(f"messages[{i}].tool_calls must be a list of calls, got {calls!r:.80}.")
    legacy = message.get("function_call")
    if calls:
        copy["tool_calls"] = [
            _call(f"messages[{i}].tool_calls[{j}]", call, None) for j, call in enumerate(calls)
        ]
    elif legacy is not None:
        wrapped = {"id": _legacy_id(i), "function": legacy}
        copy["tool_calls"] = [_call(f"messages[{i}].function_call", wrapped, legacy)]


def _call(where: str, call: Any, legacy: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        what = legacy if legacy is not None else call
        raise _bad(f"{where} must be an object with a function's name and arguments: {what!r:.80}.")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise _bad(f"{where}: the function's name must be a non-empty string.")
    fields = {k: v for k, v in call.items() if v is not None and k != "function"}
    copy: dict[str, Any] = {"type": "function", **plain(fields, where, "messages")}
    inner = {k: v for k, v in function.items() if v is not None and k != "arguments"}
    copy["function"] = plain(inner, where, "messages")
    copy["function"]["arguments"] = _arguments(where, function.get("arguments"))
    return copy


def _arguments(where: str, arguments: Any) -> Arguments:
    """What models write is not always JSON; a conversation must not die of it later on."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        return Arguments()
    return Arguments(plain(arguments, where, "messages"))


def _add_reasoning(message: Mapping[str, Any], copy: dict[str, Any]) -> None:
    """Templates read one name or the other, whichever the client used."""
    named = [copy.pop(key, None) for key in ("reasoning_content", "reasoning")]
    for text in named:
        if isinstance(text, str) and text:
            copy["reasoning_content"] = copy["reasoning"] = text
            return


def _as_tool_message(copy: dict[str, Any], call_id: str | None) -> None:
    """The result of a legacy function call, tied to the call it answers."""
    copy["role"] = "tool"
    if call_id is not None:
        copy.setdefault("tool_call_id", call_id)


def _legacy_id(i: int) -> str:
    return f"call{i % 100_000:05d}"  # nine letters and digits, as Mistral's templates insist


def _one_system_message(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Most templates take a single system message; later ones join the first."""
    system = [message for message in chat if message["role"] == "system"]
    if len(system) < 2:
        return chat
    joined = [PART_JOINER.join(message["content"]) for message in system]
    system[0]["content"] = [SYSTEM_JOINER.join(text for text in joined if text)]
    return [m for m in chat if m["role"] != "system" or m is system[0]]


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")

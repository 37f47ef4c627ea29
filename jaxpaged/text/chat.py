"""Chat messages to prompt text, through the model's Jinja template in a sandbox."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from jaxpaged.errors import InvalidRequestError
from jaxpaged.text.budget import MAX_TEXT, TemplateLimitError, check_text
from jaxpaged.text.messages import normalise_messages, plain, text_parts
from jaxpaged.text.sandbox import Sandbox

CONTENT_FORMATS = ("auto", "string", "openai")
"""What a message's content is for the template: as it wants it, text, or a list of parts."""
_RESERVED = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "bos_token", "eos_token"),
    }
)
_MAX_ERROR = 500


class ChatTemplate:
    """A chat template, compiled when first used. Compiling and rendering raise
    `InvalidRequestError`. Safe to use from several threads at once.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        self.text = text
        self._special_tokens = dict(special_tokens)
        self._environment = Sandbox()
        # Two threads that both find nothing here do the same work and store the same result.
        self._compiled: jinja2.Template | None = None
        self._takes_parts: dict[str, bool] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        content_format: str = "auto",
        seconds: float | None = None,
    ) -> str:
        """The prompt of a conversation.

        With `continue_final_message` the prompt ends exactly with the last message's text, whatever
        the template puts after messages (space that it strips in front of the text stays stripped).
        `variables` reach the template too, but may not replace what this function sets. `seconds`
        is the processor time that the template may take.
        """
        if content_format not in CONTENT_FORMATS:
            raise InvalidRequestError(
                f"chat_template_content_format={content_format!r} must be one of "
                f"{', '.join(CONTENT_FORMATS)}.",
                param="chat_template_content_format",
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true: one "
                "goes on with the last message, the other starts a new one.",
                param="continue_final_message",
            )
        given: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "tools": _tools(tools) if tools else None,
            **self._variables(variables or {}),
        }
        takes_parts = self._wants_parts if content_format == "auto" else _FIXED[content_format]
        with self._environment.limited(seconds):
            template = self._compile()
            chat = normalise_messages(messages, template=self.text, takes_parts=takes_parts)
            if continue_final_message:
                return self._run_up_to_text(template, chat, given)
            return self._run(template, chat, given)

    def check(self) -> None:
        """Raises `InvalidRequestError` if the text is not valid Jinja."""
        with self._environment.limited():
            self._compile()

    def _variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        where = "chat_template_kwargs"
        if not isinstance(variables, Mapping):
            raise InvalidRequestError(f"{where} must be an object.", param=where)
        for name in variables:
            if name in _RESERVED or name in self._special_tokens:
                raise InvalidRequestError(
                    f"{where} must not hold {name!r}: the request or the model sets it.",
                    param=where,
                )
        copy: dict[str, Any] = plain(variables, where, where)
        return copy

    def _compile(self) -> jinja2.Template:
        compiled = self._compiled
        if compiled is None:
            try:
                check_text(len(self.text))
                compiled = self._environment.from_string(self.text)
            except Exception as error:  # Python's own compiler has limits too, of many kinds
                raise InvalidRequestError(
                    f"The chat template is not valid Jinja: {_told(error)}", param="chat_template"
                ) from error
            self._compiled = compiled
        return compiled

    def _wants_parts(self, role: str) -> bool:
        """True for templates that print the text of parts but nothing of plain strings."""
        known = self._takes_parts.get(role)
        if known is None:
            known = self._takes_parts[role] = self._probe(role)
        return known

    def _probe(self, role: str) -> bool:
        word = "pr0be"
        shown = [self._shown(role, content) for content in (word, text_parts([word]))]
        if word not in shown[0] and word not in shown[1] and role != "user":
            return self._wants_parts("user")  # a template that knows no such message
        return word not in shown[0] and word in shown[1] and "'type'" not in shown[1]

    def _shown(self, role: str, content: Any) -> str:
        """What a short conversation prints whose last message but for systems is of this role."""
        user = {"role": "user", "content": "" if isinstance(content, str) else text_parts([""])}
        asked = {"role": role, "content": content}
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
        alone = role in ("user", "system", "developer")
        before: list[dict[str, Any]] = [] if alone else [user]
        if role == "tool":
            asked |= {"name": "f", "tool_call_id": "call00000"}
            before = [user, {"role": "assistant", "content": user["content"], "tool_calls": [call]}]
        after = [user] if role in ("system", "developer") else []
        try:
            given = {"add_generation_prompt": False, "tools": None}
            return self._run(self._compile(), [*before, asked, *after], given)
        except InvalidRequestError as error:
            if isinstance(error.__cause__, TemplateLimitError):
                raise
            return ""

    def _run_up_to_text(
        self, template: jinja2.Template, chat: list[dict[str, Any]], given: Mapping[str, Any]
    ) -> str:
        mark = f"<|:continue-{secrets.token_hex(8)}:|>"  # what no message can hold by itself
        _append(chat[-1], mark)
        text = self._run(template, chat, given)
        end = text.rfind(mark)
        if end < 0:
            raise InvalidRequestError(
                "continue_final_message is not possible: the chat template does not print the "
                f"text of a final {chat[-1]['role']!r} message.",
                param="continue_final_message",
            )
        return text[:end].replace(mark, "")

    def _run(
        self, template: jinja2.Template, chat: list[dict[str, Any]], given: Mapping[str, Any]
    ) -> str:
        budget = self._environment.budget
        pieces: list[str] = []
        length = 0
        try:
            for piece in template.generate({**self._special_tokens, **given, "messages": chat}):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_TEXT:
                    raise TemplateLimitError(f"it printed more than {MAX_TEXT} characters")
                budget.tick()
        except Exception as error:  # templates are programs: they can fail in any way
            raise InvalidRequestError(
                f"The chat template refused the messages: {_told(error)}", param="messages"
            ) from error
        return "".join(pieces)


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, (list, tuple)) or not all(isinstance(t, Mapping) for t in tools):
        raise InvalidRequestError(
            f"tools must be a list of objects, got {tools!r:.80}.", param="tools"
        )
    copy: list[dict[str, Any]] = plain(tools, "tools", "tools")
    return copy


def _always(role: str) -> bool:
    return True


def _never(role: str) -> bool:
    return False


_FIXED = {"string": _never, "openai": _always}


def _append(message: dict[str, Any], mark: str) -> None:
    """Mark the end of a message's text."""
    if isinstance(message["content"], str):
        message["content"] += mark
    elif message["content"]:
        message["content"][-1]["text"] += mark
    else:
        message["content"] = text_parts([mark])


def _told(error: Exception) -> str:
    """The reason, short, and without addresses of objects."""
    text = str(error) if str(error) else type(error).__name__
    if isinstance(error, jinja2.TemplateSyntaxError):
        text = f"{error.message} (line {error.lineno})"
    elif isinstance(error, RecursionError):
        text = "it calls itself without end"
    elif isinstance(error, OSError):
        text = error.strerror or "it may not use files"
    elif isinstance(error, MemoryError):
        text = "it needs too much memory"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)[:_MAX_ERROR]

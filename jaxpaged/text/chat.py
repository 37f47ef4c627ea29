"""Chat messages to prompt text, through the model's Jinja template in a sandbox."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxpaged.errors import InvalidRequestError

MAX_RENDERED = 4_000_000
"""Characters a template may produce, in its output or in one multiplied string."""
MAX_SECONDS = 2.0
"""Time a template may take; checked at each output piece and each step of range()."""
_SENTINEL = "<|:jaxpaged-continues-here:|>"
_RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "bos_token",
    "eos_token",
)


class ChatTemplate:
    """A compiled chat template. Compiling and rendering raise `InvalidRequestError`."""

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        self.text = text
        self._special_tokens = dict(special_tokens)
        self._environment = _Sandbox()
        self._compiled: jinja2.Template | None = None
        self._takes_parts = False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        With `continue_final_message` the prompt ends exactly with the last message's text, whatever
        the template puts after messages (space that it strips in front of the text stays stripped).
        `variables` reach the template too, but may not replace what this function sets.
        """
        variables = dict(variables or {})
        for name in variables:
            if name in _RESERVED:
                raise InvalidRequestError(
                    f"chat_template_kwargs may not set {name!r}.", param="chat_template_kwargs"
                )
        chat = normalise_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message and add_generation_prompt cannot both be true: one "
                    "goes on with the last message, the other starts a new one.",
                    param="continue_final_message",
                )
            chat[-1]["content"] += _SENTINEL
        self._compile()
        if self._takes_parts:
            for message in chat:
                message["content"] = [{"type": "text", "text": message["content"]}]
        text = self._run(chat, add_generation_prompt, tools, variables)
        if not continue_final_message:
            return text
        end = text.rfind(_SENTINEL)
        if end < 0:
            raise InvalidRequestError(
                "continue_final_message is not possible: the chat template does not print the "
                f"text of a final {chat[-1]['role']!r} message.",
                param="continue_final_message",
            )
        return text[:end]

    def check(self) -> None:
        """Raises `InvalidRequestError` if the text is not valid Jinja."""
        self._compile()

    def _compile(self) -> None:
        if self._compiled is not None:
            return
        try:
            self._compiled = self._environment.from_string(self.text)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"The chat template is not valid Jinja: {error}", param="chat_template"
            ) from error
        self._takes_parts = self._probe()

    def _probe(self) -> bool:
        """True for templates that print the text of parts but nothing of plain strings."""
        word = "pr0be"
        plain: dict[str, Any] = {"role": "user", "content": word}
        parts: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": word}]}
        shown = []
        for message in (plain, parts):
            try:
                shown.append(self._run([message], False, None, {}))
            except InvalidRequestError:
                shown.append("")
        return word not in shown[0] and word in shown[1] and "'type'" not in shown[1]

    def _run(
        self,
        chat: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        assert self._compiled is not None
        deadline = time.monotonic() + MAX_SECONDS
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._compiled.generate(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": chat,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                    "range": functools.partial(_TimedRange, deadline),
                }
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED:
                    raise jinja2.TemplateError(f"it printed more than {MAX_RENDERED} characters")
                _check_time(deadline)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise _refused(error) from error
        except (AttributeError, RecursionError, MemoryError) as error:
            raise _refused(error) from error
        return "".join(pieces)


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages with string contents.

    Lists of text parts are joined by newlines. Content may be missing from assistant and tool
    messages only. Arguments of tool calls become objects, which is what templates print from.
    Raises `InvalidRequestError` for anything else.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _bad("messages must be a list of messages.")
    if not messages:
        raise _bad("messages must not be empty.")
    chat = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad(f"messages[{i}] must be an object with role and content.")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _bad(f"messages[{i}].role must be a non-empty string, got {role!r}.")
        copy = dict(message)
        copy["content"] = _content(i, role, message.get("content"))
        if message.get("tool_calls"):
            copy["tool_calls"] = [_tool_call(i, call) for call in message["tool_calls"]]
        chat.append(copy)
    return chat


def _content(i: int, role: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role in ("assistant", "tool"):
            return ""
        raise _bad(f"messages[{i}].content is missing; {role} messages need text.")
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _bad(f"messages[{i}].content must be text or a list of parts, got {content!r:.80}.")
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in ("text", "input_text", "output_text") and not isinstance(part, str):
            raise _bad(
                f"messages[{i}].content[{j}] has type {kind!r}; this model takes only text parts."
            )
        if not isinstance(text, str):
            raise _bad(f"messages[{i}].content[{j}].text must be a string, got {text!r:.80}.")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(i: int, call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _bad(f"messages[{i}].tool_calls must be a list of objects.")
    copy = dict(call)
    function = call.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            raise _bad(f"messages[{i}].tool_calls: arguments are not JSON: {error}.") from error
        copy["function"] = {**function, "arguments": arguments}
    return copy


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment model authors write for: transformers' globals and white-space rules."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                sized = isinstance(many, (str, list, tuple)) and isinstance(times, int)
                if sized and len(many) * times > MAX_RENDERED:
                    raise jinja2.TemplateError("it multiplies a string beyond the limit")
        if operator == "**" and isinstance(right, (int, float)) and abs(right) > 64:
            raise jinja2.TemplateError("it raises a number to a power above 64")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - typed so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which models never saw.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _TimedRange(Sequence[int]):
    """`range` that keeps checking the clock, so that nested empty loops end too."""

    def __init__(self, deadline: float, *bounds: int) -> None:
        self._deadline = deadline
        self._range = range(*bounds)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: Any) -> Any:
        return self._range[index]

    def __iter__(self) -> Iterator[int]:
        for i in self._range:
            _check_time(self._deadline)
            yield i


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise jinja2.TemplateError(f"it ran for more than {MAX_SECONDS:g} s")


def _refused(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"The chat template refused the messages: {error}", param="messages")


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")

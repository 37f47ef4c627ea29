"""Messages as clients send them, and what templates get to see of them."""

from __future__ import annotations

import copy
import enum
import time
from typing import Any

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.text.chat import ChatTemplate
from jaxpaged.text.messages import MAX_DEPTH, normalise_messages
from tests.tiny_models import CHAT_TEMPLATE

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "<é>"}'}}


def render(template: str, messages: Any, **options: Any) -> str:
    return ChatTemplate(template, {"bos_token": "<B>", "eos_token": "<E>"}).render(
        messages, **options
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a\nb", "a\nb"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
        (({"type": "text", "text": "a"},), "a"),
        (["a", "b"], "a\nb"),
        ([], ""),
        (None, ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_contents(content: Any, text: str, role: str) -> None:
    """CH-01: and the literal None never reaches a prompt."""
    messages = [{"role": role, "content": content}]
    assert normalise_messages(messages) == [{"role": role, "content": text}]
    rendered = render(CHAT_TEMPLATE, messages)
    assert rendered == render(CHAT_TEMPLATE, [{"role": role, "content": text}])
    assert "'type'" not in rendered and "None" not in rendered


BAD: list[tuple[Any, str]] = [
    ([], "must not be empty"),
    ("hi", "must be a list"),
    ({"role": "user"}, "must be a list"),
    (["hi"], r"messages\[0\] must be an object"),
    ([{"content": "x"}], r"messages\[0\].role must be a non-empty string, got None"),
    ([USER, {"role": 3, "content": "x"}], r"messages\[1\].role"),
    (
        [USER, {"role": "robot", "content": "x"}],
        r"messages\[1\].role must be one of system, developer, user, assistant, tool, function; "
        "got 'robot'",
    ),
    ([{"role": "user"}], r"messages\[0\].content is missing; user messages need text"),
    ([{"role": "user", "content": 5}], r"messages\[0\].content must be text or a list of parts"),
    ([{"role": "user", "content": {"type": "text", "text": "a"}}], "must be text or a list"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
        r"messages\[0\].content\[1\] has type 'image_url'; this model takes only text parts",
    ),
    ([{"role": "user", "content": [{"type": "new"}]}], "has type 'new'"),
    ([{"role": "user", "content": [{"type": ["text"]}]}], r"content\[0\] has type \['text'\]"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
    ([{"role": "user", "content": [{"type": "refusal", "text": "a"}]}], r"\[0\].refusal must be"),
    ([{"role": "user", "content": [3]}], r"content\[0\] has type None"),
    ([{"role": "assistant", "tool_calls": {"function": {}}}], "tool_calls must be a list of calls"),
    ([{"role": "assistant", "tool_calls": ["f"]}], r"tool_calls\[0\] must be an object with a"),
    ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], r"tool_calls\[0\] must be an object"),
    (
        [{"role": "assistant", "tool_calls": [CALL, {"function": {"arguments": "{}"}}]}],
        r"tool_calls\[1\]: the function's name must be a non-empty string",
    ),
    ([{"role": "assistant", "function_call": "f"}], r"messages\[0\].function_call must be an obj"),
    ([{**USER, "extra": object()}], r"messages\[0\] holds a object; .* JSON values only"),
    ([{**USER, "extra": {1, 2}}], r"messages\[0\] holds a set"),
]


@pytest.mark.parametrize(("messages", "message"), BAD)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render(CHAT_TEMPLATE, messages)
    assert caught.value.param == "messages"


def test_messages_without_end() -> None:
    deep: list[Any] = []
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="nested more than 100 levels"):
        normalise_messages([{**USER, "extra": deep}])
    deep.append(deep)
    with pytest.raises(InvalidRequestError, match="nested more than 100 levels"):
        normalise_messages([{**USER, "extra": deep}])


def test_a_role_that_the_template_names_is_taken() -> None:
    messages = [USER, {"role": "ipython", "content": "out"}]
    template = "{% for m in messages %}{% if m.role == 'ipython' %}I{% endif %}{% endfor %}"
    assert render(template, messages) == "I"
    with pytest.raises(InvalidRequestError, match="role must be one of"):
        render("{% for m in messages %}{{ m.role }}{# ipython #}{% endfor %}", messages)


def test_the_input_is_left_alone() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}], "name": None},
        {"role": "system", "content": "b"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "r"},
    ]
    before = copy.deepcopy(messages)
    normalise_messages(messages)
    assert messages == before


# ------------------------------------------------------------ system and developer


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    messages = [{"role": "developer", "content": "be"}, USER]
    assert render(CHAT_TEMPLATE, messages) == render(
        CHAT_TEMPLATE, [{"role": "system", "content": "be"}, USER]
    )
    knows = CHAT_TEMPLATE + "{# developer #}"
    assert render(knows, messages).startswith("<B><|developer|>\nbe<E>")


def test_system_messages_become_one() -> None:
    """Joined by blank lines, in the place of the first."""
    messages = [
        {"role": "developer", "content": "one", "name": "d"},
        USER,
        {"role": "system", "content": [{"type": "text", "text": "two"}, "three"]},
        {"role": "system", "content": ""},
        {"role": "assistant", "content": "ok"},
        {"role": "developer", "content": "four"},
    ]
    assert normalise_messages(messages) == [
        {"role": "system", "content": "one\n\ntwo\nthree\n\nfour", "name": "d"},
        USER,
        {"role": "assistant", "content": "ok"},
    ]
    late = [USER, {"role": "system", "content": "be"}]
    assert normalise_messages(late) == late, "a single one stays where it is"


# ------------------------------------------------------------ tools


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"x": "<é>"}', {"x": "<é>"}),
        ({"x": 1}, {"x": 1}),
        *(("", {}), ("null", {}), (None, {}), ("{", {}), ("not json", {}), ("[1]", {}), ("5", {})),
        ("[" * 100_000, {}),
        ([1], {}),
    ],
)
def test_arguments_of_calls(arguments: Any, seen: dict[str, Any]) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    (message,) = normalise_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["content"] == ""
    assert message["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": seen}}
    ]


def test_missing_arguments_are_empty() -> None:
    (message,) = normalise_messages(
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    )
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ a | tojson }}", '{"x": "<é>"}'),
        ("{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}", "x=<é>"),
        ("{% for k, v in a | items %}{{ k }}={{ v }}{% endfor %}", "x=<é>"),
        ("{{ a.x }}{{ a['x'] }}{{ a is mapping }}{{ a is string }}", "<é><é>TrueFalse"),
        # Templates written for arguments as text, such as DeepSeek's:
        ("{{ a }}", '{"x": "<é>"}'),
        ("{{ '<' + a + '>' }}", '<{"x": "<é>"}>'),
        ("{{ '<' ~ a ~ '>' }}", '<{"x": "<é>"}>'),
        ("{{ '%s!' % a }}", '{"x": "<é>"}!'),
        ("{{ a | string | length }}", "12"),
    ],
)
def test_templates_that_want_arguments_as_objects_or_as_text(template: str, shown: str) -> None:
    messages = [{"role": "assistant", "tool_calls": [CALL]}]
    head = "{% set a = messages[0].tool_calls[0].function.arguments %}"
    assert render(head + template, messages) == shown


def test_empty_calls_and_null_fields_are_absent() -> None:
    """Clients send back what they got, with null in every field that was not set."""
    message = {
        **{"role": "assistant", "content": "a", "tool_calls": [], "function_call": None},
        **{"refusal": None, "audio": None, "name": None, "reasoning_content": None},
    }
    assert normalise_messages([message]) == [{"role": "assistant", "content": "a"}]
    template = "{% for m in messages %}{{ m.tool_calls is defined }}{{ 'name' in m }}{% endfor %}"
    assert render(template, [message]) == "FalseFalse"
    assert normalise_messages([{**message, "tool_calls": None}])[0].keys() == {"role", "content"}


def test_contents_of_tools_are_joined() -> None:
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    messages = [{"role": "tool", "tool_call_id": "1", "content": parts}]
    assert normalise_messages(messages) == [
        {"role": "tool", "tool_call_id": "1", "content": "1\n2"}
    ]


def test_functions_of_old_are_tools() -> None:
    messages = [
        USER,
        {
            **{"role": "assistant", "content": None},
            "function_call": {"name": "f", "arguments": '{"a": 1}'},
        },
        {"role": "function", "name": "f", "content": "2"},
    ]
    call = {"type": "function", "id": "call00001"}
    call["function"] = {"name": "f", "arguments": {"a": 1}}  # type: ignore[assignment]
    assert normalise_messages(messages)[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "2", "tool_call_id": "call00001"},
    ]
    both = [{"role": "assistant", "tool_calls": [CALL], "function_call": {"name": "g"}}]
    (message,) = normalise_messages(both)
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["f"]
    assert "function_call" not in message
    (alone,) = normalise_messages([{"role": "function", "name": "f", "content": "2"}])
    assert alone == {"role": "tool", "name": "f", "content": "2"}


# ------------------------------------------------------------ other fields


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"reasoning_content": "r"}, "r"),
        ({"reasoning": "r"}, "r"),
        ({"reasoning_content": None, "reasoning": "r"}, "r"),
        ({"reasoning_content": "", "reasoning": "r"}, "r"),
        ({"reasoning_content": "c", "reasoning": "r"}, "c"),
        ({"reasoning": {"effort": "low"}}, None),
        ({"reasoning": ""}, None),
        ({}, None),
    ],
)
def test_reasoning_under_both_names(fields: dict[str, Any], seen: str | None) -> None:
    (message,) = normalise_messages([{"role": "assistant", "content": "a", **fields}])
    both = {} if seen is None else {"reasoning": seen, "reasoning_content": seen}
    assert message == {"role": "assistant", "content": "a", **both}


def test_other_fields_do_no_harm() -> None:
    extra = {
        **{"name": "Ann", "id": "m1", "sender": "x", "opts": {"visible": True}, "refusal": "no"},
        **{"audio": {"id": "a"}, "annotations": [], "weight": 0.5, "prefix": True},
    }
    assert render(CHAT_TEMPLATE, [{**USER, **extra}]) == render(CHAT_TEMPLATE, [USER])
    assert render("{{ messages[0].name }}", [{**USER, **extra}]) == "Ann"


def test_values_of_other_types_become_plain_ones() -> None:
    """Subclasses may carry methods that a sandbox knows nothing of."""

    class Kind(enum.StrEnum):
        A = "a"

    class Loud(int):
        def shout(self) -> str:
            return "!"

    (message,) = normalise_messages([{**USER, "kind": Kind.A, "n": Loud(3), "pair": (1, 2.5)}])
    assert [type(message[k]) for k in ("kind", "n", "pair")] == [str, int, list]
    assert (message["kind"], message["n"], message["pair"]) == ("a", 3, [1, 2.5])


def test_a_long_conversation_takes_as_long_as_it_is() -> None:
    # Of results that answer no call: looking for that each time would take minutes.
    results = [{"role": "function", "name": "f", "content": "x"}] * 100_000
    begun = time.monotonic()
    assert len(normalise_messages(results)) == 100_000
    assert time.monotonic() - begun < 20

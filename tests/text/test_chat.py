"""Messages to prompt text: contents, continuing, BOS, and templates that misbehave."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from jaxpaged.errors import InvalidRequestError
from jaxpaged.text.chat import ChatTemplate, normalise_messages
from jaxpaged.text.tokenizer import Tokenizer
from tests.text.support import byte_level, from_path
from tests.tiny_models import BOS, CHAT_TEMPLATE, EOS, tiny_tokenizer

TOKENS = {"bos_token": "<B>", "eos_token": "<E>"}
USER = [{"role": "user", "content": "hi"}]


def _render(template: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(template, TOKENS).render(messages, **options)


def test_plain_chat() -> None:
    text = _render(CHAT_TEMPLATE, [{"role": "system", "content": "be"}, *USER])
    assert text == "<B><|system|>\nbe<E>\n<|user|>\nhi<E>\n<|assistant|>\n"
    assert not _render(CHAT_TEMPLATE, add_generation_prompt=False).endswith("<|assistant|>\n")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a\nb", "a\nb"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "text", "text": "a"}], "a"),
        (["a", "b"], "a\nb"),
        ([], ""),
    ],
)
def test_contents(content: Any, text: str) -> None:
    messages = [{"role": "user", "content": content}]
    assert normalise_messages(messages) == [{"role": "user", "content": text}]
    rendered = _render(CHAT_TEMPLATE, messages)
    assert rendered == _render(CHAT_TEMPLATE, [{"role": "user", "content": text}])
    assert "'type'" not in rendered


def test_template_that_iterates_parts() -> None:
    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _render(template, [{"role": "user", "content": parts}]) == "[a\nb]"
    assert _render(template, USER) == "[hi]"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must not be empty"),
        ("hi", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([*USER, {"role": 3, "content": "x"}], r"messages\[1\].role"),
        ([{"role": "user"}], "content is missing; user"),
        ([{"role": "user", "content": None}], "content is missing"),
        ([{"role": "user", "content": 5}], "must be text or a list of parts"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\] has type 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "new"}]}], "only text parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
        ([{"role": "user", "content": [3]}], r"content\[0\] has type None"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "arguments are not JSON",
        ),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        _render(CHAT_TEMPLATE, messages)
    assert caught.value.param == "messages"


def test_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": "<é>"}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    template = (
        "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    )
    assert _render(template, messages) == '{"x": "<é>"}'
    assert call["function"] == {"name": "f", "arguments": '{"x": "<é>"}'}, "the input is untouched"
    assert normalise_messages(messages)[0]["content"] == ""
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert _render("{{ tools | tojson }}", tools=tools).startswith('[{"type": "function"')
    assert _render("{{ tools is none }}") == "True"


STRIPPING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<E>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, STRIPPING])
@pytest.mark.parametrize("last", ["The answer is ", "x\n", "hi", "  lead"])
def test_continue_final_message(template: str, last: str) -> None:
    messages = [
        {"role": "assistant", "content": last},
        *USER,
        {"role": "assistant", "content": last},
    ]
    text = _render(template, messages, continue_final_message=True, add_generation_prompt=False)
    whole = _render(template, messages, add_generation_prompt=False)
    assert text.endswith(last.lstrip() if template is STRIPPING else last)
    assert text.count("<E>") == whole.count("<E>") - 1
    assert text.rstrip() == whole[: whole.rindex("<E>")].rstrip()


def test_continue_cannot_be_combined_or_faked() -> None:
    with pytest.raises(InvalidRequestError, match="cannot both be true"):
        _render(CHAT_TEMPLATE, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="does not print the text of a final 'user'"):
        _render("fixed", continue_final_message=True, add_generation_prompt=False)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_exactly_one_bos(adds_bos: bool) -> None:
    backend = tiny_tokenizer()
    if adds_bos:
        backend.post_processor = TemplateProcessing(
            single=[BOS, "$A"], pair=None, special_tokens=[(BOS, 0)]
        )
    tokenizer = Tokenizer(
        backend,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
        chat_templates={"default": CHAT_TEMPLATE},
    )
    ids = tokenizer.encode_chat(USER)
    assert ids[0] == 0 and ids.count(0) == 1
    text = tokenizer.apply_chat_template(USER)
    if adds_bos:
        assert tokenizer.encode(text) == ids, "generate() on a rendered chat adds no second BOS"


def test_template_language() -> None:
    assert (
        _render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert _render("{{ range(5) | list }}{{ range(4)[1:] | length }}") == "[0, 1, 2, 3, 4]3"
    assert _render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert len(_render("{{ strftime_now('%Y') }}")) == 4
    assert _render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert _render("{{ mode }}{{ pad_token is defined }}", variables={"mode": "m"}) == "mFalse"
    assert _render("{{ '%s-%d' % ('a', 3) }}{{ 'ab' * 2 }}") == "a-3abab"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tokenize", "chat_template"])
def test_variables_cannot_replace_ours(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"may not set '{name}'"):
        _render(CHAT_TEMPLATE, variables={name: "x"})
    tokenizer = byte_level()
    with pytest.raises((InvalidRequestError, TypeError)):
        tokenizer.apply_chat_template(USER, chat_template="x", tokenize=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ [].__class__.__base__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ 'x' * 999999999 }}", "multiplies a string"),
        ("{{ 999999999 * [1] }}", "multiplies a string"),
        ("{{ 9 ** 99999999 }}", "power"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
            "printed more than|ran for more",
        ),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "ran for more",
        ),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ undefined_thing.x }}", "undefined"),
        ("{{ messages[0]['content'] + 3 }}", "refused the messages"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for %}", "not valid Jinja"),
        ("{{ 'a' | no_such_filter }}", "not valid Jinja|refused"),
        ("{% include '/etc/passwd' %}", "refused"),
    ],
)
def test_misbehaving_templates(
    template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpaged.text.chat.MAX_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match=message):
        _render(template)
    assert time.monotonic() - started < 5


def test_smollm2_template_equals_transformers(smollm2_path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = from_path(smollm2_path)
    chats: list[list[dict[str, str]]] = [
        [{"role": "user", "content": "hi"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "q <é> 中"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": ""},
        ],
    ]
    for chat in chats:
        for prompt in (True, False):
            expected, _ = render_jinja_template(
                [chat], chat_template=tokenizer.chat_template, add_generation_prompt=prompt
            )
            assert tokenizer.apply_chat_template(chat, add_generation_prompt=prompt) == expected[0]
    assert tokenizer.encode_chat(chats[0]).count(1) == 3

"""Messages to prompt text: forms of content, continuing, BOS, variables, the language."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from jaxpaged.errors import InvalidRequestError
from jaxpaged.text.chat import ChatTemplate
from jaxpaged.text.tokenizer import Tokenizer
from tests.text.support import byte_level, from_path
from tests.tiny_models import BOS, CHAT_TEMPLATE, EOS, tiny_tokenizer

TOKENS = {"bos_token": "<B>", "eos_token": "<E>"}
USER = [{"role": "user", "content": "hi"}]


def _render(template: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(template, TOKENS).render(messages, **options)


def test_plain_chat() -> None:
    text = _render(CHAT_TEMPLATE, [{"role": "system", "content": "be"}, *USER])
    assert text == "<B><|system|>\nbe<E>\n<|user|>\nhi<E>\n<|assistant|>\n"
    assert not _render(CHAT_TEMPLATE, add_generation_prompt=False).endswith("<|assistant|>\n")


# ------------------------------------------------------------ contents as text or parts

PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]"
    "{% endif %}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
ONLY_USERS = (
    "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{% if p.type == 'text'"
    " %}[{{ p.text }}]{% endif %}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + PARTS
TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "content_format", "parts", "string"),
    [
        (CHAT_TEMPLATE, "auto", "a\nb", "hi"),
        (PARTS, "auto", "[a][b]", "[hi]"),
        (STRICT, "auto", "[a][b]", "[hi]"),
        (BOTH, "auto", "a\nb", "hi"),
        (BOTH, "string", "a\nb", "hi"),
        (BOTH, "openai", "[a][b]", "[hi]"),
        (PARTS, "string", "", ""),
        (PARTS, "openai", "[a][b]", "[hi]"),
    ],
)
def test_content_format(template: str, content_format: str, parts: str, string: str) -> None:
    for content, wanted in ((TWO_PARTS, parts), ("hi", string)):
        text = _render(
            template, [{"role": "user", "content": content}], content_format=content_format
        )
        assert text.removeprefix("<B><|user|>\n").removesuffix("<E>\n<|assistant|>\n") == wanted


def test_content_format_is_found_for_each_role() -> None:
    messages = [
        {"role": "system", "content": TWO_PARTS},
        {"role": "user", "content": TWO_PARTS},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": TWO_PARTS},
    ]
    assert _render(ONLY_USERS, messages) == "a\nb[a][b]ca\nb"
    assert _render(PARTS, messages) == "[a][b][a][b][c][a][b]"
    assert _render(PARTS, [*USER, {"role": "assistant", "content": None}]) == "[hi]"


def test_unknown_content_format() -> None:
    with pytest.raises(InvalidRequestError, match="'list' must be one of auto, string, openai"):
        _render(CHAT_TEMPLATE, content_format="list")


# ------------------------------------------------------------ continuing the last message

STRIPPING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<E>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IN_PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{% if p.type == 'text' %}"
    "{{ p.text }}{% endif %}{% endfor %}<E>\n{% endfor %}"
)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, STRIPPING, IN_PARTS])
@pytest.mark.parametrize("last", ["The answer is ", "x\n", "hi", "  lead", "<E>", "a\n\n  ", ""])
def test_continue_final_message(template: str, last: str) -> None:
    """CH-07: it ends with the text, trailing spaces included, though it stood there before."""
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


def test_continue_a_message_of_parts_and_one_printed_twice() -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    last = {"role": "assistant", "content": TWO_PARTS}
    assert _render(IN_PARTS, [*USER, last], **options) == "<|user|>hi<E>\n<|assistant|>ab"
    assert _render(CHAT_TEMPLATE, [*USER, last], **options).endswith("<|assistant|>\na\nb")
    twice = "{% for m in messages %}{{ m.content }}/{{ m.content }};{% endfor %}"
    assert _render(twice, **options) == "hi/hi"


def test_continue_cannot_be_combined_or_faked() -> None:
    with pytest.raises(InvalidRequestError, match="cannot both be true") as caught:
        _render(CHAT_TEMPLATE, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(InvalidRequestError, match="does not print the text of a final 'user'"):
        _render("fixed", continue_final_message=True, add_generation_prompt=False)


# ------------------------------------------------------------ BOS


def _tokenizer(*, adds_bos: bool, template: str = CHAT_TEMPLATE) -> Tokenizer:
    backend = tiny_tokenizer()
    if adds_bos:
        backend.post_processor = TemplateProcessing(
            single=[BOS, "$A"], pair=None, special_tokens=[(BOS, 0)]
        )
    return Tokenizer(
        backend,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
        chat_templates={"default": template},
    )


@pytest.mark.parametrize("adds_bos", [False, True])
def test_exactly_one_bos(adds_bos: bool) -> None:
    """CH-06, by whichever road the template's text becomes tokens."""
    tokenizer = _tokenizer(adds_bos=adds_bos)
    text, ids = tokenizer.render_chat(USER)
    assert ids[0] == 0 and ids.count(0) == 1
    assert tokenizer.encode_chat(USER) == ids
    assert tokenizer.render_chat(USER, add_special_tokens=True) == (text, ids)
    assert tokenizer.encode(text) == ids, "generate() on a rendered chat adds no second BOS"
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    long = [{"role": "user", "content": "hi " * 3000}]
    text, ids = tokenizer.render_chat(long, add_special_tokens=True)
    assert ids[0] == 0 and ids.count(0) == 1


def test_a_template_without_bos_gets_one_on_demand() -> None:
    template = CHAT_TEMPLATE.replace("{{ bos_token }}", "")
    tokenizer = _tokenizer(adds_bos=True, template=template)
    _, plain = tokenizer.render_chat(USER)
    assert 0 not in plain
    assert tokenizer.render_chat(USER, add_special_tokens=True)[1] == [0, *plain]


# ------------------------------------------------------------ variables and language


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
    assert _render("{{ '%%|%(k)-3s|' % {'k': 1} }}") == "%|1  |"
    assert _render("{{ '{:>5}|{k!r}'.format('a', k='b') }}") == "    a|'b'"
    assert (
        _render(
            "{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}"
            "{% endfor %}{{ ns.n }}{{ dict(a=1) }}"
        )
        == "4{'a': 1}"
    )
    assert _render("{{ ['b', 'a'] | sort | join('-') }}{{ 'x' | center(3) }}|") == "a-b x |"
    assert _render("{{ [{'n': 1}, {'n': 2}] | sum('n') }}{{ [[1], [2]] | sum(start=[]) }}") == (
        "3[1, 2]"
    )
    assert _render(
        "{{ [1, 2, 3] | batch(2, 0) | list }}{{ ' a ' | trim }}|{{ '7' | int + 1 }}"
    ) == ("[[1, 2], [3, 0]]a|8")
    assert _render("{{ 'a\nb' | indent(2) }}|{{ 'aXb'.replace('X', '--') }}") == "a\n  b|a--b"
    assert _render("{{ messages[::-1][0].content }}{{ 'a,b'.split(',')[-1] }}") == "hib"
    assert _render("{{ {'a': '<&>'} | tojson(indent=2) }}") == '{\n  "a": "<&>"\n}'
    recursive = (
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    )
    assert _render(recursive) == "123"


def test_tools_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert _render("{{ tools | tojson }}", tools=tools).startswith('[{"type": "function"')
    assert _render("{{ tools is none }}") == _render("{{ tools is none }}", tools=[]) == "True"
    for bad in ({"type": "function"}, "f", ["f"]):
        with pytest.raises(InvalidRequestError, match="tools must be a list of objects") as caught:
            _render("x", tools=bad)
        assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "name",
    [
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("chat_template", "bos_token", "eos_token"),
    ],
)
def test_variables_cannot_replace_ours(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"must not hold '{name}'") as caught:
        _render(CHAT_TEMPLATE, variables={name: "x"})
    assert caught.value.param == "chat_template_kwargs"
    with pytest.raises(InvalidRequestError, match=f"must not hold '{name}'"):
        byte_level().render_chat(USER, chat_template="x", chat_template_kwargs={name: "x"})


def test_variables_are_json() -> None:
    assert _render("{{ a.b[0] }}", variables={"a": {"b": (1, 2)}}) == "1"
    with pytest.raises(InvalidRequestError, match="holds a function"):
        _render("{{ f() }}", variables={"f": test_variables_are_json})
    with pytest.raises(InvalidRequestError, match="must be an object"):
        byte_level().render_chat(USER, chat_template="x", chat_template_kwargs=["a"])  # type: ignore[arg-type]


def test_several_threads_render_and_encode_at_once() -> None:
    tokenizer = _tokenizer(adds_bos=True)
    chats = [[{"role": "user", "content": f"{'word ' * (i * 300)}{i}"}] for i in range(8)]
    expected = [_tokenizer(adds_bos=True).render_chat(chat) for chat in chats]
    got: list[Any] = [None] * len(chats)
    start = threading.Barrier(len(chats))

    def work(i: int) -> None:
        start.wait(timeout=30)
        got[i] = tokenizer.render_chat(chats[i])
        got[i] = tokenizer.render_chat(chats[i], chat_template=CHAT_TEMPLATE + " " * (i % 2))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(chats))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [text.rstrip(" ") for text, _ in got] == [text for text, _ in expected]


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

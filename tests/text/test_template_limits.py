"""CH-09: no template reaches Python, runs for long, or makes anything huge, whatever it tries.

Each attack below would take minutes, or gigabytes, where nothing stops it.
"""

from __future__ import annotations

import time
import tracemalloc

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.text.budget import MAX_TEXT, Budget, TemplateLimitError, check_replace
from jaxpaged.text.chat import ChatTemplate

USER = [{"role": "user", "content": "hi"}]
SECONDS = 0.15
"""Allowed to each template here."""


def _refusal(template: str, seconds: float = SECONDS) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(template, {}).render(USER, seconds=seconds)
    assert caught.value.param in ("messages", "chat_template")
    return str(caught.value)


def _growing(expression: str, start: str = "'ab'") -> str:
    """Apply `expression` to ns.x sixty times, which doubles it each time."""
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}"
        f"{{% set ns.x = {expression} %}}{{% endfor %}}{{{{ ns.x }}}}"
    )


LOOP = "{% for a in range(999999) %}{% for b in range(999999) %}"
END = "{% endfor %}{% endfor %}"
TIME = {
    "nested loops": LOOP + END,
    "loops over text": "{% set s = 'x' * 999999 %}{% for a in s %}{% for b in s %}" + END,
    "filtered loops": LOOP.replace(" %}{% for b", " %}{% for b").replace(") %}", ") if 0 %}") + END,
    "inner filtered loop": "{% for a in range(999999) %}{% for b in range(999999) if 0 %}" + END,
    "calls in a loop": "{% set c = cycler(1) %}" + LOOP + "{% if c.next() %}{% endif %}" + END,
    "macros that call twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "list in list": "{% set l = range(99999) | list %}{{ l | select('in', l) | list | length }}",
    "length of a generator": "{% for i in ('x' * 9999999) if 1 %}{{ loop.length }}{% endfor %}",
    "comparisons": "{% set a = 'x' * 9999999 %}{% set b = 'x' * 9999999 %}{% for i in range(999999)"
    " %}{% if a == b %}{% endif %}{% endfor %}",
    "sums of lists": "{{ ([[1] * 1000] * 900) | map('list') | sum(start=[]) | length }}",
}


@pytest.mark.parametrize("template", TIME.values(), ids=TIME)
def test_time(template: str) -> None:
    started = time.thread_time()
    assert f"it ran for more than {SECONDS} s" in _refusal(template)
    assert time.thread_time() - started < SECONDS + 2.0


SIZE = {
    "percent": "{{ '%999999999d' % 1 }}",
    "percent with a key": "{{ '%(a)999999999d' % {'a': 1} }}",
    "percent with a hidden key": "{{ '%((a))999999999d' % {'(a)': 1} }}",
    "percent with a computed width": "{{ '%*d' % (999999999, 1) }}",
    "percent with a precision": "{{ '%.999999999f' % 1.5 }}",
    "percent as filter": "{{ '%999999999d' | format(1) }}",
    "percent, many times": "{{ ('%s' * 9999) % ((('x' * 99999),) * 9999) }}",
    "percent of a key, many times": "{{ ('%(a)s' * 9999) % {'a': 'x' * 99999} }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format with a computed width": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "format with zeros": "{{ '{:0999999999d}'.format(1) }}",
    "format with a precision": "{{ '{:.999999999f}'.format(1.5) }}",
    "format by a map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "format, many times": "{{ ('{0}' * 9999).format('x' * 999999) }}",
    "format of a number beyond reading": "{{ ('{:>' ~ '9' * 5000 ~ '}').format(1) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "rjust": "{{ 'x'.rjust(10 ** 9) }}",
    "center": "{{ 'x'.center(10 ** 9) }}",
    "zfill": "{{ 'x'.zfill(10 ** 9) }}",
    "ljust by attr": "{{ ('x' | attr('ljust'))(10 ** 9) }}",
    "ljust by index": "{{ 'x'['ljust'](10 ** 9) }}",
    "center as filter": "{{ 'x' | center(10 ** 9) }}",
    "center as block": "{% filter center(999999999) %}x{% endfilter %}",
    "indent": "{{ ('\n' * 99999) | indent(99999) }}",
    "indent of blank lines": "{{ ('\n' * 99999) | indent(99999, true, true) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "slice": "{{ [] | slice(10 ** 9) | list }}",
    "round": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "tojson": "{{ ([1] * 99999) | tojson(indent=10 ** 9) }}",
    "tojson with separators": "{{ [1] | tojson(separators=['x' * 9999, 'y']) }}",
    "strftime": "{{ strftime_now('%Y' * 99999) }}",
    "times": "{{ 'x' * 999999999 }}",
    "times, the other way": "{{ 999999999 * [1] }}",
    "times a tuple": "{{ (1,) * 999999999 }}",
    "power": "{{ 9 ** 99999999 }}",
    "power of a negative": "{{ (-9) ** 99999999 }}",
    "powers by squares": _growing("ns.x * ns.x", "9"),
    "number from text": "{{ ('1' * 9999999) | int(base=2) }}",
    "range": "{{ range(10 ** 9) | list }}",
    "range beyond all": "{{ range(10 ** 30) }}",
    "list of letters": "{{ ('x' * 9999999) | list | length }}",
    "reversed letters": "{{ ('x' * 9999999) | select | list | length }}",
    "split": "{{ ('a ' * 4999999).split() | length }}",
    "split by a letter": "{{ ('a,' * 4999999).split(',') | length }}",
    "splitlines": "{{ ('\n' * 9999999).splitlines() | length }}",
    "title": "{{ ('a b ' * 2499999) | title | length }}",
    "doubling by ~": _growing("ns.x ~ ns.x"),
    "doubling by +": _growing("ns.x + ns.x"),
    "doubling by replace": _growing("ns.x.replace('', ns.x)"),
    "doubling by the filter replace": _growing("ns.x | replace('', ns.x)"),
    "doubling by join": _growing("ns.x.join(ns.x)"),
    "doubling by the filter join": _growing("ns.x | join(ns.x)"),
    "doubling by format": _growing("'{0}{0}'.format(ns.x)"),
    "doubling by percent": _growing("'%s%s' % (ns.x, ns.x)"),
    "doubling by escapes": _growing("(ns.x | e | string)", "'&' * 999999"),
    "doubling lists": _growing("ns.x + ns.x", "[1]"),
    "doubling nested lists": _growing("[ns.x, ns.x]", "[1]"),
    "doubling nested tuples": _growing("(ns.x, ns.x)", "(1,)"),
    "doubling nested objects": _growing("{'a': ns.x, 'b': ns.x}", "1"),
    "doubling by dict": _growing("dict(a=ns.x, b=ns.x)", "1"),
    "doubling by batch": _growing("(ns.x * 2) | batch(99) | list", "[1]"),
    "doubling by items": _growing("(dict(a=ns.x, b=ns.x).items() | list)", "1"),
    "doubling by varargs": "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% else %}"
    "{{ varargs }}{% endif %}{% endmacro %}{{ m(60, 1, 2) }}",
    "doubling by kwargs": "{% macro m(n) %}{% if n %}{{ m(n - 1, a=kwargs, b=kwargs) }}{% else %}"
    "{{ kwargs }}{% endif %}{% endmacro %}{{ m(60, a=1) }}",
    "comparing doubled lists": _growing("[ns.x, ns.x]", "[1]")[:-10] + "{{ ns.x == [ns.x] }}",
    "lists within lists": "{% set ns = namespace(x=[]) %}{% for i in range(500) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}",
    "tuples within tuples": "{% set ns = namespace(x=()) %}{% for i in range(99999) %}"
    "{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
    "arguments within arguments": "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs) }}{% endif %}"
    "{% endmacro %}{{ m(150, 1) }}",
    "long text in a loop": "{% for i in range(99999) %}" + "z" * 9999 + "{% endfor %}",
    "long text in a macro": "{% macro m() %}{% for i in range(99999) %}"
    + "z" * 9999
    + "{% endfor %}{% endmacro %}{{ m() | length }}",
    "long text in a block": "{% set x %}{% for i in range(99999) %}"
    + "z" * 9999
    + "{% endfor %}{% endset %}{{ x | length }}",
    "many long texts": "{% set s = 'é' * 9999999 %}"
    + "".join(f"{{% set a{i} = s[1:] %}}" for i in range(100)),
    "many padded texts": "{{ ('x' * 999) | map('center', 9999999) | list }}",
    "search backwards": "{{ ('a' * 9999999).rfind('b' ~ 'a' * 999999) }}",
    "strip": "{{ ('a' * 9999999).strip('b' * 999999 ~ 'a') }}",
    "trim": "{{ ('a' * 9999999) | trim('b' * 999999 ~ 'a') }}",
}
LIMITS = (
    "it makes a",
    "it made",
    "it printed more",
    "it formats with",
    "it reads a number",
    "it rounds to",
    "it nests lists",
    "it looks for",
    "it gives strftime_now",
    "tojson indents",
)


@pytest.mark.parametrize("template", SIZE.values(), ids=SIZE)
def test_size(template: str) -> None:
    """Refused for its size, and soon enough that the clock plays no part."""
    started = time.thread_time()
    message = _refusal(template, seconds=5.0)
    assert message.removeprefix("The chat template refused the messages: ").startswith(LIMITS)
    assert time.thread_time() - started < 2.0


def test_memory() -> None:
    tracemalloc.start()
    try:
        for template in (SIZE["doubling by ~"], SIZE["list of letters"], SIZE["range"]):
            _refusal(template, seconds=20.0)
        assert tracemalloc.get_traced_memory()[1] < 10 * MAX_TEXT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ [].__class__.__base__ }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ (joiner | attr('__init__')).__globals__ }}", "unsafe"),
        ("{{ '{0.__init__.__globals__.os}'.format(cycler) }}", "unsafe"),
        ("{{ namespace.mro() }}", "unsafe|undefined|may not call"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(a=1) }}", "unsafe"),
        ("{{ (messages | attr('clear'))() }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "no attribute|expected token"),
        ("{{ dict.fromkeys([1]) }}", "no attribute 'fromkeys'"),
        ("{{ (1).to_bytes(10 ** 9) }}", "may not call int.to_bytes"),
        ("{{ 'x'.encode() }}", "may not call str.encode"),
        ("{{ '\t'.expandtabs(10 ** 9) }}", "may not call str.expandtabs"),
        ("{{ 'x'.translate({120: 'yy'}) }}", "may not call str.translate"),
        ("{{ lipsum(n=10 ** 9) }}", "'lipsum' is undefined"),
        ("{{ 'x y' | wordwrap(1) }}", "No filter named 'wordwrap'"),
        ("{{ {} | xmlattr }}", "No filter named 'xmlattr'"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{% extends 'x' %}", "no loader"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
        ("{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}", "calls itself without end"),
        ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "calls itself without end"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "not valid Jinja: it calls itself"),
        ("{% for a in [1] %}" * 50 + "{% endfor %}" * 50, "not valid Jinja: too many"),
        ("{{ raise_exception('roles must alternate') }}", "messages: roles must alternate$"),
        ("{{ raise_exception() }}", "messages: "),
        ("{{ undefined_thing.x }}", "undefined"),
        ("{{ messages[0]['content'] + 3 }}", "refused the messages"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ tools | tojson(indent='x', separators=3) }}", "refused the messages"),
        ("{{ cycler }}{{ range('a') }}", "refused the messages"),
        ("{% for %}", r"not valid Jinja: .*\(line 1\)"),
        ("\n\n{{ a b }}", r"not valid Jinja: .*\(line 3\)"),
        ("{{ 'a' | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("{{ 1 << 10 ** 9 }}", "not valid Jinja"),
    ],
)
def test_what_templates_may_not_do(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ChatTemplate(template, {}).render(USER)
    text = str(caught.value)
    assert len(text) < 700
    assert "/main/" not in text and "Traceback" not in text and " at 0x" not in text


def test_errors_stay_short() -> None:
    assert len(_refusal("{{ raise_exception('x' * 9999) }}")) < 700
    assert "0x" not in _refusal("{{ raise_exception('%s' % messages[0].get) }}")


def test_a_long_but_honest_conversation_passes() -> None:
    """What real templates do, on 500 messages of 2,000 characters."""
    template = (
        "{% set ns = namespace(text='', last=messages[-1]) %}{% for m in messages[1:] %}"
        "{% set body = m.content | trim %}{% if '</think>' in body %}"
        "{% set body = body.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '<|' + m.role + '|>' + body + '\n' }}{% set ns.text = ns.text ~ m.role %}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    )
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "word " * 400} for i in range(500)
    ]
    text = ChatTemplate(template, {}).render(messages)
    assert len(text) > 499 * 1999 and text.endswith("250")


def test_limits_are_per_rendering() -> None:
    template = ChatTemplate("{{ ('x' * 9000000) | length }}", {})
    for _ in range(30):
        assert template.render(USER) == "9000000"


@pytest.mark.parametrize(
    ("text", "old", "new", "count", "fits"),
    [
        ("a" * 1000, "a", "b" * 10_000, -1, True),
        ("a" * 1000, "a", "b" * 10_001, -1, False),
        ("a" * 1000, "a", "b" * 10_001, 999, True),
        ("a" * 1000, "", "b" * 10_000, -1, False),
        ("a" * 1000, "c", "b" * 9_000_000, -1, True),
        ("a" * 9_999_999, "a", "b", -1, True),
    ],
)
def test_growth_of_replace(text: str, old: str, new: str, count: int, fits: bool) -> None:
    assert (len(text.replace(old, new, count)) <= MAX_TEXT) == fits
    if fits:
        check_replace(text, old, new, count)
    else:
        with pytest.raises(TemplateLimitError):
            check_replace(text, old, new, count)


def test_printed_size_is_near_the_truth() -> None:
    budget = Budget()
    for value in ("abc", ["abc", 1, None], {"a": ["b" * 99] * 9}, ({1: 2}, (3,)), {5}):
        assert len(str(value)) * 0.5 <= budget.printed_size(value) <= len(str(value)) * 4 + 16
    assert budget.printed_size({"abc": "d"}.items()) >= len("abcd")

"""The filters of chat templates: Jinja's own, with those replaced that could run away.

Left out are the filters for HTML, and those that search with regular expressions or lay out text:
no chat template needs them, and their cost has no simple bound.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jinja2
import jinja2.filters as jinja_filters

from jaxpaged.text.budget import (
    Budget,
    TemplateLimitError,
    check_items,
    check_percent,
    check_replace,
    check_search,
    check_text,
    check_width,
)

_MAX_INDENT = 100
_MAX_DIGITS = 10_000
_MAX_PRECISION = 100
_UNCHANGED = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape"),
    *("filesizeformat", "first", "forceescape", "items", "length", "lower", "reverse", "safe"),
    *("string", "truncate", "upper"),
)
_BY_ITEM = (
    *("groupby", "last", "map", "max", "min", "random", "reject", "rejectattr", "select"),
    *("selectattr", "sort", "title", "unique", "urlencode", "wordcount"),
)
"""These make an entry of each item, or of each character of a string."""


class _Environment(Protocol):
    @property
    def budget(self) -> Budget: ...

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any: ...


def filters() -> dict[str, Callable[..., Any]]:
    """By name. Many expect an environment that has a `budget`."""
    table = {name: jinja_filters.FILTERS[name] for name in _UNCHANGED}
    table |= {name: _of_few_items(jinja_filters.FILTERS[name]) for name in _BY_ITEM}
    return table | _OWN


def _of_few_items(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # takes along what Jinja passes first
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in args[:2]:
            if isinstance(value, str):
                check_items(len(value))
        return function(*args, **kwargs)

    return checked


@jinja2.pass_environment
def _batch(env: _Environment, value: Iterable[Any], linecount: int, fill_with: Any = None) -> Any:
    check_items(linecount)
    return list(jinja_filters.do_batch(env.budget.items(value), linecount, fill_with))


@jinja2.pass_environment
def _slice(env: _Environment, value: Iterable[Any], slices: int, fill_with: Any = None) -> Any:
    check_items(slices)
    return list(jinja_filters.sync_do_slice(env.budget.items(value), slices, fill_with))


@jinja2.pass_environment
def _list(env: _Environment, value: Iterable[Any]) -> list[Any]:
    return env.budget.items(value)


@jinja2.pass_environment
def _join(
    env: _Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        assert isinstance(env, jinja2.Environment)
        value = map(jinja_filters.make_attrgetter(env, attribute), value)
    return env.budget.join(str(d), value)


@jinja2.pass_environment
def _sum(
    env: _Environment,
    iterable: Iterable[Any],
    attribute: str | int | None = None,
    start: Any = 0,
) -> Any:
    if attribute is not None:
        assert isinstance(env, jinja2.Environment)
        iterable = map(jinja_filters.make_attrgetter(env, attribute), iterable)
    for item in iterable:
        start = env.call_binop(None, "+", start, item)
    return start


@jinja2.pass_environment
def _format(env: _Environment, value: Any, *args: Any, **kwargs: Any) -> str:
    check_percent(env.budget, str(value), kwargs or args)
    return jinja_filters.do_format(str(value), *args, **kwargs)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(s)
    columns = len(width) if isinstance(width, str) else width
    check_items(len(text))
    check_text(len(text) + columns * (len(text.splitlines()) + 1))
    return jinja_filters.do_indent(text, width, first, blank)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(s), str(old), str(new)
    times = -1 if count is None else count
    check_replace(text, old, new, times)
    return text.replace(old, new, times)


def _center(value: str, width: int = 80) -> str:
    check_width(width)
    return str(value).center(width)


def _trim(value: Any, chars: str | None = None) -> str:
    check_search(str(value), chars)
    return str(value).strip(chars)


def _float(value: Any, default: float = 0.0) -> float:
    _check_digits(value)
    return jinja_filters.do_float(value, default)


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    _check_digits(value)
    return jinja_filters.do_int(value, default, base)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > _MAX_PRECISION:
        raise TemplateLimitError(f"it rounds to more than {_MAX_PRECISION} places")
    return jinja_filters.do_round(value, precision, method)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which models never saw.
    for extra in (indent, *(separators or ())):
        if (len(extra) if isinstance(extra, str) else extra or 0) > _MAX_INDENT:
            raise TemplateLimitError(f"tojson indents by more than {_MAX_INDENT} characters")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _check_digits(value: Any) -> None:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise TemplateLimitError(f"it reads a number of more than {_MAX_DIGITS} characters")


_OWN: dict[str, Callable[..., Any]] = {
    "batch": _batch,
    "center": _center,
    "float": _float,
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "list": _list,
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "sum": _sum,
    "tojson": _tojson,
    "trim": _trim,
}

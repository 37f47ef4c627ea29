"""Which methods of strings, numbers, lists and objects a chat template may call.

A list of what is allowed: each entry makes nothing larger than its inputs, or has its size checked
before it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2.exceptions import SecurityError

from jaxpaged.text.budget import (
    Budget,
    check_replace,
    check_search,
    check_split,
    check_width,
)

Args = tuple[Any, ...]


def check_method(budget: Budget, owner: object, name: str, args: Args) -> Args:
    """The arguments to call `owner.name` with. Raises `jinja2.TemplateError` if it may not be
    called, or would make too much. Objects that are no data (macros, namespaces) pass.
    """
    for kind, allowed in _METHODS.items():
        if isinstance(owner, kind):
            if name not in allowed:
                raise SecurityError(f"templates may not call {kind.__name__}.{name}")
            if isinstance(owner, str):
                guard = _GUARDS.get(name)
                return guard(budget, owner, args) if guard is not None else args
    return args


def _join(budget: Budget, separator: str, args: Args) -> Args:
    if len(args) != 1:
        return args
    items = budget.items(args[0])
    budget.join(separator, items)  # for its size only: str.join refuses what is no string
    return (items,)


def _pad(budget: Budget, text: str, args: Args) -> Args:
    check_width(args[0] if args else 0)
    return args


def _replace(budget: Budget, text: str, args: Args) -> Args:
    if len(args) in (2, 3) and isinstance(args[0], str) and isinstance(args[1], str):
        count = args[2] if len(args) == 3 and isinstance(args[2], int) else -1
        check_replace(text, args[0], args[1], count)
    return args


def _search(budget: Budget, text: str, args: Args) -> Args:
    check_search(text, args[0] if args else None)
    return args


def _split(budget: Budget, text: str, args: Args) -> Args:
    check_search(text, args[0] if args else None)
    check_split(text, args[0] if args else None)
    return args


def _splitlines(budget: Budget, text: str, args: Args) -> Args:
    check_split(text, None)
    return args


_GUARDS: dict[str, Callable[[Budget, str, Args], Args]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _pad),
    **dict.fromkeys(("lstrip", "rstrip", "strip", "rfind", "rindex", "rpartition"), _search),
    **dict.fromkeys(("split", "rsplit"), _split),
    "splitlines": _splitlines,
    "join": _join,
    "replace": _replace,
}
_STRINGS = {
    *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha"),
    *("isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"),
    *("isspace", "istitle", "isupper", "lower", "partition", "removeprefix", "removesuffix"),
    *("startswith", "swapcase", "title", "upper", "format", "format_map"),
    *_GUARDS,
}
_METHODS: dict[type, set[str]] = {
    str: _STRINGS,
    bytes: set(),
    int: {"bit_length", "is_integer"},
    float: {"is_integer"},
    list: {"count", "index", "copy"},
    tuple: {"count", "index"},
    dict: {"copy", "get", "items", "keys", "values"},
    set: {"difference", "intersection", "issubset", "issuperset", "union"},
    type: set(),
}

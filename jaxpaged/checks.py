"""Checks of values that users give. A check takes a value and returns it as a plain Python one, or
raises `Broken` with the rule; `normalise` runs a table of them over a frozen dataclass.

Scalars of array libraries pass wherever Python's own do. No library is imported for that.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from itertools import islice
from typing import Any

Check = Callable[[Any], Any]
MakeError = Callable[[str, str], Exception]
"""An exception from its message and the name of the field."""

_SIZE = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([kKmMgG]?)(i?B)?\s*")
_SUFFIX = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_MAX_DIGITS = 20
"""Longest number read from text; Python itself refuses a few thousand digits."""


class Broken(Exception):
    """The rule that a value breaks, and, where that is not the value itself, what to show."""

    def __init__(self, rule: str, got: str | None = None) -> None:
        super().__init__(rule)
        self.rule = rule
        self.got = got


def shorten(value: object) -> str:
    """The value as an error shows it."""
    try:
        text = repr(value)
    except Exception:  # integers of thousands of digits, or a class with a faulty __repr__
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= 120 else text[:117] + "..."


def normalise(instance: Any, checks: Mapping[str, Check], error: MakeError) -> None:
    """Pass every field through its check and store what comes back.

    For `__post_init__` of a frozen dataclass. Raises what `error` makes of the first rule broken.
    """
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        try:
            good = checks[field.name](value)
        except Broken as broken:
            got = shorten(value) if broken.got is None else broken.got
            raise error(f"{field.name} must be {broken.rule}, got {got}.", field.name) from None
        object.__setattr__(instance, field.name, good)


def check_names(given: Any, cls: type, argument: str, noun: str, error: MakeError) -> None:
    """Raise unless `given` is a mapping whose keys are fields of the dataclass `cls`.

    `argument` is what the mapping is called, `noun` what one of its keys is.
    """
    if not isinstance(given, Mapping):
        message = f"{argument} must be a mapping from names to values, got {shorten(given)}."
        raise error(message, argument)
    known = [field.name for field in dataclasses.fields(cls)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise error(f"Unknown {noun} {shorten(name)}.{hint}", str(name))


def boolean(value: Any) -> bool:
    value = _plain(value)
    if not isinstance(value, bool):
        raise Broken("true or false")
    return value


def integer(low: int, high: int | None = None, *, rule: str = "") -> Check:
    """An integer in [low, high]. `rule` replaces the words for that."""
    words = rule or (f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]")

    def check(value: Any) -> int:
        value = _plain(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise Broken(words)
        if value < low or (high is not None and value > high):
            raise Broken(words)
        return int(value)

    return check


def number(rule: str, accepts: Callable[[float], bool]) -> Check:
    """A finite number, integers included, for which `accepts` holds. It becomes a float."""

    def check(value: Any) -> float:
        value = _plain(value)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise Broken(rule)
        try:
            value = float(value)
        except OverflowError:
            raise Broken(rule) from None
        if not math.isfinite(value) or not accepts(value):
            raise Broken(rule)
        return float(value)

    return check


def size(low: int) -> Check:
    """What `parse_size` takes, if it is >= low."""
    at_least = integer(low)

    def check(value: Any) -> int:
        return int(at_least(parse_size(value)))

    return check


def parse_size(value: Any) -> int:
    """An integer, or text such as 8k (8,000), 8K (8,192), 1.5k (1,500) or 2GiB.

    Raises `Broken` for all else, and for what is not whole: 8.5, 1.0001k.
    """
    value = _plain(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is not None and len(match[1]) <= _MAX_DIGITS:
        digits, suffix, unit = match.groups()
        exact = Fraction(digits) * _SUFFIX[suffix.upper() if unit == "iB" else suffix]
        if exact.denominator == 1:
            return int(exact)
    raise Broken("a whole number such as 4096, 8k or 2GiB")


def text(rule: str = "a string", *, empty: bool = False) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not (value or empty):
            raise Broken(rule)
        return value

    return check


def choice(*names: str) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise Broken(f"one of {', '.join(names)}")
        return value

    return check


def optional(check: Check, *, empty: Check | None = None) -> Check:
    """None, or what `check` accepts. `empty` (such as `list`) makes the value None stands for."""

    def check_or_none(value: Any) -> Any:
        if value is None:
            return None if empty is None else empty(())
        try:
            return check(value)
        except Broken as broken:
            raise Broken(f"{broken.rule}, or None", broken.got) from None

    return check_or_none


def list_of(item: Check, rule: str, most: int, noun: str) -> Check:
    """A new list of at most `most` items, from any iterable but a text or a mapping."""

    def check(value: Any) -> list[Any]:
        if isinstance(value, (str, bytes, bytearray, Mapping)):
            raise Broken(rule)
        try:
            items = list(islice(value, most + 1))
        except TypeError:
            raise Broken(rule) from None
        if len(items) > most:
            raise Broken(f"at most {most} {noun}", _count(value, most, noun))
        return [_checked_item(item, one, rule) for one in items]

    return check


def mapping_of(key: Check, value: Check, rule: str, most: int, noun: str) -> Check:
    """A new dict of at most `most` entries, from any mapping."""

    def check(given: Any) -> dict[Any, Any]:
        if not isinstance(given, Mapping):
            raise Broken(rule)
        if len(given) > most:
            raise Broken(f"at most {most} {noun}", _count(given, most, noun))
        return {
            _checked_item(key, k, rule): _checked_item(value, v, rule) for k, v in given.items()
        }

    return check


def token_id_key(value: Any) -> int:
    """A token id, also as text: keys of JSON objects are always texts."""
    if isinstance(value, str) and re.fullmatch(rf"\s*[0-9]{{1,{_MAX_DIGITS}}}\s*", value):
        value = int(value)
    return int(integer(0)(value))


def _checked_item(check: Check, value: Any, rule: str) -> Any:
    try:
        return check(value)
    except Broken:
        raise Broken(rule, shorten(value)) from None


def _count(value: Any, most: int, noun: str) -> str:
    return f"{len(value)} {noun}" if isinstance(value, Collection) else f"more than {most}"


def _plain(value: Any) -> Any:
    """Python's own value for a scalar of NumPy, JAX and the like, which all have shape ()."""
    shape = getattr(value, "shape", None)
    return value.item() if isinstance(shape, tuple) and not shape else value

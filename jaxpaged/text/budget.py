"""How much a chat template may do: time, and the size of everything it makes.

Templates come with models, from strangers. A sandbox keeps them from reaching Python's insides,
but not from looping for ever or from asking for a string of a terabyte, in one call into C code
that nothing can interrupt. So everything that a template makes is measured, what grows faster than
its inputs is refused before it happens, and loops and calls look at the clock. All values being
bounded, so is each operation between two looks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TypeGuard, TypeVar

import jinja2

MAX_TEXT = 10_000_000
"""Characters of one string, or of one list or object when printed."""
MAX_ITEMS = 1_000_000
"""Entries of one list, object or range."""
MAX_TOTAL = 200_000_000
"""Characters and entries made in one rendering, all strings and lists together."""
MAX_SECONDS = 2.0
"""Processor time of one rendering."""
_MAX_BITS = 4096
_MAX_NESTING = 110  # messages may have MAX_DEPTH levels, and a few come on top
_MAX_COMPARISONS = 1_000_000_000
_FORMAT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d*))?")
_NESTED_KEY = re.compile(r"%\([^)]*\(")
_COLLECTIONS: tuple[type, ...] = (
    *(list, tuple, dict, set, frozenset),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
T = TypeVar("T")


class TemplateLimitError(jinja2.TemplateError):
    """A template does more than it may."""


class Budget:
    """What is left to one rendering. Belongs to one thread. Everything here raises
    `TemplateLimitError` when a limit is met.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = MAX_SECONDS if seconds is None else seconds
        # Processor time: a machine busy with other work must not make requests fail.
        self._deadline = time.thread_time() + self._seconds
        self._left = MAX_TOTAL
        self._ticks = 0
        self._measured: dict[int, tuple[object, int, int]] = {}

    def tick(self) -> None:
        """To be called in each loop, call, filter and test."""
        self._ticks += 1
        if not self._ticks & 15:
            self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it ran for more than {self._seconds:g} s")

    def spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TemplateLimitError(f"it made more than {MAX_TOTAL} characters")
        if size > 1000:
            self.check_time()

    def made(self, value: T) -> T:
        """Count a new value, and pass it on."""
        if isinstance(value, str):
            check_text(len(value))
            self.spend(len(value))
        elif isinstance(value, int):
            if value.bit_length() > _MAX_BITS:
                raise TemplateLimitError(f"it made a number of {value.bit_length()} bits")
        elif _is_collection(value):
            check_items(len(value))
            self.spend(len(value))
            check_text(self.printed_size(value))
        return value

    def printed(self, value: T) -> T:
        """Count a value that is about to become text, and pass it on."""
        self.spend(len(value) if isinstance(value, str) else self.printed_size(value))
        return value

    def printed_size(self, value: object) -> int:
        """Characters, nearly, that a value prints. One that occurs several times counts as often:
        sixty lists, each holding the one before it twice, print 2**60 entries.
        """
        return self._measure(value)[0]

    def _measure(self, value: object) -> tuple[int, int]:
        """(printed size, depth). Too deep a nesting overflows the stack of C, for which Python has
        no exception. As inner values are measured when they are made, this goes no deeper itself.
        """
        if isinstance(value, (str, bytes)):
            return len(value) + 2, 0
        if not _is_collection(value):
            return 8, 0
        known = self._measured.get(id(value))
        if known is not None:
            return known[1:]
        size, depth = 2, 0
        for item in value:
            self.tick()
            for part in (item, value[item]) if isinstance(value, dict) else (item,):
                inner, below = self._measure(part)
                size += 2 + inner
                depth = max(depth, below)
            check_text(size)
        if depth >= _MAX_NESTING:
            raise TemplateLimitError(f"it nests lists more than {_MAX_NESTING} levels deep")
        self._measured[id(value)] = (value, size, depth + 1)  # the value keeps its id from reuse
        return size, depth + 1

    def items(self, iterable: Iterable[T]) -> list[T]:
        """A list of what may be an endless generator."""
        return list(self._limited(iterable))

    def _limited(self, iterable: Iterable[T]) -> Iterator[T]:
        for count, item in enumerate(iterable):
            self.tick()
            check_items(count)
            yield item

    def join(self, separator: str, values: Iterable[object]) -> str:
        texts: list[str] = []
        size = 0
        for value in self._limited(values):
            if not isinstance(value, str):
                check_text(self.printed_size(value))
            texts.append(str(value))
            size += len(texts[-1]) + len(separator)
            check_text(size)
        return separator.join(texts)


def _is_collection(value: object) -> TypeGuard[Collection[object]]:
    return isinstance(value, _COLLECTIONS)


def check_text(size: int) -> None:
    if size > MAX_TEXT:
        raise TemplateLimitError(f"it makes a text of more than {MAX_TEXT} characters")


def check_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise TemplateLimitError(f"it makes a list of more than {MAX_ITEMS} entries")


def check_times(many: object, times: object) -> None:
    """`many * times`, a sequence repeated."""
    if isinstance(times, int):
        if isinstance(many, (str, bytes)):
            check_text(len(many) * times)
        elif isinstance(many, (list, tuple)):
            check_items(len(many) * times)


def check_power(base: object, exponent: object) -> None:
    if isinstance(base, int) and isinstance(exponent, int):
        bits = base.bit_length() * exponent
        if bits > _MAX_BITS:
            raise TemplateLimitError(f"it makes a number of {bits} bits")


def check_width(width: object) -> None:
    """Of a padded text."""
    if isinstance(width, int):
        check_text(width)


def check_percent(budget: Budget, pattern: str, arguments: object) -> None:
    """`pattern % arguments`: each field prints at most all of the arguments, or its own width."""
    if _NESTED_KEY.search(pattern):
        raise TemplateLimitError("it formats with parentheses within a key")
    fields = size = 0
    for match in _FORMAT.finditer(pattern):
        fields += 1
        for width in match.groups():
            if width == "*":
                raise TemplateLimitError("it formats with a computed width (*)")
            size += _number(width)
    if fields:
        check_text(size + len(pattern) + fields * budget.printed_size(arguments))


def check_format_spec(spec: str) -> None:
    """What follows the colon in a field of `str.format`."""
    check_text(sum(_number(digits) for digits in re.findall(r"\d+", spec)))


def check_replace(text: str, old: str, new: str, count: int) -> None:
    growth = len(new) - len(old)
    if growth > 0 and len(text) + growth * (len(text) + 1) > MAX_TEXT:
        found = text.count(old) if count < 0 else min(count, text.count(old))
        check_text(len(text) + growth * found)


def check_search(text: str, wanted: object) -> None:
    """Searching backwards and stripping compare each character with each, at the worst."""
    if isinstance(wanted, tuple):
        for one in wanted:
            check_search(text, one)
    elif isinstance(wanted, str) and len(text) * len(wanted) > _MAX_COMPARISONS:
        raise TemplateLimitError("it looks for a very long text in another")


def check_split(text: str, separator: object) -> None:
    if len(text) > MAX_ITEMS:  # else it cannot have as many pieces
        pieces = text.count(separator) if isinstance(separator, str) and separator else len(text)
        check_items(pieces)


def _number(digits: str | None) -> int:
    """A width; those that are too long to be sensible are not even read."""
    if not digits:
        return 0
    return int(digits) if len(digits) < 10 else MAX_TEXT + 1

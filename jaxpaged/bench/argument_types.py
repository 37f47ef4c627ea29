"""What the words after flags may be; each raises what argparse shows with the flag's name."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any


class Pairs(argparse.Action):
    """NAME=VALUE or NAME:VALUE words as a dictionary, from all occurrences of the flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        mark = ":" if option_string == "--goodput" else "="
        pairs = dict(getattr(namespace, self.dest) or {})
        for word in values or ():
            name, found, value = str(word).partition(mark)
            if not found or not name:
                parser.error(f"argument {option_string}: expected {self.metavar}, got {word!r}")
            pairs[name] = value
        setattr(namespace, self.dest, pairs)


def at_least(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"expected an integer >= {low}, got {text!r}")
        return value

    return integer


def number(text: str, rule: str, accepts: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not accepts(value):
        raise argparse.ArgumentTypeError(f"expected {rule}, got {text!r}")
    return value


def positive(text: str) -> float:
    return number(text, "a number > 0", lambda x: 0 < x < math.inf)


def positive_or_inf(text: str) -> float:
    return number(text, "a number > 0, or inf", lambda x: x > 0)


def not_negative(text: str) -> float:
    return number(text, "a number >= 0", lambda x: 0 <= x < math.inf)


def ratio(text: str) -> float:
    return number(text, "a number in [0, 1)", lambda x: 0 <= x < 1)


def percentiles(text: str) -> tuple[float, ...]:
    return tuple(
        number(part, "numbers in [0, 100], such as 50,99", lambda x: 0 <= x <= 100)
        for part in text.split(",")
    )


def some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Names out of `known`, separated by commas."""

    def names(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(",") if part.strip())
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {text!r}")
        return found

    return names

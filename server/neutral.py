"""Values of a field that change nothing, so that they can be taken whatever else is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Neutral = Callable[[Any], bool]


def one_of(*values: Any) -> Neutral:
    """None, and each of these."""
    # True == 1 in Python, and 1.0 == 1 is welcome here: JSON has one kind of number.
    return lambda given: (
        given is None
        or any(
            given == value and isinstance(given, bool) == isinstance(value, bool)
            for value in values
        )
    )

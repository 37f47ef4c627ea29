"""Progress bars on standard error, which may be closed or full without anybody's work ending."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")


class _StandardError:
    """Drops what cannot be written. An error inside tqdm leaves its lock taken, and the next bar of
    the process waits for it without end.
    """

    def __init__(self) -> None:
        self._stream: Any = sys.stderr  # None in a program without a console

    def write(self, text: str) -> int:
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, method: str, *arguments: str) -> None:
        with suppress(AttributeError, OSError, ValueError):  # no stream; full or gone; closed
            getattr(self._stream, method)(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:
        """For `tqdm.external_write_mode`, which looks for the bars of a terminal."""
        return other is self or other is self._stream

    __hash__ = object.__hash__


def progress_bar(items: Iterable[T] | None = None, **options: Any) -> tqdm[T]:
    """A tqdm bar with these options; iterated over, it gives the items."""
    return tqdm(items, **options, file=_StandardError())

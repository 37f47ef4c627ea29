"""Fields of a body that may hold many items: counted before they are decoded.

Such a field arrives as `msgspec.Raw`, its JSON text. A list of a million strings is then refused in
milliseconds, and without a million objects. All functions raise `ApiError` 400.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from server.errors import ApiError

T = TypeVar("T")
MAX_MESSAGE_CHARS = 1000
"""Longest message made of what a client sent."""


def is_absent(raw: msgspec.Raw) -> bool:
    """True for null, which is what a missing field reads as too."""
    return len(raw) == 4 and bytes(raw) == b"null"


def absent() -> msgspec.Raw:
    return msgspec.Raw(b"null")


def is_text(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b'"'


def items(raw: msgspec.Raw, kind: type[T], *, name: str, limit: int, noun: str) -> list[T]:
    """A list of at most `limit` values of one kind. Decoding stops at the first item too many."""
    count = 0

    def take(_: type[Any], value: Any) -> _Item:
        nonlocal count
        count += 1
        if count > limit:
            raise _TooMany
        return _Item(value)

    try:
        found = msgspec.json.decode(raw, type=list[_Item], dec_hook=take)
    except _TooMany:
        raise too_many(name, limit, noun) from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise schema_error(error, name) from None
    return [_convert(item.value, kind, f"{name}[{i}]") for i, item in enumerate(found)]


def integers(raw: msgspec.Raw, *, name: str, limit: int, noun: str) -> list[int]:
    """A list of at most `limit` integers."""
    # A list of numbers has a comma less than numbers; anything else fails to decode anyway.
    if bytes(raw).count(b",") >= limit:
        raise too_many(name, limit, noun)
    return decode(raw, list[int], name=name)


def numbers_by_key(raw: msgspec.Raw, *, name: str, limit: int, noun: str) -> dict[str, float]:
    """An object of at most `limit` numbers, whose keys hold no commas."""
    if bytes(raw).count(b",") >= limit:
        raise too_many(name, limit, noun)
    return decode(raw, dict[str, float], name=name)


def decode(raw: msgspec.Raw, kind: type[T], *, name: str) -> T:
    """A value without limits of its own: it is as large as the body allows."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise schema_error(error, name) from None


def too_many(name: str, limit: int, noun: str) -> ApiError:
    return ApiError(400, f"{name} may have at most {limit} {noun}, and has more.", param=name)


def schema_error(error: Exception, name: str = "") -> ApiError:
    """What the decoder found, with the path of the field; `name` is where decoding started."""
    if isinstance(error, RecursionError):
        return _one_error("JSON is nested too deeply", name or None)
    words, mark, path = str(error).rpartition(" - at `$")
    if not mark:
        words, path = str(error), "`"
    # "$.prompt[0]" of the decoder's; a dict's values are "[...]".
    path = f"{name}{path[:-1]}".removeprefix(".")
    return _one_error(words, path or None)


def _one_error(words: str, path: str | None) -> ApiError:
    # Enumerations quote what was sent, however long it is.
    words = words if len(words) <= 200 else f"{words[:200]}..."
    where = f" - at `{path[:200]}`" if path else ""
    message = f"1 validation error: {words}{where}"
    return ApiError(400, message, param=path[:200] if path else None, type="Bad Request")


def _convert(value: Any, kind: type[T], name: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise schema_error(error, name) from None


class _Item:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _TooMany(Exception):
    pass

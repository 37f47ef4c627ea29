"""Command-line flags made from dataclasses: one flag a field, help from the field's own text."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args

from jaxpaged.errors import ConfigError

ALIASES = {
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "tensor_parallel_size": ("-tp",),
}
"""Second names of flags, by field."""
SWITCH_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
"""What switches a boolean where a value has to be written."""
NONE = ("none", "None")
"""What stands for None on the command line."""


def flag_name(field: str, prefix: str = "") -> str:
    """`max_model_len` -> `--max-model-len`; with prefix "sampling", `--sampling-max-model-len`."""
    return "--" + (f"{prefix}_{field}" if prefix else field).replace("_", "-")


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal that follows the field in the class's source.

    Fields without one, and classes whose source is not at hand, give no entries.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:
        return {}
    (node,) = tree.body
    assert isinstance(node, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, following in zip(node.body, node.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[field.target.id] = " ".join(str(following.value.value).split())
    return docs


def add_flags(
    parser: argparse.ArgumentParser,
    cls: type,
    title: str,
    *,
    clashes: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Add a flag for every field of the dataclass `cls` (or for those in `only`), in an argument
    group named `title`.

    A flag that is not given leaves nothing in the namespace, so that the defaults stay in one
    place; `given` collects the others. `clashes` maps fields whose plain flag belongs to another
    class to the prefix that they take. Ranges are left to `cls`, which knows them.
    """
    assert dataclasses.is_dataclass(cls)
    group = parser.add_argument_group(title)
    docs = field_docs(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if only is not None and field.name not in only:
            continue
        names = [flag_name(field.name, (clashes or {}).get(field.name, ""))]
        names += ALIASES.get(field.name, ())
        text = docs.get(field.name, "")
        default = field.default
        if isinstance(default, tuple):
            default = ",".join(map(str, default)) or None
        if default not in (None, "", dataclasses.MISSING):
            text = f"{text} (default: {default})".strip()
        group.add_argument(
            *names,
            dest=f"{cls.__name__}.{field.name}",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_options(hints[field.name]),
        )


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of `cls` that were on the command line, by field name."""
    prefix = f"{cls.__name__}."
    fields = {k.removeprefix(prefix): v for k, v in vars(args).items() if k.startswith(prefix)}
    # A flag that collects texts cannot tell before the end whether "none" is one of several.
    return {k: None if v in ([word] for word in NONE) else v for k, v in fields.items()}


def value_of(cls: type, field: str, text: str) -> Any:
    """The value of a field written as one text (in the environment, say), as its flag reads it.

    Booleans are one of `SWITCH_WORDS`, or of `NONE` where they may be None. Raises `ConfigError`
    for what cannot be read.
    """
    hint = typing.get_type_hints(cls)[field]
    kinds, optional = _kinds(hint)
    if kinds == [bool]:
        if optional and text in NONE:
            return None
        if text.strip().lower() not in SWITCH_WORDS:
            raise ConfigError(f"expected true or false, got {text!r}")
        return SWITCH_WORDS[text.strip().lower()]
    options = _options(hint)
    parse = options.get("type", str)
    try:
        value = parse(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(str(error)) from None
    if options.get("action") == "append":
        value = [value]
    return None if value in ([word] for word in NONE) else value


def _kinds(hint: Any) -> tuple[list[Any], bool]:
    """The types that a field may have, None aside, and whether it may be None."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = list(typing.get_args(hint)) if union else [hint]
    return [kind for kind in kinds if kind is not type(None)], type(None) in kinds


def _options(hint: Any) -> dict[str, Any]:
    """What `add_argument` needs for a field of this type."""
    kinds, optional = _kinds(hint)
    if kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    words = [w for kind in kinds if typing.get_origin(kind) is Literal for w in get_args(kind)]
    if words:
        words = [*(("true", "false") if bool in kinds else ()), *words]
        return {"type": _one_of(words), "metavar": "|".join(words)}
    if list[str] in kinds:
        return {"action": "append", "metavar": "TEXT"}
    if list[int] in kinds:
        return {"type": _or_none(_int_list, optional), "metavar": "ID,ID,..."}
    if tuple[int, ...] in kinds:
        return {"type": _or_none(_int_list, optional), "metavar": "N,N,..."}
    if tuple[str, ...] in kinds:
        return {"type": _text_list, "action": _Collect, "nargs": "+", "metavar": "TEXT"}
    if any(typing.get_origin(kind) is Mapping for kind in kinds):
        return {"type": _or_none(json_object, optional), "metavar": "JSON"}
    if kinds == [int]:
        return {"type": _or_none(_int, optional), "metavar": "N"}
    if kinds == [float]:
        return {"type": _or_none(_float, optional), "metavar": "X"}
    if str in kinds:
        # Also int | str: sizes such as 2GiB, which the class itself parses.
        return {
            "type": _or_none(str, optional),
            "metavar": "SIZE" if int in kinds else "TEXT",
        }
    raise TypeError(f"no flag can be made for a field of type {hint}")


def _or_none(parse: Callable[[str], Any], optional: bool) -> Callable[[str], Any]:
    """`parse`, but "none" is None where the field allows it, whatever the field's default is."""

    def parse_or_none(text: str) -> Any:
        return None if optional and text in NONE else parse(text)

    return parse_or_none


def _one_of(words: Sequence[str]) -> Callable[[str], Any]:
    """One of some words; "true" and "false" are booleans."""

    def parse(text: str) -> Any:
        if text not in words:
            expected = " or ".join([", ".join(words[:-1]), words[-1]])
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return {"true": True, "false": False}.get(text, text)

    return parse


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def _int_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected integers separated by commas, such as 1,2,3, got {text!r}"
        ) from None


def _text_list(text: str) -> list[str]:
    """Texts separated by commas, or a JSON list of them."""
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not a JSON list: {error}") from None
    if not all(isinstance(part, str) for part in value):
        raise argparse.ArgumentTypeError("expected a JSON list of texts")
    return list(value)


class _Collect(argparse.Action):
    """One list from all words after a flag, and from all its occurrences.

    The namespace's `greedy` is the last such flag that took more than one word, if any did.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values is not None and len(values) > 1:
            namespace.greedy = option_string
        parts = [part for value in values or () for part in value]
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest, None) or ()), *parts])


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value

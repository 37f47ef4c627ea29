"""What `jaxpaged serve` was asked for: command line, then environment, then file, then defaults.

Reading it imports neither JAX nor the web framework, so that help and mistakes are told at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from jaxpaged import flags
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from server import foreign_flags
from server.settings import ServerConfig

HIDDEN = frozenset({"coordinator", "num_processes", "process_id"})
"""Engine settings that a server cannot have: they are told so as foreign flags."""
_FOREIGN = "foreign:"
_FROM_KUBERNETES = re.compile(r"SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP)(_.*)?")
"""What Kubernetes sets in every container when a service is called jaxpaged."""


@dataclass(frozen=True)
class Options:
    """Settings, and what to tell the user about how they were given."""

    engine: EngineConfig
    server: ServerConfig
    notes: tuple[str, ...]


@dataclass
class _Layer:
    """Fields that one source sets, by class and name."""

    engine: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)

    def of(self, cls: type) -> dict[str, Any]:
        return self.engine if cls is EngineConfig else self.server


def field_homes() -> dict[str, type]:
    """Field name -> the class it belongs to."""
    homes: dict[str, type] = {}
    for cls in (EngineConfig, ServerConfig):
        for one in dataclasses.fields(cls):
            assert one.name not in homes, f"{one.name} is a field of both"
            if one.name not in HIDDEN:
                homes[one.name] = cls
    return homes


def read(words: Sequence[str], environment: Mapping[str, str]) -> Options:
    """The settings that command line, environment (<NAME> -> text) and file come to.

    Raises `ConfigError` for what is unknown, malformed, out of range or not supported.
    """
    notes: list[str] = []
    args = _parse(words)
    line = _from_command_line(args, notes)
    surroundings = _from_environment(environment, notes)
    layers = [surroundings, line]
    file_name = args.config or environment.get("CONFIG")
    if file_name is not None:
        layers.insert(0, _from_file(file_name, notes))
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    for layer in layers:
        engine |= layer.engine
        server |= layer.server
    greedy = getattr(args, "greedy", None)
    if greedy is not None and "model" not in engine:
        raise ConfigError(
            f"{greedy} takes all the words after it. Put MODEL first; for the default model, "
            "separate the words by commas."
        )
    return Options(EngineConfig.from_dict(engine), ServerConfig.from_dict(server), tuple(notes))


# ---------------------------------------------------------------------- the command line


class _Parser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `jaxpaged serve --help` lists the flags.")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    args, rest = _parser().parse_known_args([_dashed(word) for word in words])
    _refuse_rest(rest)
    return args


def _from_command_line(args: argparse.Namespace, notes: list[str]) -> _Layer:
    for name, value in vars(args).items():
        if name.startswith(_FOREIGN):
            flag = name.removeprefix(_FOREIGN)
            notes.append(foreign_flags.note(flag, value, f"--{flag}"))
    layer = _Layer(flags.given(args, EngineConfig), flags.given(args, ServerConfig))
    if args.positional is not None:
        flagged = layer.engine.setdefault("model", args.positional)
        if flagged != args.positional:
            raise ConfigError(
                f"two models are given: {args.positional!r} and --model {flagged!r}. Leave one out."
            )
    return layer


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxpaged serve", allow_abbrev=False, add_help=False)
    parser.add_argument("positional", nargs="?", default=None, metavar="MODEL")
    parser.add_argument("--config", default=None, metavar="FILE.yaml")
    for cls in (EngineConfig, ServerConfig):
        fields = [name for name, home in field_homes().items() if home is cls]
        flags.add_flags(parser, cls, cls.__name__, only=fields)
    for name, flag in foreign_flags.FLAGS.items():
        parser.add_argument(
            *(f"--{name}", *([flag.short] if flag.short else [])),
            dest=_FOREIGN + name,
            default=argparse.SUPPRESS,
            action="store" if flag.takes_value else argparse.BooleanOptionalAction,
        )
    return parser


def _dashed(word: str) -> str:
    """--max_model_len=1 -> --max-model-len=1; all other words as they are."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _refuse_rest(rest: Sequence[str]) -> None:
    if not rest:
        return
    flag = next((word for word in rest if word.startswith("-")), None)
    if flag is None:
        raise ConfigError(
            f"unexpected argument {rest[0]!r}: there is one MODEL, and flags begin with --."
        )
    name = flag.partition("=")[0]
    known = [flags.flag_name(one) for one in (*field_homes(), "config", "help")]
    known += [f"--{one}" for one in foreign_flags.FLAGS]
    raise ConfigError(
        f"unknown flag {name}.{_nearest(name, known)} `jaxpaged serve --help` lists the flags."
    )


# ---------------------------------------------------------------------- the environment


def _from_environment(environment: Mapping[str, str], notes: list[str]) -> _Layer:
    homes = field_homes()
    layer = _Layer()
    unknown = []
    for name, text in sorted(environment.items()):
        if name == "CONFIG" or _FROM_KUBERNETES.fullmatch(name):
            continue
        home = homes.get(name.lower())
        if home is None:
            near = difflib.get_close_matches(name.lower(), homes, n=1)
            hint = f" (did you mean JAXPAGED_{near[0].upper()}?)" if near else ""
            unknown.append(f"JAXPAGED_{name}{hint}")
        elif name == "PORT" and text.startswith(("tcp://", "udp://")):
            notes.append(
                f"JAXPAGED_PORT={text} is ignored: Kubernetes sets it because a service is called "
                "jaxpaged."
            )
        else:
            layer.of(home)[name.lower()] = _read_text(home, name.lower(), text, f"JAXPAGED_{name}")
    if unknown:
        notes.append(f"Unknown variables in the environment are ignored: {', '.join(unknown)}.")
    return layer


# ---------------------------------------------------------------------- the file


def _from_file(name: str, notes: list[str]) -> _Layer:
    homes = field_homes()
    layer = _Layer()
    for key, value in _keys_of_file(name):
        home = homes.get(key)
        dashed = key.replace("_", "-")
        if home is not None:
            if isinstance(value, str):
                value = _read_text(home, key, value, f"{name}: {dashed}")
            layer.of(home)[key] = value
        elif dashed in foreign_flags.FLAGS:
            notes.append(foreign_flags.note(dashed, value, f"{dashed} in {name}"))
        else:
            known = [one.replace("_", "-") for one in homes]
            raise ConfigError(f"{name}: unknown key {dashed!r}.{_nearest(dashed, known)}")
    return layer


def _keys_of_file(name: str) -> Iterator[tuple[str, Any]]:
    """Keys with underscores, and their values."""
    import yaml

    try:
        content = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {name}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {name}: not a text in UTF-8.") from error
    except yaml.YAMLError as error:
        # The text of the line stays out of the message: it may hold a key.
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "malformed"
        raise ConfigError(f"--config {name}: not YAML{place}: {problem}.") from error
    if content is None:
        return
    if not isinstance(content, dict):
        raise ConfigError(f"--config {name}: expected lines of the form `flag: value`.")
    seen: set[str] = set()
    for key, value in content.items():
        plain = str(key).replace("-", "_")
        if plain in seen:
            raise ConfigError(f"{name}: the key {key!r} is there twice.")
        seen.add(plain)
        yield plain, value


# ---------------------------------------------------------------------- both


def _read_text(home: type, name: str, text: str, source: str) -> Any:
    try:
        return flags.value_of(home, name, text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}.") from None


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""

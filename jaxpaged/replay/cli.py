"""`jaxpaged replay`: exit status 0 if nothing differs, 1 at the first difference."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from jaxpaged import flags
from jaxpaged.config import EngineConfig
from jaxpaged.record.reader import RecordingError, Session, read_sessions
from jaxpaged.replay.settings import FIXED, deciding_changes, replay_config

if TYPE_CHECKING:  # starts JAX
    from jaxpaged.replay.run import Result

EPILOG = """\
FILE was written by --record. The engine is built with the recorded settings; flags below replace
them. Every decision and every token is compared, without regard to time, and the first difference
is told: its step, request, position and block. With a setting from which other decisions follow,
such as --num-gpu-blocks-override, and with --ignore-decisions, each request's tokens are compared.
Exit status: 0 when all is equal, 1 at a difference, 2 for a FILE that cannot be replayed: another
model, another format, a damaged line. A last line that was cut off is left out, and that is told.
"""


def add_parser(commands: Any) -> None:
    """Add `replay` to the commands of `jaxpaged`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="run a recording again and find what differs",
        usage="jaxpaged replay FILE [--ignore-decisions] [--session N] [flags]",
        description="Run a recording again and find the first thing that differs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="what --record wrote")
    parser.add_argument(
        "--ignore-decisions",
        action="store_true",
        help="compare the tokens of each request, whatever the steps are (default: False)",
    )
    parser.add_argument(
        "--session",
        type=int,
        metavar="N",
        help="replay only the Nth engine that FILE holds, from 1 (default: all, one by one)",
    )
    fields = [field.name for field in dataclasses.fields(EngineConfig) if field.name not in FIXED]
    flags.add_flags(parser, EngineConfig, "engine", only=fields)
    parser.set_defaults(command=run_replay)


def run_replay(args: argparse.Namespace) -> int:
    """Raises `RecordingError`, `ConfigError` or `ModelLoadError` for what cannot be replayed."""
    given = flags.given(args, EngineConfig)
    sessions = read_sessions(args.file)
    numbers = list(range(1, len(sessions) + 1))
    if args.session is not None:
        if args.session not in numbers:
            raise RecordingError(
                f"--session {args.session}: {args.file} holds {len(sessions)}, counted from 1."
            )
        numbers = [args.session]
    several = len(sessions) > 1
    results = []
    for number in numbers:
        result = _replay(sessions[number - 1], given, decisions=not args.ignore_decisions)
        prefix = f"session {number}: " if several else ""
        for note in result.notes:
            sys.stderr.write(f"{prefix}{note}\n")
        if result.difference is not None:
            sys.stderr.write(f"{prefix}difference: {result.difference}\n")
            return 1
        results.append(result)
    sys.stdout.write(_summary(results) + "\n")
    return 0


def _replay(session: Session, given: dict[str, Any], *, decisions: bool) -> Result:
    where = f"{session.path}, line {session.first_line}"
    config = replay_config(session.header, given, where)
    changes = deciding_changes(session.header, config)
    if decisions and changes:
        sys.stderr.write(f"Only tokens are compared, as settings differ: {', '.join(changes)}.\n")

    from jaxpaged.replay.run import replay  # imports jax: only once all else is right

    return replay(
        session,
        config,
        decisions=decisions and not changes,
        tell=_tell,
    )


def _tell(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")


def _summary(results: list[Result]) -> str:
    requests = sum(result.num_requests for result in results)
    steps = sum(result.num_steps for result in results)
    tokens = sum(result.num_tokens for result in results)
    up_to = ", up to what is told above" if any(result.notes for result in results) else ""
    return f"Equal: {requests} requests, {steps} steps, {tokens} tokens{up_to}."

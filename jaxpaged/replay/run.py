"""Runs one recorded engine again: the same requests between the same steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.errors import InvalidRequestError
from jaxpaged.models.registry import supported_architectures
from jaxpaged.record.fingerprint import fingerprint
from jaxpaged.record.format import Record
from jaxpaged.record.header import device, versions
from jaxpaged.record.journal import Journal
from jaxpaged.record.reader import Line, RecordingError, Session
from jaxpaged.replay.compare import Decisions, Tokens
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.startup import build_engine
from jaxpaged.text.tokenizer import load_tokenizer
from jaxpaged.weights.source import resolve_source

_log = logging.getLogger(__name__)

Tell = Callable[[str], None]
COMMANDS = frozenset({"add", "abort", "discard", "reset", "event", "close"})
"""Kinds of records that come from outside; all others come out of `Engine.step`."""


@dataclass(slots=True)
class Result:
    """What a replay has found."""

    difference: str | None = None
    """The first one."""
    num_requests: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    notes: list[str] = field(default_factory=list)
    """Why not all of the recording was compared."""


def replay(session: Session, config: EngineConfig, *, decisions: bool, tell: Tell) -> Result:
    """Run a session and compare: all `decisions`, or only the tokens of each request.

    `tell` gets remarks on what differs around it. Raises `RecordingError` if the recording is of
    another model or holds what this engine refuses.
    """
    _check_model(session, config)
    engine = build_engine(config)
    try:
        for text in _surroundings(session.header, engine):
            tell(text)
        return replay_on(engine, session, decisions=decisions)
    finally:
        engine.close()


def replay_on(engine: Engine, session: Session, *, decisions: bool) -> Result:
    """Run a session on an idle engine without history, and compare."""
    result = (_replay_decisions if decisions else _replay_tokens)(session, engine)
    if session.cut_off:
        result.notes.append(
            "The last line of the recording is cut off and was left out: whoever wrote it ended at "
            "once."
        )
    return result


def _check_model(session: Session, config: EngineConfig) -> None:
    source = resolve_source(config, supported_architectures=supported_architectures())
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(source, config)
    found, recorded = fingerprint(source, tokenizer, config.seed), session.header["model"]
    if config.skip_tokenizer_init:  # asked for now, as no text matters
        found["tokenizer"] = recorded.get("tokenizer")
    other = [part for part, digest in found.items() if digest != recorded.get(part)]
    if other:
        raise RecordingError(
            f"{session.path}: model={config.model!r} is not the one that was recorded: its "
            f"{' and its '.join(other)} differ. --model names another path."
        )


def _surroundings(header: Record, engine: Engine) -> list[str]:
    """What may explain a difference, and is none of the recording's own."""
    found = []
    here = {"device": device(), "versions": versions()}
    for what, now in here.items():
        then = header[what]
        for name, value in now.items():
            if then.get(name) != value:
                found.append(f"{what} {name}: recorded {then.get(name)!r}, now {value!r}.")
    ran, runner = header.get("runs_with", {}), engine.runner
    runs = {
        "attention_backend": runner.attention_backend,
        "attention_variant": runner.attention_variant,
        "kv_cache_dtype": runner.cache_dtype_name,
    }
    for name, value in runs.items():
        if ran.get(name) != value:
            found.append(f"{name}: recorded {ran.get(name)!r}, now {value!r}.")
    return found


# ---------------------------------------------------------------------- everything


def _replay_decisions(session: Session, engine: Engine) -> Result:
    run = Decisions(session.lines(), engine.scheduler.config.block_size)
    engine.observer = Journal(run.take)
    result = Result()
    while run.next is not None and not run.is_over:
        line = run.next
        kind = line.record["kind"]
        if kind == "close":
            break
        if _is_end(line):
            result.notes.append(_end_text(line))
            break
        if kind in COMMANDS:
            _command(line, engine, session)
        else:
            _step(engine, run)
        if run.next is line and not run.is_over:
            run.difference = (
                f"line {line.number} of the recording, {line.record}: this run has nothing that "
                "corresponds to it."
            )
    if run.damage is not None:
        raise run.damage
    if run.failed is not None:
        again = "does not fail there"
        if run.fails_again is not None:
            again = f"fails there as well ({run.fails_again})"
        result.notes.append(
            f"The recording holds a failed step ({run.failed}), and this run {again}. What comes "
            "after it was not compared; --ignore-decisions compares the tokens."
        )
    result.difference = run.difference
    result.num_requests, result.num_steps = run.num_requests, run.num_steps
    result.num_tokens = run.num_tokens
    return result


def _step(engine: Engine, run: Decisions | Tokens) -> None:
    try:
        engine.step()
    except Exception:
        # The engine has told that the step failed. Whether it did so then, too, is compared.
        if not run.is_over:
            raise
        _log.error("A step has failed.", exc_info=True)


def _is_end(line: Line) -> bool:
    """Whether what comes after this cannot be replayed: the weights were others from here on."""
    return line.record["kind"] == "event" and line.record["name"] not in ("sleep", "wake")


def _end_text(line: Line) -> str:
    return (
        f"Line {line.number} of the recording ({line.record['name']}) cannot be replayed, and what "
        "comes after it was not."
    )


# ---------------------------------------------------------------------- tokens


def _replay_tokens(session: Session, engine: Engine) -> Result:
    run = Tokens()
    engine.observer = Journal(run.take)
    result = Result()
    num_steps = engine.scheduler.stats.steps
    for line in session.lines():
        kind = line.record["kind"]
        if kind == "close" or run.difference is not None:
            break
        if _is_end(line):
            result.notes.append(_end_text(line))
            break
        if kind == "failed":
            result.notes.append(
                f"The recording holds a failed step ({line.record['error']}). The requests in it "
                "were compared as far as they had come."
            )
        run.then.take(line.record)
        if kind in COMMANDS and kind != "event":  # no token depends on sleep
            _command(line, engine, session)
        elif kind == "stepped" and engine.has_unfinished_requests():
            _step(engine, run)
        run.compare()
    # Where a step holds less than it did, the end takes longer.
    while run.difference is None and run.is_waiting and engine.has_unfinished_requests():
        _step(engine, run)
        run.compare()
    run.compare_endings()
    result.difference = run.difference
    result.num_requests, result.num_tokens = run.now.names.num_requests, run.num_tokens
    result.num_steps = engine.scheduler.stats.steps - num_steps
    return result


# ---------------------------------------------------------------------- commands


def _command(line: Line, engine: Engine, session: Session) -> None:
    record = line.record
    if record["kind"] == "add":
        _add(line, engine, session)
    elif record["kind"] == "abort":
        engine.abort(record["requests"])
    elif record["kind"] == "discard":
        engine.discard(record["requests"])
    elif record["kind"] == "event":
        if record["name"] == "sleep":
            engine.sleep(running=record["running"])
        else:
            engine.wake()
    else:
        engine.reset_prefix_cache()


def _add(line: Line, engine: Engine, session: Session) -> None:
    record = line.record
    while True:
        try:
            engine.add_request(
                record["request"],
                record["prompt"],
                _params(record),
                priority=record["priority"],
                cache_salt=record["cache_salt"],
                arrival_time=record["arrival"],
                delta_interval=record["delta_interval"],
            )
            return
        except InvalidRequestError as error:
            # An earlier request of this name had ended by now, and takes longer in this run.
            if error.param == "request_id" and engine.has_unfinished_requests():
                engine.step()
                continue
            raise RecordingError(
                f"{session.path}, line {line.number}: request {record['request']!r} is refused by "
                f"this engine: {error}"
            ) from error


def _params(record: Record) -> SamplingParams | BeamSearchParams:
    if record["beam_search"]:
        return BeamSearchParams.from_dict(record["params"])
    return SamplingParams.from_dict(record["params"] | {"seed": record["seed"]})

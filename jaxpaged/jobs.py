"""Prompts of an offline run: read from the command line, JSON lines or plain lines, and checked.

Everything that can be wrong without the model is found here, before a model is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.errors import InvalidRequestError, JaxpagedError
from jaxpaged.sampling_params import SamplingParams

KINDS = ("prompt", "messages", "prompt_token_ids")
KEYS = (*KINDS, "params", "cache_salt", "priority")
SHOWN_ERRORS = 10
BEAM_FIELDS = ("beam_width", "length_penalty", "early_stopping")
"""What beam searches alone have."""


class InputError(JaxpagedError, ValueError):
    """Lines of the input cannot be used; the message names each with its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt. Exactly one of `prompt`, `messages` and `prompt_token_ids` is set."""

    where: str
    """What error messages call it, such as "line 3"."""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    cache_salt: str | None = None
    priority: int = 0
    """Smaller is sooner, under the priority policy only."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling or search fields of this prompt alone; they win over those of the whole run."""


def jobs_from_texts(texts: Iterable[str], *, chat: bool) -> list[Job]:
    """Jobs of prompts given one by one as flags. Raises `InputError`."""
    jobs = []
    for number, text in enumerate(texts, start=1):
        where = f"--prompt number {number}"
        try:
            _check_text(text)
        except InvalidRequestError as error:
            raise InputError(f"{where}: {error}") from error
        jobs.append(_text_job(where, text, chat))
    return jobs


def jobs_from_lines(data: bytes, *, chat: bool) -> list[Job]:
    """One job a line of UTF-8 text; blank lines are skipped. Raises `InputError`."""
    return _parse_lines(data, lambda line, where: _text_job(where, line, chat))


def jobs_from_jsonl(data: bytes, *, chat: bool, params: Mapping[str, Any]) -> list[Job]:
    """One job a line of JSON; blank lines are skipped.

    A line is an object with one of `prompt` (text), `messages` (a conversation) and
    `prompt_token_ids`, and optionally `params` (sampling fields), `cache_salt` and `priority`.
    `params` of this function are the run's own, so that contradictions with a line are found too.
    Raises `InputError`, which lists the bad lines with their numbers.
    """
    return _parse_lines(data, lambda line, where: _json_job(line, where, chat, params))


def _parse_lines(data: bytes, parse: Callable[[str, str], Job]) -> list[Job]:
    jobs: list[Job] = []
    errors: list[str] = []
    # Only \n ends a line: JSON strings may hold the other characters that splitlines() cuts at.
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"line {number}"
        try:
            line = raw.decode("utf-8").removesuffix("\r")
            if line.strip():
                jobs.append(parse(line, where))
        except (UnicodeError, JaxpagedError) as error:
            errors.append(f"{where}: {error}")
    if errors:
        more = [f"... and {len(errors) - SHOWN_ERRORS} more"] if len(errors) > SHOWN_ERRORS else []
        raise InputError(
            "nothing was run, since the input has lines that cannot be used:\n  "
            + "\n  ".join(errors[:SHOWN_ERRORS] + more)
        )
    return jobs


def check_params(params: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
    """Raises `InvalidRequestError` for fields that are unknown or out of range: those of the whole
    run, with a line's own. With a `beam_width` of the run's all its jobs are beam searches.
    """
    fields = {**params, **(own or {})}
    if "beam_width" in params:
        BeamSearchParams.from_dict(fields)
        return
    for name in BEAM_FIELDS:
        if name in fields:
            raise InvalidRequestError(
                f"{name} is of beam searches: give the run --beam-width, and all its prompts are "
                "searched.",
                param=name,
            )
    SamplingParams.from_dict(fields)


def _text_job(where: str, text: str, chat: bool) -> Job:
    if chat:
        return Job(where=where, messages=[{"role": "user", "content": text}])
    return Job(where=where, prompt=text)


def _json_job(line: str, where: str, chat: bool, params: Mapping[str, Any]) -> Job:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"expected a JSON object, got {line[:80]}")
    for name in fields:
        if name not in KEYS:
            near = difflib.get_close_matches(name, KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(KEYS)}"
            raise InvalidRequestError(f"unknown field {name!r}; {hint}", param=name)
    kinds = [name for name in KINDS if name in fields]
    if len(kinds) != 1:
        found = " and ".join(kinds) if kinds else "none"
        raise InvalidRequestError(f"needs exactly one of {', '.join(KINDS)}, found {found}")
    _check_text(fields)
    own = fields.get("params", {})
    if not isinstance(own, dict):
        raise InvalidRequestError("params must be an object of sampling fields", param="params")
    check_params(params, own)
    salt = fields.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequestError("cache_salt must be a non-empty string", param="cache_salt")
    priority = fields.get("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError("priority must be an integer", param="priority")
    job = _prompt_of(kinds[0], fields[kinds[0]], where, chat)
    return dataclasses.replace(job, cache_salt=salt, priority=priority, params=own)


def _prompt_of(kind: str, value: Any, where: str, chat: bool) -> Job:
    if kind == "prompt":
        if not isinstance(value, str):
            raise InvalidRequestError("prompt must be a string", param=kind)
        return _text_job(where, value, chat)
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{kind} must be a non-empty list", param=kind)
    if kind == "messages":
        for message in value:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise InvalidRequestError(
                    "messages must be objects with a role and a content", param=kind
                )
        return Job(where=where, messages=value)
    if chat:
        raise InvalidRequestError("prompt_token_ids cannot be used with --chat", param=kind)
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InvalidRequestError(
                f"prompt_token_ids must be integers >= 0, got {token!r}", param=kind
            )
    return Job(where=where, prompt_token_ids=value)


def _check_text(value: Any) -> None:
    """JSON, and arguments that are not UTF-8, can hold half of a surrogate pair, which is no text.
    No tokenizer takes it.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError("the text is not Unicode (half of a surrogate pair)") from None
    except RecursionError:  # json.loads goes a little deeper
        raise InvalidRequestError("not JSON that can be used: nested too deeply") from None

"""Compares what an engine does with what was recorded: everything, or its tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxpaged.record.format import Record
from jaxpaged.record.reader import Line, RecordingError
from jaxpaged.replay import explain
from jaxpaged.replay.sequences import Names, request_of, told


class Decisions:
    """Takes the records of a run and holds each against the next recorded one.

    The first difference stays in `difference`, and what comes later is not looked at.
    """

    def __init__(self, lines: Iterator[Line], block_size: int) -> None:
        self._lines = lines
        self._block_size = block_size
        self._names = Names()
        self._outputs: dict[str, int] = {}
        """Tokens that each sequence has had."""
        self.next: Line | None = next(lines, None)
        """The record that should come now; None at the end of the recording."""
        self.damage: RecordingError | None = None
        """Why the recording could not be read on."""
        self.difference: str | None = None
        self.failed: str | None = None
        """A step that failed when it was recorded; nothing after it can be compared."""
        self.fails_again: str | None = None
        """How it failed now."""
        self.num_steps = self.num_tokens = 0
        self._last_step = -1

    @property
    def num_requests(self) -> int:
        return self._names.num_requests

    @property
    def is_over(self) -> bool:
        return self.next is None or self.difference is not None or self.failed is not None

    def take(self, now: Record) -> None:
        """Something has happened in this run."""
        if self.failed is not None and now["kind"] == "failed" and self.fails_again is None:
            self.fails_again = now["error"]
        if self.is_over:
            return
        assert self.next is not None
        then = self.next.record
        if then["kind"] == "failed":
            self.failed = then["error"]
            self.take(now)
        elif _equal(then, now):
            self._note(now)
            self._advance()
        else:
            self._differs(then, now)

    def _advance(self) -> None:
        try:
            self.next = next(self._lines, None)
        except RecordingError as error:  # the engine must not notice
            self.next, self.damage = None, error

    def _note(self, record: Record) -> None:
        self._names.take(record)
        if record["kind"] == "read":
            self.num_steps += 1
            self._last_step = record["step"]
            self.num_tokens += len(record["tokens"])
            for number, _ in record["tokens"]:
                sequence = self._names.sequence(number)
                self._outputs[sequence] = self._outputs.get(sequence, 0) + 1
        elif record["kind"] == "beams":
            self.num_tokens += len(record["next"])
            sequence = f"0_{record['request']}"
            self._outputs[sequence] = self._outputs.get(sequence, 0) + 1
        elif record["kind"] == "end":
            self._outputs.pop(record["sequence"], None)

    def _differs(self, then: Record, now: Record) -> None:
        assert self.next is not None
        if now["kind"] == "plan":  # nothing more will be compared, so this side's names may count
            self._names.take(now)
        context = explain.Context(self._names.sequence, self._position, self._block_size)
        step = now.get("step", then.get("step"))
        where = f"after step {self._last_step}" if step is None else f"step {step}"
        text = explain.differs(then, now, context)
        self.difference = f"{where}, {text} (line {self.next.number} of the recording)."

    def _position(self, sequence: str) -> int:
        return self._names.prompt_len(request_of(sequence)) + self._outputs.get(sequence, 0)


def _equal(then: Record, now: Record) -> bool:
    if then == now:
        return True
    if then["kind"] != now["kind"]:
        return False
    if now["kind"] == "end":  # texts of errors may name a path or a time
        return all(then.get(name) == now.get(name) for name in ("sequence", "reason", "stop"))
    if now["kind"] == "add":
        # A replay gives every request its seed. This build may know parameters that are newer.
        params = {k: v for k, v in now["params"].items() if k in then["params"] and k != "seed"}
        old = {k: v for k, v in then["params"].items() if k != "seed"}
        return bool(old == params and {**then, "params": 0} == {**now, "params": 0})
    return False


class TokenStreams:
    """The tokens of every sequence in one run, whatever the steps were that they came in."""

    def __init__(self) -> None:
        self.names = Names()
        self.tokens: dict[tuple[int, str], list[tuple[Any, int]]] = {}
        """(rank of the request, sequence) -> its tokens, each with the step that drew it."""
        self.ends: dict[tuple[int, str], Record] = {}
        self.grown: dict[tuple[int, str], None] = {}
        """Those with tokens that nobody has looked at."""
        self._step = -1

    def take(self, record: Record) -> None:
        self.names.take(record)
        if record["kind"] == "read":
            self._step = record["step"]
            for number, token in record["tokens"]:
                self._append(self.names.sequence(number), token)
        elif record["kind"] == "beams":  # all that a search goes on with is one token of it
            self._append(f"0_{record['request']}", record["next"])
        elif record["kind"] == "end":
            self.ends[self._key(record["sequence"])] = record

    def _append(self, sequence: str, token: Any) -> None:
        key = self._key(sequence)
        self.tokens.setdefault(key, []).append((token, self._step))
        self.grown[key] = None

    def _key(self, sequence: str) -> tuple[int, str]:
        return self.names.rank(request_of(sequence)), sequence


class Tokens:
    """Holds the tokens of this run against those recorded, as far as both have come."""

    def __init__(self) -> None:
        self.then, self.now = TokenStreams(), TokenStreams()
        self.difference: str | None = None
        self._compared: dict[tuple[int, str], int] = {}

    @property
    def is_over(self) -> bool:
        return self.difference is not None

    @property
    def num_tokens(self) -> int:
        """That were compared."""
        return sum(
            len(token) if isinstance(token, list) else 1
            for key, count in self._compared.items()
            for token, _ in self.then.tokens.get(key, [])[:count]
        )

    @property
    def is_waiting(self) -> bool:
        """Whether this run has yet to come to something that was recorded."""
        now = self.now
        return any(
            len(now.tokens.get(key, ())) < len(tokens) and key not in now.ends
            for key, tokens in self.then.tokens.items()
        ) or any(key not in now.ends and _by_itself(end) for key, end in self.then.ends.items())

    def take(self, record: Record) -> None:
        """Something has happened in this run."""
        if record["kind"] == "failed" and self.difference is None:
            self.difference = f"a step fails now: {record['error']}"
        self.now.take(record)

    def compare(self) -> None:
        """Look at all tokens that have come since the last time."""
        grown = dict.fromkeys((*self.now.grown, *self.then.grown))
        self.now.grown, self.then.grown = {}, {}
        for key in grown:
            then, now = (run.tokens.get(key, []) for run in (self.then, self.now))
            both = min(len(then), len(now))
            for index in range(self._compared.get(key, 0), both):
                if then[index][0] != now[index][0] and self.difference is None:
                    self.difference = self._told(key, index)
            self._compared[key] = both

    def compare_endings(self) -> None:
        """Look at how sequences have ended that ended by themselves when they were recorded."""
        for key, end in self.then.ends.items():
            now = self.now.ends.get(key)
            if self.difference is not None or not _by_itself(end) or now is None:
                continue
            counts = [len(run.tokens.get(key, ())) for run in (self.then, self.now)]
            if counts[0] != counts[1] or not _equal(end, now):
                self.difference = (
                    f"{told(key[1])}, ending: recorded {end['reason']!r} after {counts[0]} tokens, "
                    f"now {now['reason']!r} after {counts[1]}"
                    + (f" ({now['error']})." if "error" in now else ".")
                )

    def _told(self, key: tuple[int, str], index: int) -> str:
        (old, then), (new, now) = self.then.tokens[key][index], self.now.tokens[key][index]
        position = self.now.names.prompt_len(request_of(key[1])) + index
        return (
            f"step {now}, {told(key[1])}, position {position}, token: recorded {old} (in step "
            f"{then}), now {new}."
        )


def _by_itself(end: Record) -> bool:
    return end["reason"] in ("stop", "length")

"""What an engine does, as records: plain dictionaries that JSON holds unchanged.

The same records are written to a file, and compared with those of a file when it is replayed.
`docs/record_replay.md` describes each kind.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from jaxpaged.beam_request import Beam, BeamState
from jaxpaged.completion import Completion, RequestState
from jaxpaged.core.plan import ScheduledRow, ScheduledStep, TokenResult
from jaxpaged.core.request import Request
from jaxpaged.record.format import ADMITTED, SAMPLES, Record

Emit = Callable[[Record], None]


class Journal:
    """An `EngineObserver` that puts everything into records and hands them to `emit`.

    Sequences are numbered in the order of their first rows. A row carries of each block table what
    has changed since the row before.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._first_arrival: float | None = None
        self._num_seen = 0
        self._numbers: dict[Request, int] = {}
        self._tables: dict[Request, list[array[int]]] = {}
        """Copies of the tables as they were told last."""
        self._num_steps = 0

    # ------------------------------------------------------------------ from outside

    def added(self, state: RequestState | BeamState) -> None:
        first = state.completions[0]
        core, fields = first.core, first.row.fields
        if self._first_arrival is None:
            self._first_arrival = core.arrival_time
        self._emit(
            {
                "kind": "add",
                "request": state.request_id,
                "prompt": list(state.prompt_token_ids),
                "beam_search": core.is_beam,
                "params": _params(state),
                "seed": (fields.seed_hi & 0xFFFFFFFF) << 32 | fields.seed_lo & 0xFFFFFFFF,
                "priority": core.priority,
                "cache_salt": core.cache_salt,
                # The clock of another process begins elsewhere; only the order counts.
                "arrival": core.arrival_time - self._first_arrival,
                "delta_interval": state.delta_interval,
            }
        )

    def aborted(self, request_ids: Sequence[str]) -> None:
        self._emit({"kind": "abort", "requests": list(request_ids)})

    def discarded(self, request_ids: Sequence[str]) -> None:
        self._emit({"kind": "discard", "requests": list(request_ids)})

    def cache_reset(self, *, done: bool) -> None:
        self._emit({"kind": "reset", "done": done})

    def event(self, name: str, *, running: str = "") -> None:
        self._emit({"kind": "event", "name": name, "running": running})

    # ------------------------------------------------------------------ steps

    def planned(self, step: ScheduledStep) -> None:
        seen = self._num_seen
        record: Record = {
            "kind": "plan",
            "step": step.step_id,
            "rows": [self._row(row) for row in step.rows],
        }
        if step.preempted:
            record["preempted"] = [self._number(request) for request in step.preempted]
        if step.copies:
            record["copies"] = [list(pair) for pair in step.copies]
        if self._num_seen > seen:
            new = list(self._numbers.items())[seen - self._num_seen :]
            record["names"] = [[number, request.request_id] for request, number in new]
        self._emit(record)

    def read(self, step: ScheduledStep, results: Sequence[TokenResult]) -> None:
        numbers = self._numbers
        tokens = [[numbers[r.request], r.token] for r in results if r.token is not None]
        self._emit({"kind": "read", "step": step.step_id, "tokens": tokens})

    def branched(self, request_id: str, continuations: Sequence[tuple[int, int]]) -> None:
        beams = [[index, token] for index, token in continuations]
        self._emit({"kind": "beams", "request": request_id, "next": beams})

    def ended(self, completion: Completion | Beam) -> None:
        core = completion.core
        ended = core.group.members if core.group is not None and core.is_beam else [core]
        for one in ended:
            self._numbers.pop(one, None)
            self._tables.pop(one, None)
        record: Record = {
            "kind": "end",
            "sequence": core.request_id,
            "reason": core.finish_reason,
            "stop": core.stop_reason,
        }
        if core.error is not None:
            record["error"] = core.error
        self._emit(record)

    def failed(self, error: str) -> None:
        self._emit({"kind": "failed", "error": error})

    def stepped(self, *, idle: bool) -> None:
        self._num_steps += 1
        self._emit({"kind": "stepped", "number": self._num_steps})

    def closed(self) -> None:
        self._emit({"kind": "close"})

    def _number(self, request: Request) -> int:
        number = self._numbers.get(request)
        if number is None:
            number = self._numbers[request] = self._num_seen
            self._num_seen += 1
        return number

    def _row(self, row: ScheduledRow) -> list[Any]:
        request = row.request
        flags = (SAMPLES if row.samples else 0) | (ADMITTED if row.admitted else 0)
        told: list[Any] = [self._number(request), row.start, row.num_tokens, flags]
        known = self._tables.get(request)
        if known != request.tables:
            told.append(self._changes(request, known))
        if row.source >= 0:
            told += ([], row.source) if len(told) == 4 else (row.source,)
        return told

    def _changes(self, request: Request, known: list[array[int]] | None) -> list[list[int]]:
        """[group, index, ids from there on] for each table that has changed."""
        if known is None:
            known = self._tables[request] = [array("i") for _ in request.tables]
        while len(known) < len(request.tables):
            known.append(array("i"))
        changes = []
        for group, (before, table) in enumerate(zip(known, request.tables, strict=True)):
            if before == table:
                continue
            index = common_length(before, table)
            del before[index:]
            before.extend(table[index:])
            changes.append([group, index, *table[index:]])
        return changes


def common_length(before: array[int], table: array[int]) -> int:
    """Entries from the beginning on that are the same."""
    length = len(before)
    if table[:length] == before:  # it has only grown, as nearly always
        return length
    for index, (old, new) in enumerate(zip(before, table, strict=False)):
        if old != new:
            return index
    return min(length, len(table))


def _params(state: RequestState | BeamState) -> Record:
    """The fields of what the user asked for, as JSON has them."""
    asked = state.beam_params if isinstance(state, BeamState) else state.params
    fields = dataclasses.asdict(asked)
    bias = fields.get("logit_bias")
    if bias is not None:
        fields["logit_bias"] = {str(token): value for token, value in bias.items()}
    return fields

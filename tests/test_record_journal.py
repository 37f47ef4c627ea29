"""What the records of an engine say, and the sentences about two that differ."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from jaxpaged.core.plan import ScheduledRow, ScheduledStep
from jaxpaged.core.request import Request
from jaxpaged.record.format import Record
from jaxpaged.record.journal import Journal, common_length
from jaxpaged.replay.explain import Context, differs


def request(name: str, *tables: list[int]) -> Request:
    made = Request(name, [1, 2, 3], max_tokens=5, arrival_time=0.0)
    made.tables = [array("i", table) for table in tables]
    return made


def row(of: Request, start: int = 3, **options: Any) -> ScheduledRow:
    fields = {"num_tokens": 1, "samples": True, "admitted": False} | options
    return ScheduledRow(of, 0, start, **fields)


def plans(*steps: list[ScheduledRow], **options: Any) -> list[Record]:
    found: list[Record] = []
    journal = Journal(found.append)
    for number, rows in enumerate(steps):
        journal.planned(ScheduledStep(number, rows, 0, **{"preempted": [], **options}))
    return found


def test_sequences_are_numbered_and_named_at_their_first_row() -> None:
    a, b = request("0_a"), request("0_b")
    first, second, third = plans([row(a)], [row(a)], [row(b), row(a, 4)])
    assert first == {"kind": "plan", "step": 0, "rows": [[0, 3, 1, 1, []]], "names": [[0, "0_a"]]}
    assert "names" not in second
    assert third["names"] == [[1, "0_b"]]
    assert [found[:2] for found in third["rows"]] == [[1, 3], [0, 4]]


def test_flags_copies_preempted_and_sources() -> None:
    a, b = request("0_a", [7]), request("1_a", [7])
    rows = [row(a, admitted=True, samples=False), row(b, num_tokens=0, source=0)]
    (found,) = plans(rows, copies=[(7, 9)], preempted=[b])
    assert found["rows"] == [[0, 3, 1, 2, [[0, 0, 7]]], [1, 3, 0, 1, [[0, 0, 7]], 0]]
    assert found["copies"] == [[7, 9]]
    assert found["preempted"] == [1]


def changes(*tables: list[list[int]]) -> list[Any]:
    """What is told of one request's tables, step by step."""
    found: list[Record] = []
    journal, one = Journal(found.append), request("0_a")
    for number, now in enumerate(tables):
        one.tables = [array("i", table) for table in now]
        journal.planned(ScheduledStep(number, [row(one)], 0, []))
    return [step["rows"][0][4:] for step in found]


def test_only_what_has_changed_in_a_table_is_told() -> None:
    told = changes([[1, 2]], [[1, 2]], [[1, 2, 3]], [[1, 2, 4]], [[5, 2, 4]], [[5]], [[6, 7]])
    assert told == [
        [[[0, 0, 1, 2]]],
        [],
        [[[0, 2, 3]]],
        [[[0, 2, 4]]],
        [[[0, 0, 5, 2, 4]]],
        [[[0, 1]]],
        [[[0, 0, 6, 7]]],
    ]
    told = changes([[1], [2]], [[1], [0, 3]], [[1, 4], [0, 3]])
    assert told == [[[[0, 0, 1], [1, 0, 2]]], [[[1, 0, 0, 3]]], [[[0, 1, 4]]]]


@pytest.mark.parametrize(
    ("before", "table", "length"),
    [([], [1], 0), ([1], [1, 2], 1), ([1, 2], [1, 2], 2), ([1, 3], [1, 2], 1), ([1, 2], [1], 1)],
)
def test_common_length(before: list[int], table: list[int], length: int) -> None:
    assert common_length(array("i", before), array("i", table)) == length


# ---------------------------------------------------------------------- differences

CONTEXT = Context(lambda number: {0: "0_a", 1: "2_b"}[number], lambda sequence: 21, 16)


def plan(*rows: list[Any], **options: Any) -> Record:
    return {"kind": "plan", "step": 4, "rows": list(rows), **options}


def read(*tokens: list[int]) -> Record:
    return {"kind": "read", "step": 4, "tokens": list(tokens)}


ROW = [0, 20, 1, 1]
END = {"kind": "end", "sequence": "2_b", "reason": "stop", "stop": 7}


@pytest.mark.parametrize(
    ("then", "now", "text"),
    [
        (read([0, 5]), read([0, 6]), "request 'a', position 21, token: recorded 5, now 6"),
        (read([1, 5]), read([1, 6]), "request 'b' (sample 2), position 21, token: recorded 5"),
        (read([0, 5], [1, 5]), read([0, 5]), "position 21, token: recorded 5, now none"),
        (read(), read([0, 5]), "request 'a', position 21, token: recorded none, now 5"),
        (plan(ROW), plan([1, *ROW[1:]]), "row: recorded request 'a', now request 'b' (sample 2)"),
        (plan(ROW), plan([0, 19, 1, 1]), "request 'a', first position: recorded 20, now 19"),
        (plan(ROW), plan([0, 20, 2, 1]), "position 20, number of tokens: recorded 1, now 2"),
        (plan(ROW), plan([0, 20, 1, 0]), "position 20, draws a token: recorded yes, now no"),
        (plan(ROW), plan([0, 20, 1, 3]), "position 20, is admitted: recorded no, now yes"),
        (plan(ROW), plan(), "row 0: recorded request 'a', now nobody"),
        (plan(), plan(ROW), "row 0: recorded nobody, now request 'a'"),
        (
            plan([*ROW, [[0, 2, 8, 9]]]),
            plan([*ROW, [[0, 2, 8, 10]]]),
            "request 'a', position 48, block 3 of its table: recorded 9, now 10",
        ),
        (
            plan([*ROW, [[0, 0, 8], [1, 0, 9]]]),
            plan([*ROW, [[0, 0, 8]]]),
            "position 0, block 0 of its table of layer group 1: recorded 9, now none",
        ),
        (plan(ROW), plan([*ROW, [], 3]), "row with its logits: recorded [], now [3]"),
        (plan(ROW), plan(ROW, preempted=[1]), "preempted: recorded nobody, now request 'b'"),
        (plan(ROW), plan(ROW, copies=[[1, 2]]), "copied (from, to): recorded [], now [[1, 2]]"),
        (
            END,
            {**END, "reason": "length", "stop": None},
            "request 'b' (sample 2): recorded ends by 'stop' (7), now ends by 'length'",
        ),
        (
            END,
            plan(ROW),
            "recorded request 'b' (sample 2) ends by 'stop' (7), now step 4 is planned",
        ),
        (
            {"kind": "beams", "request": "a", "next": [[0, 5]]},
            {"kind": "beams", "request": "a", "next": [[0, 6]]},
            "position 21, next beams as (beam, token): recorded [[0, 5]], now [[0, 6]]",
        ),
        # Edited to what no engine writes.
        (plan(5), plan(ROW), "recorded {"),  # type: ignore[arg-type]
        (read([0]), read([0, 5]), "recorded {"),
        ({"kind": "plan"}, plan(ROW), "recorded {"),
    ],
)
def test_differences_are_told_in_a_sentence(then: Record, now: Record, text: str) -> None:
    assert text in differs(then, now, CONTEXT)

"""What exactly differs between two records that should be equal, in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.record.format import ADMITTED, SAMPLES, Record
from jaxpaged.replay.sequences import told


@dataclass(frozen=True, slots=True)
class Context:
    """What is known of the sequences when the difference appears."""

    name: Callable[[Any], str]
    """The id of a sequence from its number."""
    position: Callable[[str], int]
    """Where the next token of the sequence with this id stands; the prompt begins at 0."""
    block_size: int


_SHOWN = 160


def differs(then: Record, now: Record, context: Context) -> str:
    """`then` was recorded. Works for records that were edited to anything at all."""
    try:
        text = _explain(then, now, context)
    except (TypeError, ValueError, LookupError, AttributeError):  # rows that are no rows
        text = None
    return text or f"recorded {_short(then)}, now {_short(now)}"


def _explain(then: Record, now: Record, context: Context) -> str | None:
    kind = then["kind"]
    if kind != now["kind"]:
        return _pair("next", _happening(then), _happening(now))
    if kind == "plan":
        return _plan(then, now, context)
    if kind == "read":
        return _tokens(then, now, context)
    if kind == "end":
        return _pair(told(now["sequence"]), _ending(then), _ending(now))
    if kind == "beams":
        position = context.position(f"0_{now['request']}")
        what = f"request {now['request']!r}, position {position}, next beams as (beam, token)"
        return _pair(what, then["next"], now["next"])
    return None


def _pair(what: str, old: object, new: object) -> str:
    return f"{what}: recorded {old}, now {new}"


def _happening(record: Record) -> str:
    kind = record["kind"]
    if kind in ("plan", "read"):
        return f"step {record['step']} is {'planned' if kind == 'plan' else 'read'}"
    if kind == "end":
        return f"{told(record['sequence'])} {_ending(record)}"
    if kind == "stepped":
        return "nothing more of this step"
    if kind == "failed":
        return f"a step fails ({record['error']})"
    return _short(record)


def _ending(record: Record) -> str:
    stop = record.get("stop")
    text = f"ends by {record['reason']!r}" + ("" if stop is None else f" ({stop!r})")
    return text + (f" ({record['error']})" if "error" in record else "")


def _tokens(then: Record, now: Record, context: Context) -> str | None:
    before, after = dict(then["tokens"]), dict(now["tokens"])
    for number in dict.fromkeys((*after, *before)):
        old, new = before.get(number, "none"), after.get(number, "none")
        if old != new:
            sequence = context.name(number)
            where = f"{told(sequence)}, position {context.position(sequence)}"
            return _pair(f"{where}, token", old, new)
    return None


def _plan(then: Record, now: Record, context: Context) -> str | None:
    if then["step"] != now["step"]:
        return _pair("number of the step", then["step"], now["step"])
    for old, new in zip(then["rows"], now["rows"], strict=False):
        if old != new:
            return _row(old, new, context)
    who = [[told(context.name(row[0])) for row in record["rows"]] for record in (then, now)]
    if len(who[0]) != len(who[1]):
        both = min(map(len, who))
        return _pair(f"row {both}", *(_list(names[both:]) for names in who))
    if then.get("preempted") != now.get("preempted"):
        names = [[told(context.name(n)) for n in r.get("preempted", ())] for r in (then, now)]
        return _pair("preempted", _list(names[0]), _list(names[1]))
    if then.get("copies") != now.get("copies"):
        return _pair("blocks copied (from, to)", then.get("copies", []), now.get("copies", []))
    return None


def _row(old: Sequence[Any], new: Sequence[Any], context: Context) -> str | None:
    """What differs between the rows of one place in a step."""
    if old[0] != new[0]:
        return _pair("row", told(context.name(old[0])), told(context.name(new[0])))
    who = told(context.name(new[0]))
    if old[1] != new[1]:
        return _pair(f"{who}, first position", old[1], new[1])
    where = f"{who}, position {new[1]}"
    if old[2] != new[2]:
        return _pair(f"{where}, number of tokens", old[2], new[2])
    for bit, what in ((SAMPLES, "draws a token"), (ADMITTED, "is admitted")):
        if (old[3] ^ new[3]) & bit:
            return _pair(
                f"{where}, {what}", *("yes" if row[3] & bit else "no" for row in (old, new))
            )
    before, after = _blocks(old), _blocks(new)
    for place in sorted({*before, *after}):
        if before.get(place) != after.get(place):
            group, index = place
            where = f"{who}, position {index * context.block_size}, block {index} of its table"
            where += f" of layer group {group}" if group else ""
            return _pair(where, before.get(place, "none"), after.get(place, "none"))
    return _pair(f"{where}, row with its logits", old[5:], new[5:])


def _blocks(row: Sequence[Any]) -> dict[tuple[int, int], int]:
    """(group, index in the table) -> block, for what a row tells."""
    changes = row[4] if len(row) > 4 else []
    return {
        (group, index + i): block
        for group, index, *blocks in changes
        for i, block in enumerate(blocks)
    }


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "nobody"


def _short(record: Record) -> str:
    text = json.dumps(record)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."

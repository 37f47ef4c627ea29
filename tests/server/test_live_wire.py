"""Whoever applies the changes to the first view has the view that the engine has."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from jaxpaged.core.snapshot import RequestSnapshot, take_snapshot
from jaxpaged.outputs import EngineStats
from server.live_wire import COUNTERS, View, _table_change, change, counters_of, whole
from tests.core.harness import Sim, make_config, make_request

STATES = {"0": "null", "f": "free", "c": "cached", "h": "held", "s": "shared"}


def over_the_wire(payload: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(payload))


def view_of(sim: Sim, seconds: float = 0.0) -> View:
    stats = EngineStats(preemptions=sim.scheduler.stats.preemptions)
    return View(take_snapshot(sim.scheduler), counters_of(stats), "ready", seconds)


def apply(copy: dict[str, Any], told: dict[str, Any]) -> None:
    """What the page's pool.js does."""
    states = list(copy["states"])
    for first, letters in told["blocks"]:
        states[first : first + len(letters)] = letters
    copy["states"] = "".join(states)
    shared = {**copy["shared"], **told["shared"]}
    copy["shared"] = {b: n for b, n in shared.items() if states[int(b)] == "s"}
    requests = {r["key"]: r for r in copy["requests"]}
    changes = told["requests"]
    requests.update({r["key"]: r for r in changes.get("new", [])})
    for changed in changes.get("changed", []):
        request = requests[changed["key"]]
        for group, behind, at, ids in changed.pop("tables", []):
            table = request["tables"][group]
            table[at:] = ids
            table[:behind] = [0] * behind
        request.update(changed)
    order = changes.get("order", [r["key"] for r in copy["requests"]])
    copy["requests"] = [requests[key] for key in order]
    for name in ("seconds", "status", "running", "waiting", "counts", "counters"):
        copy[name] = told[name]


def record(windows: tuple[int | None, ...], num_blocks: int) -> list[View]:
    """The views of a busy run, with preemptions and a queue longer than what is listed."""
    rng = random.Random(3)
    config = make_config(
        num_blocks=num_blocks,
        max_num_seqs=5,
        max_num_batched_tokens=20,
        windows=windows,
    )
    sim = Sim(config)
    common = [rng.randrange(50) for _ in range(13)]
    for i in range(30):
        prompt = common + [rng.randrange(50) for _ in range(rng.randrange(1, 9))]
        most = rng.randrange(2, 30)
        if i % 10 == 4:
            sim.add_beams(f"b{i}", prompt, 3, most)
        else:
            names = [f"{sample}_r{i}" for sample in range(rng.choice((1, 1, 3)))]
            sim.add_group([make_request(name, prompt, max_tokens=most) for name in names])
    views = [view_of(sim)]
    for turn in range(1000):
        if not sim.scheduler.has_unfinished:
            break
        sim.turn()
        if turn % 3 == 0:  # some changes come several at once
            views.append(view_of(sim, turn))
    views.append(view_of(sim, 1000))
    assert sim.scheduler.stats.preemptions > 0
    return views


@pytest.mark.parametrize(("windows", "num_blocks"), [((None,), 20), ((None, 9), 40), ((7,), 12)])
def test_changes_add_up_to_the_whole(windows: tuple[int | None, ...], num_blocks: int) -> None:
    views = record(windows, num_blocks)
    copy = over_the_wire(whole(views[0]))
    kinds: set[str] = set()
    for before, after in pairwise(views):
        told = over_the_wire(change(before, after))
        if told is None:  # it had come to its end
            assert whole(after) == {**whole(before), "seconds": after.seconds}
            continue
        kinds |= told["requests"].keys() | {k for k in ("hits", "evicted", "copies") if told[k]}
        apply(copy, told)
        assert copy == over_the_wire(whole(after))
    assert kinds == {"order", "new", "changed", "hits", "evicted", "copies"}
    assert copy["requests"] == [] and copy["counts"]["held"] == 0


def test_the_counts_are_those_of_the_letters() -> None:
    for view in record((None,), 20):
        told = whole(view)
        for letter, name in STATES.items():
            assert told["counts"][name] == told["states"].count(letter)
        assert told["shared"].keys() == {i for i, s in enumerate(told["states"]) if s == "s"}


def test_nothing_is_said_when_nothing_happened() -> None:
    sim = Sim(make_config())
    before = view_of(sim, 1.0)
    assert change(before, view_of(sim, 2.0)) is None
    sim.add(make_request("a", range(9)))
    waiting = change(before, view_of(sim, 3.0))
    assert waiting is not None
    assert (waiting["waiting"], waiting["blocks"]) == (1, [])
    assert [r["status"] for r in waiting["requests"]["new"]] == ["waiting"]


def test_a_step_of_decoding_in_a_large_pool_is_a_short_message() -> None:
    sim = Sim(make_config(num_blocks=20_000, max_num_seqs=32, max_num_batched_tokens=512))
    for i in range(32):
        sim.add(make_request(f"0_chatcmpl-{i:032x}-0123abcd", range(i, i + 120), max_tokens=90))
    for _ in range(30):
        sim.turn()
    before = view_of(sim)
    for _ in range(4):  # a block more for everybody
        sim.turn()
    message = msgspec.json.encode(change(before, view_of(sim)))
    assert len(message) < 3500
    assert len(msgspec.json.encode(whole(before))) > 20_000


def test_a_table_that_grows_is_sent_by_its_new_end() -> None:
    sim = Sim(make_config(block_size=4))
    sim.add(make_request("a", range(30), max_tokens=60))
    sim.turn()
    before = view_of(sim)
    for _ in range(9):
        sim.turn()
    told = change(before, view_of(sim))
    assert told is not None
    [changed] = told["requests"]["changed"]
    assert changed["tables"] == [[0, 0, 8, [9, 10]]]
    assert told["blocks"] == [(9, "hh")]


@pytest.mark.parametrize(
    ("request_id", "shown"),
    [
        ("0_chatcmpl-0123456789abcdef-00aa11bb", ("89abcdef", 0, 0)),
        ("3_cmpl-0123456789abcdef-00aa11bb-12", ("89abcdef", 12, 3)),
        ("1_cmpl-my-own\nid-00aa11bb", ("y-own\nid", 0, 1)),
        ("whatever", ("whatever", 0, 0)),
        ("something-longer", ("g-longer", 0, 0)),
        ("x", ("x", 0, 0)),
    ],
)
def test_only_the_end_of_what_the_client_knows_is_shown(
    request_id: str, shown: tuple[str, int, int]
) -> None:
    sim = Sim(make_config())
    sim.add(make_request(request_id, range(5)))
    [told] = whole(view_of(sim))["requests"]
    assert (told["id"], told["place"], told["sample"]) == shown


def test_no_token_of_a_request_is_told() -> None:
    fields = {name for name in RequestSnapshot.__slots__ if "token" in name}
    assert fields == {
        *("num_tokens", "num_computed_tokens", "num_prompt_tokens", "num_cached_tokens"),
        "num_hit_tokens",
    }
    sim = Sim(make_config(num_blocks=9))
    sim.add(make_request("a", [4711] * 9))
    sim.turn()
    told = msgspec.json.encode(whole(view_of(sim)))
    assert b"4711" not in told


def test_counters_are_those_of_the_engine() -> None:
    reported = counters_of(EngineStats(preemptions=2, forks=3, copied_blocks=4))
    assert tuple(reported) == COUNTERS
    told = [reported[name] for name in ("steps", "preemptions", "forks", "copied_blocks")]
    assert told == [0, 2, 3, 4]


def test_forks_and_copies_on_write() -> None:
    sim = Sim(make_config(block_size=4))
    views = [view_of(sim)]
    names = [f"{sample}_cmpl-abc-00aa11bb" for sample in range(3)]
    sim.add_group([make_request(name, range(6), max_tokens=9) for name in names])
    for _ in range(2):
        sim.turn()
        views.append(view_of(sim))
    forked, parted = (over_the_wire(change(*pair)) for pair in pairwise(views))
    assert (forked["copies"], forked["hits"]) == ([], [])
    assert forked["shared"] == {"1": 3, "2": 3}
    assert parted["hits"] == [] and len(parted["copies"]) == 2
    last = {r["sample"]: r["tables"][0][-1] for r in whole(views[-1])["requests"]}
    # The last one that writes to the shared block keeps it.
    assert [to for _, to in parted["copies"]] == [last[0], last[1]] and last[2] == 2
    assert [source for source, _ in parted["copies"]] == [2, 2]
    changed = {r["key"]: r.get("tables") for r in parted["requests"]["changed"]}
    assert list(changed.values()) == [[[0, 0, 1, [last[0]]]], [[0, 0, 1, [last[1]]]], None]
    copy = over_the_wire(whole(views[0]))
    for told in (forked, parted):
        apply(copy, told)
    assert copy == over_the_wire(whole(views[-1]))


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ([1, 2, 3], [1, 2, 3, 4], (0, 3, [4])),
        ([1, 2, 3], [1, 2, 9], (0, 2, [9])),
        ([1, 2, 3], [7, 8, 9, 4], (0, 0, [7, 8, 9, 4])),
        ([1, 2, 3, 4], [1, 2], (0, 2, [])),
        ([1, 2], [], (0, 0, [])),
        ([], [5], (0, 0, [5])),
        ([1, 2, 3], [0, 2, 3, 4], (1, 3, [4])),
        ([0, 2, 3], [0, 0, 3, 9, 4], (2, 3, [9, 4])),
        ([0, 2, 3], [0, 0, 7, 4], (2, 2, [7, 4])),
        ([1], [0, 0, 5], (2, 0, [0, 0, 5])),
        ([1], [0, 0], (2, 0, [0, 0])),
    ],
)
def test_a_table_is_sent_from_where_it_differs(
    was: list[int], now: list[int], told: tuple[int, int, list[int]]
) -> None:
    assert _table_change(array("i", was), array("i", now)) == told
    behind, at, ids = told
    table = was[:at] + ids
    table[:behind] = [0] * behind
    assert table == now


def test_tables_are_not_shared_with_the_engine() -> None:
    sim = Sim(make_config())
    request = sim.add(make_request("a", range(9)))
    sim.turn()
    [seen] = take_snapshot(sim.scheduler).running
    assert seen.tables[0] is not request.tables[0]
    assert seen.tables[0] == array("i", request.tables[0])

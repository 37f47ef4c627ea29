"""Requests that decode and are planned without a closer look."""

from __future__ import annotations

import pytest

from jaxpaged.core.request import Request
from jaxpaged.core.steady import steady_until
from tests.core.harness import Sim, make_config, make_request, make_samples


def decoding(
    prompt_len: int = 5, max_tokens: int = 30, steps: int = 3, **settings: object
) -> tuple[Sim, Request]:
    """A request that has been given its prompt's step and so many more of one token."""
    limits = {"num_blocks": 50, "block_size": 8, "max_model_len": 64, **settings}
    sim = Sim(make_config(**limits), depth=1)
    request = sim.add(make_request("a", range(prompt_len), max_tokens))
    for _ in range(steps):
        sim.turn()
    return sim, request


@pytest.mark.parametrize(
    ("settings", "until"),
    [
        ({}, 7),  # the row at 7 fills the block
        ({"enable_prefix_caching": False}, 8),  # nothing to make findable then
        ({"block_size": 16}, 15),
        ({"block_size": 16, "max_tokens": 6}, 10),  # the row at 9 draws the last token
        ({"block_size": 16, "max_model_len": 12}, 11),
        ({"max_tokens": 3}, 0),  # has ended
        ({"windows": (4,)}, 0),  # blocks may have to be given back at any row
        ({"windows": (None, 4)}, 0),
        ({"prompt_len": 6, "steps": 1}, 0),  # the row of the prompt is none of one token
    ],
)
def test_until(settings: dict[str, object], until: int) -> None:
    _, request = decoding(**settings)  # type: ignore[arg-type]
    assert request.steady_until == until


def test_steady_rows_are_those_without_any_change_of_blocks() -> None:
    sim, request = decoding(steps=1)
    steady = []
    while not request.is_finished:
        before = (request.num_blocks, request.num_registered_blocks)
        start = request.num_computed_tokens
        promised = start < request.steady_until
        step = sim.launch()
        if step is not None:
            (row,) = step.rows
            assert (row.start, row.num_tokens, row.samples, row.admitted) == (start, 1, True, False)
            if promised:
                assert before == (request.num_blocks, request.num_registered_blocks)
                steady.append(start)
        sim.read()
    sim.assert_outputs()
    assert len(steady) > 15 and not {7, 8, 15, 16, 23, 24}.intersection(steady)


def test_whoever_is_set_back_or_forked_is_not_steady() -> None:
    sim, request = decoding()
    sim.scheduler.reset_prefix_cache(preempt_running=True)
    assert request.steady_until == 0
    sim.run()
    sim.assert_outputs()
    sim, request = decoding()
    child = Request("b", list(range(5)), max_tokens=30, arrival_time=0.0)
    sim.scheduler.kv.fork(request, child)
    assert request.steady_until == child.steady_until == 0
    assert steady_until(request, sim.scheduler.kv, 64) == 0, "its last block is shared now"


def test_samples_are_steady_once_they_have_parted() -> None:
    sim = Sim(make_config(num_blocks=50, block_size=8, max_model_len=64), depth=1)
    samples = sim.add_group(make_samples("a", range(5), 3, max_tokens=20))
    sim.turn()
    assert [sample.steady_until for sample in samples] == [0, 0, 0]
    sim.turn()
    assert [sample.steady_until for sample in samples] == [7, 7, 7]
    sim.run()
    sim.assert_outputs()


def test_the_check_sees_a_promise_that_is_too_long() -> None:
    sim, request = decoding()
    sim.scheduler.check_integrity()
    request.steady_until += 1
    with pytest.raises(AssertionError, match="steady until 7 only"):
        sim.scheduler.check_integrity()

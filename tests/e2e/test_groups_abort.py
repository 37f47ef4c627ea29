"""Groups that are given up in every phase: n samples and beam searches leave no block and no slot
behind, are reported once, and their neighbours get what they would have got.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from jaxpaged import RequestOutput, SamplingParams
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.beam_request import BeamState
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.engine import Engine
from tests.e2e.engine_support import (
    EOS,
    GREEDY,
    PROMPT,
    SECOND_EOS,
    assert_idle,
    drain,
    fresh_engine,
    greedy_tokens,
    reference_llm,
    run_one,
)

LONG = [(3 * i) % 400 + 10 for i in range(100)]
SHORT = [61, 62, 63, 64, 65, 66]
WIDTH = 3
Params = SamplingParams | BeamSearchParams
SAMPLES = SamplingParams(n=WIDTH, temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=WIDTH, max_tokens=24, ignore_eos=True)
KINDS: dict[str, Params] = {"samples": SAMPLES, "beams": BEAMS}
STAYS = dataclasses.replace(GREEDY, max_tokens=30)


@functools.cache
def undisturbed(kind: str, length: int) -> RequestOutput:
    prompt = SHORT if length == len(SHORT) else LONG[:length]
    return run_one(fresh_engine(llm=reference_llm()), prompt, KINDS[kind])


def ends_early(kind: str) -> Params:
    """The same, but one of them ends after a few tokens, and no other within ten."""
    outputs = undisturbed(kind, len(SHORT)).outputs
    early = [output.token_ids[:10] for output in outputs]
    if kind == "beams":
        # The second token of the best hypothesis: its first beam ends there, and others do not.
        return dataclasses.replace(BEAMS, stop_token_ids=[early[0][1]], max_tokens=20)
    own = next(
        token
        for place, token in enumerate(early[1])
        if place > 0 and not any(token in other for other in (early[0], early[2]))
    )
    assert own not in (EOS, SECOND_EOS)
    return dataclasses.replace(SAMPLES, stop_token_ids=[own])


def members(engine: Engine) -> list[Request]:
    state = engine._states["gone"]
    return [c.core for c in (state.beams if isinstance(state, BeamState) else state.completions)]


def recorded(engine: Engine) -> list[RequestOutput]:
    """What its steps return from now on."""
    outputs: list[RequestOutput] = []
    original = engine.step

    def step() -> list[RequestOutput]:
        new = original()
        outputs.extend(new)
        return new

    engine.step = step  # type: ignore[method-assign]
    return outputs


def waiting(engine: Engine) -> None:
    engine.step()
    assert {m.status for m in members(engine)} == {RequestStatus.WAITING}


def mid_prefill(engine: Engine) -> None:
    """Its first member computes the prompt in chunks, the others wait for it."""
    engine.step()
    first, *others = members(engine)
    assert first.status is RequestStatus.RUNNING
    assert 0 < first.num_computed_tokens < first.num_prompt_tokens
    assert all(other.awaits_fork and not other.capacity for other in others)


def just_forked(engine: Engine) -> None:
    for _ in range(20):
        if engine.stats().forks:
            return
        engine.step()
    raise AssertionError("it never forked")


def decoding(engine: Engine) -> None:
    for _ in range(7):
        engine.step()
    assert all(m.num_output_tokens > 2 for m in members(engine))
    assert engine.stats().copied_blocks > 0


def one_has_ended(engine: Engine) -> None:
    for _ in range(30):
        engine.step()
        state = engine._states["gone"]
        if isinstance(state, BeamState):
            if state.search._ended:
                assert not state.search.done
                return
        elif any(m.is_finished for m in members(engine)):
            assert [m.is_finished for m in members(engine)] == [False, True, False]
            return
    raise AssertionError("none of them ended")


def preempted(engine: Engine) -> None:
    for _ in range(200):
        engine.step()
        if members(engine)[0].status is RequestStatus.PREEMPTED:
            assert {m.status for m in members(engine)} == {RequestStatus.PREEMPTED}
            return
    raise AssertionError("it was never preempted")


def resumed(engine: Engine) -> None:
    preempted(engine)
    for _ in range(200):
        engine.step()
        if members(engine)[0].status is RequestStatus.RUNNING:
            return
    raise AssertionError("it never came back")


Reach = Callable[[Engine], None]
PHASES: dict[str, tuple[Reach, dict[str, int], int]] = {
    "waiting": (waiting, {"max_num_seqs": 3}, 6),
    "mid prefill": (mid_prefill, {"long_prefill_token_threshold": 20}, 100),
    "just forked": (just_forked, {}, 6),
    "decoding": (decoding, {}, 6),
    "one has ended": (one_has_ended, {}, 6),
    "preempted": (preempted, {"num_blocks": 21}, 6),
    "resumed": (resumed, {"num_blocks": 21}, 6),
}


@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("way", ["abort", "discard"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_is_given_up(kind: str, phase: str, way: str, overlap: bool) -> None:
    reach, settings, length = PHASES[phase]
    prompt = SHORT if length == len(SHORT) else LONG[:length]
    params = ends_early(kind) if phase == "one has ended" else KINDS[kind]
    if "num_blocks" in settings and kind == "beams":
        settings = {"num_blocks": 14}  # they have more in common
    engine = fresh_engine(async_scheduling=overlap, **settings)
    outputs = recorded(engine)
    engine.add_request("stays", PROMPT, STAYS)
    engine.add_request("gone", prompt, params)
    reach(engine)
    assert not any(output.finished for output in outputs if output.request_id == "gone")
    outputs[:] = [output for output in outputs if output.request_id != "gone"]
    engine.add_request("late", [50, 51], STAYS)
    ended = [member.request_id for member in members(engine) if member.is_finished]
    getattr(engine, way)(["gone", "gone", "unknown"])
    engine.scheduler.check_integrity()
    if way == "abort":
        engine.abort("gone")
    while engine.has_unfinished_requests():
        engine.step()
    assert_idle(engine)

    last = {output.request_id: output for output in outputs}
    assert last["stays"].outputs[0].token_ids == greedy_tokens(tuple(PROMPT), 30)
    assert last["late"].outputs[0].token_ids == greedy_tokens((50, 51), 30)
    reports = [output for output in outputs if output.request_id == "gone"]
    assert len(reports) == (way == "abort")
    # A search ends once, samples each for themselves.
    whole = 1 if kind == "beams" else WIDTH - len(ended)
    expected = {"length": 2, "abort": whole} | ({"stop": 1} if ended else {})
    assert engine.stats().requests_finished == expected
    for report in reports:
        assert report.finished and {o.error for o in report.outputs} == {None}
        reasons = [output.finish_reason for output in report.outputs]
        if kind == "samples":
            assert reasons == ["stop" if i == 1 and ended else "abort" for i in range(WIDTH)]
            wanted = run_one(fresh_engine(llm=reference_llm()), prompt, params).outputs
            for got, want in zip(report.outputs, wanted, strict=True):
                assert got.token_ids == want.token_ids[: len(got.token_ids)]
        else:
            assert set(reasons) == {"abort"} and len(reasons) <= WIDTH


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_slots_are_free_at_once(kind: str) -> None:
    engine = fresh_engine()
    engine.add_request("gone", SHORT, KINDS[kind])
    decoding(engine)
    assert engine.scheduler.num_running == WIDTH and engine.scheduler.kv_usage > 0
    engine.abort("gone")
    assert (engine.scheduler.num_running, engine.scheduler.kv_usage) == (0, 0.0)
    assert sorted(engine.scheduler._free_slots) == list(range(8))
    drain(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_id_can_be_used_again_though_steps_are_in_flight(kind: str) -> None:
    engine = fresh_engine()
    engine.add_request("gone", SHORT, KINDS[kind])
    decoding(engine)
    # A search waits for each of its steps; one is on its way before it is read.
    engine._launch_next()
    assert engine.scheduler.num_in_flight > 0
    engine.discard(["gone"])
    engine.add_request("gone", SHORT, KINDS[kind])
    again = drain(engine)["gone"]
    assert again.outputs == undisturbed(kind, len(SHORT)).outputs


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_group_is_reported_once_and_cannot_be_aborted(kind: str) -> None:
    engine = fresh_engine()
    done = run_one(engine, SHORT, KINDS[kind])
    assert [output.index for output in done.outputs] == list(range(WIDTH))
    engine.abort("one")
    engine.discard(["one"])
    assert engine.step() == []
    assert engine.stats().requests_finished == {"length": 1 if kind == "beams" else WIDTH}


def test_deltas_of_samples_carry_their_index_and_tell_each_end_once() -> None:
    params = ends_early("samples")
    whole = run_one(fresh_engine(llm=reference_llm()), SHORT, params).outputs
    engine = fresh_engine()
    engine.add_request("a", SHORT, params, delta_interval=1)
    texts, tokens = [""] * WIDTH, [[] for _ in range(WIDTH)]  # type: ignore[var-annotated]
    ends: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert [c.index for c in output.outputs] == sorted({c.index for c in output.outputs})
            for completion in output.outputs:
                assert completion.index not in ends, "more of one that has ended"
                texts[completion.index] += completion.text
                tokens[completion.index] += completion.token_ids
                if completion.finish_reason is not None:
                    ends.append(completion.index)
            assert output.finished == (len(ends) == WIDTH)
    assert ends[0] == 1 and sorted(ends) == [0, 1, 2]
    assert texts == [w.text for w in whole] and tokens == [w.token_ids for w in whole]
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
def test_groups_come_and_go_at_random(overlap: bool) -> None:
    """Samples and searches in a small pool, many given up at any moment."""
    rng = random.Random(23)
    engine = fresh_engine(num_blocks=24, async_scheduling=overlap, long_prefill_token_threshold=9)
    asked: dict[str, tuple[list[int], Params]] = {}
    calm: dict[str, RequestOutput] = {}
    for number in range(60):
        prompt = LONG[number % 7 :][: rng.randint(1, 30)]
        most = rng.randint(1, 12)
        asked[str(number)] = (
            prompt,
            (
                BeamSearchParams(beam_width=rng.choice([2, 3, 4]), max_tokens=most)
                if rng.random() < 0.4
                else SamplingParams(n=rng.choice([1, 2, 4]), seed=number, max_tokens=most)
            ),
        )
    reference = fresh_engine(llm=reference_llm())
    for request_id, (prompt, params) in asked.items():
        reference.add_request(request_id, prompt, params)
    calm = drain(reference)
    assert reference.stats().preemptions == 0

    done: dict[str, RequestOutput] = {}
    left = list(asked)
    reasons: Counter[str] = Counter()
    gone: set[str] = set()
    while left or engine.has_unfinished_requests():
        if left and rng.random() < 0.4:
            request_id = left.pop(0)
            engine.add_request(request_id, *asked[request_id])
        if engine._states and rng.random() < 0.12:
            victim = rng.choice(list(engine._states))
            gone.add(victim)
            getattr(engine, rng.choice(["abort", "discard"]))([victim])
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done
                done[output.request_id] = output
    assert_idle(engine)
    for request_id, output in done.items():
        for got, want in zip(output.outputs, calm[request_id].outputs, strict=False):
            reasons[got.finish_reason or "none"] += 1
            if request_id not in gone:
                assert got == want
    assert done.keys() | gone == asked.keys()
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.forks > 20 and stats.copied_blocks > 20
    assert len(gone) > 5 and reasons["abort"] > 3 and reasons["length"] > 20

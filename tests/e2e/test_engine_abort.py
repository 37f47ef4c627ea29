"""Aborts in every phase of a request: reported once, no block lost, nobody else disturbed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from jaxpaged import RequestOutput, SamplingParams
from jaxpaged.core.request import RequestStatus
from jaxpaged.device.runner import Launched, StepResult
from jaxpaged.engine import Engine
from tests.e2e.engine_support import (
    GREEDY,
    PROMPT,
    RunnerProxy,
    assert_idle,
    drain,
    fresh_engine,
    greedy_tokens,
    piece,
    reference_llm,
    run_one,
    shared_llm,
)

LONG = [(3 * i) % 400 + 10 for i in range(120)]


def status_of(engine: Engine, request_id: str) -> RequestStatus:
    return engine._states[request_id].completions[0].core.status


def waiting(engine: Engine) -> None:
    assert status_of(engine, "gone") is RequestStatus.WAITING


def mid_prefill(engine: Engine) -> None:
    """Two of its three chunks are launched, one is read."""
    engine.step()
    core = engine._states["gone"].completions[0].core
    assert status_of(engine, "gone") is RequestStatus.RUNNING
    assert 0 < core.num_computed_tokens < core.num_prompt_tokens


def decoding(engine: Engine) -> None:
    for _ in range(5):
        engine.step()
    core = engine._states["gone"].completions[0].core
    assert core.num_output_tokens > 1 and core.num_inflight <= 1


def preempted(engine: Engine) -> None:
    for _ in range(200):
        engine.step()
        if status_of(engine, "gone") is RequestStatus.PREEMPTED:
            return
    raise AssertionError("it was never preempted")


PHASES: dict[str, tuple[Callable[[Engine], None], dict[str, int], int]] = {
    "waiting": (waiting, {"max_num_seqs": 1}, 6),
    "mid prefill": (mid_prefill, {"long_prefill_token_threshold": 40}, 120),
    "decoding": (decoding, {}, 6),
    "preempted": (preempted, {"num_blocks": 15}, 6),
}


@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_abort(phase: str, twice: bool, overlap: bool) -> None:
    reach, settings, length = PHASES[phase]
    if phase == "mid prefill" and not overlap:
        settings = settings | {"long_prefill_token_threshold": 20}
    engine = fresh_engine(async_scheduling=overlap, **settings)
    params = dataclasses.replace(GREEDY, max_tokens=25)
    for request_id, prompt in (("stays", PROMPT), ("gone", LONG[:length])):
        engine.add_request(request_id, prompt, params)
    reach(engine)
    engine.abort(["gone", "unknown"] if twice else "gone")
    if twice:
        engine.abort("gone")
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert_idle(engine)

    (gone,) = (out for out in outputs if out.request_id == "gone")
    assert gone.finished and gone.outputs[0].finish_reason == "abort"
    assert gone.outputs[0].stop_reason is None and gone.outputs[0].error is None
    want = greedy_tokens(tuple(LONG[:length]), 25 if length < 100 else 8)
    got = gone.outputs[0].token_ids
    assert got == want[: len(got)] and len(got) < 25
    assert gone.outputs[0].text == shared_llm().get_tokenizer().decode(got)
    assert (len(got) > 0) == (phase in ("decoding", "preempted"))
    stays = [out for out in outputs if out.request_id == "stays"][-1]
    assert stays.outputs[0].token_ids == greedy_tokens(tuple(PROMPT), 25)
    assert engine.stats().requests_finished == {"abort": 1, "length": 1}


def test_abort_frees_blocks_at_once() -> None:
    engine = fresh_engine()
    engine.add_request("gone", LONG, GREEDY)
    engine.step()
    engine.step()
    assert engine.scheduler.kv_usage > 0
    engine.abort("gone")
    assert engine.scheduler.kv_usage == 0.0
    assert engine.has_unfinished_requests(), "its end has not been reported yet"
    drain(engine)


def test_abort_of_finished_and_unknown_requests_does_nothing() -> None:
    engine = fresh_engine()
    run_one(engine, PROMPT, GREEDY)
    engine.abort("one")
    engine.abort(["one", "never"])
    engine.abort([])
    assert engine.step() == []
    assert engine.stats().requests_finished == {"length": 1}


def test_abort_before_the_last_token_is_read() -> None:
    """Its last token is on the way: the request ends as aborted, and the token is dropped."""
    engine = fresh_engine()
    engine.add_request("gone", PROMPT, dataclasses.replace(GREEDY, max_tokens=2))
    engine.step()
    assert engine.scheduler.num_in_flight == 1
    engine.abort("gone")
    output = drain(engine)["gone"].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 1)


def test_an_id_can_be_used_again_after_an_abort_though_its_step_is_in_flight() -> None:
    engine = fresh_engine()
    engine.add_request("same", PROMPT, dataclasses.replace(GREEDY, max_tokens=20))
    engine.step()
    engine.abort("same")
    (report,) = engine.step()
    assert report.finished
    engine.add_request("same", [50, 51], GREEDY)
    assert drain(engine)["same"].outputs[0].token_ids == greedy_tokens((50, 51))


def test_discard_reports_nothing() -> None:
    engine = fresh_engine()
    engine.add_request("gone", PROMPT, GREEDY)
    engine.add_request("stays", [50, 51], GREEDY)
    engine.step()
    engine.discard(["gone", "unknown"])
    assert drain(engine).keys() == {"stays"}


def test_abort_releases_the_text_that_was_held_back() -> None:
    params = dataclasses.replace(
        GREEDY, stop="ab" * 9, logit_bias={piece("ab"): 100}, max_tokens=30, ignore_eos=True
    )
    engine = fresh_engine()
    engine.add_request("gone", PROMPT, params)
    shown = []
    for _ in range(4):
        shown += [out.outputs[0].text for out in engine.step()]
    assert shown == [""] * 4
    engine.abort("gone")
    assert drain(engine)["gone"].outputs[0].text == "abababab"


@functools.cache
def wave_requests() -> dict[str, tuple[list[int], SamplingParams]]:
    rng = random.Random(17)
    requests = {}
    for i in range(500):
        params = SamplingParams(
            seed=i,
            max_tokens=rng.randint(1, 12),
            n=rng.choice([1, 1, 1, 2, 3]),
            stop=rng.choice([None, "e", "the"]),
            temperature=rng.choice([0.0, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        )
        requests[str(i)] = (LONG[: rng.randint(1, 30)], params)
    return requests


@functools.cache
def calm_results() -> dict[str, RequestOutput]:
    """The same requests where nothing goes wrong and there is room."""
    engine = fresh_engine(llm=reference_llm())
    for request_id, (prompt, params) in wave_requests().items():
        engine.add_request(request_id, prompt, params)
    done = drain(engine)
    assert engine.stats().preemptions == 0
    return done


class SometimesFails(RunnerProxy):
    """One read fails after `left` good ones."""

    left = -1

    def read(self, launched: Launched) -> StepResult:
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("injected")
        return self.inner.read(launched)


@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
def test_five_hundred_requests_in_waves(overlap: bool) -> None:
    """SC-17: aborts, failing steps, preemptions, n, stop strings: no wave loses a block."""
    engine = fresh_engine(num_blocks=16, async_scheduling=overlap)
    runner = engine.runner = SometimesFails(engine.runner)  # type: ignore[assignment]
    rng = random.Random(18)
    ids = list(wave_requests())
    aborted = 0
    reasons: Counter[str] = Counter()
    for wave in range(0, 500, 8):
        batch = ids[wave : wave + 8]
        for request_id in batch:
            engine.add_request(request_id, *wave_requests()[request_id])
        victims = [key for key in batch if rng.random() < 0.1]
        runner.left = rng.randint(0, 9) if rng.random() < 0.4 else -1
        done: dict[str, RequestOutput] = {}
        for step in itertools.count():
            if not engine.has_unfinished_requests():
                break
            for out in engine.step():
                if out.finished:
                    assert out.request_id not in done
                    done[out.request_id] = out
            if step == 3:
                aborted += sum(key not in done for key in victims)
                engine.abort(victims)
        assert_idle(engine)
        assert done.keys() == set(batch)
        for key, out in done.items():
            for got, want in zip(out.outputs, calm_results()[key].outputs, strict=True):
                reasons[got.finish_reason or "none"] += 1
                if got.finish_reason in ("abort", "error"):
                    assert got.token_ids == want.token_ids[: len(got.token_ids)]
                else:
                    assert got == want
    stats = engine.stats()
    assert stats.preemptions > 50 and aborted > 10 and stats.failed_steps > 10
    assert stats.requests_finished == reasons
    assert min(reasons[reason] for reason in ("abort", "error", "length", "stop")) > 10
    assert run_one(engine, PROMPT, GREEDY).outputs[0].token_ids == greedy_tokens(tuple(PROMPT))

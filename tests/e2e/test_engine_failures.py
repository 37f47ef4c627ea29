"""A failed step ends the requests in it and nothing else; a failed request ends alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from jaxpaged import SamplingParams
from jaxpaged.engine import Engine
from jaxpaged.outputs import RequestOutput
from tests.e2e.engine_support import (
    EOS,
    GREEDY,
    PROMPT,
    FaultyRunner,
    RunnerProxy,
    assert_idle,
    drain,
    fresh_engine,
    greedy_tokens,
    poison,
    reference_llm,
    run_one,
    shared_llm,
)

REQUESTS: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": ([31, 32, 33], dataclasses.replace(GREEDY, max_tokens=6)),
    "long prompt": (list(range(20, 120)), dataclasses.replace(GREEDY, max_tokens=7)),
    "sampled": (
        [31, 32, 33, 34, 35, 36],
        SamplingParams(seed=5, max_tokens=9, repetition_penalty=1.2, ignore_eos=True, logprobs=2),
    ),
    "scored": (
        [31, 32, 33, 34, 35, 36, 90],
        SamplingParams(seed=6, max_tokens=5, prompt_logprobs=1, min_tokens=5),
    ),
    "twins": ([70, 71, 72, 73], SamplingParams(seed=7, n=2, max_tokens=5, ignore_eos=True)),
}


def add_all(engine: Engine) -> None:
    for request_id, (prompt, params) in REQUESTS.items():
        engine.add_request(request_id, prompt, params)


def make_engine(overlap: bool) -> Engine:
    return fresh_engine(async_scheduling=overlap, max_num_seqs=3)


@functools.cache
def undisturbed() -> dict[str, RequestOutput]:
    engine = fresh_engine(llm=reference_llm())
    add_all(engine)
    return drain(engine)


class TracingFault(FaultyRunner):
    """Also keeps which requests each packed step holds."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[set[str]] = []
        inner_pack = self.__dict__.get("pack", self.inner.pack)

        def pack(rows: Any, requests: Any) -> Any:
            self.steps.append({row.request.payload.parent.request_id for row in rows})
            return inner_pack(rows, requests)

        self.__dict__["pack"] = pack


def broken() -> None:
    raise RuntimeError("the device caught fire")


def lose_the_pool() -> None:
    state = shared_llm().engine.runner._state
    assert state is not None
    state.kv[1].k.delete()


@functools.cache
def number_of_calls(method: str, overlap: bool) -> int:
    engine = make_engine(overlap)
    runner = engine.runner = TracingFault(engine.runner, method, 10**9, broken)  # type: ignore[assignment]
    add_all(engine)
    drain(engine)
    return runner.calls


@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("when", ["first", "second", "middle", "last"])
@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("admit", broken),
        ("pack", broken),
        ("launch", broken),
        ("launch", lose_the_pool),
        ("read", broken),
    ],
    ids=["admit", "pack", "launch", "launch-deleted", "read"],
)
def test_a_failed_step(method: str, fault: Callable[[], None], when: str, overlap: bool) -> None:
    calls = number_of_calls(method, overlap)
    number = {"first": 0, "second": 1, "middle": calls // 2, "last": calls - 1}[when]
    engine = make_engine(overlap)
    runner = engine.runner = TracingFault(engine.runner, method, number, fault)  # type: ignore[assignment]
    add_all(engine)
    done: dict[str, RequestOutput] = {}
    while engine.stats().failed_steps == 0:
        assert engine.has_unfinished_requests(), "the fault never happened"
        done |= {out.request_id: out for out in engine.step() if out.finished}
        if runner.calls > number:
            assert engine.stats().failed_steps > 0
    failed_steps = engine.stats().failed_steps
    # In the order of planning, the failed steps are the last ones. A step that failed before it
    # was packed has left no trace of its own.
    in_failed: set[str] = set()
    if method != "admit":
        in_failed = set().union(*runner.steps[-failed_steps:])
    engine.runner = runner.inner
    done |= drain(engine)

    assert done.keys() == REQUESTS.keys()
    failed = {key for key, out in done.items() if any(c.error for c in out.outputs)}
    assert failed, "the failure went unnoticed"
    if in_failed:
        assert failed <= in_failed
    for key, output in done.items():
        for got, want in zip(output.outputs, undisturbed()[key].outputs, strict=True):
            if got.error is None:
                assert got == want
                continue
            assert got.finish_reason == "error"
            assert "fire" in got.error or "deleted" in got.error
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            assert len(got.token_ids) < len(want.token_ids)
        if key not in failed:
            assert output.prompt_logprobs == undisturbed()[key].prompt_logprobs
    # Those that were in the failed steps and did not fail had ended before.
    stats = engine.stats()
    assert sum(stats.requests_finished.values()) == len(REQUESTS) + 1
    assert stats.failed_steps == failed_steps == (1 if method != "read" else failed_steps)
    assert stats.compiles_after_warmup == shared_llm().stats().compiles_after_warmup

    again = run_one(engine, [31, 32, 33], GREEDY)
    assert again.outputs[0].token_ids == greedy_tokens((31, 32, 33))


def test_the_cache_is_forgotten_with_the_pool() -> None:
    """Hashes of KV that is gone must not be hit."""
    engine = fresh_engine()
    run_one(engine, PROMPT, GREEDY)
    engine.runner = FaultyRunner(engine.runner, "read", 0, broken)  # type: ignore[assignment]
    assert run_one(engine, PROMPT, GREEDY).outputs[0].finish_reason == "error"
    again = run_one(engine, PROMPT, GREEDY)
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == greedy_tokens(tuple(PROMPT))
    assert run_one(engine, PROMPT, GREEDY).num_cached_tokens == 5


def test_failures_one_after_another() -> None:
    engine = fresh_engine(max_num_seqs=2)

    class Flaky(RunnerProxy):
        calls = 0

        def launch(self, packed: Any, *, wants_prompt: bool) -> Any:
            self.calls += 1
            if self.calls % 23 == 0:
                raise RuntimeError("again")
            return self.inner.launch(packed, wants_prompt=wants_prompt)

    engine.runner = Flaky(engine.runner)  # type: ignore[assignment]
    prompts = {str(i): [40 + i, 41, 42] for i in range(20)}
    for key, prompt in prompts.items():
        engine.add_request(key, prompt, GREEDY)
    done = drain(engine)
    assert engine.stats().failed_steps >= 3
    reasons = {key: out.outputs[0].finish_reason for key, out in done.items()}
    assert set(reasons.values()) == {"length", "error"}
    for key, reason in reasons.items():
        if reason == "length":
            assert done[key].outputs[0].token_ids == greedy_tokens(tuple(prompts[key]))


# ---------------------------------------------------------------- failures of one request


class Broken:
    """A detokenizer that fails at a given push, or when it is closed."""

    def __init__(self, inner: Any, at: int, *, close: bool) -> None:
        self.inner, self.left, self.close = inner, at, close

    def push(self, token: int) -> str:
        self.left -= 1
        if self.left < 0:
            raise ValueError("text broke")
        return str(self.inner.push(token))

    def finish(self) -> str:
        if self.close:
            raise ValueError("text broke")
        return str(self.inner.finish())


@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_request_that_fails_on_the_host_ends_alone(at: int, close: bool, overlap: bool) -> None:
    engine = fresh_engine(async_scheduling=overlap)
    engine.add_request("bad", PROMPT, GREEDY)
    engine.add_request("good", [50, 51], GREEDY)
    completion = engine._states["bad"].completions[0]
    completion.detokenizer = Broken(completion.detokenizer, at, close=close)  # type: ignore[assignment]
    done = drain(engine)
    bad = done["bad"].outputs[0]
    assert (bad.finish_reason, bad.stop_reason) == ("error", None)
    assert bad.error is not None and "text broke" in bad.error
    assert bad.token_ids == greedy_tokens(tuple(PROMPT))[: at + 1]
    assert done["good"].outputs[0].token_ids == greedy_tokens((50, 51))
    assert engine.stats().requests_finished == {"error": 1, "length": 1}
    assert engine.stats().failed_steps == 0


def test_closing_the_text_fails() -> None:
    engine = fresh_engine()
    for key in ("bad", "aborted", "good"):
        engine.add_request(key, PROMPT, GREEDY)
    for key in ("bad", "aborted"):
        completion = engine._states[key].completions[0]
        completion.detokenizer = Broken(completion.detokenizer, 99, close=True)  # type: ignore[assignment]
    engine.step()
    engine.abort("aborted")
    done = drain(engine)
    assert done["bad"].outputs[0].finish_reason == "error"
    assert "text broke" in (done["bad"].outputs[0].error or "")
    assert done["aborted"].outputs[0].finish_reason == "error"
    assert done["good"].outputs[0].token_ids == greedy_tokens(tuple(PROMPT))


def test_the_prompt_logprobs_of_a_request_fail() -> None:
    class NoTexts:
        def token(self, token: int) -> str:
            raise ValueError("no text for you")

    engine = fresh_engine()
    engine.add_request("bad", PROMPT, dataclasses.replace(GREEDY, prompt_logprobs=1))
    engine.add_request("bad too", PROMPT, dataclasses.replace(GREEDY, logprobs=1))
    engine.add_request("good", PROMPT, GREEDY)
    for key in ("bad", "bad too"):
        engine._states[key].tokenizer = NoTexts()  # type: ignore[assignment]
    done = drain(engine)
    for key in ("bad", "bad too"):
        assert done[key].outputs[0].finish_reason == "error"
        assert "no text for you" in (done[key].outputs[0].error or "")
    assert done["good"].outputs[0].token_ids == greedy_tokens(tuple(PROMPT))


def test_a_row_without_any_token_to_draw_ends_alone() -> None:
    engine = fresh_engine()
    stuck = SamplingParams(allowed_token_ids=[EOS], min_tokens=2, max_tokens=4)
    engine.add_request("stuck", PROMPT, stuck)
    engine.add_request("good", PROMPT, GREEDY)
    done = drain(engine)
    output = done["stuck"].outputs[0]
    assert (output.finish_reason, output.token_ids) == ("error", [])
    assert "allowed_token_ids" in (output.error or "")
    assert done["good"].outputs[0].token_ids == greedy_tokens(tuple(PROMPT))


def test_logits_that_are_not_numbers_end_one_request() -> None:
    """NaN in one request's KV: neighbours never see it, nor do later owners of its blocks."""
    engine = fresh_engine(enable_prefix_caching=False)
    engine.add_request("bad", [60] * 20, GREEDY)
    engine.add_request("good", PROMPT, GREEDY)
    assert not any(out.finished for out in engine.step())
    poison(engine, "bad")
    done = drain(engine)
    assert done["bad"].outputs[0].finish_reason == "error"
    assert "not finite" in (done["bad"].outputs[0].error or "")
    assert done["good"].outputs[0].token_ids == greedy_tokens(tuple(PROMPT))
    heirs = {str(i): [40 + i, 41] for i in range(8)}
    for key, prompt in heirs.items():
        engine.add_request(key, prompt, GREEDY)
    done = drain(engine)
    engine.runner.reset()
    for key, prompt in heirs.items():
        assert done[key].outputs[0].token_ids == greedy_tokens(tuple(prompt))


def test_prompt_logits_that_are_not_numbers_end_the_request() -> None:
    """A request that only scores draws nothing, so no drawn row tells."""
    engine = fresh_engine(long_prefill_token_threshold=20)
    engine.add_request("bad", [60] * 50, SamplingParams(max_tokens=0, prompt_logprobs=1))
    engine.add_request("good", PROMPT, GREEDY)
    engine.step()
    poison(engine, "bad")
    done = drain(engine)
    engine.runner.reset()
    assert done["bad"].outputs[0].finish_reason == "error"
    assert "not finite" in (done["bad"].outputs[0].error or "")
    assert done["bad"].prompt_logprobs is None
    assert done["good"].outputs[0].token_ids == greedy_tokens(tuple(PROMPT))


# ---------------------------------------------------------------- interrupts


@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("method", "number"),
    [("admit", 0), ("admit", 1), *((m, n) for m in ("pack", "launch", "read") for n in (0, 1, 3))],
)
def test_an_interrupted_step_leaves_an_engine_that_works(
    method: str, number: int, overlap: bool
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    engine = make_engine(overlap)
    engine.runner = FaultyRunner(engine.runner, method, number, interrupt)  # type: ignore[assignment]
    add_all(engine)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    engine.discard(list(REQUESTS))
    assert_idle(engine)
    again = run_one(engine, PROMPT, GREEDY)
    assert again.outputs[0].token_ids == greedy_tokens(tuple(PROMPT))


def test_an_interrupt_while_results_are_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh_engine()
    original, calls = engine.scheduler.update, 0

    def update(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(engine.scheduler, "update", update)
    engine.add_request("gone", PROMPT, GREEDY)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    engine.discard(["gone"])
    assert_idle(engine)
    again = run_one(engine, PROMPT, GREEDY)
    assert again.outputs[0].token_ids == greedy_tokens(tuple(PROMPT))


@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("number", [1, 4, 9])
@pytest.mark.parametrize("method", ["allocate_slots", "register", "get_computed_blocks"])
def test_an_interrupt_while_planning(
    method: str, number: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(overlap)
    original, calls = getattr(engine.scheduler.kv, method), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(engine.scheduler.kv, method, interrupted)
    for i in range(12):
        engine.add_request(str(i), [*PROMPT, 40 + i], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    engine.discard([str(i) for i in range(12)])
    assert_idle(engine)
    again = run_one(engine, PROMPT, GREEDY)
    assert again.outputs[0].token_ids == greedy_tokens(tuple(PROMPT))

"""The host works while the device does: order of launches and reads, state that stays put."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxpaged import SamplingParams
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.device.runner import Launched, StepResult
from jaxpaged.device.step import StepOutput
from tests.e2e.engine_support import (
    EOS,
    GREEDY,
    MAX_MODEL_LEN,
    PROMPT,
    RunnerProxy,
    drain,
    fresh_engine,
    greedy_tokens,
    run_one,
    scripted,
    shared_llm,
)


class RecordingRunner(RunnerProxy):
    """Keeps the order of launches and reads, by the number of the launch."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.events: list[str] = []
        self.ready_at_launch: list[bool] = []
        self._launched: list[Any] = []

    def launch(self, packed: Any, *, wants_prompt: bool) -> Launched:
        launched: Launched = self.inner.launch(packed, wants_prompt=wants_prompt)
        self.ready_at_launch.append(launched.output.samples.is_ready())
        self.events.append(f"launch {len(self._launched)}")
        self._launched.append(packed)
        return launched

    def read(self, launched: Launched) -> StepResult:
        number = next(i for i, p in enumerate(self._launched) if p is launched.packed)
        self.events.append(f"read {number}")
        return self.inner.read(launched)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_is_launched_before_the_one_before_is_read(overlap: bool) -> None:
    engine = fresh_engine(async_scheduling=overlap)
    runner = engine.runner = RecordingRunner(engine.runner)  # type: ignore[assignment]
    output = run_one(engine, PROMPT, dataclasses.replace(GREEDY, max_tokens=4))
    assert len(output.outputs[0].token_ids) == 4
    if overlap:
        expected = ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3"]
        expected += ["read 2", "read 3"]
    else:
        expected = [f"{event} {n}" for n in range(4) for event in ("launch", "read")]
    assert runner.events == expected


def test_a_launch_returns_before_the_step_has_run() -> None:
    engine = fresh_engine()
    runner = engine.runner = RecordingRunner(engine.runner)  # type: ignore[assignment]
    for i in range(4):
        prompt = [(7 * i + j) % 400 + 10 for j in range(60)]
        engine.add_request(str(i), prompt, dataclasses.replace(GREEDY, max_tokens=30))
    drain(engine)
    assert len(runner.ready_at_launch) > 20
    assert not all(runner.ready_at_launch), "every launch waited for its step"


class CountedArray:
    """A result of a step, and nothing that can be done with it but what the runner may do."""

    def __init__(self, inner: Any, name: str, copied: list[str]) -> None:
        self._inner, self._name, self._copied = inner, name, copied

    def copy_to_host_async(self) -> None:
        self._inner.copy_to_host_async()

    def is_ready(self) -> bool:
        return bool(self._inner.is_ready())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._copied.append(self._name)
        return np.asarray(self._inner)


def test_a_step_is_copied_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples, in one array; prompt logprobs and beams only in steps that have them."""
    engine = fresh_engine()
    programs = engine.runner.programs
    step, steps, copied = programs.step, 0, list[str]()

    def counting(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        state, output = step(*args)
        arrays: dict[str, Any] = {
            name: CountedArray(getattr(output, name), name, copied)
            for name in ("samples", "prompt", "beams")
        }
        return state, StepOutput(**arrays)

    monkeypatch.setattr(programs, "step", counting)
    for index, params in enumerate(
        [
            GREEDY,
            dataclasses.replace(GREEDY, n=3, temperature=0.9, seed=1, logprobs=2, stop=["END"]),
            dataclasses.replace(GREEDY, max_tokens=12, frequency_penalty=0.3, logprobs=0),
        ]
    ):
        engine.add_request(str(index), [20 + index] * (10 + 40 * index), params)
    drain(engine)
    assert steps > 8
    assert copied == ["samples"] * steps
    copied.clear()
    steps = 0
    run_one(engine, PROMPT, dataclasses.replace(GREEDY, prompt_logprobs=1))
    assert copied == ["samples", "prompt"] + ["samples"] * (steps - 1)
    copied.clear()
    steps = 0
    run_one(engine, PROMPT, BeamSearchParams(beam_width=2, max_tokens=4))
    assert copied == ["samples", "beams"] * steps


def test_each_step_has_arrays_of_its_own() -> None:
    """JAX may alias host memory, so a reused array would change under a queued step."""
    engine = fresh_engine()
    seen: list[Any] = []

    class Keeping(RunnerProxy):
        def pack(self, rows: Any, requests: Any) -> Any:
            packed = self.inner.pack(rows, requests)
            seen.append((packed.ints, packed.ints.copy(), packed.floats, packed.floats.copy()))
            return packed

    engine.runner = Keeping(engine.runner)  # type: ignore[assignment]
    run_one(engine, PROMPT, GREEDY)
    assert len({ints.ctypes.data for ints, *_ in seen}) == len(seen) == 8
    for ints, ints_then, floats, floats_then in seen:
        assert (ints == ints_then).all() and (floats == floats_then).all()


def test_the_state_never_moves() -> None:
    """Pools and slot state are updated in place whatever the steps are, also after host reads."""
    engine = fresh_engine()
    runner = shared_llm().engine.runner

    def addresses() -> list[int]:
        assert runner._state is not None
        slots = vars(runner._state.slots).values()
        return runner.pool_pointers() + [a.unsafe_buffer_pointer() for a in slots]

    before = addresses()
    assert len(set(before)) == len(before) == 2 * 2 + 6
    for i, params in enumerate(
        [
            GREEDY,
            SamplingParams(max_tokens=9, seed=1, repetition_penalty=1.3, ignore_eos=True),
            SamplingParams(max_tokens=5, seed=2, logit_bias={3: 5.0}, min_tokens=5, logprobs=3),
            SamplingParams(max_tokens=3, seed=3, prompt_logprobs=2, top_k=5, top_p=0.9),
        ]
    ):
        engine.add_request(str(i), [20 + i] * (10 + 20 * i), params)
    while engine.has_unfinished_requests():
        engine.step()
        assert addresses() == before
        runner.read_pool(0)
    drain(engine)
    assert addresses() == before


@pytest.mark.parametrize("overlap", [True, False])
def test_a_token_drawn_after_the_end_is_dropped(overlap: bool) -> None:
    """The end is known one step late; the slot's next request must not get the stale token."""
    other = [33, 34, 35]
    want = greedy_tokens(tuple(other))
    engine = scripted({"ends": [5, 6, EOS]}, async_scheduling=overlap, max_num_seqs=1)
    engine.add_request("ends", PROMPT, SamplingParams(max_tokens=20))
    engine.add_request("next", other, GREEDY)
    done = drain(engine)
    assert done["ends"].outputs[0].token_ids == [5, 6, EOS]
    assert done["ends"].outputs[0].finish_reason == "stop"
    assert done["next"].outputs[0].token_ids == want
    assert engine.stats().generation_tokens == 3 + len(want)


def test_nothing_is_launched_past_a_certain_end() -> None:
    """A request computes prompt + max_tokens - 1 tokens, though its last token is read late."""
    engine = fresh_engine(enable_prefix_caching=False)
    computed: list[int] = []

    class Counting(RunnerProxy):
        def pack(self, rows: Any, requests: Any) -> Any:
            computed.extend(row.num_tokens for row in rows)
            return self.inner.pack(rows, requests)

    engine.runner = Counting(engine.runner)  # type: ignore[assignment]
    run_one(engine, PROMPT, dataclasses.replace(GREEDY, max_tokens=6))
    assert sum(computed) == len(PROMPT) + 6 - 1
    computed.clear()
    run_one(engine, [9] * 120, dataclasses.replace(GREEDY, max_tokens=None))
    assert sum(computed) == MAX_MODEL_LEN - 1

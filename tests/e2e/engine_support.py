"""One loaded tiny model for all engine tests, fresh engines over it, and runners that misbehave.

Compiling the programs is what costs time, so the tests share one runner: `fresh_engine` puts a new
scheduler with new limits over it, which gives every test an engine without history, and any pool
size that is at most the runner's, for nothing. One engine uses the runner at a time. What an
undisturbed engine would give comes from a second runner, so that it can be asked for at any time.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import LLM, EngineConfig, RequestOutput, SamplingParams
from jaxpaged.core.plan import ScheduledRow
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.device.packing import PackedStep, RowRequest
from jaxpaged.device.runner import Launched, Runner, StepResult
from jaxpaged.engine import Engine
from jaxpaged.intake import Intake
from tests.tiny_models import tiny_llama, tiny_tokenizer

VOCAB = 512
EOS, SECOND_EOS = 1, 7
"""config.json names the first, generation_config.json both."""
PIECES = ["ab", "c DE", "F gh", "x<", "/", "s", ">y", "END", "foo", "<", "a", "b", "aab"]
PIECES += [" th", "e e", "nd", "e c", "at", "x", "y"]
"""Tokens of the model whose texts the stop string tests need."""
UNKNOWN_ID = 505
"""The model has this id and its tokenizer does not."""
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 100, 4, 128
SETTINGS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "decode_buckets": (8,),
    "prefill_buckets": (64,),
    "dtype": "float32",
    "disable_progress": True,
    "check_integrity": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [11, 12, 13, 14, 15, 16]


def folder(name: str) -> Path:
    """A folder that goes away with the session's cache."""
    path = Path(os.environ["JAXPAGED_CACHE_DIR"]) / "engine-tests" / name
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def model_folder() -> Path:
    """A tiny Llama with two EOS ids, and a tokenizer that has `PIECES` and stops below its 512."""
    path = tiny_llama(folder("model"))
    tokenizer = tiny_tokenizer(400)
    tokenizer.add_tokens(PIECES)
    tokenizer.add_tokens([f"<filler {i}>" for i in range(tokenizer.get_vocab_size(), UNKNOWN_ID)])
    assert tokenizer.get_vocab_size() == UNKNOWN_ID
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, {SECOND_EOS}]}}')
    return path


@functools.cache
def shared_llm() -> LLM:
    """The model under `SETTINGS`; tests may use it but must leave it idle."""
    return LLM(config=EngineConfig(model=str(model_folder()), **SETTINGS))


@functools.cache
def reference_llm() -> LLM:
    """The same again, with a pool of its own, to say what is right."""
    return LLM(config=EngineConfig(model=str(model_folder()), **SETTINGS))


def piece(text: str) -> int:
    """The id of one of `PIECES`, or of any other text that is a single token."""
    tokenizer = shared_llm().get_tokenizer()
    found: int | None = tokenizer.backend.token_to_id(text)
    if found is None:
        (found,) = tokenizer.encode(text)
    return found


_previous: list[Engine] = []


def fresh_engine(
    *,
    llm: LLM | None = None,
    async_scheduling: bool = True,
    max_model_len: int = MAX_MODEL_LEN,
    tokenizer: bool = True,
    limits: Mapping[str, Any] | None = None,
    **scheduler: Any,
) -> Engine:
    """An engine without history over the shared runner; `scheduler` are SchedulerConfig fields."""
    base = (llm or shared_llm()).engine
    if llm is None:
        # The new engine overwrites the pool, so nobody may find their old KV in it.
        for engine in (base, *_previous):
            engine.reset_prefix_cache()
    assert scheduler.get("num_blocks", 2) <= NUM_BLOCKS
    config = dataclasses.replace(base.scheduler.config, max_model_len=max_model_len, **scheduler)
    changed = {"max_model_len": max_model_len}
    engine = Engine(
        Scheduler(config),
        base.runner,
        Intake(
            dataclasses.replace(base.intake.limits, **(changed | dict(limits or {}))),
            base.intake.tokenizer if tokenizer else None,
            0,
        ),
        SamplingParams(),
        async_scheduling=async_scheduling,
        check_integrity=True,
        eager=False,
    )
    if llm is None:
        _previous[:] = [engine]
    return engine


def assert_idle(engine: Engine) -> None:
    """Nothing is queued, and every block but the null block is free."""
    scheduler = engine.scheduler
    scheduler.check_integrity()
    assert not engine.has_unfinished_requests()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.kv.pool.num_free == scheduler.config.num_blocks - 1
    assert scheduler.kv_usage == 0.0


def drain(engine: Engine, *, max_steps: int = 3000) -> dict[str, RequestOutput]:
    """Step until nothing is left. Each request must end once, and all blocks be free then."""
    done: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            assert_idle(engine)
            return done
        for output in engine.step():
            assert output.request_id not in done, "reported after its end"
            assert output.finished == all(c.finished() for c in output.outputs)
            if output.finished:
                done[output.request_id] = output
    raise AssertionError(f"still busy after {max_steps} steps: {engine.stats()}")


def run_one(engine: Engine, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
    engine.add_request("one", prompt, params, **options)
    return drain(engine)["one"]


def tokens_of(outputs: Mapping[str, RequestOutput]) -> dict[str, list[list[int]]]:
    return {key: [c.token_ids for c in out.outputs] for key, out in outputs.items()}


@functools.cache
def greedy_tokens(prompt: tuple[int, ...], max_tokens: int = 8) -> list[int]:
    """What an undisturbed engine gives for a prompt alone."""
    params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
    return run_one(fresh_engine(llm=reference_llm()), list(prompt), params).outputs[0].token_ids


class RunnerProxy:
    """Stands in front of the shared runner; subclasses change what a call does."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ScriptedRunner(RunnerProxy):
    """Replaces drawn tokens: request id -> its output tokens, the last one repeated for ever.

    The device goes on with the tokens that it drew itself, so only what the host makes of the
    tokens can be tested this way.
    """

    def __init__(self, inner: Runner, scripts: Mapping[str, Sequence[int]]) -> None:
        super().__init__(inner)
        self.scripts = scripts
        self._rows: dict[int, list[ScheduledRow]] = {}

    def pack(self, rows: Sequence[ScheduledRow], requests: Sequence[RowRequest]) -> PackedStep:
        packed = self.inner.pack(rows, requests)
        self._rows[id(packed)] = list(rows)
        return packed

    def read(self, launched: Launched) -> StepResult:
        result = self.inner.read(launched)
        tokens = result.samples.tokens.copy()
        rows = self._rows.pop(id(launched.packed))
        for row, place in zip(rows, launched.packed.order, strict=True):
            script = self.scripts.get(row.request.payload.parent.request_id)
            if row.samples and script is not None:
                number = row.start + row.num_tokens - row.request.num_prompt_tokens
                tokens[place] = script[min(number, len(script) - 1)]
        return dataclasses.replace(
            result, samples=dataclasses.replace(result.samples, tokens=tokens)
        )


def scripted(scripts: Mapping[str, Sequence[int]], **options: Any) -> Engine:
    """A fresh engine whose model says what `scripts` tells."""
    engine = fresh_engine(**options)
    engine.runner = ScriptedRunner(engine.runner, scripts)  # type: ignore[assignment]
    return engine


def say(pieces: Sequence[str | int], params: SamplingParams, **options: Any) -> RequestOutput:
    """The result of one request for which the model says these pieces (texts or ids)."""
    ids = [p if isinstance(p, int) else piece(p) for p in pieces]
    return run_one(scripted({"one": ids}, **options), PROMPT, params)


class FaultyRunner(RunnerProxy):
    """Calls `fault` instead of the `number`-th call (from 0) of one method."""

    def __init__(self, inner: Runner, method: str, number: int, fault: Callable[[], None]) -> None:
        super().__init__(inner)
        self.calls = 0
        original = getattr(inner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == number + 1:
                fault()
            return original(*args, **kwargs)

        setattr(self, method, call)


def poison(engine: Engine, request_id: str) -> None:
    """Write NaN into all KV of a running request: in an 8-bit cache, into its scales."""
    runner = engine.runner
    (core,) = (r for r in engine.scheduler.running if r.request_id.endswith(request_id))
    slots = np.concatenate([np.arange(BLOCK_SIZE) + BLOCK_SIZE * b for b in core.block_ids])

    def with_nan(pool: jax.Array) -> jax.Array:
        return pool.at[slots].set(jnp.nan) if pool.dtype == jnp.float32 else pool

    assert runner._state is not None
    kv = jax.tree.map(with_nan, runner._state.kv)
    runner._state = dataclasses.replace(runner._state, kv=kv)

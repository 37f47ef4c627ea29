"""An engine that sleeps gives its memory back, and wakes as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.errors import InvalidRequestError, UnavailableError
from tests.e2e.support import ids, live_bytes, run, small_llm
from tests.e2e.test_engine_compiles import resident_bytes

BLOCKS = 30_000
"""Of 2 KiB, in four arrays of 15 MiB."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 400 + 10 for j in range(5 + 4 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def llm(tiny_llama_path: Path) -> Iterator[LLM]:
    with small_llm(tiny_llama_path, num_gpu_blocks_override=BLOCKS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _awake(llm: LLM, tiny_llama_path: Path) -> Iterator[None]:
    yield
    if llm.engine.runner._weights is None and llm.engine.runner._stored is None:
        llm.update_weights(tiny_llama_path)
    llm.wake()


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return ids(run(llm.engine, PROMPTS, GREEDY))


@pytest.mark.parametrize("weights", [False, True, "discard"])
def test_what_is_given_back_and_what_returns(
    weights: bool | str, llm: LLM, tiny_llama_path: Path
) -> None:
    before, memory = tokens(llm), llm.engine.runner.memory_bytes()
    assert memory["kv_cache"] == BLOCKS * 2048
    live, compiles = live_bytes(), llm.stats().compiles
    llm.sleep(weights=weights)
    asleep = llm.engine.runner.memory_bytes()
    assert (asleep["kv_cache"], asleep["sampling_state"]) == (0, 0)
    # On CPUs the host memory that keeps the weights is the device's memory.
    assert asleep["weights"] == (0 if weights == "discard" else memory["weights"])
    assert live - live_bytes() == sum(memory.values()) - sum(asleep.values())
    if weights == "discard":
        with pytest.raises(UnavailableError, match="update_weights before wake"):
            llm.wake()
        llm.update_weights(tiny_llama_path)
        assert llm.engine.runner.asleep
    llm.wake()
    assert llm.engine.runner.memory_bytes() == memory
    assert live_bytes() == live
    assert tokens(llm) == before
    stats = llm.stats()
    assert (stats.compiles, stats.compiles_after_warmup) == (compiles, 0)


def test_the_process_shrinks(llm: LLM) -> None:
    """The memory is the system's again, not only unknown to JAX, though it lies in the heap."""
    # Freeing one block of almost 32 MiB tells glibc to take all smaller ones from its heap, and to
    # keep 64 MiB of that free.
    np.ones((32 << 20) - 65536, np.uint8)
    llm.sleep()
    llm.wake()
    tokens(llm)
    pool = llm.engine.runner.memory_bytes()["kv_cache"]
    before = resident_bytes()
    llm.sleep()
    # Not all of it: the system may have taken pages back before.
    assert before - resident_bytes() > 0.5 * pool


def test_asleep_it_refuses_requests_and_says_why(llm: LLM) -> None:
    llm.sleep()
    with pytest.raises(UnavailableError, match="asleep; call wake"):
        llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    with pytest.raises(UnavailableError, match="asleep"):
        llm.engine.add_request("x", PROMPTS[0], GREEDY)
    assert llm.engine.step() == [] and not llm.engine.has_unfinished_requests()
    assert llm.reset_prefix_cache()
    assert llm.stats().num_waiting == 0
    llm.wake()
    tokens(llm)


def test_both_are_idempotent_and_sleep_can_deepen(llm: LLM) -> None:
    before = tokens(llm)
    llm.wake()
    llm.sleep()
    llm.sleep()
    llm.sleep(weights=True)
    llm.sleep(weights=True)
    llm.sleep()  # what is away stays away
    assert llm.engine.runner._weights is None
    llm.wake()
    llm.wake()
    assert tokens(llm) == before


def test_new_weights_come_while_it_sleeps(llm: LLM, tiny_llama_path: Path) -> None:
    before, module = tokens(llm), llm.flax_model()
    for weights in (False, True, "discard"):
        llm.sleep(weights=weights)
        llm.update_weights(module)
        llm.wake()
        assert tokens(llm) == before


def test_nothing_cached_outlives_the_pool(llm: LLM) -> None:
    long = [(3 * i) % 400 + 10 for i in range(60)]
    run(llm.engine, [long], GREEDY)
    llm.sleep()
    llm.wake()
    hits = llm.stats().prefix_hit_tokens
    run(llm.engine, [long], GREEDY)
    assert llm.stats().prefix_hit_tokens == hits


# ---------------------------------------------------------------- requests that run


def started(llm: LLM, steps: int = 4) -> Any:
    engine = llm.engine
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY)
    for _ in range(steps):
        engine.step()
    return engine


def drained(engine: Any) -> dict[str, Any]:
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
    engine.scheduler.check_integrity()
    assert engine.scheduler.kv_usage == 0
    return done


def test_requests_that_run_are_not_forgotten(llm: LLM) -> None:
    want, engine = tokens(llm), started(llm)
    with pytest.raises(InvalidRequestError) as error:
        engine.sleep()
    assert all(part in str(error.value) for part in ("4 unfinished", "recompute", "abort"))
    assert not engine.runner.asleep
    done = drained(engine)
    assert [tuple(done[str(i)].outputs[0].token_ids) for i in range(4)] == want


@pytest.mark.parametrize("running", ["finish", "recompute"])
@pytest.mark.parametrize("steps", [0, 4])
def test_they_end_before_or_after_as_asked(running: str, steps: int, llm: LLM) -> None:
    want, engine = tokens(llm), started(llm, steps)
    engine.sleep(running=running)
    early = drained(engine)
    assert len(early) == (4 if running == "finish" else 0)
    engine.wake()
    done = early | drained(engine)
    assert [tuple(done[str(i)].outputs[0].token_ids) for i in range(4)] == want


def test_they_are_aborted_even_in_their_sleep(llm: LLM) -> None:
    engine = started(llm)
    engine.sleep(running="abort")
    assert {o.outputs[0].finish_reason for o in drained(engine).values()} == {"abort"}
    engine.wake()
    engine = started(llm)
    engine.sleep(running="recompute")
    drained(engine)
    engine.abort(["0", "1"])
    assert {o.outputs[0].finish_reason for o in drained(engine).values()} == {"abort"}
    with pytest.raises(InvalidRequestError, match="2 requests cannot be finished now"):
        engine.sleep(running="finish")
    engine.sleep(running="abort")
    assert len(drained(engine)) == 2
    engine.wake()
    assert drained(engine) == {}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"weights": "host"}, "True, False or \"discard\", got 'host'"),
        ({"weights": None}, "got None"),
        ({"running": "wait"}, "running must be one of refuse, finish, recompute, abort"),
    ],
)
def test_bad_choices(fields: dict[str, Any], text: str, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError) as error:
        llm.sleep(**fields)
    assert text in str(error.value)
    assert not llm.engine.runner.asleep


def test_a_closed_engine_stays_closed(tiny_llama_path: Path) -> None:
    from jaxpaged.errors import EngineDeadError

    llm = small_llm(tiny_llama_path)
    llm.sleep(weights=True)
    llm.close()
    for call in (llm.sleep, llm.wake, lambda: llm.update_weights(tiny_llama_path)):
        with pytest.raises(EngineDeadError):
            call()
    llm.close()


def test_samples_of_one_prompt_go_on_together(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, n=3, temperature=1.0, seed=5)
    (want,) = run(llm.engine, [PROMPTS[0]], params)
    engine = llm.engine
    engine.add_request("n", PROMPTS[0], params)
    for _ in range(4):
        engine.step()
    engine.sleep(running="recompute")
    engine.wake()
    answers = drained(engine)["n"].outputs
    assert [tuple(a.token_ids) for a in answers] == [r.token_ids for r in want]

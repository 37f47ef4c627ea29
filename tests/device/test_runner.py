from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import monitoring

from jaxpaged.device.packing import FROM_HISTORY, pack
from jaxpaged.device.program_set import ProgramSet
from jaxpaged.device.runner import Runner, first_state
from jaxpaged.device.step import StepOutput
from jaxpaged.errors import ConfigError
from tests.device.tiny_runner import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Sequence,
    parts_of,
    pools_of,
    run,
    runner_of,
    tokens_of,
)
from tests.tiny_models import tiny_llama

PROMPT = list(range(100, 121))


@pytest.fixture(scope="module")
def warm_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    parts = parts_of(tiny_llama(Path(tmp_path_factory.mktemp("model"))))
    runner = runner_of(parts)
    steps: list[tuple[int, int, str]] = []
    runner.warm_up(lambda done, total, program: steps.append((done, total, program)))
    assert steps == [
        (0, 5, "init"),
        (1, 5, "decode[8]"),
        (2, 5, "prefill[64]"),
        (3, 5, "copy[8]"),
        (4, 5, "admit"),
        (5, 5, "ready"),
    ]
    assert [record.program for record in runner.ledger.records] == [s[2] for s in steps[:-1]]
    assert all(not pool.any() for pool in pools_of(runner)), "warming up wrote into the pool"
    yield runner
    assert runner.ledger.after_warmup == 0, "something here compiled after warm-up"
    runner.close()


@pytest.fixture
def runner(warm_runner: Runner) -> Runner:
    warm_runner.reset()
    return warm_runner


def test_memory_is_told_by_kind(runner: Runner) -> None:
    told = runner.memory_bytes()
    pools = sum(pool.nbytes for pool in pools_of(runner))
    assert told["kv_cache"] == pools
    assert told["weights"] > 0
    assert told["sampling_state"] > 0
    assert set(told) == {"weights", "kv_cache", "sampling_state"}  # CPUs tell no more


def changed_slots(before: list[np.ndarray], after: list[np.ndarray]) -> set[int]:
    changes = [
        {int(s) for s in np.flatnonzero((a != b).any(axis=(1, 2)))}
        for a, b in zip(before, after, strict=True)
    ]
    assert all(change == changes[0] for change in changes), "every layer, K and V, alike"
    return changes[0]


def test_a_step_writes_exactly_the_slots_of_its_tokens(runner: Runner) -> None:
    """Decode rows, whole prompts and chunks side by side; the rest of the pool keeps its bits."""
    rng = np.random.default_rng(0)
    blocks = iter((1 + rng.permutation(NUM_BLOCKS - 1)).tolist())
    sequences = []
    for slot, length in enumerate([21, 4, 1, 13, 30]):
        mine = [next(blocks) for _ in range(8)]
        tokens = rng.integers(0, 512, length).tolist()
        sequences.append(Sequence(runner, slot, tokens, mine))
    for sequence in sequences:
        sequence.admit()
    plan = [
        [(0, 0, 21), (1, 0, 3), (4, 0, 7)],
        [(0, 21, 1), (1, 3, 1), (2, 0, 1)],
        [(0, 22, 1), (3, 0, 12), (4, 7, 23), (2, 1, 1)],
        [(3, 12, 1), (4, 30, 1), (0, 23, 1), (1, 4, 1), (2, 2, 1)],
    ]
    for step in plan:
        before = pools_of(runner)
        result = run(runner, *(sequences[i].row(start, count) for i, start, count in step))
        expected = {
            slot for i, start, count in step for slot in sequences[i].kv_slots(start, count)
        }
        assert changed_slots(before, pools_of(runner)) == expected
        for (i, start, count), token in zip(step, tokens_of(result), strict=True):
            if start + count == len(sequences[i].core.token_ids):
                sequences[i].core.token_ids.append(token)
    assert all(not pool[:BLOCK_SIZE].any() for pool in pools_of(runner)), "block 0 stays zero"


@pytest.mark.parametrize("prompt_tokens", [0, 64])
def test_a_step_of_padding_changes_nothing(runner: Runner, prompt_tokens: int) -> None:
    sequence = Sequence(runner, 0, PROMPT, [1, 2, 3, 4, 5, NUM_BLOCKS - 1])
    sequence.admit()
    run(runner, sequence.row(0, len(PROMPT)))
    before, state = pools_of(runner), _slot_state(runner)
    shape = runner.buckets.shape_for(1, prompt_tokens)
    empty = pack([], [], runner.layout(shape), runner.max_num_seqs)
    runner.read(runner.launch(empty, wants_prompt=False))
    for a, b in zip(before, pools_of(runner), strict=True):
        assert a.tobytes() == b.tobytes()
    for a, b in zip(state, _slot_state(runner), strict=True):
        assert a.tobytes() == b.tobytes()


def _slot_state(runner: Runner) -> list[np.ndarray]:
    assert runner._state is not None
    return [np.array(array, copy=True) for array in vars(runner._state.slots).values()]


def test_the_cache_is_the_same_however_it_was_filled(runner: Runner) -> None:
    """One go, two chunks, and token by token through decode rows: the same bits in the pool."""
    contents = []
    for cuts in ([21], [8, 13], [1] * 21):
        runner.reset()
        sequence = Sequence(runner, 0, PROMPT, [9, 3, 50, 2, 11, 8])
        sequence.admit()
        start = 0
        for count in cuts:
            result = run(runner, sequence.row(start, count))
            start += count
        contents.append((tokens_of(result), [pool.tobytes() for pool in pools_of(runner)]))
    assert contents[0] == contents[1] == contents[2]


def test_tokens_still_in_flight_come_from_the_device(runner: Runner) -> None:
    """Launching ahead, the host does not know the last token; the results are the same."""

    def tokens(ahead: bool) -> list[int]:
        runner.reset()
        sequence = Sequence(runner, 3, PROMPT, [1, 2, 3, 4, 5, 6, 7], temperature=1.0)
        sequence.admit()
        launched, drawn = [], []
        for i in range(5):
            start, count = (0, 21) if i == 0 else (20 + i, 1)
            row, request = sequence.row(start, count)
            packed = runner.pack([row], [request])
            if i and ahead:
                f = packed.layout.split(packed.ints)
                assert f["decode_token"][0] == FROM_HISTORY
            launched.append(runner.launch(packed, wants_prompt=False))
            if not ahead:
                drawn += tokens_of(runner.read(launched[-1]))
                sequence.core.token_ids.append(drawn[-1])
        return drawn or [tokens_of(runner.read(entry))[0] for entry in launched]

    known = tokens(ahead=False)
    assert len(set(known)) > 1, "a constant answer would prove little"
    assert tokens(ahead=True) == known


def test_pools_never_move(runner: Runner) -> None:
    pointers = runner.pool_pointers()
    assert len(set(pointers)) == 4
    sequence = Sequence(runner, 0, PROMPT, list(range(1, 10)))
    sequence.admit()
    for start, count in [(0, 8), (8, 13), (21, 1), (22, 1)]:
        run(runner, sequence.row(start, count))
        pools_of(runner)  # looking must not keep the next step from working in place
        assert runner.pool_pointers() == pointers


def test_admit_changes_one_slot(runner: Runner) -> None:
    before = _slot_state(runner)
    Sequence(runner, 5, PROMPT, [1], logit_bias={3: 1.0}, allowed_token_ids=[3, 4]).admit()
    after = _slot_state(runner)
    changed = set()
    for a, b in zip(before, after, strict=True):
        changed |= {int(i) for i in np.flatnonzero((a != b).reshape(len(a), -1).any(axis=1))}
    assert changed == {5}
    history = after[0][5]
    assert history[: len(PROMPT)].tolist() == PROMPT and (history[len(PROMPT) :] == -1).all()


class _Unreadable:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("copied to the host")


def test_one_small_copy_a_step(runner: Runner) -> None:
    """Without prompt logprobs and beams only the samples cross over, as one array."""
    sequence = Sequence(runner, 0, PROMPT, [1, 2, 3, 4, 5, 6])
    sequence.admit()
    packed = runner.pack(*map(list, zip(sequence.row(0, 21), strict=True)))
    launched = runner.launch(packed, wants_prompt=False)
    assert launched.output.samples.shape == (8, 4 + 2 * 5)
    unread = StepOutput(launched.output.samples, _Unreadable(), _Unreadable())  # type: ignore[arg-type]
    result = runner.read(dataclasses.replace(launched, output=unread))
    assert result.prompt is None
    with pytest.raises(AssertionError, match="copied"):
        runner.read(dataclasses.replace(launched, output=unread, wants_prompt=True))


def test_prompt_logprobs_of_exactly_the_prompt(runner: Runner) -> None:
    """Same numbers in one chunk and in three; one token at a time where a chunk has one."""
    rows = {}
    for cuts in ([21], [5, 1, 15]):
        runner.reset()
        sequence = Sequence(runner, 0, PROMPT, [1, 2, 3, 4, 5, 6], prompt_logprobs=2)
        sequence.admit()
        start, tokens, logprobs = 0, [], []
        for count in cuts:
            result = run(runner, sequence.row(start, count), wants_prompt=True)
            assert result.prompt is not None
            first = result.packed.prompt_start[0]
            start += count
            for i in range(first, first + count - (start == 21)):
                tokens.append(int(result.prompt.tokens[i]))
                logprobs.append(float(result.prompt.logprob[i]))
        assert tokens == PROMPT[1:]
        rows[len(cuts)] = logprobs
    assert rows[1] == rows[3]
    assert all(value < 0 for value in rows[1])


def test_reset_gives_a_new_pool_of_zeros(runner: Runner) -> None:
    sequence = Sequence(runner, 0, PROMPT, [1, 2, 3, 4, 5, 6])
    sequence.admit()
    first = tokens_of(run(runner, sequence.row(0, 21)))
    runner.reset()
    assert all(not pool.any() for pool in pools_of(runner))
    sequence.admit()
    assert tokens_of(run(runner, sequence.row(0, 21))) == first


def test_reset_compiles_nothing(runner: Runner) -> None:
    compiled: list[str] = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    runner.reset()
    monitoring.register_event_duration_secs_listener(listen)
    try:
        runner.reset()
        assert compiled == []
        jax.jit(lambda x: x + 1)(np.float32(len(compiled)))  # the listener hears compiles
        assert compiled != []
    finally:
        monitoring.unregister_event_duration_listener(listen)


def test_no_room_for_the_pools(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    monkeypatch.setattr(ProgramSet, "init", full)
    with pytest.raises(ConfigError, match=r"no memory for 97 KV blocks.*Lower gpu_memory"):
        first_state(runner.programs)

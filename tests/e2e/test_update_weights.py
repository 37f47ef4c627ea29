"""Weights are swapped under a running engine: from whatever a trainer has, wholly or not at all."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxpaged import LLM, SamplingParams
from jaxpaged.errors import InvalidRequestError, ModelLoadError, UnavailableError
from jaxpaged.training import parameters
from tests.e2e.mesh_worker import run_jobs
from tests.e2e.support import (
    engine_over,
    frozen,
    ids,
    live_bytes,
    results,
    run,
    run_alone,
    small_llm,
)
from tests.tiny_models import tiny_gguf, tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 400 + 10 for j in range(5 + 4 * i)] for i in range(4)]


@dataclasses.dataclass(frozen=True)
class Models:
    """Two sets of weights A and B of one shape, an engine, and what it must give with each."""

    folder_a: Path
    folder_b: Path
    llm: LLM
    module_b: nnx.Module
    tokens_a: list[tuple[int, ...]]
    tokens_b: list[tuple[int, ...]]

    def tokens(self) -> list[tuple[int, ...]]:
        return ids(run(self.llm.engine, PROMPTS, GREEDY))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    root = tmp_path_factory.mktemp("weights")
    a, b = tiny_llama(root / "a"), tiny_llama(root / "b", seed=5)
    with small_llm(b) as other:
        tokens_b = ids(run_alone(other, PROMPTS, GREEDY))
        module_b = other.flax_model()
    with small_llm(a) as llm:
        tokens_a = ids(run_alone(llm, PROMPTS, GREEDY))
        assert all(x != y for x, y in zip(tokens_a, tokens_b, strict=True))
        yield Models(a, b, llm, module_b, tokens_a, tokens_b)


@pytest.fixture
def fresh(models: Models) -> Models:
    """With the weights A, idle."""
    models.llm.update_weights(models.folder_a)
    return models


# ---------------------------------------------------------------- from where


def save_orbax(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as saver:
        saver.save(path.absolute(), tree)
    return path


def with_other_gguf(models: Models, tmp_path: Path) -> Path:
    return tiny_gguf(tmp_path / "b.gguf", seed=5)


SOURCES: dict[str, Callable[[Models, Path], Any]] = {
    "a module": lambda m, _: m.module_b,
    "an nnx.State": lambda m, _: nnx.state(m.module_b),
    "a nested dict": lambda m, _: nnx.to_pure_dict(nnx.state(m.module_b)),
    "a flat dict": lambda m, _: parameters(m.module_b),
    "numpy arrays": lambda m, _: {k: np.asarray(v) for k, v in parameters(m.module_b).items()},
    "float64": lambda m, _: {
        k: np.asarray(v, np.float64) for k, v in parameters(m.module_b).items()
    },
    "tensors by name": lambda m, _: load_file(m.folder_b / "model.safetensors"),
    "what checkpoint_tensors gives": lambda m, _: m.llm.checkpoint_tensors(m.module_b),
    "a folder": lambda m, _: str(m.folder_b),
    "a safetensors file": lambda m, _: m.folder_b / "model.safetensors",
    "a gguf file": with_other_gguf,
    "orbax, tensors by name": lambda m, path: save_orbax(
        path / "o", load_file(m.folder_b / "model.safetensors")
    ),
    "orbax, a state": lambda m, path: save_orbax(path / "o", nnx.state(m.module_b)),
    "orbax, a nested dict": lambda m, path: save_orbax(
        path / "o", nnx.to_pure_dict(nnx.state(m.module_b))
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_new_models_tokens(kind: str, fresh: Models, tmp_path: Path) -> None:
    source = SOURCES[kind](fresh, tmp_path)
    before = fresh.llm.stats().compiles
    assert fresh.tokens() == fresh.tokens_a
    fresh.llm.update_weights(source)
    assert fresh.tokens() == fresh.tokens_b
    stats = fresh.llm.stats()
    assert (stats.compiles, stats.compiles_after_warmup) == (before, 0)


def test_tied_embeddings_and_16_bit(tmp_path: Path) -> None:
    """A trainer's float32 weights are rounded to the engine's bfloat16 as a loader would."""
    tied = {"tie_word_embeddings": True}
    a, b = tiny_llama(tmp_path / "a", **tied), tiny_llama(tmp_path / "b", seed=5, **tied)
    with small_llm(b, dtype="bfloat16") as other:
        wanted = ids(run_alone(other, PROMPTS, GREEDY))
    with small_llm(b) as wide:
        module = wide.flax_model()
        tensors = wide.checkpoint_tensors()
    assert "head" not in parameters(module)
    with small_llm(a, dtype="bfloat16") as llm:
        old = ids(run_alone(llm, PROMPTS, GREEDY))
        assert old != wanted
        for source in (module, tensors):
            llm.update_weights(source)
            assert ids(run_alone(llm, PROMPTS, GREEDY)) == wanted
            assert llm.flax_model().embedding.dtype == jnp.bfloat16
            llm.update_weights(a)
        untied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}
        with pytest.raises(ModelLoadError, match="head is its embedding"):
            llm.update_weights(untied)
        assert ids(run_alone(llm, PROMPTS, GREEDY)) == old
        assert llm.stats().compiles_after_warmup == 0


@pytest.mark.slow
def test_over_four_devices(tmp_path: Path) -> None:
    """Vocabulary and MLP are padded, KV heads copied: the trainer's shapes are the model's own."""
    odd = {"vocab_size": 503, "intermediate_size": 100, "num_attention_heads": 8}
    folders = [str(tiny_llama(tmp_path / str(seed), seed=seed, **odd)) for seed in (0, 5)]
    job = ("updated", {"folders": folders, "size": 4, "prompts": PROMPTS, "count": 12})
    (found,) = run_jobs(4, [job])
    want = []
    for folder in folders:
        with small_llm(folder) as llm:
            params = dataclasses.replace(GREEDY, max_tokens=12)
            want.append([list(t) for t in ids(run_alone(llm, PROMPTS, params))])
    assert found["before"] == want[0]
    assert found["after"] == [want[1]] * len(found["after"]) and len(found["after"]) == 4
    assert found["compiles_after_warmup"] == 0


# ---------------------------------------------------------------- what does not fit


def changed(models: Models, name: str, value: Any) -> dict[str, Any]:
    return {**parameters(models.module_b), name: value}


def deleted() -> jax.Array:
    array = jnp.zeros((64, 128))
    array.delete()
    return array


def without(source: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in source.items() if key != name}


DOWN = "layers.1.mlp.down"
WRONG: dict[str, tuple[Callable[[Models], Any], list[str]]] = {
    "shape": (lambda m: changed(m, DOWN, jnp.zeros((64, 127))), [DOWN, "(64, 127)", "(64, 128)"]),
    "missing": (lambda m: without(parameters(m.module_b), DOWN), ["lack 1 parameters", DOWN]),
    "left over": (lambda m: changed(m, "layers.2.mlp.down", np.zeros(1)), ["layers.2.mlp.down"]),
    "integers": (lambda m: changed(m, DOWN, np.zeros((64, 128), np.int32)), [DOWN, "int32"]),
    "no array": (lambda m: changed(m, DOWN, 1.0), [DOWN, "float"]),
    "deleted": (lambda m: changed(m, DOWN, deleted()), [DOWN, "donated"]),
    "tensor's shape": (
        lambda m: {
            **load_file(m.folder_b / "model.safetensors"),
            "model.norm.weight": np.zeros(3, np.float32),
        },
        ["model.norm.weight", "(3,)", "(64,)"],
    ),
    "missing tensor": (
        lambda m: without(load_file(m.folder_b / "model.safetensors"), "lm_head.weight"),
        ["lm_head.weight"],
    ),
    "foreign names": (lambda m: {"x": np.zeros(2)}, ["none", "embedding", "lm_head.weight"]),
    "nothing": (lambda m: {}, ["0 names"]),
    "a path to nothing": (lambda m: m.folder_a / "nowhere", ["nowhere", "Orbax"]),
    "an empty folder": (lambda m: m.folder_a.parent, ["holds no weights"]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_changes_nothing(kind: str, fresh: Models) -> None:
    make, parts = WRONG[kind]
    engine = fresh.llm.engine
    engine.add_request("runs", PROMPTS[0], GREEDY)
    engine.step()
    with pytest.raises(ModelLoadError) as error:
        fresh.llm.update_weights(make(fresh), running="abort")
    assert all(part in str(error.value) for part in parts), str(error.value)
    done = [o for _ in range(40) if engine.has_unfinished_requests() for o in engine.step()]
    assert tuple(done[-1].outputs[0].token_ids) == fresh.tokens_a[0], "not even aborted"
    assert fresh.tokens() == fresh.tokens_a


def test_under_jit_is_refused(fresh: Models) -> None:
    @jax.jit
    def push(x: jax.Array) -> jax.Array:
        fresh.llm.update_weights(changed(fresh, DOWN, x))
        return x

    with pytest.raises(ModelLoadError, match="outside of jit"):
        push(jnp.zeros((64, 128)))
    assert fresh.tokens() == fresh.tokens_a


def test_a_damaged_checkpoint_is_noticed_in_time(fresh: Models, tmp_path: Path) -> None:
    path = save_orbax(tmp_path / "o", load_file(fresh.folder_b / "model.safetensors"))
    stored = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(stored.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    stored.write_bytes(data)
    with pytest.raises(ModelLoadError):
        fresh.llm.update_weights(path)
    assert fresh.tokens() == fresh.tokens_a
    broken = tmp_path / "broken"
    shutil.copytree(fresh.folder_b, broken)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="truncated"):
        fresh.llm.update_weights(broken)
    assert fresh.tokens() == fresh.tokens_a


def test_an_update_that_breaks_off_is_admitted(
    fresh: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory half-way: no tokens of half a model, and the next update mends it."""
    from jaxpaged.device import weight_update

    real, calls = weight_update._copied, 0

    def fails(*arguments: Any) -> jax.Array:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MemoryError("none left")
        return real(*arguments)

    monkeypatch.setattr(weight_update, "_copied", fails)
    with pytest.raises(MemoryError):
        fresh.llm.update_weights(fresh.module_b)
    assert fresh.llm.engine.runner.memory_bytes()["weights"] == 0
    with pytest.raises(UnavailableError, match="update_weights"):
        fresh.llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    with pytest.raises(UnavailableError):
        fresh.llm.flax_model()
    fresh.llm.update_weights(fresh.module_b)
    assert fresh.tokens() == fresh.tokens_b


# ---------------------------------------------------------------- whose arrays


def test_the_engines_arrays_are_its_own(fresh: Models) -> None:
    """The trainer donates its arrays to its next step, and overwrites others in place."""
    ours = {k: jnp.array(v) for k, v in parameters(fresh.module_b).items()}
    fresh.llm.update_weights(ours)
    jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)(ours)
    assert fresh.tokens() == fresh.tokens_b
    fresh.llm.update_weights(fresh.folder_a)
    host = {k: np.array(v) for k, v in parameters(fresh.module_b).items()}
    fresh.llm.update_weights(host)
    for array in host.values():
        array.fill(0)
    assert fresh.tokens() == fresh.tokens_b
    module = fresh.llm.flax_model()
    for leaf in parameters(module).values():
        leaf.delete()
    assert fresh.tokens() == fresh.tokens_b


def test_old_weights_go_as_new_ones_come(fresh: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxpaged.device import weight_update

    sizes = [v.nbytes for v in parameters(fresh.module_b).values()]
    live: list[int] = []
    real = weight_update._copied

    def watched(*arguments: Any) -> jax.Array:
        made = real(*arguments)
        live.append(live_bytes())
        return made

    before = live_bytes()
    monkeypatch.setattr(weight_update, "_copied", watched)
    fresh.llm.update_weights(fresh.module_b)
    assert len(live) == len(sizes)
    assert max(live) - before <= max(sizes) < sum(sizes) / 3
    assert live_bytes() == before


# ---------------------------------------------------------------- requests that run


def test_no_kv_of_the_old_weights_is_used(fresh: Models) -> None:
    long = [(3 * i) % 400 + 10 for i in range(60)]
    engine = fresh.llm.engine
    run(engine, [long], GREEDY)
    hits = fresh.llm.stats().prefix_hit_tokens
    run(engine, [long], GREEDY)
    assert fresh.llm.stats().prefix_hit_tokens > hits
    hits = fresh.llm.stats().prefix_hit_tokens
    fresh.llm.update_weights(fresh.module_b)
    warm = run(engine, [long], GREEDY)
    assert fresh.llm.stats().prefix_hit_tokens == hits
    assert warm == run_alone(fresh.llm, [long], GREEDY)


def started(models: Models, *, steps: int = 6, **fields: Any) -> Any:
    """An engine with the four prompts under way."""
    engine = engine_over(models.llm)
    params = dataclasses.replace(GREEDY, **fields)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params)
    last: dict[str, Any] = {}
    for _ in range(steps):
        last |= {o.request_id: o for o in engine.step()}
    assert len(last) == 4 and not any(o.finished for o in last.values())
    return engine, {key: output.outputs[0].token_ids for key, output in last.items()}


def drained(engine: Any) -> dict[str, Any]:
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done, "reported once"
                done[output.request_id] = output
    engine.scheduler.check_integrity()
    assert engine.scheduler.kv_usage == 0
    return done


def test_running_requests_finish_with_the_old_weights(fresh: Models) -> None:
    engine, _ = started(fresh)
    engine.update_weights(fresh.module_b, running="finish")
    assert engine.has_unfinished_requests(), "their outputs have not been told"
    done = drained(engine)
    assert [tuple(done[str(i)].outputs[0].token_ids) for i in range(4)] == fresh.tokens_a
    assert fresh.tokens() == fresh.tokens_b


def test_deltas_lose_nothing_meanwhile(fresh: Models) -> None:
    engine = engine_over(fresh.llm)
    engine.add_request("d", PROMPTS[0], GREEDY, delta_interval=2)
    parts = [o for _ in range(4) for o in engine.step()]
    engine.update_weights(fresh.module_b, running="finish")
    while engine.has_unfinished_requests():
        parts += engine.step()
    tokens = [t for part in parts for t in part.outputs[0].token_ids]
    assert tuple(tokens) == fresh.tokens_a[0] and parts[-1].finished


@pytest.mark.parametrize("swap", ["weights", "sleep"])
def test_running_requests_go_on_with_the_new_weights(swap: str, fresh: Models) -> None:
    """The next token is what the new weights say after all tokens so far, and new KV of those."""
    engine, _ = started(fresh)
    if swap == "sleep":
        engine.sleep(weights="discard", running="recompute")
        engine.step()  # what was under way
        assert not engine.has_unfinished_requests() and engine.step() == []
    engine.update_weights(fresh.module_b, running="recompute")
    if swap == "sleep":
        engine.wake()
    kept = {i: list(engine._states[str(i)].completions[0].token_ids) for i in range(4)}
    assert all(1 <= len(tokens) < 16 for tokens in kept.values())
    done = drained(engine)
    for i, prompt in enumerate(PROMPTS):
        tokens = done[str(i)].outputs[0].token_ids
        assert tokens[: len(kept[i])] == kept[i] == list(fresh.tokens_a[i][: len(kept[i])])
        rest = dataclasses.replace(GREEDY, max_tokens=16 - len(kept[i]))
        ((want,),) = run_alone(fresh.llm, [prompt + kept[i]], rest)
        assert tuple(tokens[len(kept[i]) :]) == want.token_ids
    assert engine.stats().compiles_after_warmup == 0


def test_running_requests_are_aborted(fresh: Models) -> None:
    engine, told = started(fresh)
    engine.update_weights(fresh.module_b, running="abort")
    done = drained(engine)
    for key, output in done.items():
        (answer,) = output.outputs
        assert answer.finish_reason == "abort"
        assert answer.token_ids[: len(told[key])] == told[key]
    assert len(done) == 4
    assert fresh.tokens() == fresh.tokens_b


def test_prompt_logprobs_are_of_one_set_of_weights(fresh: Models) -> None:
    long = [(3 * i) % 400 + 10 for i in range(120)]  # 4 chunks, at most 2 under way
    ask = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2, ignore_eos=True)
    engine = engine_over(fresh.llm, max_num_batched_tokens=32)
    engine.add_request("p", long, ask)
    engine.step()
    engine.update_weights(fresh.module_b, running="recompute")
    found = drained(engine)["p"]
    (want,) = results(fresh.llm.generate([long], ask, use_tqdm=False)[0])
    assert found.prompt_logprobs is not None
    assert frozen(found.prompt_logprobs) == want.prompt_logprobs


def test_bad_choices(fresh: Models) -> None:
    with pytest.raises(InvalidRequestError, match="running must be one of finish, recompute, abo"):
        fresh.llm.update_weights(fresh.module_b, running="drain")
    assert fresh.tokens() == fresh.tokens_a


def test_a_checkpoint_can_be_made_of_a_trained_module(fresh: Models, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    shutil.copytree(fresh.folder_a, folder)
    save_file(fresh.llm.checkpoint_tensors(fresh.module_b), folder / "model.safetensors")
    theirs, ours = (load_file(f / "model.safetensors") for f in (fresh.folder_b, folder))
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)

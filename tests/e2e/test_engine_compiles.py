"""No request, whatever it asks for, compiles anything once an engine is warm."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from jaxpaged import LLM, EngineConfig, SamplingParams
from tests.e2e.engine_support import (
    GREEDY,
    PROMPT,
    SETTINGS,
    drain,
    fresh_engine,
    greedy_tokens,
    model_folder,
    run_one,
    shared_llm,
)

CHOICES: dict[str, list[Any]] = {
    "n": [1, 1, 1, 3],
    "temperature": [0.0, 0.3, 1.0, 2.0],
    "top_k": [0, 1, 5, 100, 511],
    "top_p": [1.0, 0.9, 0.1],
    "min_p": [0.0, 0.05, 1.0],
    "repetition_penalty": [1.0, 1.2, 0.8],
    "frequency_penalty": [0.0, 0.5, -0.5],
    "presence_penalty": [0.0, 1.0, -1.0],
    "logit_bias": [None, {3: 5.0, 400: -50.0}, dict.fromkeys(range(500), 1.0)],
    "allowed_token_ids": [None, list(range(100)), [9, 10, 11]],
    "bad_words": [None, ["the", "dog"], ["a"]],
    "max_tokens": [1, 5, 20, None],
    "min_tokens": [0, 1],
    "stop": [None, "e", ["the", "a"]],
    "stop_token_ids": [None, [10], list(range(60, 100))],
    "include_stop_str_in_output": [False, True],
    "ignore_eos": [False, True],
    "seed": [None, 0, 7, 2**63],
    "logprobs": [None, 0, 3, 20],
    "logprobs_mode": ["raw", "raw", "processed"],
    "prompt_logprobs": [None, 0, 3, 20],
    "detokenize": [True, True, False],
    "skip_special_tokens": [True, False],
    "spaces_between_special_tokens": [True, False],
}


def any_params(rng: random.Random) -> SamplingParams:
    fields = {name: rng.choice(values) for name, values in CHOICES.items()}
    if not fields["detokenize"]:
        fields["stop"] = None
    return SamplingParams(**fields)


def test_no_compile_after_warm_up() -> None:
    assert set(CHOICES) == {field.name for field in dataclasses.fields(SamplingParams)}
    rng = random.Random(3)
    ledger = shared_llm().engine.runner.ledger
    compiles = ledger.compiles
    assert compiles == ledger.traces == 5 and ledger.warm, "each is traced once"
    for settings in ({}, {"num_blocks": 34}, {"long_prefill_token_threshold": 9}):
        engine = fresh_engine(**settings)
        ended: list[str] = []
        for i in range(60):
            prompt = [rng.randrange(512) for _ in range(rng.choice([1, 2, 7, 63, 64, 65, 100]))]
            engine.add_request(str(i), prompt, any_params(rng), cache_salt=rng.choice([None, "s"]))
            if i % 7 == 0:
                ended += [output.request_id for output in engine.step() if output.finished]
            if i % 20 == 19:
                engine.abort(str(i - 1))
        ended += drain(engine)
        assert sorted(ended, key=int) == [str(i) for i in range(60)]
        assert engine.stats().compiles_after_warmup == 0
        assert ledger.compiles == compiles
        # A refused combination may end a request, but never a step.
        assert engine.stats().failed_steps == 0


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_memory_stays_bounded() -> None:
    """JX-05: random lengths and numbers of logprobs neither compile nor pile up."""
    rng = random.Random(5)
    engine = fresh_engine()

    def wave(count: int) -> None:
        for i in range(count):
            prompt = [rng.randrange(512) for _ in range(rng.randint(1, 120))]
            params = dataclasses.replace(
                GREEDY, logprobs=rng.randint(1, 5), prompt_logprobs=rng.randint(0, 5), max_tokens=4
            )
            engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            engine.step()

    wave(100)
    before = resident_bytes()
    for _ in range(2):
        wave(100)
    assert engine.stats().compiles_after_warmup == 0
    # Everything those 200 requests bring to the host is about 3 MB.
    assert resident_bytes() - before < 40 * 2**20


def test_eager_engines_compile_when_they_must() -> None:
    config = EngineConfig(model=str(model_folder()), enforce_eager=True, **SETTINGS)
    with LLM(config=config) as llm:
        assert (llm.stats().compiles, llm.stats().lazy_compiles) == (0, 0)
        assert llm.engine.runner.ledger.traces == 0, "a start that is eager compiles nothing"
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == greedy_tokens(tuple(PROMPT))
        assert (llm.stats().compiles, llm.stats().lazy_compiles) == (2, 2)
        # A copy, as the prompt is cached whole, and an admission.
        llm.generate([PROMPT], dataclasses.replace(GREEDY, min_tokens=2), use_tqdm=False)
        stats = llm.stats()
        assert (stats.compiles, stats.lazy_compiles, stats.compiles_after_warmup) == (4, 4, 0)
    assert shared_llm().stats().lazy_compiles == 0


def test_a_new_pool_after_a_failure_needs_no_compile() -> None:
    shared_llm().engine.runner.reset()
    engine = fresh_engine()
    assert run_one(engine, PROMPT, GREEDY).outputs[0].token_ids == greedy_tokens(tuple(PROMPT))
    assert engine.stats().compiles_after_warmup == 0

"""A trainer's forward pass and the engine agree on the log-probability of every token."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import LLM, RequestOutput, SamplingParams
from jaxpaged.models.base import CausalLM
from jaxpaged.training import token_logprobs
from tests.e2e.support import LONG, small_llm
from tests.tiny_models import tiny_llama, tiny_mistral
from tests.zoo.case import all_cases, write_case

FLOAT32_BOUND = 1e-4
BFLOAT16_BOUND, BFLOAT16_MEAN = 0.3, 0.03
"""The stated bounds, in nats a token; docs/training.md says what was measured."""
PROMPTS = [[(7 * i + 3 * j) % 400 + 10 for j in range(4 + 31 * i)] for i in range(4)]
DRAWN = SamplingParams(temperature=1.0, max_tokens=24, logprobs=0, seed=3, ignore_eos=True)


def of_engine(output: RequestOutput, index: int = 0) -> np.ndarray:
    answer = output.outputs[index]
    assert answer.logprobs is not None
    entries = zip(answer.logprobs, answer.token_ids, strict=True)
    return np.array([entry[token].logprob for entry, token in entries])


def of_trainer(model: CausalLM, output: RequestOutput, index: int = 0) -> np.ndarray:
    tokens = output.prompt_token_ids + output.outputs[index].token_ids
    scored = jax.jit(token_logprobs)(model, jnp.array([tokens]))
    return np.asarray(scored)[0, len(output.prompt_token_ids) - 1 :]


def differences(llm: LLM, params: SamplingParams = DRAWN) -> np.ndarray:
    """Of drawn tokens: fresh, from the prefix cache, and of several samples."""
    model = llm.flax_model()
    several = dataclasses.replace(params, n=2)
    found = []
    for ask in (params, params, several):
        for output in llm.generate(PROMPTS, ask, use_tqdm=False):
            for index in range(ask.n):
                found.append(np.abs(of_engine(output, index) - of_trainer(model, output, index)))
    return np.concatenate(found)


def test_float32_is_equal_within_its_bound(tiny_llm: LLM, window_llm: LLM) -> None:
    for llm in (tiny_llm, window_llm):
        assert 0 < differences(llm).max() < FLOAT32_BOUND


FAMILIES = ("gemma", "deepseek", "moe", "phi3", "qwen", "opt")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_in_float32(family: str, tmp_path: Path) -> None:
    case = next(c for c in all_cases() if family in c.name or family in c.model_type)
    with small_llm(write_case(tmp_path / family, case), **{**LONG, **case.engine}) as llm:
        assert differences(llm).max() < FLOAT32_BOUND


def test_bfloat16_is_equal_within_its_bound(tmp_path: Path) -> None:
    """Weights of both sides are bfloat16; single tokens differ as sums are rounded elsewhere."""
    for folder in (tiny_llama(tmp_path / "a"), tiny_mistral(tmp_path / "b")):
        with small_llm(folder, dtype="bfloat16") as llm:
            apart = differences(llm)
            assert apart.max() < BFLOAT16_BOUND and apart.mean() < BFLOAT16_MEAN


def test_the_embedded_model_in_float32(smollm2_llm: LLM) -> None:
    params = dataclasses.replace(DRAWN, max_tokens=32)
    chat = [{"role": "user", "content": "Name three rivers."}]
    (output,) = smollm2_llm.chat(chat, params, use_tqdm=False)
    apart = of_engine(output) - of_trainer(smollm2_llm.flax_model(), output)
    assert np.abs(apart).max() < FLOAT32_BOUND


def test_importance_ratios_are_one(tiny_llm: LLM) -> None:
    """What a trainer computes with them, over whole answers."""
    model = tiny_llm.flax_model()
    for mode in ("raw", "processed"):
        params = dataclasses.replace(DRAWN, logprobs_mode=mode)
        for output in tiny_llm.generate(PROMPTS, params, use_tqdm=False):
            ratio = math.exp(float(np.sum(of_trainer(model, output) - of_engine(output))))
            assert ratio == pytest.approx(1.0, abs=2e-4)
            assert output.outputs[0].logprobs_mode == mode
            assert output.outputs[0].cumulative_logprob == pytest.approx(
                float(np.sum(of_engine(output))), abs=1e-4
            )


def test_processed_is_what_was_drawn_from(tiny_llm: LLM) -> None:
    """Temperature and top_k applied to the trainer's logits give the engine's numbers."""
    from jaxpaged.training import forward

    model = tiny_llm.flax_model()
    params = dataclasses.replace(
        DRAWN, temperature=0.7, top_k=20, logprobs=25, logprobs_mode="processed", max_tokens=12
    )
    with small_llm_like(tiny_llm, max_logprobs=25) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for output in outputs:
        answer = output.outputs[0]
        assert answer.logprobs is not None
        tokens = output.prompt_token_ids + answer.token_ids
        logits = np.asarray(forward(model, jnp.array([tokens])), np.float64)[0]
        for place, entry in enumerate(answer.logprobs, len(output.prompt_token_ids) - 1):
            row = logits[place] / 0.7
            row = np.where(row >= np.sort(row)[-20], row, -np.inf)
            want = row - row.max() - np.log(np.sum(np.exp(row - row.max())))
            found = {token: value.logprob for token, value in entry.items()}
            assert len(found) == 25
            assert sum(math.exp(value) for value in found.values()) == pytest.approx(1.0, abs=1e-5)
            assert sum(value == -math.inf for value in found.values()) == 5
            for token, value in found.items():
                assert value == pytest.approx(want[token], abs=2e-4)


def test_modes_side_by_side_change_nothing(tiny_llm: LLM) -> None:
    asks = [
        dataclasses.replace(DRAWN, temperature=0.6, top_p=0.9, logprobs=3, logprobs_mode=mode)
        for mode in ("raw", "processed", "raw", "processed")
    ]
    together = tiny_llm.generate(PROMPTS, asks, use_tqdm=False)
    for prompt, ask, output in zip(PROMPTS, asks, together, strict=True):
        (alone,) = tiny_llm.generate([prompt], ask, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
        assert alone.outputs[0].logprobs_mode == ask.logprobs_mode


def test_without_logprobs_there_is_no_mode(tiny_llm: LLM) -> None:
    ask = SamplingParams(max_tokens=2, logprobs_mode="processed")
    (output,) = tiny_llm.generate([PROMPTS[0]], ask, use_tqdm=False)
    assert (output.outputs[0].logprobs, output.outputs[0].logprobs_mode) == (None, None)


def small_llm_like(llm: LLM, **settings: Any) -> LLM:
    return small_llm(llm.config.model, **settings)

"""Greedy tokens and logprobs equal to what transformers gave when the references were stored.

The same statement as in test_parity_torch.py, for Python versions on which torch is not installed.
"""

from __future__ import annotations

import pytest

from jaxpaged import LLM, SamplingParams
from tests.e2e.support import Answer, stored_reference

LOGPROB_TOLERANCE = 2e-3


@pytest.mark.slow
def test_smollm2_answers_equal_the_stored_ones(smollm2_answers: list[Answer]) -> None:
    assert len(smollm2_answers) == 32
    for answer in smollm2_answers:
        case, output = answer.case, answer.output
        question = case["question"]
        assert answer.prompt_token_ids == case["prompt_token_ids"], question
        assert len(case["token_ids"]) == 64
        assert output.token_ids == case["token_ids"], question
        assert output.logprobs is not None
        drawn = [
            entry[token].logprob
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
        assert drawn == pytest.approx(case["logprobs"], abs=LOGPROB_TOLERANCE), question


def check_tiny(llm: LLM, name: str) -> None:
    cases = stored_reference(name)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=0)
    prompts = [case["prompt_token_ids"] for case in cases]
    for case, output in zip(cases, llm.generate(prompts, params, use_tqdm=False), strict=True):
        done = output.outputs[0]
        assert done.token_ids == case["token_ids"]
        assert done.logprobs is not None
        drawn = [
            entry[token].logprob for token, entry in zip(done.token_ids, done.logprobs, strict=True)
        ]
        assert drawn == pytest.approx(case["logprobs"], abs=LOGPROB_TOLERANCE)


def test_tiny_llama_equals_the_stored_outputs(tiny_llm: LLM) -> None:
    check_tiny(tiny_llm, "tiny_llama")


def test_tiny_mistral_equals_the_stored_outputs(window_llm: LLM) -> None:
    longest = max(len(case["prompt_token_ids"]) for case in stored_reference("tiny_mistral"))
    assert longest > 8, "no prompt is longer than the sliding window"
    check_tiny(window_llm, "tiny_mistral")

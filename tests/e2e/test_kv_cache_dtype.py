"""An engine with an 8-bit KV cache: half the bytes, nearly the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpaged import LLM, SamplingParams
from tests.e2e.engine_support import SETTINGS, assert_idle, model_folder, reference_llm
from tests.e2e.mesh_worker import run_jobs
from tests.e2e.support import stored_reference

PROMPTS = [[(7 * i + n) % 400 + 5 for i in range(n)] for n in (1, 17, 100)]


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_tiny_engine(name: str) -> None:
    """With hits and preemptions; what a prompt's blocks hold is the same bits when found again."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, prompt_logprobs=0)
    with LLM(str(model_folder()), **SETTINGS, kv_cache_dtype=name) as llm:
        runner = llm.engine.runner
        wide = reference_llm().engine.runner.memory_bytes()["kv_cache"]
        elements, scales = wide // 4, wide // 4 // 16 * 4  # heads of 16
        assert runner.memory_bytes()["kv_cache"] == elements + scales
        kind = {"int8": "int8", "fp8": "float8_e4m3fn"}[name]
        assert (runner.cache_dtype_name, runner.dtype_name) == (kind, "float32")
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        again = llm.generate(PROMPTS, plain, use_tqdm=False)
        assert llm.stats().prefix_hit_tokens > 0
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in found]
        assert_idle(llm.engine)
    expected = reference_llm().generate(PROMPTS, params, use_tqdm=False)
    differences = []
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.prompt_logprobs is not None and theirs.prompt_logprobs is not None
        for mine, other in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            assert mine is not None and other is not None
            (token,) = other
            differences.append(abs(mine[token].logprob - other[token].logprob))
    mean = sum(differences) / len(differences)
    assert 0 < mean < {"int8": 0.03, "fp8": 0.12}[name], mean


@pytest.mark.slow
def test_the_embedded_model_says_nearly_the_same(smollm2_path: Path) -> None:
    cases = stored_reference("smollm2")[:6]
    jobs = []
    for name in ("int8", "fp8"):
        arguments = {"folder": str(smollm2_path), "size": 1, "count": 32}
        prompts = [case["prompt_token_ids"] for case in cases]
        engine = {"kv_cache_dtype": name}
        jobs.append(("tokens", {**arguments, "prompts": prompts, "engine": engine}))
    for answers in run_jobs(1, jobs):
        agreed = []
        for answer, case in zip(answers, cases, strict=True):
            pairs = zip(answer, case["token_ids"], strict=False)
            agreed.append(next((i for i, (a, b) in enumerate(pairs) if a != b), 32))
        assert len(answers[0]) == 32
        assert sum(length == 32 for length in agreed) >= 3, agreed
        assert min(agreed) >= 10, agreed

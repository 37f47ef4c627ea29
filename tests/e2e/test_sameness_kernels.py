"""An engine that is deterministic by a GPU's kernels, interpreted: the same bits in any company,
and the tokens that other engines give. Slow, because every program is compiled with the interpreter
in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxpaged import SamplingParams
from tests.e2e.mesh_worker import Job, run_jobs
from tests.e2e.support import engine_over, run, run_alone, small_llm, watched
from tests.tiny_models import tiny_llama
from tests.zoo.case import all_cases, stored, write_case

pytestmark = pytest.mark.slow
FIXED: dict[str, Any] = {"attention_backend": "pallas_interpret", "deterministic": True}
CASES = {case.name: case for case in all_cases()}


def prompt(first: int, count: int) -> list[int]:
    return [(7 * i + first) % 500 + 5 for i in range(count)]


TEXTS = [prompt(3 * i, count) for i, count in enumerate((9, 33, 34, 54, 70, 87))]
PARAMS = [
    SamplingParams(
        temperature=0.8 * (i % 2),
        seed=i,
        n=1 + (i == 1),
        max_tokens=12,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=3 if i % 3 == 0 else None,
    )
    for i in range(len(TEXTS))
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_schedule_gives_the_same_bits(tmp_path: Path, dtype: str) -> None:
    with small_llm(tiny_llama(tmp_path), dtype=dtype, decode_buckets=None, **FIXED) as llm:
        assert llm.engine.runner.deterministic
        assert llm.engine.runner.buckets.decode == (8,)
        expected = run_alone(llm, TEXTS, PARAMS)
        assert run(llm.engine, TEXTS, PARAMS) == expected
        chunked = engine_over(llm, long_prefill_token_threshold=7)
        with watched(chunked) as watch:
            assert run(chunked, TEXTS, PARAMS) == expected
        assert any(chunks for _, _, chunks in watch.steps)
        small = engine_over(llm, num_blocks=33, max_num_batched_tokens=17)
        assert run(small, TEXTS, PARAMS, order=(5, 3, 1, 0, 2, 4)) == expected
        assert small.stats().preemptions > 0
        hits = engine_over(llm)
        for _ in range(2):
            assert run(hits, TEXTS, PARAMS) == expected
        assert hits.stats().prefix_hit_tokens > 0
        assert hits.stats().copied_blocks > 0
        if dtype == "float32":  # the prompt's logprobs are those of the same tokens as outputs
            text, done = TEXTS[1], expected[1][0]
            scored = SamplingParams(max_tokens=1, prompt_logprobs=3)
            ((given,),) = run(llm.engine, [[*text, *done.token_ids]], scored)
            assert given.prompt_logprobs is not None
            assert given.prompt_logprobs[len(text) :] == done.logprobs


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v2-groups", "gemma2"])
def test_architectures_give_the_stored_tokens(tmp_path: Path, name: str) -> None:
    """Experts, a latent cache, windows with a soft cap: all their products have a fixed order."""
    arguments = CASES[name].job(write_case(tmp_path, CASES[name]), **FIXED)
    (found,) = run_jobs(1, [("tokens", {**arguments, "size": 1})])
    assert found == [output["token_ids"] for output in stored(CASES[name])["outputs"]]


def test_devices_add_up_in_their_order(tmp_path: Path) -> None:
    folder = str(tiny_llama(tmp_path, num_attention_heads=8, num_key_value_heads=4))
    arguments = {"folder": folder, "prompts": [prompt(1, 9), prompt(5, 40)], "count": 16}
    jobs: list[Job] = [
        ("tokens", {**arguments, "size": size, "engine": engine})
        for size, engine in ((1, {}), (4, FIXED))
    ]
    one, four = run_jobs(4, jobs)
    assert four == one

"""Models and engines that several end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpaged import LLM, SamplingParams
from tests.e2e.support import LONG, Answer, small_llm, stored_reference
from tests.tiny_models import tiny_llama, tiny_mistral


@pytest.fixture(scope="session")
def tiny_llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("e2e") / "llama")


@pytest.fixture(scope="session")
def tiny_llm(tiny_llama_path: Path) -> Iterator[LLM]:
    """The engine that sameness is measured with: `SMALL` settings, idle between tests."""
    with small_llm(tiny_llama_path) as llm:
        yield llm


@pytest.fixture(scope="session")
def window_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A Mistral that sees 8 tokens back."""
    folder = tmp_path_factory.mktemp("e2e") / "mistral"
    with small_llm(tiny_mistral(folder, sliding_window=8), **LONG) as llm:
        yield llm


@pytest.fixture(scope="session")
def smollm2_llm(smollm2_path: Path) -> Iterator[LLM]:
    """The embedded model in float32; 32 rows, steps of at most 256 prompt tokens."""
    with LLM(
        str(smollm2_path),
        dtype="float32",
        max_num_seqs=32,
        max_num_batched_tokens=256,
        decode_buckets=(32,),
        prefill_buckets=(256,),
        max_model_len=256,
        num_gpu_blocks_override=32 * 16 + 1,
        max_logprobs=5,
        check_integrity=True,
        disable_progress=True,
    ) as llm:
        yield llm


@pytest.fixture(scope="session")
def smollm2_answers(smollm2_llm: LLM) -> list[Answer]:
    """Greedy answers to the questions of the stored reference, all in one batch of 32."""
    cases = stored_reference("smollm2")
    params = SamplingParams(
        temperature=0.0, max_tokens=len(cases[0]["token_ids"]), ignore_eos=True, logprobs=5
    )
    chats = [[{"role": "user", "content": case["question"]}] for case in cases]
    found = smollm2_llm.chat(chats, params, use_tqdm=False)
    return [
        Answer(case, output.prompt_token_ids, output.outputs[0])
        for case, output in zip(cases, found, strict=True)
    ]

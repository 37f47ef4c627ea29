"""Gemma in bfloat16, against transformers in the same type and in float32."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxpaged import SamplingParams
from tests.e2e.support import LONG, small_llm
from tests.zoo.case import HAS_TORCH, write_case
from tests.zoo.gemma import CASES

if not HAS_TORCH:
    pytest.skip("needs torch, the oracle", allow_module_level=True)

import torch

from tests.e2e import oracle


@pytest.mark.parametrize("name", ["gemma2", "gemma3-older-spelling"])
def test_no_further_from_float32_than_transformers(name: str, tmp_path: Path) -> None:
    """The residual stream stays in float32 here, so both have other roundings; the tolerance is
    what logprobs of 130 tokens differ by on average.
    """
    case = next(case for case in CASES if case.name == name)
    folder = write_case(tmp_path / "model", case, ml_dtypes.bfloat16)
    prompt = case.prompt_ids()[-1]
    with small_llm(folder, **{**LONG, "dtype": "bfloat16"}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    entries = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ours = np.array([entry[token].logprob for token, entry in entries if entry is not None])

    in_float32 = prompt_logprobs(folder, torch.float32, prompt)
    in_bfloat16 = prompt_logprobs(folder, torch.bfloat16, prompt)
    theirs = np.abs(in_bfloat16 - in_float32).mean()
    assert 0 < np.abs(ours - in_float32).mean() <= theirs
    assert np.abs(ours - in_bfloat16).mean() < 2e-2


def prompt_logprobs(folder: Path, dtype: torch.dtype, prompt: list[int]) -> np.ndarray:
    values = oracle.log_softmax(oracle.logits(oracle.from_folder(folder, dtype), prompt))
    return values[np.arange(len(prompt) - 1), prompt[1:]]

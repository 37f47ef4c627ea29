"""Every architecture against transformers: logprobs, tokens, and its own greedy generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxpaged import SamplingParams
from jaxpaged.models.registry import supported_architectures
from tests.e2e.support import LONG, small_llm
from tests.zoo.case import HAS_TORCH, Case, all_cases, stored, write_case

CASES = {case.name: case for case in all_cases()}
STORED_TOLERANCE = 1e-3


def greedy(case: Case) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=case.count, ignore_eos=True, logprobs=5, prompt_logprobs=5
    )


def test_no_architecture_is_without_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == set(supported_architectures())


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch, the oracle")
@pytest.mark.parametrize("name", CASES)
def test_equal_to_transformers(name: str, tmp_path: Path) -> None:
    from tests.e2e import oracle
    from tests.e2e.test_parity_torch import check_against, check_prompt

    case = CASES[name]
    folder = write_case(tmp_path / "model", case)
    model = oracle.from_folder(folder)
    with small_llm(folder, **{**LONG, **case.engine}) as llm:
        outputs = llm.generate(case.prompt_ids(), greedy(case), use_tqdm=False)
    for output in outputs:
        if case.one_pass:
            check_against(model, output, case.tolerance)
        else:
            check_prompt(model, output, case.tolerance)
    for output in outputs if not case.one_pass else outputs[-1:]:
        tokens, _ = oracle.greedy(model, output.prompt_token_ids, case.count)
        assert output.outputs[0].token_ids == tokens


@pytest.mark.skipif(HAS_TORCH, reason="torch is here: compared with it directly")
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_stored_outputs(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = stored(case)["outputs"]
    folder = write_case(tmp_path / "model", case)
    with small_llm(folder, **{**LONG, **case.engine}) as llm:
        outputs = llm.generate(case.prompt_ids(), greedy(case), use_tqdm=False)
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == wanted["token_ids"]
        assert prompt_logprobs(output) == pytest.approx(wanted["prompt"], abs=STORED_TOLERANCE)


def prompt_logprobs(output: Any) -> list[float]:
    entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [entry[token].logprob for token, entry in entries]


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch to say what transformers saves")
@pytest.mark.parametrize("name", CASES)
def test_the_stored_description_is_what_transformers_saves(name: str) -> None:
    from tests.zoo.case import describe

    about, kept = describe(CASES[name]), stored(CASES[name])
    assert {key: kept[key] for key in about} == about

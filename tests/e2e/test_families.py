"""Every architecture against transformers: logprobs, tokens, and its own greedy generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxpaged import RequestOutput
from jaxpaged.models.registry import supported_architectures
from tests.e2e.mesh_worker import run_jobs
from tests.zoo.case import HAS_TORCH, all_cases, stored, write_case

CASES = {case.name: case for case in all_cases()}
STORED_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[RequestOutput]]]:
    """Name -> checkpoint and outputs, of the cases that the tests to run are about."""
    chosen = {
        item.callspec.params.get("name")
        for item in request.session.items
        if "answers" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
    }
    names = [name for name in CASES if name in chosen]
    root = tmp_path_factory.mktemp("families")
    folders = [write_case(root / name, CASES[name]) for name in names]
    jobs = [("greedy", CASES[n].job(folder)) for n, folder in zip(names, folders, strict=True)]
    return dict(zip(names, zip(folders, run_jobs(1, jobs), strict=True), strict=True))


def test_no_architecture_is_without_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == set(supported_architectures())


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch, the oracle")
@pytest.mark.parametrize("name", CASES)
def test_equal_to_transformers(
    name: str, answers: dict[str, tuple[Path, list[RequestOutput]]]
) -> None:
    from tests.e2e import oracle
    from tests.e2e.test_parity_torch import check_against, check_prompt

    case, (folder, outputs) = CASES[name], answers[name]
    model = oracle.from_folder(folder)
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
def test_equal_to_the_stored_outputs(
    name: str, answers: dict[str, tuple[Path, list[RequestOutput]]]
) -> None:
    for output, wanted in zip(answers[name][1], stored(CASES[name])["outputs"], strict=True):
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

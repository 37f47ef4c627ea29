"""A model out of a GGUF file, or an Orbax checkpoint on several devices, gives the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpaged.convert import convert
from tests.e2e.mesh_worker import Job, run_jobs
from tests.gguf_writer import write_gguf
from tests.zoo.case import Case, all_cases, fill, stored, write_case

CASES = {case.name: case for case in all_cases()}


def job(case: Case, model: Path, *, size: int) -> Job:
    return "tokens", {**case.job(model, skip_tokenizer_init=True), "size": size}


def expected(case: Case) -> list[list[int]]:
    return [output["token_ids"] for output in stored(case)["outputs"]]


@pytest.mark.slow
def test_gguf_gives_the_tokens_of_safetensors(tmp_path: Path) -> None:
    names = ["qwen2", "gemma2", "phi3-window", "mixtral", "qwen3-moe", "deepseek-v3"]
    jobs = []
    for name in names:
        about = stored(CASES[name])
        path = write_gguf(tmp_path / f"{name}.gguf", about["config"], fill(about["tensors"]))
        jobs.append(job(CASES[name], path, size=1))
    for name, found in zip(names, run_jobs(1, jobs), strict=True):
        assert found == expected(CASES[name]), name


@pytest.mark.slow
def test_an_orbax_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    """Written from one process without devices, read by slices on one, two and four."""
    case = CASES["qwen3"]
    folder = write_case(tmp_path / "model", case)
    target = convert(str(folder), tmp_path / "orbax", progress=False)
    assert not list(target.glob("*.safetensors"))
    jobs = [job(case, target, size=size) for size in (1, 2, 4)]
    assert run_jobs(4, jobs) == [expected(case)] * 3

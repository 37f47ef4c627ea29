"""The same model out of a GGUF file, or an Orbax checkpoint on several devices, gives its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpaged import SamplingParams
from jaxpaged.convert import convert
from tests.e2e.mesh_worker import run_jobs
from tests.e2e.support import LONG, small_llm
from tests.gguf_writer import write_gguf
from tests.zoo.case import all_cases, fill, stored, write_case

CASES = {case.name: case for case in all_cases()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen2", "gemma2", "phi3-window", "mixtral", "qwen3-moe", "deepseek-v3"]
)
def test_gguf_gives_the_tokens_of_safetensors(name: str, tmp_path: Path) -> None:
    case, about = CASES[name], stored(CASES[name])
    path = write_gguf(tmp_path / "model.gguf", about["config"], fill(about["tensors"]))
    params = SamplingParams(temperature=0.0, max_tokens=case.count, ignore_eos=True)
    with small_llm(path, skip_tokenizer_init=True, **{**LONG, **case.engine}) as llm:
        outputs = llm.generate(case.prompt_ids(), params, use_tqdm=False)
    expected = [output["token_ids"] for output in about["outputs"]]
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.slow
def test_an_orbax_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    """Written from one process without devices, read by slices on one, two and four."""
    case = CASES["qwen3"]
    folder = write_case(tmp_path / "model", case)
    target = convert(str(folder), tmp_path / "orbax", progress=False)
    assert not list(target.glob("*.safetensors"))
    jobs = [
        (
            "tokens",
            {
                "folder": str(target),
                "size": size,
                "prompts": case.prompt_ids(),
                "count": case.count,
                "engine": {**LONG, **case.engine},
            },
        )
        for size in (1, 2, 4)
    ]
    expected = [output["token_ids"] for output in stored(case)["outputs"]]
    assert run_jobs(4, jobs) == [expected] * 3

"""The engine over the Pallas kernels, interpreted, gives the tokens it gives over the reference.

The tiny models compute in float32, where the two differ by no more than rounding. Engines run in
processes of their own (see mesh_worker.py), which compile with less effort.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.mesh_worker import Job, run_jobs
from tests.tiny_models import tiny_llama
from tests.zoo.case import all_cases, stored, write_case

KERNELS = {"attention_backend": "pallas_interpret"}
CASES = {case.name: case for case in all_cases()}
ARCHITECTURES = (
    "opt",  # one query head a KV head
    "qwen2-window-nowhere-five-heads",
    "gemma2",  # windows of 8 in some layers, soft cap
    "deepseek-v2-groups",  # a latent cache
)
"""All have a prompt that takes three chunks."""


@pytest.mark.slow
def test_architectures_give_the_stored_tokens(tmp_path: Path) -> None:
    jobs = []
    for name in ARCHITECTURES:
        arguments = CASES[name].job(write_case(tmp_path / name, CASES[name]), **KERNELS)
        jobs.append(("tokens", {**arguments, "size": 1}))
    for name, found in zip(ARCHITECTURES, run_jobs(1, jobs), strict=True):
        expected = [output["token_ids"] for output in stored(CASES[name])["outputs"]]
        assert found == expected, name


@pytest.mark.slow
def test_every_sampling_parameter_with_hits_and_preemptions(tmp_path: Path) -> None:
    """On four devices each has two of the eight query heads and a copy of one of the two KV
    heads.
    """
    folder = str(tiny_llama(tmp_path / "m", num_attention_heads=8, attention_bias=True))
    jobs = [
        ("everything", {"folder": folder, "size": 1}),
        ("everything", {"folder": folder, "size": 1, **KERNELS}),
        ("everything", {"folder": folder, "size": 4, **KERNELS}),
    ]
    one, *others = run_jobs(4, jobs)
    for found in others:
        assert found["preemptions"] > 0 and found["hits"] > 0
        assert found["compiles_after_warmup"] == 0
        assert found["tokens"] == one["tokens"]
        np.testing.assert_allclose(found["logprobs"], one["logprobs"], atol=1e-4)


# ---------------------------------------------------------------- heads, blocks, 8-bit caches

PROMPTS = [[(7 * i + n) % 500 + 5 for i in range(n)] for n in (1, 16, 17, 40, 100)]


def tokens_job(folder: Path, size: int = 1, **engine: Any) -> Job:
    arguments = {"folder": str(folder), "size": size, "prompts": PROMPTS, "count": 24}
    return "tokens", {**arguments, "engine": engine}


@pytest.mark.slow
def test_heads_that_are_no_power_of_two(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, head_dim=20)
    larger = {"block_size": 16, "num_gpu_blocks_override": 40}
    reference, kernels = run_jobs(1, [tokens_job(folder), tokens_job(folder, **larger, **KERNELS)])
    assert kernels == reference


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_8_bit_caches_on_a_mesh(tmp_path: Path, name: str) -> None:
    """Reference and kernels write the same bits, and scales are cut along with their heads."""
    llama = tiny_llama(tmp_path / "llama")
    latent = write_case(tmp_path / "latent", CASES["deepseek-v2-groups"])
    jobs = []
    for folder in (llama, latent):
        jobs.append(tokens_job(folder, kv_cache_dtype=name))
        jobs.append(tokens_job(folder, 2, kv_cache_dtype=name, **KERNELS))
    found = run_jobs(2, jobs)
    assert found[0] == found[1]
    assert found[2] == found[3]

"""A model cut over several devices gives the tokens it gives on one.

The devices are virtual CPU devices, in processes of their own (see mesh_worker.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.registry import find_model, supported_architectures
from tests.device.model_shapes import TINY
from tests.e2e.mesh_worker import ROOT, run_jobs
from tests.e2e.support import stored_reference
from tests.tiny_models import tiny_llama
from tests.zoo.case import Case, all_cases, stored, write_case

LAYERS, HIDDEN, VOCAB = 2, 64, 503


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Size -> what `mesh_worker.everything` found, for a Llama that nothing divides evenly: 8 query
    and 2 KV heads, an odd vocabulary, an MLP of 100, biases everywhere.
    """
    folder = tiny_llama(
        tmp_path_factory.mktemp("tp") / "llama",
        vocab_size=VOCAB,
        intermediate_size=100,
        num_attention_heads=8,
        attention_bias=True,
        mlp_bias=True,
    )
    sizes = (1, 2, 4, 8)
    jobs = [("everything", {"folder": str(folder), "size": size}) for size in sizes]
    return dict(zip(sizes, run_jobs(8, jobs), strict=True))


@pytest.mark.slow
def test_every_sampling_parameter_with_hits_and_preemptions(
    everywhere: dict[int, dict[str, Any]],
) -> None:
    one = everywhere[1]
    for size, found in everywhere.items():
        assert found["preemptions"] > 0 and found["hits"] > 0
        assert found["compiles_after_warmup"] == 0
        assert found["devices"] == list(range(size))
        assert found["tokens"] == one["tokens"], size
        np.testing.assert_allclose(found["logprobs"], one["logprobs"], atol=1e-4)
    drawn = {token for tokens in one["tokens"] for token in tokens}
    assert max(drawn) < VOCAB and len(drawn) > 50


@pytest.mark.slow
def test_a_layer_has_two_collectives_and_weights_stay_where_they_are(
    everywhere: dict[int, dict[str, Any]],
) -> None:
    """One sum more for the embedding; only logits are gathered, a few rows at a time."""
    assert everywhere[1]["collectives"] == [[], []]
    for size in (2, 4, 8):
        width = -(-VOCAB // size) * size
        for prompt_tokens, found in zip((0, 64), everywhere[size]["collectives"], strict=True):
            sums = [shape for name, shape in found if name == "all-reduce"]
            gathers = [shape for name, shape in found if name == "all-gather"]
            assert len(sums) + len(gathers) == len(found), found
            assert sums == [f"f32[{8 + prompt_tokens},{HIDDEN}]"] * (2 * LAYERS + 1)
            assert set(gathers) <= {f"f32[{rows},{width}]" for rows in (8, 32)}
            assert len(gathers) == (1 if prompt_tokens == 0 else 2)


# ---------------------------------------------------------------- every architecture


def size_for(case: Case) -> int:
    """More devices than one, as many as the heads allow of the four that a test starts."""
    config = find_model(stored(case)["config"], case.name)[1]
    return max(size for size in (1, 2, 3, 4) if config.splits_into(size))


@pytest.mark.slow
def test_every_architecture_on_several_devices(tmp_path: Path) -> None:
    cases = {case.architecture: case for case in reversed(all_cases()) if size_for(case) > 1}
    assert cases.keys() == set(supported_architectures())
    jobs = []
    for name, case in cases.items():
        arguments = case.job(write_case(tmp_path / name, case))
        jobs.append(("tokens", {**arguments, "size": size_for(case)}))
    found = dict(zip(cases, run_jobs(4, jobs), strict=True))
    for name, case in cases.items():
        expected = [output["token_ids"] for output in stored(case)["outputs"]]
        assert found[name] == expected, (name, size_for(case))


@pytest.mark.slow
def test_smollm2_on_three_devices(smollm2_path: Path) -> None:
    """9 query and 3 KV heads."""
    cases = stored_reference("smollm2")[:4]
    arguments = {
        "folder": str(smollm2_path),
        "size": 3,
        "prompts": [case["prompt_token_ids"] for case in cases],
        "count": 32,
        "engine": {},
    }
    (found,) = run_jobs(3, [("tokens", arguments)])
    assert found == [case["token_ids"][:32] for case in cases]


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"),
    [
        (8, 8, [1, 2, 4, 8]),
        (8, 4, [1, 2, 4, 8]),
        (8, 2, [1, 2, 4, 8]),
        (8, 1, [1, 2, 4, 8]),
        (6, 3, [1, 3, 6]),
        (6, 2, [1, 2, 6]),
        (5, 1, [1, 5]),
        (9, 3, [1, 3, 9]),
    ],
)
def test_sizes_that_work(heads: int, kv_heads: int, sizes: list[int]) -> None:
    model = dataclasses.replace(TINY, num_heads=heads, num_kv_heads=kv_heads)
    for size in range(1, 13):
        if size in sizes:
            cut = model.over(size)
            assert cut.kv_shape.heads % size == 0
            assert cut.group_size * cut.kv_shape.heads == heads
            continue
        with pytest.raises(ConfigError) as error:
            model.over(size)
        text = str(error.value)
        assert f"tensor_parallel_size={size}" in text
        assert f"sizes that work: {', '.join(map(str, sizes))}." in text


def test_what_is_padded() -> None:
    model: ModelConfig = dataclasses.replace(TINY, vocab_size=503).over(4)
    assert model.padded(model.vocab_size) == 504
    assert model.padded(100) == 100
    assert model.kv_repeat == 2


def test_more_devices_than_there_are(tmp_path: Path) -> None:
    from jaxpaged import LLM

    with pytest.raises(ConfigError) as error:
        LLM(str(tiny_llama(tmp_path / "m")), tensor_parallel_size=2, disable_progress=True)
    for part in ("tensor_parallel_size=2", "1 cpu devices", "device_count=2"):
        assert part in str(error.value)


# ---------------------------------------------------------------- several processes


def generate(folder: Path, *flags: str) -> subprocess.Popen[str]:
    settings = {
        "model": folder,
        "dtype": "float32",
        "max-model-len": 128,
        "block-size": 4,
        "num-gpu-blocks-override": 100,
        "max-num-seqs": 8,
        "max-num-batched-tokens": 64,
        "decode-buckets": 8,
        "prefill-buckets": 64,
        "temperature": 0,
        "max-tokens": 12,
    }
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    prompts = [f"--prompt={text}" for text in ("The quick brown fox", "There are many", "x")]
    return subprocess.Popen(
        [sys.executable, "scripts/generate.py", *arguments, *prompts, "--ignore-eos", *flags],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_give_the_same_tokens(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    together = ["--coordinator", address, "--num-processes", "2"]
    runs = [
        generate(folder),
        generate(folder, *together, "--process-id", "0"),
        generate(folder, *together, "--process-id", "1"),
    ]
    alone, first, second = (run.communicate(timeout=300) for run in runs)
    assert [run.returncode for run in runs] == [0, 0, 0], (alone[1], first[1], second[1])
    assert second[0] == "", "only process 0 writes results"
    assert "1 of 2 devices are here" in first[1]
    answers = [json.loads(line) for line in first[0].splitlines()]
    assert len(answers) == 3
    assert answers == [json.loads(line) for line in alone[0].splitlines()]


@pytest.mark.slow
def test_processes_with_different_prompts_are_refused(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    together = ["--coordinator", address, "--num-processes", "2", "--process-id"]
    runs = [
        generate(folder, *together, "0"),
        generate(folder, *together, "1", "--prompt", "only here"),
    ]
    for run in runs:
        out, err = run.communicate(timeout=300)
        assert (run.returncode, out) == (2, "")
        assert "different prompts or sampling parameters" in err


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"num_processes": 2}, ["num_processes=2", "coordinator"]),
        ({"process_id": 1}, ["process_id=1", "num_processes=1"]),
        ({"coordinator": "nowhere"}, ["coordinator", "'nowhere'", "HOST:PORT"]),
        ({"coordinator": "host:99999"}, ["coordinator", "HOST:PORT"]),
    ],
)
def test_process_settings_are_checked(settings: dict[str, Any], parts: list[str]) -> None:
    from jaxpaged import EngineConfig

    with pytest.raises(ConfigError) as error:
        EngineConfig(**settings)
    assert all(part in str(error.value) for part in parts), str(error.value)

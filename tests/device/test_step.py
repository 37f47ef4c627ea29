"""What the compiled step looks like: no copy of the pool, nothing traced twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpaged.device.runner import Runner
from jaxpaged.models.llama import LlamaLayer
from pallas_kernels.native import build
from tests.device.tiny_runner import BLOCK_SIZE, NUM_BLOCKS, parts_of, runner_of
from tests.tiny_models import tiny_llama

LAYERS = 3
STATE_LEAVES = 2 * LAYERS + 6
POOL = f"{NUM_BLOCKS * BLOCK_SIZE},2,16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(Path(tmp_path_factory.mktemp("model")), num_hidden_layers=LAYERS)


def lowered(runner: Runner, prompt_tokens: int) -> Any:
    return runner.programs.lower(str(runner.buckets.shape_for(1, prompt_tokens)))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def programs(folder: Path, request: pytest.FixtureRequest) -> tuple[str, list[Any]]:
    """The compiled decode and prefill programs of one type."""
    return request.param, compiled(folder, request.param, "reference")


def compiled(folder: Path, dtype: str, backend: str) -> list[Any]:
    runner = runner_of(parts_of(folder, dtype=dtype, attention_backend=backend))
    programs = [lowered(runner, tokens).compile() for tokens in (0, 64)]
    runner.close()
    return programs


def made_by(program: Any, dtype: str) -> list[str]:
    """The operations whose result is a pool, all of them in the type that it is stored in."""
    text = program.as_text()
    stored = "u16" if dtype == "bfloat16" else "f32"
    assert set(re.findall(rf"(\w+)\[{POOL}\]", text)) == {stored}, "a pool in another type"
    return re.findall(rf"= \w+\[{POOL}\]\S* ([\w-]+)\(", text)


def test_no_program_copies_or_converts_a_pool(programs: tuple[str, list[Any]]) -> None:
    dtype, compiled = programs
    for program in compiled:
        makers = made_by(program, dtype)
        assert "scatter" in makers, "the search finds what makes pools"
        assert not {"copy", "convert", "broadcast", "select", "transpose", "copy-start"} & set(
            makers
        )
        assert makers.count("scatter") == 2 * LAYERS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_kernels_write_into_the_pools_themselves(folder: Path, dtype: str) -> None:
    try:
        build.load()
    except build.NativeUnavailable as error:
        pytest.skip(str(error))
    for program in compiled(folder, dtype, "native"):
        makers = made_by(program, dtype)
        assert makers.count("get-tuple-element") >= 2 * LAYERS, "the search finds what makes pools"
        assert set(makers) <= {"parameter", "get-tuple-element"}


def test_the_state_is_updated_in_place(programs: tuple[str, list[Any]]) -> None:
    dtype, compiled = programs
    item = 2 if dtype == "bfloat16" else 4
    pool_bytes = NUM_BLOCKS * BLOCK_SIZE * 2 * 16 * item
    for program in compiled:
        header = program.as_text().splitlines()[0]
        assert "input_output_alias=" in header
        assert len(re.findall(r"(?:may|must)-alias", header)) == STATE_LEAVES
        assert program.memory_analysis().alias_size_in_bytes >= 2 * LAYERS * pool_bytes


def test_a_step_returns_three_arrays_beside_the_state(programs: tuple[str, list[Any]]) -> None:
    for program, prompt_tokens in zip(programs[1], (0, 64), strict=True):
        state, output = program.out_info
        assert len(jax.tree.leaves(state)) == STATE_LEAVES
        shapes = [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(output)]
        assert shapes == [((8, 14), "int32"), ((prompt_tokens, 14), "int32"), ((8, 2 * 2), "int32")]


def test_a_layer_is_traced_once_a_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = 0
    original = LlamaLayer.__call__

    def counting(self: LlamaLayer, *args: Any) -> Any:
        nonlocal traces
        traces += 1
        return original(self, *args)

    monkeypatch.setattr(LlamaLayer, "__call__", counting)
    runner = runner_of(parts_of(folder))
    text = lowered(runner, 0).as_text()
    assert traces == 1
    assert len(re.findall(r"func\.func private @run\w*\(", text)) == 1
    assert len(re.findall(r"call @run\w*\(", text)) == LAYERS
    lowered(runner, 64)
    assert traces == 2
    runner.close()


def test_the_suite_runs_under_strict_rules() -> None:
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert jax.config.jax_numpy_rank_promotion == "raise"

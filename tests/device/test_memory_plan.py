from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged import blueprint
from jaxpaged.config import EngineConfig
from jaxpaged.device.kv_cache import block_bytes, max_blocks
from jaxpaged.device.memory_plan import (
    GIB,
    MemoryInputs,
    MemoryPlan,
    device_memory,
    host_memory,
    plan_memory,
    round_blocks,
)
from jaxpaged.device.programs import step_temporaries
from jaxpaged.errors import ConfigError
from jaxpaged.models.config import ModelConfig
from tests.device.model_shapes import LLAMA_3_8B, TINY
from tests.device.tiny_runner import backend_of, parts_of
from tests.tiny_models import tiny_config

MIB = 2**20
BF16 = jnp.dtype(jnp.bfloat16)
BLOCK = 2 * MIB  # 16 tokens of an 8B model in bfloat16


def never() -> int:
    raise AssertionError("asked for the step's temporaries, which costs a compile")


GPU = MemoryInputs(
    weight_bytes=15 * GIB,
    step_bytes=lambda: 3 * GIB,
    slot_bytes=GIB,
    device_bytes=80 * GIB,
    host_bytes=500 * GIB,
    max_tokens_in_step=8192,
)
CPU = MemoryInputs(
    weight_bytes=GIB,
    step_bytes=never,
    slot_bytes=MIB,
    device_bytes=None,
    host_bytes=8 * GIB,
    max_tokens_in_step=1024,
)


def plan(
    inputs: MemoryInputs,
    model: ModelConfig = LLAMA_3_8B,
    seqs: int = 256,
    cache_dtype: jnp.dtype = BF16,
    **settings: Any,
) -> MemoryPlan:
    return plan_memory(EngineConfig(**settings), model, cache_dtype, seqs, inputs)


# ---------------------------------------------------------------- accelerators


@pytest.mark.parametrize("utilization", [0.5, 0.92, 1.0])
@pytest.mark.parametrize("margin", [None, 0, 5 * GIB])
def test_what_is_left_of_a_gpu(utilization: float, margin: int | None) -> None:
    plan_ = plan(GPU, gpu_memory_utilization=utilization, device_memory_margin=margin)
    kept = int(0.02 * 80 * GIB) if margin is None else margin
    budget = int(80 * GIB * utilization) - (15 + 3 + 1) * GIB - kept
    assert plan_.num_blocks == round_blocks(budget // BLOCK)
    assert plan_.max_model_len == 8192
    assert plan_.num_blocks * BLOCK <= budget


def test_the_margin_is_at_least_256_mib() -> None:
    small = dataclasses.replace(
        GPU, device_bytes=8 * GIB, weight_bytes=GIB, slot_bytes=0, step_bytes=lambda: 0
    )
    blocks = plan(small, gpu_memory_utilization=1.0).num_blocks
    assert blocks == round_blocks((7 * GIB - 256 * MIB) // BLOCK)


def test_a_host_gives_no_more_than_all_sequences_at_full_length() -> None:
    """2 sequences of 1,024 tokens need 64 blocks each, and the null block."""
    assert plan(CPU, seqs=2, max_model_len=1024).num_blocks == 2 * 64 + 1
    assert plan(CPU, seqs=2, max_model_len=1025).num_blocks == 2 * 65 + 1


def test_a_gpu_gives_everything_since_cached_prefixes_use_it() -> None:
    few, many = plan(GPU, seqs=8, max_model_len=1024), plan(GPU, seqs=256)
    assert few.num_blocks == many.num_blocks > 20_000


def test_every_term_is_shown() -> None:
    text = "\n".join(plan(GPU).lines)
    for part in (
        *("80.00 GiB", "0.92 -> 73.60 GiB", "15.00 GiB", "3.00 GiB", "1.00 GiB", "1.60 GiB"),
        "53.00 GiB",
        "131072 B (bfloat16)",
    ):
        assert part in text, (part, text)
    blocks = plan(GPU).num_blocks
    assert f"GPU KV cache size: {(blocks - 1) * 16:,} tokens" in text
    assert f"for 8,192 tokens per request: {(blocks - 1) / 512:.2f}x" in text


def test_concurrency_counts_whole_blocks() -> None:
    lines = plan(GPU, num_gpu_blocks_override=1537, max_model_len=8192).lines
    assert lines[-1].endswith("Maximum concurrency for 8,192 tokens per request: 3.00x")
    lines = plan(GPU, num_gpu_blocks_override=1537, max_model_len=8191).lines
    assert lines[-1].endswith("Maximum concurrency for 8,191 tokens per request: 3.00x")


def test_nothing_left() -> None:
    full = dataclasses.replace(GPU, weight_bytes=75 * GIB)
    with pytest.raises(ConfigError) as error:
        plan(full)
    for part in ("2.0 MiB", "75.00 GiB", "gpu_memory_utilization", "kv_cache_memory_bytes"):
        assert part in str(error.value)


def test_a_null_block_alone_is_nothing() -> None:
    with pytest.raises(ConfigError, match="room for 1"):
        plan(CPU, kv_cache_memory_bytes=BLOCK + 1)
    assert plan(CPU, kv_cache_memory_bytes=2 * BLOCK).max_model_len == 16


# ---------------------------------------------------------------- CPU


def test_a_quarter_of_the_machine() -> None:
    assert plan(CPU).num_blocks == round_blocks(2 * GIB // BLOCK)


def test_at_most_4_gib() -> None:
    large = dataclasses.replace(CPU, host_bytes=100 * GIB)
    assert plan(large).num_blocks == round_blocks(4 * GIB // BLOCK)


def test_a_tiny_model_gets_what_it_can_use() -> None:
    assert plan(CPU, TINY, seqs=32).num_blocks == 32 * 16 + 1


# ---------------------------------------------------------------- explicit sizes


@pytest.mark.parametrize("inputs", [CPU, dataclasses.replace(GPU, step_bytes=never)])
def test_explicit_sizes_are_exact_and_compile_nothing(inputs: MemoryInputs) -> None:
    assert plan(inputs, num_gpu_blocks_override=1013).num_blocks == 1013
    assert plan(inputs, kv_cache_memory_bytes=1013 * BLOCK).num_blocks == 1013
    assert plan(inputs, kv_cache_memory_bytes=1014 * BLOCK - 1).num_blocks == 1013
    both = plan(inputs, num_gpu_blocks_override=600, kv_cache_memory_bytes=1013 * BLOCK)
    assert both.num_blocks == 600


@pytest.mark.parametrize("dtype", [BF16, jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn)])
def test_offsets_within_a_pool_stay_below_2_to_the_31(dtype: jnp.dtype) -> None:
    """Elements count, not bytes: code for 8-bit pools of 2 to 4 GiB has 32-bit offsets as well."""
    huge = dataclasses.replace(GPU, device_bytes=4000 * GIB)
    limit = max_blocks(LLAMA_3_8B, 16)
    assert limit * 16 * 8 * 128 < 2**31 <= (limit + 1) * 16 * 8 * 128
    plan_ = plan(huge, cache_dtype=dtype, kv_cache_memory_bytes="2000GiB")
    assert plan_.num_blocks == limit
    assert any("32-bit" in line for line in plan_.lines)
    with pytest.raises(ConfigError, match=f"num_gpu_blocks_override=300000 is more than {limit}"):
        plan(huge, cache_dtype=dtype, num_gpu_blocks_override=300_000)
    assert plan(huge, seqs=100_000, cache_dtype=dtype).num_blocks <= limit


def test_blocks_too_large_for_32_bits_are_what_has_to_shrink() -> None:
    with pytest.raises(ConfigError, match=r"with block_size=2097152: .* Lower block_size\."):
        plan(GPU, block_size=2**21, num_gpu_blocks_override=2)
    with pytest.raises(
        ConfigError, match=r"more than 1023, .* with block_size=2048: .* Lower it\."
    ):
        plan(GPU, block_size=2**11, num_gpu_blocks_override=1024)


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
def test_an_8_bit_cache_holds_nearly_twice_the_tokens(name: str) -> None:
    wide = plan(GPU, kv_cache_memory_bytes="20GiB")
    narrow = plan(GPU, cache_dtype=jnp.dtype(name), kv_cache_memory_bytes="20GiB")
    assert wide.num_blocks == 20 * GIB // BLOCK
    assert narrow.num_blocks == 20 * GIB // (BLOCK // 2 + 16 * 2 * 32 * 8 * 4)
    assert 1.93 < narrow.num_blocks / wide.num_blocks < 1.94
    assert any(f"67584 B ({name} and float32 scales)" in line for line in narrow.lines)


# ---------------------------------------------------------------- context length


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, 8192), ("auto", 8192), (-1, 8192), (5000, 5000), ("4k", 4000)]
)
def test_length_when_there_is_room(asked: Any, expected: int) -> None:
    assert plan(CPU, max_model_len=asked).max_model_len == expected


@pytest.mark.parametrize("asked", [None, "auto"])
def test_length_shrinks_to_what_fits_unless_asked_for(asked: Any) -> None:
    plan_ = plan(CPU, max_model_len=asked, num_gpu_blocks_override=101)
    assert plan_.max_model_len == 100 * 16
    assert "1,600 tokens per request: 1.00x" in plan_.lines[-1]


def test_a_length_that_does_not_fit() -> None:
    with pytest.raises(ConfigError) as error:
        plan(CPU, max_model_len=1601, num_gpu_blocks_override=101)
    for part in ("max_model_len=1601", "101 KV blocks", "202.0 MiB", "100 are usable", "is 1600"):
        assert part in str(error.value), str(error.value)
    assert plan(CPU, max_model_len=1600, num_gpu_blocks_override=101).max_model_len == 1600


def test_a_length_beyond_the_model() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=8193 .* 8192 positions"):
        plan(CPU, max_model_len=8193)


# ---------------------------------------------------------------- rounding


@given(blocks=st.integers(0, 10**7))
def test_rounding_keeps_63_of_64(blocks: int) -> None:
    rounded = round_blocks(blocks)
    assert rounded <= blocks
    assert 64 * (blocks - rounded) < max(blocks, 64)
    assert round_blocks(rounded) == rounded
    assert len(bin(rounded).rstrip("0")) - 2 <= 7, "seven leading bits, then zeros"


@given(blocks=st.integers(1, 10**7), more=st.integers(0, 10**4))
def test_rounding_never_inverts(blocks: int, more: int) -> None:
    assert round_blocks(blocks) <= round_blocks(blocks + more)


def test_similar_budgets_meet_the_same_shape() -> None:
    assert {round_blocks(blocks) for blocks in range(10_112, 10_240)} == {10_112}


# ---------------------------------------------------------------- this machine, and XLA's numbers


class FakeDevice:
    """What `device_memory` asks of a device."""

    def __init__(self, platform: str, stats: dict[str, int] | None) -> None:
        self.platform = platform
        self.memory_stats = lambda: stats


def test_this_machine() -> None:
    assert 2**28 < host_memory() < 2**50
    assert device_memory(jax.devices("cpu")[0], 0.92, 0.75) is None


@pytest.mark.parametrize(
    ("utilization", "fraction", "expected"),
    [
        (0.5, 0.75, 80 * GIB),  # the allocator's limit is 60 GiB of 80
        (0.75, 0.75, 80 * GIB),
        (1.0, 0.75, 60 * GIB),  # more than the allocator may take is not there
    ],
)
def test_a_device_is_as_large_as_its_allocator_says(
    utilization: float, fraction: float, expected: int
) -> None:
    device = FakeDevice("gpu", {"bytes_limit": 60 * GIB})
    assert device_memory(device, utilization, fraction) == expected  # type: ignore[arg-type]
    assert utilization * expected <= 60 * GIB
    assert device_memory(FakeDevice("gpu", None), 0.9, 0.75) is None  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one small layer and a vocabulary of 64,000."""
    folder = tmp_path_factory.mktemp("wide")
    config = tiny_config(vocab_size=64_000, num_hidden_layers=1, hidden_size=16)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_temporaries_hold_the_logits_of_all_rows_but_not_of_all_prompt_tokens(
    wide_folder: Path,
) -> None:
    seqs, tokens = 64, 4096
    parts = parts_of(
        wide_folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
    )
    backend = backend_of(parts)
    found = step_temporaries(parts.loaded, backend, parts.buckets, parts.settings, seqs, 128)
    row = 64_000 * 4
    assert found >= seqs * row
    assert found < tokens * row / 4, "prompt logits are computed in slices"


def test_start_up_plans_with_the_length_that_was_asked_for(
    wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampling state of a long-context model must not be reserved for a short context."""
    monkeypatch.setattr(blueprint, "device_memory", lambda *args: 2 * GIB)
    monkeypatch.setattr(blueprint, "claim_device_memory", lambda utilization: 0.75)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(blueprint, "step_temporaries", lambda *args: seen.append(args[4:]) or 0)
    parts = parts_of(wide_folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=100)
    made = (parts.loaded, backend_of(parts), parts.buckets, parts.settings)
    inputs = blueprint._memory_inputs(parts.config, *made, 8, 64, 0.92)
    lines = blueprint._plan(parts.config, parts.loaded, 8, inputs).lines
    assert seen == [(8, 100)]
    state = blueprint.slot_state_bytes(8, 100)
    assert any("sampling state" in line and f"{state / MIB:.1f} MiB" in line for line in lines)


def test_block_bytes_follow_the_type() -> None:
    assert block_bytes(LLAMA_3_8B, 16, BF16) == BLOCK


@pytest.mark.parametrize("inputs", [CPU, GPU], ids=["cpu", "gpu"])
def test_exact_sizes_beyond_the_machine_are_refused(inputs: MemoryInputs) -> None:
    for settings in ({"kv_cache_memory_bytes": "100GiB"}, {"num_gpu_blocks_override": 60_000}):
        with pytest.raises(ConfigError, match=r"exceed the memory of .* Lower kv_cache_memory"):
            plan(inputs, **settings)

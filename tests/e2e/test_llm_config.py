"""Engine settings that cannot work are refused before anything is compiled; the odd ones work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxpaged import LLM
from jaxpaged.errors import ConfigError, InvalidRequestError
from tests.e2e.engine_support import (
    GREEDY,
    SETTINGS,
    assert_idle,
    greedy_tokens,
    model_folder,
)

BASE = SETTINGS | {"enforce_eager": True}


def make(**settings: Any) -> LLM:
    return LLM(str(model_folder()), **(BASE | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocksize": 4}, "'blocksize'.*'block_size'"),
        ({"max_num_seq": 4}, "'max_num_seq'.*'max_num_seqs'"),
        ({"zzz": 4}, "'zzz'"),
        ({"block_size": 0}, "block_size.*>= 1.*0"),
        ({"dtype": "int8"}, "dtype.*float32.*'int8'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype.*auto, int8, fp8.*'fp8_e5m2'"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype.*auto, int8, fp8.*'bfloat16'"),
        ({"attention_backend": "cuda"}, "attention_backend.*reference, native, .*'cuda'"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy.*fcfs.*'lifo'"),
        # Combinations that each name both sides.
        (
            {"max_num_batched_tokens": 4, "prefill_buckets": None},
            "max_num_batched_tokens=4.*max_num_seqs=8",
        ),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens=64.*max_model_len=128"),
        (
            {
                "enable_chunked_prefill": False,
                "max_model_len": 64,
                "long_prefill_token_threshold": 8,
            },
            "long_prefill_token_threshold=8.*enable_chunked_prefill",
        ),
        ({"long_prefill_token_threshold": 129}, "long_prefill_token_threshold=129.*128"),
        ({"decode_buckets": (8, 16)}, r"decode_buckets=\(8, 16\).*max_num_seqs \(8"),
        ({"prefill_buckets": (32,)}, r"prefill_buckets=\(32,\).*max_num_batched_tokens \(64"),
        ({"max_model_len": 257}, "max_model_len=257.*256 positions"),
        # What is the largest that fits is told.
        (
            {"num_gpu_blocks_override": 32},
            "max_model_len=128 needs 32 KV blocks.*31 are usable.*max_model_len that fits is 124",
        ),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 16 * 4 * 512},
            "max_model_len=128.*15 are usable.*fits is 60.*kv_cache_memory_bytes",
        ),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 3000},
            "No memory for KV blocks.*kv_cache_memory_bytes",
        ),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "pallas_triton"}, "'pallas_triton'.*needs a CUDA device.*'auto'"),
        ({"attention_backend": "pallas_mosaic"}, "'pallas_mosaic'.*needs a CUDA device.*'auto'"),
        ({"attention_backend": "pallas_interpret", "block_size": 3}, "block_size 3.*powers of two"),
    ],
)
def test_a_backend_that_cannot_serve_is_refused_before_the_weights_are_read(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("jaxpaged.device.model_loader.load_parameters", load_model)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make(**settings)


def test_the_backend_and_the_reason_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxpaged")
    make(attention_backend="reference").close()
    lines = [r.getMessage() for r in caplog.records if "ttention" in r.getMessage()]
    assert lines == ["Attention backend: reference (asked for)."]


def test_the_largest_length_that_was_told_works() -> None:
    """The usable blocks are what counts: the null block is not for sale."""
    make(num_gpu_blocks_override=32, max_model_len=124).close()
    make(num_gpu_blocks_override=33).close()


@pytest.fixture
def quick_programs() -> Iterator[None]:
    """Programs of odd shapes are run a few times only, so they need not be optimised."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize("asked", [None, "auto"])
def test_a_length_that_was_lowered_is_the_limit_of_requests(
    asked: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """SC-06: 7 usable blocks of 4 tokens hold 28, though the model could do 256."""
    with make(max_model_len=asked, num_gpu_blocks_override=8) as llm:
        assert llm.engine.scheduler.config.max_model_len == 28
        assert ("lowered from the model's 256 to 28" in caplog.text) == (asked is None)
        with pytest.raises(InvalidRequestError, match="28 tokens.*100 input"):
            llm.generate([[11] * 100], GREEDY, use_tqdm=False)
        assert_idle(llm.engine)
        # One token is a decode row, so that only one program is compiled.
        (output,) = llm.generate(
            [[11]], dataclasses.replace(GREEDY, max_tokens=None), use_tqdm=False
        )
        assert output.outputs[0].token_ids == greedy_tokens((11,), 27)
        assert output.outputs[0].finish_reason == "length"
        assert_idle(llm.engine)


SLOW = pytest.mark.slow


@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize(
    "block_size",
    [1, 64, *(pytest.param(size, marks=SLOW) for size in (2, 3, 8, 16, 17, 32))],
)
def test_block_sizes(block_size: int) -> None:
    """SC-18: all of them work, with context that crosses blocks and prefixes that are shared."""
    prompt = [(3 * i) % 400 + 10 for i in range(70)]
    blocks = 2 * -(-96 // block_size) + 2
    with make(block_size=block_size, max_model_len=96, num_gpu_blocks_override=blocks) as llm:
        for _ in range(2):
            (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == greedy_tokens(tuple(prompt))
            assert_idle(llm.engine)
        assert output.num_cached_tokens == 69

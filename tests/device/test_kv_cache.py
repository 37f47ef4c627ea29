from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.device.kv_cache import block_bytes, make_pools, max_blocks, storage_dtype
from jaxpaged.models.config import ModelConfig
from jaxpaged.sharding import make_mesh
from tests.device.model_shapes import LLAMA_3_8B, OPT_13B, QWEN3_0_6B, TINY


@pytest.mark.parametrize(
    ("model", "expected"), [(LLAMA_3_8B, 131_072), (QWEN3_0_6B, 114_688), (OPT_13B, 819_200)]
)
def test_bytes_per_token_of_known_models(model: ModelConfig, expected: int) -> None:
    for dtype in (jnp.bfloat16, jnp.float16):
        assert block_bytes(model, 1, jnp.dtype(dtype)) == expected
        assert block_bytes(model, 16, jnp.dtype(dtype)) == 16 * expected
    assert block_bytes(model, 1, jnp.dtype(jnp.float32)) == 2 * expected


def test_16384_tokens_of_a_7b_model_take_8_gib() -> None:
    model = dataclasses.replace(LLAMA_3_8B, num_kv_heads=32)
    assert block_bytes(model, 16, jnp.dtype(jnp.float16)) * (16_384 // 16) == 8 * 2**30


@pytest.mark.parametrize(
    ("dtype", "platform", "expected"),
    [
        ("float32", "cpu", "float32"),
        ("bfloat16", "cpu", "uint16"),
        ("float16", "cpu", "uint16"),
        ("float32", "gpu", "float32"),
        ("bfloat16", "gpu", "bfloat16"),
        ("float16", "gpu", "float16"),
    ],
)
def test_storage_dtype(dtype: str, platform: str, expected: str) -> None:
    assert storage_dtype(jnp.dtype(dtype), platform) == jnp.dtype(expected)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("model", [LLAMA_3_8B, OPT_13B, TINY], ids=["8b", "13b", "tiny"])
def test_every_offset_in_a_pool_fits_32_bits(model: ModelConfig, block_size: int) -> None:
    per_block = block_size * model.num_kv_heads * model.head_dim
    limit = max_blocks(model, block_size)
    assert limit * per_block <= 2**31 - 1 < (limit + 1) * per_block


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pools_are_zero_and_as_large_as_promised(dtype: str) -> None:
    pools = make_pools(TINY, 7, 3, jnp.dtype(dtype), make_mesh())
    assert len(pools) == TINY.num_layers
    leaves = jax.tree.leaves(pools)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == 2 * TINY.num_layers
    for leaf in leaves:
        assert leaf.shape == (21, TINY.num_kv_heads, TINY.head_dim)
        assert leaf.dtype == storage_dtype(jnp.dtype(dtype), "cpu")
        assert not np.asarray(leaf).any()
    assert sum(leaf.nbytes for leaf in leaves) == 7 * block_bytes(TINY, 3, jnp.dtype(dtype))

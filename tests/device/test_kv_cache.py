from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpaged.config import KV_CACHE_DTYPES
from jaxpaged.device.kv_cache import (
    CACHE_DTYPES,
    block_bytes,
    cache_dtype,
    make_pools,
    max_blocks,
    pool_specs,
    storage_dtype,
)
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.registry import find_model
from jaxpaged.sharding import make_mesh
from tests.device.model_shapes import LLAMA_3_8B, OPT_13B, QWEN3_0_6B, TINY
from tests.zoo.case import all_cases, stored

_DEEPSEEK = next(case for case in all_cases() if case.architecture == "DeepseekV2ForCausalLM")
LATENT = dataclasses.replace(
    find_model(stored(_DEEPSEEK)["config"], "deepseek")[1], kv_lora_rank=512, head_dim=64
)


@pytest.mark.parametrize(
    ("model", "expected"), [(LLAMA_3_8B, 131_072), (QWEN3_0_6B, 114_688), (OPT_13B, 819_200)]
)
def test_bytes_per_token_of_known_models(model: ModelConfig, expected: int) -> None:
    for dtype in (jnp.bfloat16, jnp.float16):
        assert block_bytes(model, 1, jnp.dtype(dtype)) == expected
        assert block_bytes(model, 16, jnp.dtype(dtype)) == 16 * expected
    assert block_bytes(model, 1, jnp.dtype(jnp.float32)) == 2 * expected


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_8_bits_take_half_of_16_and_4_bytes_for_each_head_and_token(name: str) -> None:
    dtype = cache_dtype(name, jnp.dtype(jnp.bfloat16))
    scales = 2 * 32 * 8 * 4  # K and V, layers, heads
    assert block_bytes(LLAMA_3_8B, 1, dtype) == 131_072 // 2 + scales
    assert block_bytes(LLAMA_3_8B, 16, dtype) == 16 * (131_072 // 2 + scales)
    assert block_bytes(LLAMA_3_8B.over(4), 16, dtype) == 4 * (131_072 // 2 + scales)
    # One latent head serves K and V, and every device has all of it.
    layers = LATENT.num_layers
    assert block_bytes(LATENT, 1, jnp.dtype(jnp.bfloat16)) == layers * (512 + 64) * 2
    assert block_bytes(LATENT, 1, dtype) == layers * (512 + 64 + 4)
    assert block_bytes(LATENT.over(4), 1, dtype) == layers * (512 + 64 + 4)


def test_the_type_of_the_cache() -> None:
    for dtype in (np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.float16)):
        assert cache_dtype("auto", dtype) == dtype
        assert cache_dtype("int8", dtype) == np.int8
        assert cache_dtype("fp8_e4m3", dtype) == jnp.float8_e4m3fn
    assert {"auto", "fp8", *CACHE_DTYPES} == set(KV_CACHE_DTYPES)


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
        ("int8", "cpu", "int8"),
        ("float8_e4m3fn", "cpu", "uint8"),
        ("int8", "gpu", "int8"),
        ("float8_e4m3fn", "gpu", "float8_e4m3fn"),
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


def test_a_latent_pool_is_not_cut_so_its_limit_stays() -> None:
    assert max_blocks(LATENT, 16) == max_blocks(LATENT.over(4), 16) == (2**31 - 1) // (16 * 576)
    assert max_blocks(LLAMA_3_8B.over(4), 16) == (2**31 - 1) // (16 * 2 * 128)


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


@pytest.mark.parametrize("name", CACHE_DTYPES)
@pytest.mark.parametrize("model", [TINY, LATENT], ids=["tiny", "latent"])
def test_8_bit_pools_have_scales(model: ModelConfig, name: str) -> None:
    dtype = cache_dtype(name, jnp.dtype(jnp.float32))
    model = dataclasses.replace(model, num_layers=2)
    pools = make_pools(model, 7, 3, dtype, make_mesh())
    shape = model.kv_shape
    for kv in pools:
        assert kv.quantized and (kv.v is None) == (kv.v_scale is None) == shape.latent
        assert kv.k.shape == (21, shape.heads, shape.key_dim)
        assert kv.k.dtype == storage_dtype(dtype, "cpu")
        for scale in jax.tree.leaves((kv.k_scale, kv.v_scale)):
            assert scale.shape == (21, shape.heads) and scale.dtype == np.float32
    leaves = jax.tree.leaves(pools)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    assert not any(np.asarray(leaf).any() for leaf in leaves)
    assert sum(leaf.nbytes for leaf in leaves) == 7 * block_bytes(model, 3, dtype)
    specs = pool_specs(model, dtype)
    assert jax.tree.structure(specs, is_leaf=is_spec) == jax.tree.structure(pools[0])
    cut = jax.tree.leaves(specs, is_leaf=is_spec)
    for spec, leaf in zip(cut, jax.tree.leaves(pools[0]), strict=True):
        assert len(spec) == leaf.ndim and spec[1] == (None if shape.latent else "tensor")


def is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)

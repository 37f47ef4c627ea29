"""Which configuration a kernel is compiled with: from a table by device and shape, else computed.

The package's own table holds what was measured or, where nothing was measured yet, what compiles
without spilling; `scripts/bench_kernels.py --tune` writes another one for the device at hand. A
call that no entry is for gets a conservative configuration from its sizes alone.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

from pallas_kernels.kernel_configs import (
    MAX_SPLITS,
    MIN_TILE,
    DecodeConfig,
    KernelConfig,
    PrefillConfig,
    WriteConfig,
    heads_per_program,
)
from pallas_kernels.tuning_table import Entry, Query, TuningTable, load_table, write_table

__all__ = [
    "DecodeConfig",
    "Entry",
    "KernelConfig",
    "PrefillConfig",
    "Query",
    "TuningTable",
    "WriteConfig",
    "builtin_table",
    "decode_config",
    "decode_splits",
    "load_table",
    "prefill_config",
    "write_config",
    "write_table",
]

TABLE_PATH = Path(__file__).with_name("tuning_table.json")
MULTIPROCESSORS = 132
"""Of an H100 SXM or H200. On a smaller device the rule splits a little further than it must."""
_SHARED_MEMORY = 96 * 1024
"""Bytes that the tiles in flight may take by default: every GPU since compute capability 8.6
has them."""
_SAME_CHIP = re.compile(r"\bG?H(20|100|200|800)\b")
"""Devices with the H200's multiprocessors, and so with its limits. They differ in number and in
bandwidth."""
_CHIP_ENTRIES = "NVIDIA H200"
_CTA_SHARED_MEMORY = 227 * 1024
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}


@functools.cache
def builtin_table() -> TuningTable:
    """The table that comes with the package."""
    return load_table(TABLE_PATH)


def decode_config(
    device_kind: str,
    *,
    head_dim: int,
    value_dim: int,
    group: int,
    kv_heads: int,
    block_size: int,
    q_dtype: str,
    kv_dtype: str,
    batch: int,
    context: int,
    table: TuningTable | None = None,
    backend: str = "pallas_triton",
) -> DecodeConfig:
    """For `batch` decode rows (of the program, padding included) of at most `context` tokens.

    `value_dim` is less than `head_dim` in a latent cache. `group` and `kv_heads` are those of one
    device; dtypes by name. `table`, if given, is searched before the package's own.
    """
    query = Query(
        backend=backend,
        kernel="decode",
        device=device_kind,
        head_dim=head_dim,
        kv_dtype=_table_dtype(kv_dtype),
        value_dim=value_dim,
        kv_heads=kv_heads,
        block_size=block_size,
        group=group,
        batch=batch,
        context=context,
    )
    entry = _find(query, q_dtype, table)
    if entry is not None and not entry.splits_from_rule:
        assert isinstance(entry.config, DecodeConfig)
        return entry.config
    config = _default_decode(_as_computed(query, q_dtype)) if entry is None else entry.config
    assert isinstance(config, DecodeConfig)
    ctas = None if entry is None else entry.ctas_per_sm
    splits = decode_splits(
        programs=batch * kv_heads * _head_blocks(query, config),
        context=context,
        ctas_per_sm=ctas or _likely_ctas(query, config),
        min_split_tokens=config.min_split_tokens,
    )
    return dataclasses.replace(config, splits=splits)


def prefill_config(
    device_kind: str,
    *,
    head_dim: int,
    value_dim: int,
    group: int,
    kv_heads: int,
    block_size: int,
    q_dtype: str,
    kv_dtype: str,
    tokens: int,
    context: int,
    table: TuningTable | None = None,
    backend: str = "pallas_triton",
) -> PrefillConfig:
    """For a step with `tokens` prompt tokens; the rest as for `decode_config`."""
    query = Query(
        backend=backend,
        kernel="prefill",
        device=device_kind,
        head_dim=head_dim,
        kv_dtype=_table_dtype(kv_dtype),
        value_dim=value_dim,
        kv_heads=kv_heads,
        block_size=block_size,
        group=group,
        batch=tokens,
        context=context,
    )
    entry = _find(query, q_dtype, table)
    if entry is None:
        return _default_prefill(_as_computed(query, q_dtype))
    assert isinstance(entry.config, PrefillConfig)
    return entry.config


def write_config(
    device_kind: str,
    *,
    head_dim: int,
    value_dim: int,
    kv_heads: int,
    block_size: int,
    kv_dtype: str,
    tokens: int,
    table: TuningTable | None = None,
    backend: str = "pallas_triton",
) -> WriteConfig:
    """For `tokens` new tokens in a cache of `kv_dtype`; the rest as for `decode_config`."""
    query = Query(
        backend=backend,
        kernel="write",
        device=device_kind,
        head_dim=head_dim,
        kv_dtype=_table_dtype(kv_dtype),
        value_dim=value_dim,
        kv_heads=kv_heads,
        block_size=block_size,
        group=1,
        batch=tokens,
        context=1,
    )
    entry = _find(query, "bfloat16", table)
    if entry is None:
        return WriteConfig()
    assert isinstance(entry.config, WriteConfig)
    return entry.config


def decode_splits(
    *, programs: int, context: int, ctas_per_sm: int, min_split_tokens: int = 256
) -> int:
    """The smallest power of two, up to 32, that makes of so many `programs` (rows x KV heads x
    blocks of query heads) as many as the multiprocessors can hold, as long as each keeps
    `min_split_tokens` tokens of a context of that length.
    """
    splits = 1
    while (
        splits < MAX_SPLITS
        and programs * splits < MULTIPROCESSORS * ctas_per_sm
        and context >= 2 * splits * min_split_tokens
    ):
        splits *= 2
    return splits


# ---------------------------------------------------------------------------- internals


def _table_dtype(name: str) -> str:
    return "bfloat16" if name == "float16" else name


def _find(query: Query, q_dtype: str, table: TuningTable | None) -> Entry | None:
    # Entries are for queries of 16 bits, except those of float32 caches: float32 dots run on other
    # instructions and need other registers.
    if q_dtype == "float32" and query.kv_dtype != "float32":
        return None
    asked = [query]
    if _SAME_CHIP.search(query.device):
        asked.append(dataclasses.replace(query, device=_CHIP_ENTRIES))
    for one in (table, builtin_table()):
        for question in asked:
            entry = None if one is None else one.find(question)
            if entry is not None:
                return entry
    return None


def _as_computed(query: Query, q_dtype: str) -> Query:
    """Float32 queries make float32 tiles of an 8-bit cache, which then take the registers and the
    shared memory of those of a float32 cache.
    """
    return dataclasses.replace(query, kv_dtype="float32") if q_dtype == "float32" else query


def _token_bytes(query: Query) -> int:
    """Of K and V of one token and head as a tile holds them; a latent cache has only K."""
    dim = _padded(query.head_dim)
    if query.value_dim == query.head_dim:
        dim *= 2
    return dim * _DTYPE_BYTES.get(query.kv_dtype, 4)


def _padded(dim: int) -> int:
    """Tiles are cut into powers of two from 16 on."""
    return -(-dim // MIN_TILE) * MIN_TILE


def _head_blocks(query: Query, config: DecodeConfig) -> int:
    """Programs of the Triton kernel that share a KV head: many query heads are more than one
    takes.
    """
    if query.backend != "pallas_triton":
        return 1
    heads = heads_per_program(
        query.group,
        query.value_dim,
        config.num_warps,
        cache_8_bit=_DTYPE_BYTES[query.kv_dtype] == 1,
    )
    return -(-query.group // heads)


def _default_decode(query: Query) -> DecodeConfig:
    if query.backend == "pallas_mosaic":  # tiles of 64 or 128 tokens; its ring fits itself
        return DecodeConfig(block_kv=64)
    element = _DTYPE_BYTES.get(query.kv_dtype, 4)
    if element == 4:  # every product is three of TF32, which takes registers and shared memory
        warps = 8 if 128 < query.head_dim <= 256 else 4
        block = 32 if query.head_dim <= 64 else 16
        stages = 2 if query.head_dim <= 256 else 1
        config = DecodeConfig(block_kv=block, num_warps=warps, num_stages=stages)
    elif query.head_dim <= 128:
        config = DecodeConfig(block_kv=64)
    else:
        latent_8_bit = query.head_dim > 256 and element == 1
        config = DecodeConfig(block_kv=16 if latent_8_bit else 32)
    in_flight = max(1, config.num_stages - 1) * _token_bytes(query)
    return dataclasses.replace(config, block_kv=_fitting(config.block_kv, in_flight, 0))


def _default_prefill(query: Query) -> PrefillConfig:
    if query.backend == "pallas_mosaic":  # two warpgroups that compute, or one if heads are wide
        return PrefillConfig(block_rows=128 if query.head_dim <= 128 else 64, num_stages=2)
    element = _DTYPE_BYTES.get(query.kv_dtype, 4)
    # Registers are what is scarce: the accumulator has rows x value_dim float32 elements.
    if element == 4:
        rows = 64 if query.head_dim <= 64 else 16
        block, warps, stages = 32 if query.head_dim <= 128 else 16, 8, 2
    elif query.head_dim > 256:
        rows, block, warps, stages = 32 if element == 2 else 16, 64, 8, 2
    elif query.head_dim > 128:
        rows, block, warps, stages = 64, 64, 8, 2
    else:
        rows, block, warps, stages = 64, 64, 4, 3
    # Hopper's wgmma, which starts at 64 rows, reads a tile while the next ones are on their way.
    in_flight = (stages if rows >= 64 else stages - 1) * _token_bytes(query)
    queries = rows * _padded(query.head_dim) * max(2, element)
    block = _fitting(block, in_flight, queries)
    return PrefillConfig(block_rows=rows, block_kv=block, num_warps=warps, num_stages=stages)


def _fitting(block: int, bytes_per_token: int, other_bytes: int) -> int:
    """The largest tile, `block` at most, that fits the shared memory of small devices."""
    while block > MIN_TILE and other_bytes + block * bytes_per_token > _SHARED_MEMORY:
        block //= 2
    return block


def _likely_ctas(query: Query, config: DecodeConfig) -> int:
    """Programs of a kernel that nobody compiled yet on one multiprocessor."""
    if query.backend == "pallas_mosaic":
        return 1  # its warpgroups take all registers
    tiles = max(1, config.num_stages - 1) * config.block_kv * _token_bytes(query)
    return max(1, min(4, _CTA_SHARED_MEMORY // tiles))

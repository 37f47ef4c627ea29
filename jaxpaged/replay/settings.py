"""The settings that a recording is replayed with, and in what they differ from its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.record.format import Record
from jaxpaged.record.reader import RecordingError

DECIDING = (
    *("skip_tokenizer_init", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes"),
    *("enable_prefix_caching", "enable_chunked_prefill", "long_prefill_token_threshold"),
    *("scheduling_policy", "watermark", "async_scheduling"),
)
"""Engine settings from which other steps may follow."""
FIXED = frozenset({"record", "chat_template", "coordinator", "num_processes", "process_id"})
"""Those that a replay has no use for, or that it cannot have."""


def replay_config(header: Record, given: Mapping[str, Any], where: str) -> EngineConfig:
    """The recorded settings with the given ones in their place.

    Raises `RecordingError` for recorded ones that this build does not have, `ConfigError` for
    given ones that cannot be.
    """
    recorded = dict(header["settings"])
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(recorded) - known)
    if unknown:
        raise RecordingError(
            f"{where}: the engine was recorded with the setting {unknown[0]!r}, which this build "
            f"does not have. Replay it with jaxpaged {header['versions'].get('jaxpaged')}."
        )
    # The last bucket is the limit itself.
    for limit, buckets in (
        ("max_num_seqs", "decode_buckets"),
        ("max_num_batched_tokens", "prefill_buckets"),
    ):
        if limit in given and given[limit] != recorded.get(limit):
            recorded[buckets] = None
    if "num_gpu_blocks_override" not in given and "kv_cache_memory_bytes" in given:
        recorded["num_gpu_blocks_override"] = None
    try:
        EngineConfig.from_dict(recorded)
    except ConfigError as error:
        raise RecordingError(f"{where}: a recorded setting is of no use: {error}") from error
    return EngineConfig.from_dict(recorded | dict(given))


def deciding_changes(header: Record, config: EngineConfig) -> list[str]:
    """What differs from the recording so that other decisions may follow, as "name=new (old)"."""
    recorded = EngineConfig.from_dict(header["settings"])
    return [
        f"{name}={getattr(config, name)!r} (recorded {getattr(recorded, name)!r})"
        for name in DECIDING
        if getattr(config, name) != getattr(recorded, name)
    ]

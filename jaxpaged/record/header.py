"""The first line of a recording: all settings that the engine came to, and what it ran on."""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import version
from pathlib import Path

import jax

from jaxpaged import __version__
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.record.fingerprint import fingerprint
from jaxpaged.record.format import FORMAT, Record
from jaxpaged.weights.source import ModelSource

NOT_RECORDED = frozenset(
    {
        *("record", "compile_cache_dir", "compiled", "disable_progress", "check_integrity"),
        *("chat_template", "coordinator", "num_processes", "process_id"),
    }
)
"""Engine settings that change neither decisions nor tokens, or belong to one machine."""


def header(config: EngineConfig, source: ModelSource, engine: Engine) -> Record:
    """Describes an engine that has just been built from these."""
    settings = dataclasses.asdict(config)
    for name in NOT_RECORDED:
        del settings[name]
    scheduler, runner = engine.scheduler.config, engine.runner
    resolved = {
        "max_model_len": scheduler.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "num_gpu_blocks_override": scheduler.num_blocks,
        "decode_buckets": list(runner.buckets.decode),
        "prefill_buckets": list(runner.buckets.prefill),
        "dtype": runner.dtype_name,
        "tensor_parallel_size": runner.num_devices,
    }
    for name in ("model", "tokenizer", "kernel_tuning_table"):
        given = settings[name]
        if given is not None and Path(given).expanduser().exists():  # another folder may be ours
            settings[name] = str(Path(given).expanduser().absolute())
    return {
        "kind": "header",
        "format": FORMAT,
        "versions": versions(),
        "device": device(),
        "settings": settings | resolved,
        "runs_with": {
            "attention_backend": runner.attention_backend,
            "attention_variant": runner.attention_variant,
            "kv_cache_dtype": runner.cache_dtype_name,
            "eos_token_ids": list(engine.intake.limits.eos_token_ids),
        },
        "model": fingerprint(source, engine.intake.tokenizer, config.seed),
    }


def versions() -> Record:
    """Of what may change a result."""
    return {"jaxpaged": __version__, "jax": jax.__version__, "jaxlib": version("jaxlib")}


def device() -> Record:
    """What this process computes on."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": len(jax.devices()),
        "processor": _processor(),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "model name"), "")

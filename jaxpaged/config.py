"""Engine settings: frozen, validated once; every default with its unit. Unknown keys raise."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
ATTENTION_BACKENDS = ("auto", "reference")
SCHEDULING_POLICIES = ("fcfs", "priority")
MAX_SEED = 2**64 - 1

_SUFFIX = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def parse_size(name: str, value: int | str) -> int:
    """An integer, or a string such as 8k (8,000), 8K (8,192) or 2GiB. Raises `ConfigError`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([kKmMgG]?)(i?B)?\s*", str(value))
    if match is None:
        raise ConfigError(f"{name} must be an integer such as 4096, 8k or 2GiB, got {value!r}.")
    number, suffix, unit = match.groups()
    scale = _SUFFIX[suffix.upper() if unit == "iB" else suffix] if suffix else 1
    return int(float(number) * scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """All settings of one engine. Names follow vLLM's; see `docs/configuration.md`.

    Raises `ConfigError` (a `ValueError`) for unknown, out-of-range or contradictory settings.
    A value of None means: decided from the device and the model when the engine starts.
    """

    model: str = "smollm2-135m-instruct"
    """A folder, a .gguf file, a hub id, or the alias of the embedded model."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; None takes the model's own."""
    skip_tokenizer_init: bool = False
    """Work on token ids only."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is the hub's default."""
    load_format: str = "auto"
    """auto, safetensors, gguf, or dummy (random weights, only the model's config is read)."""
    dtype: str = "auto"
    """Type of weights, activations and KV cache: auto, float32, bfloat16 or float16."""
    seed: int = 0
    """Seeds dummy weights and the seeds of requests that bring none."""
    max_model_len: int | str | None = None
    """Tokens, prompt plus output; None is the model's own, "auto" the largest that fits."""
    max_num_seqs: int | None = None
    """Sequences running at once; None is 32 on CPU, 256 on GPU."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step; None is 1,024 on CPU, 8,192 on GPU."""
    block_size: int = 16
    """Tokens in one KV block."""
    gpu_memory_utilization: float = 0.92
    """Share of device memory the engine may use, on accelerators."""
    device_memory_margin: int | str | None = None
    """Bytes kept free for libraries; None is 2 %, at least 256 MiB, on accelerators."""
    kv_cache_memory_bytes: int | str | None = None
    """Exact size of the KV pool in bytes; wins over utilization."""
    num_gpu_blocks_override: int | None = None
    """Exact number of KV blocks, the null block included; wins over everything."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prompts that begin alike."""
    enable_chunked_prefill: bool = True
    """Let a prompt be computed over several steps, next to decoding requests."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens one request may compute in a step; 0 is no limit."""
    scheduling_policy: str = "fcfs"
    """fcfs (first come, first served) or priority (smaller numbers first)."""
    watermark: float = 0.01
    """Share of the blocks that admissions leave free while anything runs; [0, 1)."""
    max_logprobs: int = 20
    """Most logprobs a request may ask for; -1 is the whole vocabulary."""
    attention_backend: str = "auto"
    """auto or reference."""
    enforce_eager: bool = False
    """Skip warm-up; programs are compiled at first use."""
    async_scheduling: bool = True
    """Launch a step before the tokens of the one before reach the host."""
    generation_config: str = "auto"
    """"auto" takes sampling defaults from the model, "none" ignores them."""
    chat_template: str | None = None
    """Path of a Jinja file, or the template itself; None takes the model's own."""
    compile_cache_dir: str | None = None
    """Persistent compilation cache; None is $JAXPAGED_CACHE_DIR or ~/.cache/jaxpaged, "" is off."""
    decode_buckets: tuple[int, ...] | None = None
    """Row counts of decode programs, ascending; the last must be max_num_seqs rounded up to 8."""
    prefill_buckets: tuple[int, ...] | None = None
    """Prompt-token counts of prefill programs, ascending; the last must be the token budget."""
    check_integrity: bool = False
    """Prove the block pool's invariants after every step (slow; also JAXPAGED_CHECK=1)."""
    disable_progress: bool = False
    """No progress bars."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # normalising a frozen dataclass, once, here only
        for name, choices in (
            ("dtype", DTYPES),
            ("load_format", LOAD_FORMATS),
            ("attention_backend", ATTENTION_BACKENDS),
            ("scheduling_policy", SCHEDULING_POLICIES),
            ("generation_config", ("auto", "none", "vllm")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}."
                )
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a path, hub id or alias, got {self.model!r}.")
        if self.max_model_len is not None:
            length = self.max_model_len
            if str(length) in ("auto", "-1"):
                set_(self, "max_model_len", "auto")
            else:
                set_(self, "max_model_len", parse_size("max_model_len", length))
                self._at_least("max_model_len", 2)
        for name in ("kv_cache_memory_bytes", "device_memory_margin"):
            if getattr(self, name) is not None:
                set_(self, name, parse_size(name, getattr(self, name)))
        self._at_least("kv_cache_memory_bytes", 1)
        self._at_least("device_memory_margin", 0)
        self._at_least("max_num_seqs", 1)
        self._at_least("max_num_batched_tokens", 1)
        self._at_least("block_size", 1)
        self._at_least("num_gpu_blocks_override", 2)
        self._at_least("long_prefill_token_threshold", 0)
        self._at_least("max_logprobs", -1)
        self._at_least("seed", 0)
        if self.seed > MAX_SEED:
            raise ConfigError(f"seed must be below 2**64, got {self.seed}.")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}."
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark}.")
        for name in ("decode_buckets", "prefill_buckets"):
            buckets = getattr(self, name)
            if buckets is None:
                continue
            buckets = tuple(buckets)
            set_(self, name, buckets)
            if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
                raise ConfigError(f"{name} must be ascending positive numbers, got {buckets!r}.")

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{name} must be an integer >= {low}, got {value!r}.")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Build from a mapping. An unknown name raises `ConfigError` and shows the nearest one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"Unknown engine setting {name!r}.{hint}")
        return cls(**settings)


def cache_root() -> Path:
    """Folder for compiled programs and fetched data: $JAXPAGED_CACHE_DIR or ~/.cache/jaxpaged."""
    given = os.environ.get("JAXPAGED_CACHE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "jaxpaged"


def claim_device_memory(utilization: float) -> float:
    """Let XLA's allocator take this share of an accelerator, and return the share in force.

    $XLA_PYTHON_CLIENT_MEM_FRACTION is only set if the user has not set it, and only counts if
    JAX has not opened the device yet; the memory plan asks the device what it got.
    """
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    return float(os.environ.setdefault(name, str(utilization)))


def integrity_checks_forced() -> bool:
    """True when JAXPAGED_CHECK=1 asks every engine to prove its invariants after each step."""
    return os.environ.get("JAXPAGED_CHECK", "") not in ("", "0")

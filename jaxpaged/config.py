"""Engine settings: frozen, validated once; every default with its unit. Unknown keys raise."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged import checks
from jaxpaged.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "int8", "fp8", "fp8_e4m3")
LOAD_FORMATS = ("auto", "safetensors", "orbax", "gguf", "dummy")
ATTENTION_BACKENDS = (
    *("auto", "reference", "native"),
    *("pallas_triton", "pallas_mosaic", "pallas_interpret"),
)
SCHEDULING_POLICIES = ("fcfs", "priority")
MAX_SEED = 2**64 - 1
MAX_BUCKETS = 1024
CLIENT_KEYS = ("JAXPAGED_API_KEY", "OPENAI_API_KEY")
"""Where our own clients find their key."""
_PREFIX = "JAXPAGED_"
_KEY_NAME = re.compile(r"^[A-Za-z0-9_.-]{1,64}:(?=.)")
"""What may stand before a key."""
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


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
    """auto, safetensors, orbax, gguf, or dummy (random weights; only a config is read)."""
    dtype: str = "auto"
    """Type of weights and activations: auto, float32, bfloat16 or float16."""
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
    kv_cache_dtype: str = "auto"
    """Type of the KV cache: auto (that of the activations), int8 or fp8 (fp8_e4m3)."""
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
    """auto, reference, native, pallas_triton, pallas_mosaic or pallas_interpret (for tests)."""
    kernel_tuning_table: str | None = None
    """JSON file with sizes of GPU kernels that go before the package's own."""
    deterministic: bool | None = None
    """Same bits in any company; None is on where it is free (CPU). Costs speed on GPUs."""
    tensor_parallel_size: int | None = None
    """Devices to cut the model over; None is 1, or all devices of several processes."""
    coordinator: str | None = None
    """HOST:PORT where process 0 of several waits for the others."""
    num_processes: int = 1
    """Processes that run the model together, each started with the same settings."""
    process_id: int = 0
    """Which of them this is, from 0."""
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
    compiled: str | None = None
    """Folder that `jaxpaged compile` wrote: load programs instead of compiling. It can run code."""
    decode_buckets: tuple[int, ...] | None = None
    """Row counts of decode programs, ascending; the last must be max_num_seqs rounded up to 8."""
    prefill_buckets: tuple[int, ...] | None = None
    """Prompt-token counts of prefill programs, ascending; the last must be the token budget."""
    record: str | None = None
    """File to append all requests, decisions and tokens to, for `jaxpaged replay`."""
    check_integrity: bool = False
    """Prove the block pool's invariants after every step (slow; also JAXPAGED_CHECK=1)."""
    disable_progress: bool = False
    """No progress bars."""

    def __post_init__(self) -> None:
        checks.normalise(self, _CHECKS, _error)
        if self.process_id >= self.num_processes:
            raise ConfigError(
                f"process_id={self.process_id} must be below num_processes={self.num_processes}."
            )
        if self.num_processes > 1 and self.coordinator is None:
            raise ConfigError(
                f"num_processes={self.num_processes} needs coordinator, the HOST:PORT at which "
                "process 0 can be reached."
            )
        if self.compiled is not None and self.enforce_eager:
            raise ConfigError(
                f"compiled={self.compiled!r} has no use with enforce_eager=True, which compiles "
                "each program when it is first needed; leave one of them out."
            )
        if self.num_processes > 1 and self.record is not None:
            raise ConfigError(
                f"record={self.record!r} cannot be used with num_processes={self.num_processes}: "
                "only an engine of one process can be recorded."
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Build from a mapping. An unknown name raises `ConfigError` and shows the nearest one."""
        checks.check_names(settings, cls, "settings", "engine setting", _error)
        return cls(**settings)


def _error(message: str, _name: str) -> ConfigError:
    return ConfigError(message)


def _dtype(value: Any) -> str:
    known = _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value
    return str(checks.choice(*DTYPES)(known))


def _kv_cache_dtype(value: Any) -> str:
    name = checks.choice(*KV_CACHE_DTYPES)(value)
    return "fp8_e4m3" if name == "fp8" else str(name)


def _model_len(value: Any) -> int | str:
    if isinstance(value, str) and value == "auto":
        return "auto"
    length = checks.parse_size(value)
    if length == -1:
        return "auto"
    if length < 2:
        raise checks.Broken("an integer >= 2, auto")
    return length


def _address(value: Any) -> str:
    text: str = checks.text("HOST:PORT, such as 10.0.0.1:1234")(value)
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise checks.Broken("HOST:PORT, such as 10.0.0.1:1234")
    return text


def _buckets(value: Any) -> tuple[int, ...]:
    rule = "ascending integers >= 1, such as (8, 16)"
    found = checks.list_of(checks.integer(1), rule, MAX_BUCKETS, "buckets")(value)
    if not found or found != sorted(set(found)):
        raise checks.Broken(rule)
    return tuple(found)


_CHECKS: dict[str, checks.Check] = {
    "model": checks.text("a path, hub id or alias"),
    "tokenizer": checks.optional(checks.text("a path or hub id")),
    "skip_tokenizer_init": checks.boolean,
    "revision": checks.optional(checks.text("the name of a branch, tag or commit")),
    "load_format": checks.choice(*LOAD_FORMATS),
    "dtype": _dtype,
    "seed": checks.integer(0, MAX_SEED, rule="an integer in [0, 2**64)"),
    "max_model_len": checks.optional(_model_len),
    "max_num_seqs": checks.optional(checks.integer(1)),
    "max_num_batched_tokens": checks.optional(checks.integer(1)),
    "block_size": checks.integer(1),
    "kv_cache_dtype": _kv_cache_dtype,
    "gpu_memory_utilization": checks.number("a number in (0, 1]", lambda x: 0 < x <= 1),
    "device_memory_margin": checks.optional(checks.size(0)),
    "kv_cache_memory_bytes": checks.optional(checks.size(1)),
    "num_gpu_blocks_override": checks.optional(checks.integer(2)),
    "enable_prefix_caching": checks.boolean,
    "enable_chunked_prefill": checks.boolean,
    "long_prefill_token_threshold": checks.integer(0),
    "scheduling_policy": checks.choice(*SCHEDULING_POLICIES),
    "watermark": checks.number("a number in [0, 1)", lambda x: 0 <= x < 1),
    "max_logprobs": checks.integer(-1),
    "attention_backend": checks.choice(*ATTENTION_BACKENDS),
    "kernel_tuning_table": checks.optional(checks.text("the path of a JSON file")),
    "deterministic": checks.optional(checks.boolean),
    "tensor_parallel_size": checks.optional(checks.integer(1)),
    "coordinator": checks.optional(_address),
    "num_processes": checks.integer(1),
    "process_id": checks.integer(0),
    "enforce_eager": checks.boolean,
    "async_scheduling": checks.boolean,
    "generation_config": checks.choice("auto", "none", "vllm"),
    "chat_template": checks.optional(checks.text("the path or the text of a Jinja template")),
    "compile_cache_dir": checks.optional(checks.text("a path, or an empty text", empty=True)),
    "compiled": checks.optional(checks.text("the path of a folder")),
    "decode_buckets": checks.optional(_buckets),
    "prefill_buckets": checks.optional(_buckets),
    "record": checks.optional(checks.text("the path of a file")),
    "check_integrity": checks.boolean,
    "disable_progress": checks.boolean,
}


def cache_root() -> Path:
    """Folder for compiled programs and fetched data: $JAXPAGED_CACHE_DIR or ~/.cache/jaxpaged."""
    given = os.environ.get("JAXPAGED_CACHE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "jaxpaged"


def cxx() -> str | None:
    """The C++ compiler that $CXX names, which native kernels are compiled with."""
    return os.environ.get("CXX") or None


def compiler_environment() -> dict[str, str]:
    """The variables that tell XLA how to compile."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_CPU_MAX_ISA")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def server_environment() -> dict[str, str]:
    """What $JAXPAGED_<NAME> sets for `jaxpaged serve`: <NAME> -> text. Empty ones count as unset.

    $VLLM_API_KEY, one key, stands in for $JAXPAGED_API_KEY: a server that was to have a key must
    not come up without one because its start command was taken over.
    """
    # Settings of the library, read above and below, and by the native kernels.
    ours = {"JAXPAGED_CACHE_DIR", "JAXPAGED_CHECK", "JAXPAGED_NATIVE_ISA"}
    found = {
        name.removeprefix(_PREFIX): text
        for name, text in os.environ.items()
        if name.startswith(_PREFIX) and name not in ours and text
    }
    other = os.environ.get("VLLM_API_KEY")
    if other and "API_KEY" not in found:
        found["API_KEY"] = json.dumps([f"vllm:{other}"])
    return found


def client_api_key() -> str | None:
    """The key that our own clients send: the first of $JAXPAGED_API_KEY, else $OPENAI_API_KEY.

    The former may be written as for the server: several, and each with a name.
    """
    ours, theirs = (os.environ.get(name) for name in CLIENT_KEYS)
    if not ours:
        return theirs or None
    try:
        first = str(json.loads(ours)[0]) if ours.startswith("[") else ours.split(",")[0].strip()
    except (ValueError, LookupError):
        raise ConfigError("$JAXPAGED_API_KEY begins with [ but is no JSON list of keys.") from None
    return _KEY_NAME.sub("", first, count=1)


def claim_device_memory(utilization: float) -> float:
    """Let XLA's allocator take this share of an accelerator, and return the share in force.

    $XLA_CLIENT_MEM_FRACTION, or the older $XLA_PYTHON_CLIENT_MEM_FRACTION, wins where the user has
    set one; else the older one, which every supported JAX reads, is set. That only counts if JAX
    has not opened the device yet; the memory plan asks the device what it got. Raises
    `ConfigError` if the user's value is no share.
    """
    older = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    # Our setting one while the user has set the other is an error of XLA's.
    for name in ("XLA_CLIENT_MEM_FRACTION", older):
        given = os.environ.get(name, "")
        if given:  # XLA takes an empty one as not set, too
            return _share(name, given)
    os.environ[older] = str(utilization)
    return utilization


def _share(name: str, given: str) -> float:
    try:
        share = float(given)
    except ValueError:
        share = math.nan
    # More than 1 is possible: with unified memory it reaches into the host's.
    if not 0 < share < math.inf:
        raise ConfigError(f"${name} must be a number > 0, such as 0.9, or unset, got {given!r}.")
    return share


def integrity_checks_forced() -> bool:
    """True when JAXPAGED_CHECK=1 asks every engine to prove its invariants after each step."""
    return os.environ.get("JAXPAGED_CHECK", "") not in ("", "0")

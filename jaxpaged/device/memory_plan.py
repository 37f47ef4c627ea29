"""How many KV blocks there is memory for, with the arithmetic shown."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpaged.config import EngineConfig
from jaxpaged.core.kv_groups import blocks_for_sequence
from jaxpaged.device.kv_cache import KVLayout, block_bytes, max_blocks
from jaxpaged.errors import ConfigError
from jaxpaged.models.config import ModelConfig
from pallas_kernels.paged_kv import is_8_bit

GIB = 2**30
CPU_SHARE = 0.25
"""Share of the machine's memory for KV on CPU, where nobody else reserves any."""
CPU_LIMIT = 4 * GIB
MIN_MARGIN = 256 * 2**20
MARGIN_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The outcome: blocks (null block included), the context length they allow, and the lines that
    explain it.
    """

    num_blocks: int
    max_model_len: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """What the plan depends on, all in bytes. `device_bytes` is None on CPU."""

    weight_bytes: int
    step_bytes: Callable[[], int]
    """Temporaries of the largest program; asked only where it matters, since it costs a compile."""
    slot_bytes: int
    """Per-sequence sampling state."""
    device_bytes: int | None
    host_bytes: int
    max_tokens_in_step: int
    """Windows keep the blocks of a whole step on top of their own."""
    host_devices: int = 1
    """Devices of a mesh on CPU: they share the host's memory."""


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_memory(device: jax.Device, utilization: float, fraction: float) -> int | None:
    """The device's memory in bytes, or None where JAX does not say (CPU).

    Known is the limit of XLA's allocator, which takes `fraction` of the device. The result is
    capped so that `utilization` of it stays within that limit.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    return None if not stats else int(stats["bytes_limit"] / max(fraction, utilization))


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    cache_dtype: jnp.dtype,
    max_num_seqs: int,
    inputs: MemoryInputs,
) -> MemoryPlan:
    """Decide num_blocks and max_model_len, for a KV cache of this type.

    Raises `ConfigError` when nothing is left for KV, or when a max_model_len that was asked for
    does not fit; the message names the largest that would.
    """
    per_block = block_bytes(model, config.block_size, cache_dtype)
    windows = KVLayout.of(model).windows
    wanted_len = wanted_length(config, model)

    def blocks_for(length: int) -> int:
        """Blocks that one sequence of this many tokens needs."""
        return blocks_for_sequence(
            length,
            block_size=config.block_size,
            windows=windows,
            max_tokens_in_step=inputs.max_tokens_in_step,
            max_model_len=length,
        )

    rows: list[tuple[str, str]] = [("weights", _gib(inputs.weight_bytes))]
    if model.tensor_parallel > 1:
        rows.insert(0, ("", f"on each of {model.tensor_parallel} devices:"))
    if config.num_gpu_blocks_override is not None:
        blocks = config.num_gpu_blocks_override
        rows.append(("KV blocks", f"{blocks} (num_gpu_blocks_override)"))
    else:
        budget, why = _kv_budget(config, inputs)
        rows += why
        blocks = budget // per_block
        if config.kv_cache_memory_bytes is None:
            blocks = round_blocks(blocks)
            if inputs.device_bytes is None:  # no more of the host's memory than can ever be used
                full = max_num_seqs * blocks_for(wanted_len) + 1
                if full < blocks:
                    rows.append(("", f"of which {max_num_seqs} full sequences use {full} blocks"))
                    blocks = full
    limit = max_blocks(model, config.block_size)
    if blocks > limit:
        why_not = "offsets within a layer's pool are 32-bit"
        if config.num_gpu_blocks_override is not None:
            raise ConfigError(
                f"num_gpu_blocks_override={blocks} is more than {limit}, the most for this model "
                f"with block_size={config.block_size}: {why_not}. Lower "
                f"{'it' if limit > 1 else 'block_size'}."
            )
        rows.append(("KV blocks", f"capped at {limit}: {why_not}"))
        blocks = limit
    usable = blocks - 1
    if usable < 1:
        raise ConfigError(
            f"No memory for KV blocks: one block takes {_gib(per_block)}, and after weights "
            f"({_gib(inputs.weight_bytes)}) there is room for {max(blocks, 0)}. Raise "
            "gpu_memory_utilization or kv_cache_memory_bytes, or take a smaller model."
        )
    _check_size(blocks * per_block, inputs)
    length = _fit_length(config, wanted_len, usable, per_block, blocks_for)
    per_token = per_block * len(windows) // config.block_size
    concurrency = usable / blocks_for(length)
    told_type = jnp.dtype(cache_dtype).name
    if is_8_bit(cache_dtype):
        told_type += " and float32 scales"
    of_windows = ""
    if any(windows):
        sizes = ", ".join("all" if w is None else f"{w:,}" for w in windows)
        of_windows = f"; groups of layers that keep so many tokens: {sizes}"
    rows += [
        ("KV per token", f"{per_token} B ({told_type}){of_windows}"),
        ("KV blocks", f"{blocks} of {config.block_size} tokens, {_gib(blocks * per_block)}"),
    ]
    tokens = usable * config.block_size // len(windows)
    lines = [f"  {name:<22} {value}" for name, value in rows]
    lines.append(
        f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for "
        f"{length:,} tokens per request: {concurrency:.2f}x"
    )
    return MemoryPlan(blocks, length, tuple(lines))


def _check_size(pool: int, inputs: MemoryInputs) -> None:
    """Sizes that were asked for exactly are not planned, but they cannot exceed the machine."""
    total = inputs.host_bytes if inputs.device_bytes is None else inputs.device_bytes
    devices = 1 if inputs.device_bytes is not None else inputs.host_devices
    if (pool + inputs.weight_bytes) * devices > total:
        raise ConfigError(
            f"The KV pool of {_gib(pool)} and the weights ({_gib(inputs.weight_bytes)}) exceed the "
            f"memory of {_gib(total)}. Lower kv_cache_memory_bytes or num_gpu_blocks_override."
        )


def round_blocks(blocks: int) -> int:
    """Down to a multiple of 1/64 of its leading power of two, so that a restart with a slightly
    different budget meets the same pool shape and finds its programs in the compilation cache.
    """
    if blocks < 64:
        return blocks
    step = max(1, 1 << (blocks.bit_length() - 1 - 6))
    return blocks // step * step


def wanted_length(config: EngineConfig, model: ModelConfig) -> int:
    """The context length asked for, or the model's own. Raises `ConfigError` beyond that."""
    asked = config.max_model_len
    if asked is None or asked == "auto":
        return model.max_position
    assert isinstance(asked, int)
    if asked > model.max_position:
        raise ConfigError(
            f"max_model_len={asked} is beyond the model's {model.max_position} positions; lower it."
        )
    return asked


def _kv_budget(config: EngineConfig, inputs: MemoryInputs) -> tuple[int, list[tuple[str, str]]]:
    if config.kv_cache_memory_bytes is not None:
        budget = int(config.kv_cache_memory_bytes)
        return budget, [("KV budget", f"{_gib(budget)} (kv_cache_memory_bytes)")]
    if inputs.device_bytes is None:
        budget = min(int(CPU_SHARE * inputs.host_bytes), CPU_LIMIT) // inputs.host_devices
        why = f"min({CPU_SHARE:.0%} of {_gib(inputs.host_bytes)}, {_gib(CPU_LIMIT)})"
        if inputs.host_devices > 1:
            why += f" / {inputs.host_devices} devices"
        return budget, [("KV budget", f"{_gib(budget)} = {why}")]
    total = inputs.device_bytes
    allowed = int(total * config.gpu_memory_utilization)
    margin = config.device_memory_margin
    margin = max(MIN_MARGIN, int(MARGIN_SHARE * total)) if margin is None else int(margin)
    step = inputs.step_bytes()
    budget = allowed - inputs.weight_bytes - inputs.slot_bytes - step - margin
    rows = [
        ("device", _gib(total)),
        ("utilization", f"{config.gpu_memory_utilization:.2f} -> {_gib(allowed)}"),
        ("largest step", _gib(step)),
        ("sampling state", _gib(inputs.slot_bytes)),
        ("margin", _gib(margin)),
        ("KV budget", _gib(budget)),
    ]
    return budget, rows


def _fit_length(
    config: EngineConfig,
    wanted: int,
    usable: int,
    per_block: int,
    blocks_for: Callable[[int], int],
) -> int:
    if blocks_for(wanted) <= usable:
        return wanted
    # The largest that fits, by bisection: the need grows with the length.
    largest = bisect_right(range(1, wanted + 1), usable, key=blocks_for)
    if largest == 0:
        raise ConfigError(
            f"{usable} KV blocks are usable and the shortest sequence needs {blocks_for(1)}; raise "
            "gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks_override."
        )
    if isinstance(config.max_model_len, int):
        needed = blocks_for(wanted)
        raise ConfigError(
            f"max_model_len={wanted} needs {needed} KV blocks ({_gib(needed * per_block)}), and "
            f"{usable} are usable ({_gib(usable * per_block)}). The largest max_model_len that "
            f"fits is {largest}; lower it, or raise gpu_memory_utilization, kv_cache_memory_bytes "
            "or num_gpu_blocks_override."
        )
    return largest


def _gib(size: int) -> str:
    if abs(size) < GIB:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / GIB:.2f} GiB"

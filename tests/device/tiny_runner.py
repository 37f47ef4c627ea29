"""A runner over a tiny model without an engine, and hand-made steps for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.core.plan import ScheduledRow
from jaxpaged.core.request import Request
from jaxpaged.device.attention import AttentionSizes, PagedAttention
from jaxpaged.device.attention_choice import choose_backend
from jaxpaged.device.buckets import Buckets, choose_buckets
from jaxpaged.device.kv_cache import KVLayout
from jaxpaged.device.model_loader import LoadedModel, load_model
from jaxpaged.device.packing import RowRequest
from jaxpaged.device.runner import Runner, StepResult
from jaxpaged.device.sampling_state import pack_slot, row_fields
from jaxpaged.device.step import StepSettings
from jaxpaged.models.registry import supported_architectures
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.weights.source import resolve_source

BLOCK_SIZE = 4
NUM_BLOCKS = 97  # an odd size, so that shapes of the pool stand out in a program
MAX_LEN = 120
NUM_SEQS = 8


@dataclass(frozen=True)
class Parts:
    """What a runner is made of."""

    config: EngineConfig
    loaded: LoadedModel
    buckets: Buckets
    settings: StepSettings


def parts_of(folder: Path, **overrides: Any) -> Parts:
    config = EngineConfig(
        **{
            "model": str(folder),
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_num_seqs": NUM_SEQS,
            "max_num_batched_tokens": 64,
            "disable_progress": True,
            **overrides,
        }
    )
    source = resolve_source(config, supported_architectures=supported_architectures())
    loaded = load_model(config, source)
    assert config.max_num_seqs is not None and config.max_num_batched_tokens is not None
    buckets = choose_buckets(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.decode_buckets,
        config.prefill_buckets,
    )
    vocab = loaded.config.vocab_size
    settings = StepSettings(config.block_size, 5, vocab, vocab, KVLayout.of(loaded.config))
    return Parts(config, loaded, buckets, settings)


def backend_of(parts: Parts) -> PagedAttention:
    loaded, config = parts.loaded, parts.config
    sizes = AttentionSizes.of(
        loaded.config,
        block_size=config.block_size,
        dtype=loaded.dtype,
        cache_dtype=loaded.cache_dtype,
    )
    return choose_backend(config.attention_backend, sizes, loaded.mesh.local_devices[0])[0]


def runner_of(
    parts: Parts, *, num_blocks: int = NUM_BLOCKS, backend: PagedAttention | None = None
) -> Runner:
    assert parts.config.max_num_seqs is not None
    backend = backend or backend_of(parts)
    return Runner(
        parts.config,
        parts.loaded,
        backend,
        parts.buckets,
        num_blocks=num_blocks,
        max_model_len=MAX_LEN,
        max_num_seqs=parts.config.max_num_seqs,
        settings=parts.settings,
    )


class Sequence:
    """One request that a test moves through the runner by hand."""

    def __init__(
        self,
        runner: Runner,
        slot: int,
        prompt: list[int],
        blocks: list[int],
        **params: Any,
    ) -> None:
        self.runner = runner
        self.params = SamplingParams(**{"temperature": 0.0, **params})
        self.core = Request(f"s{slot}", prompt, max_tokens=50, arrival_time=0.0)
        self.core.slot = slot
        self.core.block_ids.extend(blocks)
        fields = row_fields(self.params, 7 + slot, vocab_size=512)
        self.request = RowRequest(fields, 0, self.params.prompt_logprobs is not None)

    def admit(self) -> None:
        values = pack_slot(self.params, [], [], self.core.token_ids, MAX_LEN)
        self.runner.admit(self.core.slot, values)

    def row(self, start: int, count: int) -> tuple[ScheduledRow, RowRequest]:
        samples = start + count >= len(self.core.token_ids)
        return ScheduledRow(self.core, 0, start, count, samples, start == 0), self.request

    def kv_slots(self, start: int, count: int) -> list[int]:
        blocks = self.core.block_ids
        return [
            blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for p in range(start, start + count)
        ]


def run(
    runner: Runner, *pairs: tuple[ScheduledRow, RowRequest], wants_prompt: bool = False
) -> StepResult:
    packed = runner.pack([row for row, _ in pairs], [request for _, request in pairs])
    return runner.read(runner.launch(packed, wants_prompt=wants_prompt))


def tokens_of(result: StepResult) -> list[int]:
    """Drawn tokens in the order in which the rows were scheduled."""
    return [int(result.samples.tokens[place]) for place in result.packed.order]


def pools_of(runner: Runner) -> list[np.ndarray]:
    """K and V pools of all layers, [layers x 2] arrays [S, K, H]."""
    return [pool for layer in range(2) for pool in runner.read_pool(layer)]

"""Owns what is on the device: weights, KV pools, slot state and the compiled step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpaged.config import EngineConfig
from jaxpaged.core.plan import ScheduledRow
from jaxpaged.device.attention import PagedAttention
from jaxpaged.device.beam_candidates import split_candidates
from jaxpaged.device.buckets import Buckets, StepShape
from jaxpaged.device.host_memory import HugePages, give_back_freed
from jaxpaged.device.model_loader import LoadedModel
from jaxpaged.device.packing import Layout, PackedStep, RowRequest, count_prompt_tokens, pack
from jaxpaged.device.program_set import ProgramSet, Progress
from jaxpaged.device.sampler import HostSamples, unpack
from jaxpaged.device.sampling_state import SlotValues
from jaxpaged.device.step import (
    EngineState,
    StepOutput,
    StepSettings,
    Weights,
)
from jaxpaged.device.weight_update import (
    HostWeights,
    Target,
    WeightUpdate,
    by_path,
    replaced,
    to_devices,
    to_host,
)
from jaxpaged.errors import ConfigError, UnavailableError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way: its host arrays (kept alive until it is read) and its results to come."""

    packed: PackedStep
    output: StepOutput
    wants_prompt: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """Host results. `samples` has program rows, `prompt` prompt tokens; `packed` maps them. `beams`
    are ids and log-probabilities [rows, candidates].
    """

    packed: PackedStep
    samples: HostSamples
    prompt: HostSamples | None
    beams: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None = None


class Runner:
    """Launches steps and reads them. Single-threaded; a launch returns before the step has run."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        backend: PagedAttention,
        buckets: Buckets,
        *,
        num_blocks: int,
        max_model_len: int,
        max_num_seqs: int,
        settings: StepSettings,
        programs: ProgramSet | None = None,
        state: EngineState | None = None,
    ) -> None:
        """`programs` and their first `state` are made here unless they are given. Raises
        `ConfigError` if the device has no room for the pools.
        """
        self.programs = programs or ProgramSet(
            loaded,
            backend,
            buckets,
            settings,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self.buckets = buckets
        self.ledger = self.programs.ledger
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self._dtype = loaded.dtype
        self._cache_dtype = loaded.cache_dtype
        self._mesh = loaded.mesh
        self._backend = backend
        self.target = Target(loaded.model_class, loaded.config, loaded.parts, loaded.mesh)
        own = loaded.weights  # lists of our own: an update empties them
        self._weights: Weights | None = Weights([list(x) for x in own.layers], list(own.rest))
        self._stored: HostWeights | None = None
        """The weights while they sleep in host memory."""
        self._huge_pages = HugePages([])
        self._kv_layout = settings.kv_layout
        self._deterministic = settings.determinism.promised
        self._state: EngineState | None = state or first_state(self.programs)
        self._settle()

    @property
    def alone(self) -> bool:
        """False if other processes run the same steps: none of them may leave the common order."""
        return bool(jax.process_count() == 1)

    @property
    def dtype_name(self) -> str:
        """Of weights and activations."""
        return jnp.dtype(self._dtype).name

    @property
    def attention_backend(self) -> str:
        """Its name."""
        return self._backend.name

    @property
    def attention_variant(self) -> str | None:
        """Which of the backend's code paths runs, if it has several."""
        return self._backend.variant

    @property
    def deterministic(self) -> bool:
        """True if a request's bits do not depend on what runs beside it."""
        return self._deterministic

    @property
    def cache_dtype_name(self) -> str:
        """Of the KV cache."""
        return jnp.dtype(self._cache_dtype).name

    @property
    def num_devices(self) -> int:
        """Devices that the model is cut over."""
        return int(self._mesh.size)

    def memory_bytes(self) -> dict[str, int]:
        """What lies on the first device, in bytes by kind: weights, kv_cache and sampling_state;
        where JAX tells them (not on CPU) also in_use, peak and limit of its allocator. From any
        thread.
        """
        stats = self._mesh.local_devices[0].memory_stats() or {}
        told = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
        live = {kind: int(stats[key]) for kind, key in told.items() if key in stats}
        return self._lasting_bytes | live

    def _measured(self) -> dict[str, int]:
        state, weights = self._state, _bytes_on_first_device(self._weights)
        if self._stored is not None and self._mesh.local_devices[0].platform == "cpu":
            weights = sum(value.nbytes for value, _ in self._stored.values())
        return {
            "weights": weights,
            "kv_cache": _bytes_on_first_device(None if state is None else state.kv),
            "sampling_state": _bytes_on_first_device(None if state is None else state.slots),
        }

    # ------------------------------------------------------------------ state

    def reset(self) -> None:
        """A new, zeroed pool and slot state: after a failed step the donated ones are gone."""
        self._state = None
        self._state = self.programs.init()

    def close(self) -> None:
        """Give the device memory back. The runner cannot be used afterwards."""
        self._huge_pages.stop()
        self._state = None
        self._weights = self._stored = None

    # ------------------------------------------------------------------ weights, sleep

    @property
    def unready(self) -> str | None:
        """Why no step can be launched now, and what to do; None if one can."""
        if self._state is None:
            return "The engine is asleep; call wake first."
        if self._weights is None:
            return "The engine's weights are gone, as an update broke off; call update_weights."
        return None

    @property
    def asleep(self) -> bool:
        return self._state is None

    def weights_by_path(self) -> dict[str, jax.Array]:
        """The arrays in use. Raises `UnavailableError` while there are none on the device."""
        if self._weights is None:
            raise UnavailableError(
                "The engine's weights are not on the device; call wake or update_weights.", 1.0
            )
        return by_path(self.target.parts, self._weights)

    def check_weights(self, source: Any) -> WeightUpdate:
        """All that can be said against new weights, before anything is changed."""
        self._check_alone("update_weights")
        return WeightUpdate(source, self.target)

    def replace_weights(self, update: WeightUpdate) -> None:
        """Take the new weights; programs stay. No step may be in flight.

        While asleep without weights, they come to the device all the same. Should this fail (out of
        memory, Ctrl-C), the engine has none, and says so until it is given some.
        """
        self._huge_pages.stop()
        old, self._weights, self._stored = self._weights, None, None
        try:
            self._weights = replaced(self.target.parts, old, update)
        finally:
            self._settle()

    def sleep(self, weights: bool | str) -> None:
        """Drop pools and slots, and with `weights` True or "discard" the weights. Idempotent."""
        self._check_alone("sleep")
        self._huge_pages.stop()
        self._state = None
        if weights is True and self._weights is not None:
            self._stored = to_host(self.target.parts, self._weights)
        if weights:
            self._weights = None
        if weights == "discard":
            self._stored = None
        give_back_freed()
        self._lasting_bytes = self._measured()

    def wake(self) -> None:
        """Bring back what `sleep` took. Idempotent; raises and stays asleep if it cannot."""
        if self._weights is None and self._stored is None:
            raise UnavailableError(
                "The engine's weights were discarded; call update_weights before wake.", 1.0
            )
        if self._weights is None and self._stored is not None:
            self._weights = to_devices(self.target.parts, self._stored)
            self._stored = None
        if self._state is None:
            self._state = first_state(self.programs)
        self._settle()

    def _settle(self) -> None:
        """See to what lies on the device from now on."""
        self._huge_pages.stop()
        self._huge_pages = HugePages(jax.tree.leaves(self._weights))
        self._lasting_bytes = self._measured()

    def _check_alone(self, what: str) -> None:
        if not self.alone:
            raise ConfigError(
                f"{what} works in one process only, and num_processes is {jax.process_count()}."
            )

    def pool_pointers(self) -> list[int]:
        """Addresses of the pools on every device; they never change while steps run in place."""
        assert self._state is not None
        return [
            shard.data.unsafe_buffer_pointer()
            for pool in jax.tree.leaves(self._state.kv)
            for shard in pool.addressable_shards
        ]

    def read_pool(self, layer: int) -> tuple[npt.NDArray[np.generic], ...]:
        """A copy of one layer's K and V pool as stored, and their scales where it has some; for
        tests and debugging.
        """
        assert self._state is not None
        pools = self._state.kv[self._kv_layout.pool_of[layer]]
        return tuple(np.array(pool, copy=True) for pool in jax.tree.leaves(pools))

    # ------------------------------------------------------------------ steps

    def layout(self, shape: StepShape) -> Layout:
        return self.programs.layout(shape)

    def admit(self, slot: int, values: SlotValues) -> None:
        """Write a request's sampling data into its slot, before the step that first uses it."""
        assert self._state is not None
        slots = self.programs.admit(self._state.slots, np.int32(slot), values)
        self._state = EngineState(self._state.kv, slots)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination), before the step whose plan asks for it."""
        assert self._state is not None
        size = next(size for size in self.programs.copy_sizes if size >= len(copies))
        blocks = np.zeros((2, size), np.int32)
        # Padding goes beyond the pool, each to a place of its own.
        blocks[1] = self.num_blocks + np.arange(size, dtype=np.int32)
        blocks[:, : len(copies)] = np.array(copies, np.int32).reshape(-1, 2).T
        kv = self.programs.copy(self._state.kv, blocks)
        self._state = EngineState(kv, self._state.slots)

    def pack(self, rows: Sequence[ScheduledRow], requests: Sequence[RowRequest]) -> PackedStep:
        shape = self.buckets.shape_for(len(rows), count_prompt_tokens(rows, requests))
        return pack(rows, requests, self.layout(shape), self.max_num_seqs)

    def launch(self, packed: PackedStep, *, wants_prompt: bool) -> Launched:
        """Queue the step. Its arrays must not be touched afterwards."""
        assert self._state is not None and self._weights is not None
        state, output = self.programs.step(
            self._weights, self._state, packed.ints, packed.floats, packed.layout
        )
        self._state = state
        output.samples.copy_to_host_async()
        if packed.has_beams:
            output.beams.copy_to_host_async()
        return Launched(packed, output, wants_prompt)

    def is_ready(self, launched: Launched) -> bool:
        """True if the step has run, so that reading it would not wait."""
        samples: Any = launched.output.samples  # its type says nothing of this method
        return bool(samples.is_ready())

    def read(self, launched: Launched) -> StepResult:
        """Wait for the step and copy its results; raises whatever made it fail."""
        samples = unpack(np.asarray(launched.output.samples))
        prompt = unpack(np.asarray(launched.output.prompt)) if launched.wants_prompt else None
        beams = None
        if launched.packed.has_beams:
            beams = split_candidates(np.asarray(launched.output.beams))
        return StepResult(launched.packed, samples, prompt, beams)

    # ------------------------------------------------------------------ warm-up

    @property
    def num_programs(self) -> int:
        """Those that warm-up prepares."""
        return len(self.programs.names)

    def warm_up(self, progress: Progress) -> float:
        """Prepare every program that is not ready, and on accelerators run each on padding: what
        their memory and their libraries cannot do should be known now. Returns seconds.
        """
        start = time.perf_counter()
        self.programs.prepare(progress)
        if self._mesh.devices.flat[0].platform != "cpu":
            self._run_all()
        progress(self.num_programs, self.num_programs, "ready")
        self.ledger.warm = True
        return time.perf_counter() - start

    def _run_all(self) -> None:
        for shape in self.buckets.shapes:
            packed = pack([], [], self.layout(shape), self.max_num_seqs)
            self.read(self.launch(packed, wants_prompt=False))
        for size in self.programs.copy_sizes:
            self.copy_blocks([(0, self.num_blocks + place) for place in range(size)])
        assert self._state is not None
        values = SlotValues(
            **{
                name: np.zeros(array.shape[1:], array.dtype)
                for name, array in vars(self._state.slots).items()
            }
        )
        self.admit(self.max_num_seqs, values)  # a slot out of range: nothing is written
        jax.block_until_ready(self._state)


def first_state(programs: ProgramSet) -> EngineState:
    """Raises `ConfigError` if the device has no room for the pools."""
    try:
        state = programs.init()
        jax.block_until_ready(state)
        return state
    except (ValueError, RuntimeError) as error:  # which of them depends on the backend
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"There is no memory for {programs.num_blocks} KV blocks: {error} Lower "
            "gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks_override."
        ) from error


def _bytes_on_first_device(arrays: Any) -> int:
    # From shapes: a look at the shards would leave second handles on what steps donate.
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arrays)
    )

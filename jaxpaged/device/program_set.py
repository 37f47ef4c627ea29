"""All programs of an engine: lowered once, compiled side by side or loaded, and called."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.stages import Compiled, Lowered

from jaxpaged.device.attention import PagedAttention
from jaxpaged.device.buckets import Buckets, StepShape
from jaxpaged.device.compile_ledger import CompileLedger, cache_hits, known_deprecations
from jaxpaged.device.executables import Executables
from jaxpaged.device.kv_cache import make_pools
from jaxpaged.device.model_loader import LoadedModel
from jaxpaged.device.packing import Layout
from jaxpaged.device.programs import (
    copy_sizes,
    everywhere,
    jit_admit,
    jit_copy,
    jit_state,
    jit_step,
    layout_of,
    state_shardings,
)
from jaxpaged.device.sampling_state import SlotState, SlotValues, empty_slot_state
from jaxpaged.device.step import EngineState, StepOutput, StepSettings, Weights
from pallas_kernels.paged_kv import PagedKV

Progress = Callable[[int, int, str], None]
"""(programs that are ready, all of them, the one that is waited for)."""
_MOST_AT_ONCE = 4
"""Programs that are compiled at the same time: each may take a gigabyte of the host's memory."""
INIT, ADMIT = "init", "admit"


class ProgramSet:
    """The programs of one engine, by name.

    `prepare` gets executables of all of them, which are then called without JAX ever tracing
    again: other shapes or shardings are an error. What was not prepared is compiled at its first
    call.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: PagedAttention,
        buckets: Buckets,
        settings: StepSettings,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Of `model` the shapes and shardings of the weights count; `described` ones will do."""
        self.ledger = CompileLedger()
        self._model, self._backend, self._settings = model, backend, settings
        self.num_blocks, self._max_model_len = num_blocks, max_model_len
        self._max_num_seqs = max_num_seqs
        self.copy_sizes = copy_sizes(max_num_seqs * len(settings.kv_layout.windows))
        self._shapes = {str(shape): shape for shape in buckets.shapes}
        self._step = jit_step(model, backend, settings, self.ledger)
        self._admit = jit_admit(model, self.ledger)
        self._copy = jit_copy(model, self.ledger, settings.block_size)
        self._init = jit_state(model, self._first_state, self.ledger)
        self._make_slots = jax.jit(self._first_slots, out_shardings=everywhere(model))
        self._layouts: dict[StepShape, Layout] = {}
        self._ready: dict[str, Compiled] = {}
        self._steps: dict[StepShape, Compiled] = {}

    @property
    def names(self) -> list[str]:
        """The state's beginning, the step's shapes, block copies, and admission."""
        copies = [_copy_name(size) for size in self.copy_sizes]
        return [INIT, *self._shapes, *copies, ADMIT]

    @property
    def prepared(self) -> dict[str, Compiled]:
        return dict(self._ready)

    @property
    def compiled_here(self) -> dict[str, Compiled]:
        """Those that can be serialised: what came out of a cache has lost its object code."""
        hits = {record.program for record in self.ledger.records if record.cache_hit}
        return {name: program for name, program in self._ready.items() if name not in hits}

    def layout(self, shape: StepShape) -> Layout:
        layout = self._layouts.get(shape)
        if layout is None:
            settings = self._settings
            layout = self._layouts[shape] = layout_of(
                shape, self._max_model_len, settings.block_size, self._backend, settings.kv_layout
            )
        return layout

    # ------------------------------------------------------------------ calls

    def init(self) -> EngineState:
        """Zeroed pools and empty slots."""
        run = self._ready.get(INIT)
        if run is not None:
            state: EngineState = run()
            return state
        # Of single operations, whose programs are compiled in no time.
        return EngineState(self._pools(), self._make_slots())

    def step(
        self,
        weights: Weights,
        state: EngineState,
        ints: npt.NDArray[np.int32],
        floats: npt.NDArray[np.float32],
        layout: Layout,
    ) -> tuple[EngineState, StepOutput]:
        run = self._steps.get(layout.shape)
        result: tuple[EngineState, StepOutput]
        if run is not None:
            result = run(weights, state, ints, floats)
            return result
        with self.ledger.watch(str(layout.shape)):
            return self._step(weights, state, ints, floats, layout)

    def admit(self, slots: SlotState, slot: np.int32, values: SlotValues) -> SlotState:
        return self._call(ADMIT, self._admit, slots, slot, values)  # type: ignore[no-any-return]

    def copy(self, kv: list[PagedKV], blocks: npt.NDArray[np.int32]) -> list[PagedKV]:
        """`blocks` i32 [2, N], of one of `copy_sizes`."""
        name = _copy_name(blocks.shape[1])
        return self._call(name, self._copy, kv, blocks)  # type: ignore[no-any-return]

    def _call(self, name: str, lazy: Callable[..., Any], *arguments: Any) -> Any:
        run = self._ready.get(name)
        if run is not None:
            return run(*arguments)
        with self.ledger.watch(name):
            return lazy(*arguments)

    # ------------------------------------------------------------------ preparing

    def prepare(self, progress: Progress, stored: Executables | None = None) -> None:
        """Get executables of all programs that have none yet: out of `stored`, as far as it has
        them, or by compiling.

        Each is traced and lowered once, here, one after the other; XLA and the persistent cache
        work on other threads meanwhile. What `progress` raises ends it after what is being
        compiled.
        """
        names = [name for name in self.names if name not in self._ready]
        total = len(self.names)
        done = total - len(names)
        pool = ThreadPoolExecutor(_workers(), thread_name_prefix="jaxpaged-compile")
        try:
            with cache_hits() as hits:
                waiting = self._submit(names, pool, hits, stored)
                for name, future in waiting:
                    progress(done, total, name)
                    compiled, milliseconds, hit = future.result()
                    self._ready[name] = compiled
                    if name in self._shapes:
                        self._steps[self._shapes[name]] = compiled
                    self.ledger.add(name, milliseconds, cache_hit=hit)
                    done += 1
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self,
        names: Sequence[str],
        pool: ThreadPoolExecutor,
        hits: Callable[[], int],
        stored: Executables | None,
    ) -> list[tuple[str, Future[tuple[Compiled, float, bool]]]]:
        def load(name: str, folder: Executables) -> tuple[Compiled, float, bool]:
            start = time.perf_counter()
            devices = list(self._model.mesh.devices.flat)
            compiled = folder.load(name, *self._trees(name), devices)
            return compiled, 1e3 * (time.perf_counter() - start), True

        def compile_(lowered: Lowered, milliseconds: float) -> tuple[Compiled, float, bool]:
            start, before = time.perf_counter(), hits()
            compiled = lowered.compile()
            return compiled, milliseconds + 1e3 * (time.perf_counter() - start), hits() > before

        waiting = []
        for name in names:
            if stored is not None and name in stored.files:
                waiting.append((name, pool.submit(load, name, stored)))
                continue
            start = time.perf_counter()
            with known_deprecations():
                lowered = self.lower(name)
            milliseconds = 1e3 * (time.perf_counter() - start)
            waiting.append((name, pool.submit(compile_, lowered, milliseconds)))
        return waiting

    def lower(self, name: str) -> Lowered:
        """The program, traced and lowered from shapes; nothing is allocated."""
        jitted, arguments, static = self._program(name)
        function: Any = jitted
        lowered: Lowered = function.lower(*arguments, *static)
        return lowered

    def _program(self, name: str) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
        """The jitted function, the shapes of its arguments, and its static arguments."""
        state = self._state()
        if name in self._shapes:
            layout = self.layout(self._shapes[name])
            ints = jax.ShapeDtypeStruct((layout.num_ints,), jnp.int32)
            floats = jax.ShapeDtypeStruct((layout.num_floats,), jnp.float32)
            return self._step, (self._weights(), state, ints, floats), (layout,)
        if name == INIT:
            return self._init, (), ()
        if name == ADMIT:
            values = SlotValues(**_one_slot(state.slots))
            return self._admit, (state.slots, jax.ShapeDtypeStruct((), jnp.int32), values), ()
        sizes = {_copy_name(size): size for size in self.copy_sizes}
        return self._copy, (state.kv, jax.ShapeDtypeStruct((2, sizes[name]), jnp.int32)), ()

    def _trees(self, name: str) -> tuple[Any, Any]:
        """Structures of the arguments and of the result."""
        state = self._state()
        leaf: Any = jax.ShapeDtypeStruct((), jnp.int32)
        result: Any = state.kv
        if name in self._shapes:
            result = (state, StepOutput(leaf, leaf, leaf))
        elif name in (INIT, ADMIT):
            result = state if name == INIT else state.slots
        return jax.tree.structure((self._program(name)[1], {})), jax.tree.structure(result)

    def _weights(self) -> Weights:
        weights: Weights = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self._model.weights,
        )
        return weights

    def _state(self) -> EngineState:
        state: EngineState = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(self._first_state),
            state_shardings(self._model),
        )
        return state

    def _first_state(self) -> EngineState:
        return EngineState(self._pools(), self._first_slots())

    def _first_slots(self) -> SlotState:
        return empty_slot_state(self._max_num_seqs, self._max_model_len)

    def _pools(self) -> list[PagedKV]:
        model = self._model
        return make_pools(
            model.config,
            self.num_blocks,
            self._settings.block_size,
            model.cache_dtype,
            model.mesh,
        )


def _copy_name(size: int) -> str:
    return f"copy[{size}]"


def _one_slot(slots: SlotState) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
        for name, array in vars(slots).items()
    }


def _workers() -> int:
    return min(_MOST_AT_ONCE, os.cpu_count() or 1)

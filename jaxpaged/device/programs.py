"""The programs that a runner compiles, and how they run on every device of the mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.device.attention import PagedAttention
from jaxpaged.device.buckets import ROW_MULTIPLE, Buckets, StepShape, round_up
from jaxpaged.device.compile_ledger import CompileLedger, known_deprecations
from jaxpaged.device.kv_cache import KVLayout, copy_blocks, make_pools, pool_specs
from jaxpaged.device.model_loader import LoadedModel
from jaxpaged.device.packing import Layout
from jaxpaged.device.sampling_state import SlotState, SlotValues, empty_slot_state, write_slot
from jaxpaged.device.step import (
    EngineState,
    StepFunction,
    StepOutput,
    StepSettings,
    Weights,
    make_step,
)
from jaxpaged.models.config import ModelConfig
from pallas_kernels.paged_kv import PagedKV

T = TypeVar("T")
_COPY_GROWTH = 4


def step_temporaries(
    loaded: LoadedModel,
    backend: PagedAttention,
    buckets: Buckets,
    settings: StepSettings,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Bytes of temporaries of the largest program, from XLA's own analysis of a compile with a pool
    of two blocks.

    Nothing is allocated: the program is lowered from shapes. (XLA's peak_memory is no use here;
    temp is.)
    """
    shape = StepShape(buckets.max_rows, buckets.prefill[-1])
    layout = layout_of(shape, max_model_len, settings.block_size, backend, settings.kv_layout)
    state = jax.eval_shape(
        lambda: EngineState(
            make_pools(loaded.config, 2, settings.block_size, loaded.cache_dtype, loaded.mesh),
            empty_slot_state(max_num_seqs, max_model_len),
        )
    )
    step = jax.jit(
        _step_over_mesh(make_step(loaded.parts, backend, settings), loaded),
        static_argnames="layout",
        donate_argnames="state",
        compiler_options=settings.determinism.compiler_options,
    )
    ints = jax.ShapeDtypeStruct((layout.num_ints,), jnp.int32)
    floats = jax.ShapeDtypeStruct((layout.num_floats,), jnp.float32)
    with known_deprecations():
        compiled = step.lower(loaded.weights, state, ints, floats, layout).compile()
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def layout_of(
    shape: StepShape,
    max_model_len: int,
    block_size: int,
    backend: PagedAttention,
    kv_layout: KVLayout,
) -> Layout:
    width = -(-max_model_len // block_size)
    tile = backend.tile(shape.tokens, width * block_size)
    return Layout(shape, width, tile, len(kv_layout.windows))


def state_specs(model: ModelConfig, cache_dtype: jnp.dtype) -> EngineState:
    """How the state is cut over the mesh: KV pools by heads, all else is on every device."""
    slots: dict[str, Any] = dict.fromkeys(SlotState.__dataclass_fields__, PartitionSpec())
    kv = [pool_specs(model, cache_dtype)] * KVLayout.of(model).num_pools
    return EngineState(kv, SlotState(**slots))


def state_shardings(loaded: LoadedModel) -> EngineState:
    shardings: EngineState = jax.tree.map(
        functools.partial(NamedSharding, loaded.mesh),
        state_specs(loaded.config, loaded.cache_dtype),
    )
    return shardings


def everywhere(loaded: LoadedModel) -> NamedSharding:
    """The whole of an array on every device."""
    return NamedSharding(loaded.mesh, PartitionSpec())


def over_mesh(
    loaded: LoadedModel, *, inputs: int, outputs: Any
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Makes `run(weights, state, *inputs)` run on every device of the mesh at once: each has its
    slice of weights and KV pools, and the layers say what they exchange. All that the host sends
    is on every device; `outputs` are the specs of what comes back.
    """
    if loaded.mesh.size == 1:
        return lambda run: run
    weights = jax.tree.map(lambda leaf: leaf.sharding.spec, loaded.weights)
    everywhere = PartitionSpec()
    return functools.partial(
        jax.shard_map,
        mesh=loaded.mesh,
        in_specs=(
            weights,
            state_specs(loaded.config, loaded.cache_dtype),
            *[everywhere] * inputs,
        ),
        out_specs=outputs,
        check_vma=False,
    )


def _step_over_mesh(step: StepFunction, loaded: LoadedModel) -> StepFunction:
    everywhere: Any = PartitionSpec()
    state = state_specs(loaded.config, loaded.cache_dtype)
    outputs = (state, StepOutput(everywhere, everywhere, everywhere))
    spread = over_mesh(loaded, inputs=2, outputs=outputs)

    def run(
        weights: Weights, state: EngineState, ints: jax.Array, floats: jax.Array, layout: Layout
    ) -> tuple[EngineState, StepOutput]:
        def on_device(
            weights: Weights, state: EngineState, ints: jax.Array, floats: jax.Array
        ) -> tuple[EngineState, StepOutput]:
            return step(weights, state, ints, floats, layout)

        return spread(on_device)(weights, state, ints, floats)

    return run


def jit_step(
    loaded: LoadedModel, backend: PagedAttention, settings: StepSettings, ledger: CompileLedger
) -> Callable[..., tuple[EngineState, StepOutput]]:
    """`step(weights, state, ints, floats, layout)`, with the state donated."""
    step = _step_over_mesh(make_step(loaded.parts, backend, settings), loaded)

    def jaxpaged_step(
        weights: Weights, state: EngineState, ints: jax.Array, floats: jax.Array, layout: Layout
    ) -> tuple[EngineState, StepOutput]:
        ledger.traced()
        return step(weights, state, ints, floats, layout)

    replicated: Any = everywhere(loaded)
    return jax.jit(
        jaxpaged_step,
        static_argnames="layout",
        donate_argnames="state",
        out_shardings=(
            state_shardings(loaded),
            StepOutput(replicated, replicated, replicated),
        ),
        compiler_options=settings.determinism.compiler_options,
    )


def jit_state(
    loaded: LoadedModel, make: Callable[[], EngineState], ledger: CompileLedger
) -> Callable[[], EngineState]:
    """`make`, in one program."""

    def jaxpaged_init() -> EngineState:
        ledger.traced()
        return make()

    shardings: Any = state_shardings(loaded)
    return jax.jit(jaxpaged_init, out_shardings=shardings)


def jit_admit(loaded: LoadedModel, ledger: CompileLedger) -> Callable[..., SlotState]:
    """`write_slot`, with the state donated."""

    def jaxpaged_admit(state: SlotState, slot: jax.Array, values: SlotValues) -> SlotState:
        ledger.traced()
        return write_slot(state, slot, values)

    slots: Any = state_shardings(loaded).slots
    return jax.jit(jaxpaged_admit, donate_argnames="state", out_shardings=slots)


def jit_copy(
    loaded: LoadedModel, ledger: CompileLedger, block_size: int
) -> Callable[..., list[PagedKV]]:
    """`copy(pools, i32 [2, N])` of N blocks, sources and destinations, with the pools donated."""

    def jaxpaged_copy(kv: list[PagedKV], blocks: jax.Array) -> list[PagedKV]:
        ledger.traced()
        return copy_blocks(kv, blocks[0], blocks[1], block_size=block_size)

    pools: Any = state_shardings(loaded).kv
    return jax.jit(jaxpaged_copy, donate_argnames="kv", out_shardings=pools)


def copy_sizes(most: int) -> tuple[int, ...]:
    """Numbers of blocks that are copied at once, up to as many as a step can ask for."""
    sizes, last = [], round_up(most, ROW_MULTIPLE)
    size = ROW_MULTIPLE
    while size < last:
        sizes.append(size)
        size *= _COPY_GROWTH
    return (*sizes, last)

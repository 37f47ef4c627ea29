"""Whole steps of a model, as the engine's runner compiles them, on weights that are only shapes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.device import programs
from jaxpaged.device.attention import AttentionSizes
from jaxpaged.device.attention_choice import choose_backend
from jaxpaged.device.buckets import StepShape
from jaxpaged.device.compile_ledger import CompileLedger
from jaxpaged.device.determinism import COMPILER_OPTIONS, UNDECIDED, Determinism, KernelOrder
from jaxpaged.device.kv_cache import KVLayout, copy_blocks, make_pools
from jaxpaged.device.sampling_state import empty_slot_state
from jaxpaged.device.step import EngineState, StepSettings, Weights, take_apart
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.registry import find_model
from jaxpaged.sharding import make_mesh
from pallas_kernels.paged_kv import PagedKV
from tests.kernels.aot.program import Program, lower_function

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
BLOCK_SIZE = 16
NUM_BLOCKS = 2**15
"""1 GiB for K of a layer in 16 bits, 64 GiB in all."""
ROWS = 64
MAX_LEN = 8192


@dataclass(frozen=True)
class StepCase:
    name: str
    prompt_tokens: int = 0
    backend: str = "auto"
    cache_dtype: str = "bfloat16"
    layers: int = 32
    deterministic: bool = False


CASES = (
    StepCase("step-decode"),
    StepCase("step-mixed", prompt_tokens=2048),
    StepCase("step-mixed-int8", prompt_tokens=2048, cache_dtype="int8", layers=4),
    StepCase("step-decode-deterministic", layers=4, deterministic=True),
    StepCase("step-mixed-deterministic", prompt_tokens=2048, layers=4, deterministic=True),
)


def step_programs() -> list[Program]:
    return [_program(case) for case in CASES]


def _program(case: StepCase) -> Program:
    model_class, model = find_model(LLAMA_8B | {"num_hidden_layers": case.layers}, case.name)
    model = model.over(1)
    dtype, cache_dtype = np.dtype(jnp.bfloat16), np.dtype(case.cache_dtype)

    def lower(topology: Mesh) -> Any:
        mesh = make_mesh(list(topology.devices.flat))
        parts = take_apart(model_class, model, dtype)
        everywhere = NamedSharding(mesh, PartitionSpec())

        def placed(tree: Any) -> Any:
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
                tree,
            )

        chosen = UNDECIDED
        if case.deterministic:
            order = KernelOrder(interpret=False)
            chosen = Determinism(True, order, COMPILER_OPTIONS, "asked for")
        sizes = AttentionSizes.of(
            model,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            cache_dtype=cache_dtype,
            fixed=chosen.fixed_sizes,
        )
        backend, _ = choose_backend(case.backend, sizes, mesh.devices.flat[0])
        assert backend.name != "reference"
        weights = Weights([part.leaves for part in parts.layers], parts.rest.leaves)
        loaded: Any = SimpleNamespace(
            config=model,
            parts=parts,
            weights=weights,
            dtype=dtype,
            cache_dtype=cache_dtype,
            mesh=mesh,
        )
        settings = StepSettings(
            BLOCK_SIZE,
            20,
            model.vocab_size,
            model.vocab_size,
            KVLayout.of(model),
            determinism=chosen,
        )
        shape = StepShape(ROWS, case.prompt_tokens)
        layout = programs.layout_of(shape, MAX_LEN, BLOCK_SIZE, backend, settings.kv_layout)
        state = jax.eval_shape(
            lambda: EngineState(
                make_pools(model, NUM_BLOCKS, BLOCK_SIZE, cache_dtype, mesh),
                empty_slot_state(ROWS, MAX_LEN),
            )
        )
        step: Any = programs.jit_step(loaded, backend, settings, CompileLedger())
        inputs = placed(
            [
                jax.ShapeDtypeStruct((layout.num_ints,), jnp.int32),
                jax.ShapeDtypeStruct((layout.num_floats,), jnp.float32),
            ]
        )
        traced = step.trace(placed(weights), placed(state), *inputs, layout)
        return traced.lower(lowering_platforms=("cuda",))

    shape = model.kv_shape
    pool = jax.ShapeDtypeStruct((NUM_BLOCKS * BLOCK_SIZE, shape.heads, shape.key_dim), cache_dtype)
    pools = [pool, pool] * model.num_layers
    if cache_dtype.itemsize == 1:
        pools += [jax.ShapeDtypeStruct(pool.shape[:-1], np.dtype(np.float32))] * len(pools)
    return Program(
        name=case.name,
        kind="step",
        lower=lower,
        pools=pools,
        in_place=True,
        shape=(
            f"Llama 3 8B, {case.layers} layers, {case.cache_dtype}, {ROWS} rows, "
            f"{case.prompt_tokens} prompt tokens"
        ),
    )


def copy_programs() -> list[Program]:
    """Block copies, that a step with forks begins with."""
    model = find_model(LLAMA_8B | {"num_hidden_layers": 4}, "copies")[1].over(1)
    return [_copy_program(model, np.dtype(name)) for name in (jnp.bfloat16, jnp.int8)]


def _copy_program(model: ModelConfig, cache_dtype: jnp.dtype) -> Program:
    def pools_on(mesh: Mesh) -> list[PagedKV]:
        return make_pools(model, NUM_BLOCKS, BLOCK_SIZE, cache_dtype, mesh)

    def copy(pools: list[PagedKV], blocks: jax.Array) -> list[PagedKV]:
        return copy_blocks(pools, blocks[0], blocks[1], block_size=BLOCK_SIZE)

    def lower(topology: Mesh) -> Any:
        mesh = make_mesh(list(topology.devices.flat))
        shapes = jax.eval_shape(lambda: pools_on(mesh))
        blocks = jax.ShapeDtypeStruct((2, ROWS), jnp.int32)
        return lower_function(topology, copy, [shapes, blocks], donated=(0,))

    shape = model.kv_shape
    pool = jax.ShapeDtypeStruct((NUM_BLOCKS * BLOCK_SIZE, shape.heads, shape.key_dim), cache_dtype)
    pools = [pool, pool] * model.num_layers
    if cache_dtype.itemsize == 1:
        pools += [jax.ShapeDtypeStruct(pool.shape[:-1], np.dtype(np.float32))] * len(pools)
    return Program(
        name=f"copy-{cache_dtype.name}",
        kind="copy",
        lower=lower,
        pools=pools,
        in_place=True,
        shape=f"{ROWS} blocks, {model.num_layers} layers of Llama 3 8B, {cache_dtype.name}",
    )

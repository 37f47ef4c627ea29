"""The step: embed, layers with paged attention, logits, sample, in one program per shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpaged.device.attention import AttentionMeta, PagedAttention
from jaxpaged.device.beam_candidates import beam_candidates
from jaxpaged.device.determinism import UNDECIDED, Determinism
from jaxpaged.device.kv_cache import KVLayout
from jaxpaged.device.packing import FROM_HISTORY, Layout
from jaxpaged.device.sampler import prompt_logprobs, sample
from jaxpaged.device.sampling_state import SlotState, record_tokens
from jaxpaged.models.base import CausalLM
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.order import fixed_order
from jaxpaged.models.routines import LiveRows, live_rows, routines
from pallas_kernels.paged_kv import PagedKV, PrefillTiles

_PROMPT_ROWS = (32, 16, 8)
"""Prompt tokens whose logits are computed at a time, when their logprobs are wanted."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """Everything on the device that a step changes. Donated, and rebound in one place."""

    kv: list[PagedKV]  # one entry a pool; see `kv_cache.KVLayout` for which layer has which
    slots: SlotState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """`samples` i32 [R, 4 + 2K] (see `sampler.unpack`). Read only when wanted: `prompt` i32
    [P, 4 + 2K], and `beams` i32 [R, 2C] (see `beam_candidates`).
    """

    samples: jax.Array
    prompt: jax.Array
    beams: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """Flat leaves of the model: one list a layer, so that one traced layer serves all, and the
    rest.
    """

    layers: list[list[jax.Array]]
    rest: list[jax.Array]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a program is specialised on, beside the shape."""

    block_size: int
    max_logprobs: int
    valid_vocab: int
    """Rows of the head that are the model's; those behind are padding."""
    drawable: int
    """Of those, the ids that the tokenizer knows; the others stand for nothing."""
    kv_layout: KVLayout
    num_candidates: int = 2
    """Tokens that each beam of a search is told it may go on with."""
    determinism: Determinism = UNDECIDED


@dataclass(frozen=True, slots=True)
class Part:
    """A module taken apart: what `nnx.merge` needs, and the path of each of its flat leaves."""

    graph: Any
    tree: Any
    paths: list[str]
    leaves: list[jax.ShapeDtypeStruct]

    def build(self, leaves: list[jax.Array]) -> Any:
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The layers apart, and the model without them."""

    rest: Part
    layers: list[Part]

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Parameter path -> shape and type, in the order of the checkpoint's layers."""
        parts = [self.rest, *self.layers]
        return {p: leaf for part in parts for p, leaf in zip(part.paths, part.leaves, strict=True)}

    def weights(self, params: dict[str, jax.Array]) -> Weights:
        return Weights(
            layers=[[params[path] for path in part.paths] for part in self.layers],
            rest=[params[path] for path in self.rest.paths],
        )


def take_apart(model_class: type[CausalLM], config: ModelConfig, dtype: jnp.dtype) -> ModelParts:
    """Build the modules abstractly (nothing is allocated) and split them once: NNX objects in the
    call of a step would cost milliseconds; inside the program they are put together again while
    tracing.
    """
    model = nnx.eval_shape(lambda: model_class(config, dtype))
    layers = [_part(layer, f"layers.{i}.") for i, layer in enumerate(model.layers)]
    model.layers = nnx.List([])
    return ModelParts(_part(model, ""), layers)


def _part(module: nnx.Module, prefix: str) -> Part:
    graph, state = nnx.split(module)
    keyed, tree = jax.tree_util.tree_flatten_with_path(state)
    paths = [prefix + ".".join(str(k.key) for k in path if hasattr(k, "key")) for path, _ in keyed]
    return Part(graph, tree, paths, [leaf for _, leaf in keyed])


StepFunction = Callable[
    [Weights, EngineState, jax.Array, jax.Array, Layout], tuple[EngineState, StepOutput]
]
Trunk = Callable[
    [Weights, EngineState, dict[str, jax.Array], Layout],
    tuple[CausalLM, list[PagedKV], list[jax.Array]],
]
"""(weights, state, fields of the packed ints, layout) -> the model without its layers, the new
pools, and f32 [R + P, E] after the embedding and after each layer."""


def make_trunk(parts: ModelParts, backend: PagedAttention, settings: StepSettings) -> Trunk:
    """What a step does before its logits. To be traced; `layout` is static."""
    layer_functions = _layer_functions(parts.layers, backend)

    def trunk(
        weights: Weights, state: EngineState, f: dict[str, jax.Array], layout: Layout
    ) -> tuple[CausalLM, list[PagedKV], list[jax.Array]]:
        num_pool_slots = state.kv[0].k.shape[0]
        tokens, positions, lengths, metas = token_fields(
            f, state.slots, layout, settings, num_pool_slots
        )
        live = _counts(f["decode_position"] >= 0, f["token_tile"] >= 0)
        model: CausalLM = parts.rest.build(weights.rest)

        hidden = [model.embed(tokens, positions)]
        rope = model.rope_tables(positions, lengths)
        pools, kv = list(state.kv), settings.kv_layout
        with routines(backend.routines):
            layers = zip(layer_functions, weights.layers, strict=True)
            for index, (run, leaves) in enumerate(layers):
                pool, meta = kv.pool_of[index], metas[kv.group_of[index]]
                x, pools[pool] = run(leaves, hidden[-1], rope, pools[pool], meta, live)
                hidden.append(x)
        return model, pools, hidden

    return trunk


def make_step(parts: ModelParts, backend: PagedAttention, settings: StepSettings) -> StepFunction:
    """The function to jit; `layout` is static."""
    trunk = make_trunk(parts, backend, settings)

    def step(
        weights: Weights, state: EngineState, ints: jax.Array, floats: jax.Array, layout: Layout
    ) -> tuple[EngineState, StepOutput]:
        with fixed_order(settings.determinism.order), routines(backend.routines):
            return traced(weights, state, ints, floats, layout)

    def traced(
        weights: Weights, state: EngineState, ints: jax.Array, floats: jax.Array, layout: Layout
    ) -> tuple[EngineState, StepOutput]:
        rows = layout.shape.rows
        f = layout.split(ints)
        model, pools, hidden = trunk(weights, state, f, layout)
        x = hidden[-1]
        with jax.named_scope("sample"):
            used = _counts(f["row_slot"] < state.slots.history.shape[0])
            with live_rows(LiveRows(used, rows, rows)):
                logits = model.logits(jnp.take(x, f["logits_index"], axis=0, mode="clip"))
            drawn = sample(
                logits,
                state.slots,
                sample_rows := layout.sample_rows(f["sample"], floats),
                max_logprobs=settings.max_logprobs,
                valid_vocab=settings.valid_vocab,
                drawable=settings.drawable,
            )
        with jax.named_scope("beams"):
            beams = beam_candidates(
                logits,
                state.slots,
                sample_rows,
                count=settings.num_candidates,
                valid_vocab=settings.valid_vocab,
                drawable=settings.drawable,
            )
        slots = record_tokens(state.slots, sample_rows, drawn.tokens)
        prompt = _prompt_logprobs(model, x[rows:], f["prompt_target"], settings)
        return EngineState(pools, slots), StepOutput(drawn.packed, prompt, beams)

    return step


def _layer_functions(
    layers: list[Part], backend: PagedAttention
) -> list[Callable[..., tuple[jax.Array, PagedKV]]]:
    """One jitted function per kind of layer: jit inside jit, so that equal layers are traced and
    compiled as one call.
    """
    made: dict[Any, Callable[..., tuple[jax.Array, PagedKV]]] = {}
    functions = []
    for part in layers:
        kind = (part.graph, part.tree)
        if kind not in made:

            def run(
                leaves: list[jax.Array],
                x: jax.Array,
                rope: jax.Array,
                layer_kv: PagedKV,
                meta: AttentionMeta,
                live: jax.Array,
                part: Part = part,
            ) -> tuple[jax.Array, PagedKV]:
                result: tuple[jax.Array, PagedKV]
                with live_rows(LiveRows(live, meta.decode_positions.shape[0], x.shape[0])):
                    result = part.build(leaves)(x, rope, layer_kv, meta, backend.attend)
                return result

            made[kind] = jax.jit(run)
        functions.append(made[kind])
    return functions


def _counts(rows: jax.Array, tokens: jax.Array | None = None) -> jax.Array:
    """i32 [2]: how many of each are set."""
    counts = [jnp.sum(mask) if mask is not None else 0 for mask in (rows, tokens)]
    return jnp.stack([jnp.asarray(count, jnp.int32) for count in counts])


def token_fields(
    f: dict[str, jax.Array],
    slots: SlotState,
    layout: Layout,
    settings: StepSettings,
    num_pool_slots: int,
) -> tuple[jax.Array, jax.Array, jax.Array, list[AttentionMeta]]:
    """Token ids, positions and rope lengths of the flat token axis (i32 [R + P] each), and what
    attention needs, for each group of layers.
    """
    block_size, decode_position = settings.block_size, f["decode_position"]
    history = slots.history.at[f["row_slot"], decode_position].get(mode="fill", fill_value=0)
    decode_token = jnp.where(f["decode_token"] == FROM_HISTORY, history, f["decode_token"])

    tile, offset = f["token_tile"] // layout.tile, f["token_tile"] % layout.tile
    real = f["token_tile"] >= 0
    row_of = jnp.concatenate([lax.iota(jnp.int32, layout.shape.rows), _pick(f["tile_row"], tile)])
    position = jnp.concatenate(
        [decode_position, jnp.where(real, _pick(f["tile_position"], tile) + offset, -1)]
    )
    column = jnp.maximum(position, 0) // block_size
    # Padding tokens get slots beyond the pool, all different, so that the scatter may count on
    # unique ones.
    spread = num_pool_slots + lax.iota(jnp.int32, position.shape[0])

    tiles = PrefillTiles(
        row=f["tile_row"],
        start=f["tile_start"],
        length=f["tile_len"],
        position=f["tile_position"],
        token_tile=jnp.maximum(f["token_tile"], 0),
        count=f["num_tiles"][0],
    )

    def meta_of(tables: jax.Array) -> AttentionMeta:
        block = tables.at[row_of, column].get(mode="clip")
        return AttentionMeta(
            kv_slots=jnp.where(position < 0, spread, block * block_size + position % block_size),
            block_tables=tables,
            decode_positions=decode_position,
            tiles=tiles,
        )

    tokens = jnp.concatenate([decode_token, f["prompt_token"]])
    lengths = jnp.take(f["rope_length"], row_of, axis=0, mode="clip")
    metas = [meta_of(f["block_tables"][group]) for group in range(layout.num_groups)]
    return tokens, jnp.maximum(position, 0), lengths, metas


def _pick(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(values, index, axis=0, mode="clip") if values.shape[0] else index


def _prompt_logprobs(
    model: CausalLM, x: jax.Array, targets: jax.Array, settings: StepSettings
) -> jax.Array:
    """i32 [P, 4 + 2K] for the tokens that have a target; computed a few rows at a time and only
    where wanted.
    """
    width = 4 + 2 * settings.max_logprobs
    total = targets.shape[0]
    out = jnp.zeros((total, width), jnp.int32)
    if total == 0:
        return out
    rows = next(n for n in _PROMPT_ROWS if total % n == 0)
    if settings.determinism.fixed_sizes:
        rows = _PROMPT_ROWS[-1]  # which divides every bucket

    def one_chunk(index: jax.Array, out: jax.Array) -> jax.Array:
        wanted = lax.dynamic_slice_in_dim(targets, index * rows, rows)

        def compute() -> jax.Array:
            logits = model.logits(lax.dynamic_slice_in_dim(x, index * rows, rows))
            return prompt_logprobs(
                logits,
                wanted,
                jnp.where(wanted >= 0, settings.max_logprobs, -1),
                max_logprobs=settings.max_logprobs,
                valid_vocab=settings.valid_vocab,
            ).packed

        chunk = lax.cond(jnp.any(wanted >= 0), compute, lambda: jnp.zeros((rows, width), jnp.int32))
        return lax.dynamic_update_slice_in_dim(out, chunk, index * rows, 0)

    last = jnp.max(jnp.where(targets >= 0, lax.iota(jnp.int32, total), -1))
    scored: jax.Array = lax.fori_loop(0, (last + rows) // rows, one_chunk, out)
    return scored

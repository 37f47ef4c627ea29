"""The trainer's side: the engine's models as plain Flax modules, over whole sequences.

`LLM.flax_model()` gives the module; `token_logprobs` runs it over whole sequences and can be
differentiated. What comes out of the optimiser goes back with `LLM.update_weights(model)`.

Legend: `B` sequences, `S` tokens of the longest, `V` vocabulary, `N` query heads, `K` KV heads, `G`
query heads per KV head, `H` head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxpaged.models.base import CausalLM
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.exchange import parameters, path_of

__all__ = ["build_module", "forward", "parameters", "token_logprobs"]


def build_module(
    model: type[CausalLM],
    config: ModelConfig,
    params: Mapping[str, jax.Array | np.ndarray[Any, Any]],
    dtype: jnp.dtype,
) -> CausalLM:
    """A module of these parameters, by path, in `dtype`. `config` must be of one device."""
    assert config.tensor_parallel == 1, "trainers shard as they like, with their own means"
    graph, state = nnx.split(nnx.eval_shape(lambda: model(config, dtype)))
    keyed, tree = jax.tree_util.tree_flatten_with_path(state)
    leaves = [jnp.array(params[path_of(keys)], dtype) for keys, _ in keyed]  # always a copy
    module: CausalLM = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    return module


def forward(model: CausalLM, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """Logits f32 [B, S, V] of i32 [B, S]; those at a position are for the token after it.

    Sequences start at position 0 and are padded behind; what stands there has no influence on what
    comes before. `lengths` i32 [B] matters only to rotary frequencies that depend on it (longrope,
    dynamic scaling); the default is S. Rounding is where the engine has it: everything is float32
    but the weights and what they are multiplied with.
    """
    batch, length = tokens.shape
    flat = tokens.reshape(-1)
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    whole = jnp.full(batch, length, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    rope = model.rope_tables(positions, jnp.repeat(whole, length, total_repeat_length=flat.size))
    x = model.embed(flat, positions)
    for layer in model.layers:
        x, _ = layer(x, rope, None, batch, _attend)
    return model.logits(x).reshape(batch, length, -1)


def token_logprobs(
    model: CausalLM, tokens: jax.Array, lengths: jax.Array | None = None
) -> jax.Array:
    """Log-probability f32 [B, S - 1] of each token of i32 [B, S] but the first, given those before
    it: what the engine calls raw.
    """
    logits = forward(model, tokens, lengths)[:, :-1]
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=2, mode="clip")[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=2)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    layer_kv: None,
    meta: int,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    value_dim: int | None = None,
) -> tuple[jax.Array, None]:
    """Causal attention over B = `meta` sequences side by side; all scores at once, in float32."""
    (tokens, kv_heads, dim), batch = k.shape, meta
    length, group = tokens // batch, q.shape[1] // kv_heads
    values = k[..., :value_dim] if v is None else v
    queries = q.reshape(batch, length, kv_heads, group, dim).astype(jnp.float32)
    keys, values = (a.reshape(batch, length, kv_heads, -1).astype(jnp.float32) for a in (k, values))
    scores = scale * jnp.einsum("bqkgh,bskh->bkgqs", queries, keys, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    back = lax.broadcasted_iota(jnp.int32, (length, length), 0)
    back = back - lax.broadcasted_iota(jnp.int32, (length, length), 1)
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgqs,bskh->bqkgh", weights, values, precision="highest")
    return out.reshape(tokens, kv_heads * group, -1).astype(q.dtype), None

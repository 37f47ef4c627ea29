"""Mixtures of experts (Shazeer et al., 2017): routing, and the matmuls of the chosen experts.

Legend: `T` tokens of a step, `X` experts (on a device), `k` experts a token is sent to, `P = T k`
pairs of a token and one of its experts, `E` hidden size, `I` width of an expert.

Every device has some of the experts and computes the pairs that are routed to those. The cost
follows the true number of pairs: they are sorted by expert, and each expert's run of pairs is
multiplied with that expert's weights.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import ACTIVATIONS, matmul, mean, param
from jaxpaged.models.order import order_in_force
from jaxpaged.models.parallel import first_of_mine
from jaxpaged.models.routines import live_among, live_rows
from jaxpaged.models.sources import GatesThenUps, Interleaved, ParamSource, Stacked, Tensor, whole

_GATE_UP_AXES = ("experts", None, "gate_up", "embed")
_DOWN_AXES = ("experts", "embed", None)
_SMALL_TILE, _TILE = 8, 32
"""Pairs multiplied at a time on CPU, where experts have few of them and where they have many."""
_FEW = 16
_FIXED_TILE = 128
"""The same where a fixed order is in force: the rows that its products take at a time."""

_Activation = Callable[[jax.Array], jax.Array]
_Grouped = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(x f32 [T, E], token i32 [P], weights f32 [P], sizes i32 [X], gate_up, down) -> f32 [P, E].

`token` and `weights` are of the pairs in the order of their experts, of which expert n has
sizes[n]; results of pairs behind the last expert's are meaningless.
"""


class Experts(nnx.Module):
    """The routed experts of a layer, each down(act(gate(x)) * up(x)), their weights `gate_up`
    [X, I, 2, E] and `down` [X, E, I] cut over the devices by experts.

    The number of experts is rounded up to a multiple of the devices; those added are zero, and no
    token is ever sent there.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        *,
        count: int,
        width: int,
        activation: str = "silu",
    ) -> None:
        count, hidden = config.padded(count), config.hidden_size
        self.gate_up = param((count, width, 2, hidden), dtype)
        self.down = param((count, hidden, width), dtype)
        self.activation = activation
        self.devices = config.tensor_parallel

    def __call__(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """Each token's experts, weighted and summed: f32 [T, E], this device's part of the sum.

        `x` f32 [T, E]; `ids` i32 [T, k], counted over all devices; `weights` f32 [T, k]. On CPU the
        bits of a token do not depend on the others.
        """
        gate_up, down = self.gate_up[...], self.down[...]
        count, per_token = gate_up.shape[0], ids.shape[1]
        local = ids - first_of_mine(count, self.devices)
        mine = (local >= 0) & (local < count)
        live = live_among(x.shape[0])
        if live is not None:
            mine &= live.mask()[:, None]
        expert = jnp.where(mine, local, count).reshape(-1)  # others' pairs stand last
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)
        counts = expert[:, None] == lax.iota(jnp.int32, count)[None, :]
        act = ACTIVATIONS[self.activation]
        pairs = lax.platform_dependent(
            x,
            order // per_token,
            weights.reshape(-1)[order],
            jnp.sum(counts, axis=0, dtype=jnp.int32),
            gate_up,
            down,
            cpu=_by_tiles(act),
            default=_by_ragged_dot(act) if order_in_force() is None else _by_tiles(act),
        )
        places = lax.iota(jnp.int32, order.size)
        place = jnp.zeros_like(order).at[order].set(places, unique_indices=True)
        found = jnp.where(mine[:, :, None], pairs[place.reshape(ids.shape)], 0.0)
        return in_order(found)

    @staticmethod
    def sources(
        config: ModelConfig,
        prefix: str,
        *,
        count: int,
        width: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        fused: str | None = None,
    ) -> dict[str, ParamSource]:
        """From `{prefix}{expert}.{name}.weight` with the names of gate, up and down, or, where the
        checkpoint has those, from `{fused}gate_up_proj` and `{fused}down_proj`, which hold all
        experts (`fused` None: `prefix`).
        """
        hidden = config.hidden_size
        fused = prefix if fused is None else fused

        def joined(expert: int) -> ParamSource:
            gate, up = (
                Tensor(f"{prefix}{expert}.{name}.weight", (width, hidden)) for name in names[:2]
            )
            return Interleaved(tensors=(gate, up))

        downs = [whole(f"{prefix}{x}.{names[2]}.weight", (hidden, width)) for x in range(count)]
        both = Tensor(f"{fused}gate_up_proj", (count, 2 * width, hidden))
        return {
            "gate_up": Stacked(
                parts=tuple(joined(expert) for expert in range(count)),
                axes=_GATE_UP_AXES,
                instead=GatesThenUps(tensors=(both,), axes=_GATE_UP_AXES),
            ),
            "down": Stacked(
                parts=tuple(downs),
                axes=_DOWN_AXES,
                instead=whole(f"{fused}down_proj", (count, hidden, width), _DOWN_AXES),
            ),
        }


def route(logits: jax.Array, count: int, *, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """The `count` best experts of each token, best first, and their weights: i32 and f32 [T, k].

    `logits` f32 [T, X]. The weights are a softmax over all experts or, with `normalise`, over the
    chosen ones. Of experts with equal logits the one with the lower number comes first (torch.topk
    leaves their order open).
    """
    top, ids = lax.top_k(logits, count)
    powers = jnp.exp(top - top[:, :1])
    if normalise:
        total = in_order(powers[:, :, None])
    else:
        total = mean(jnp.exp(logits - top[:, :1])) * logits.shape[1]
    return ids, powers / total


def in_order(x: jax.Array) -> jax.Array:
    """The sum f32 [T, E] over the k slots of [T, k, E], in the same order everywhere, unlike a
    `reduce`.
    """
    total = x[:, 0]
    for slot in range(1, x.shape[1]):
        total = total + x[:, slot]
    return total


def _by_tiles(act: _Activation) -> _Grouped:
    """Expert by expert in tiles of a few pairs. A tile has the same number of rows whatever is in
    it, so that the bits of a pair do not depend on the others.
    """

    def run(
        x: jax.Array,
        token: jax.Array,
        weights: jax.Array,
        sizes: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
    ) -> jax.Array:
        pairs = token.size
        tile = _SMALL_TILE if pairs <= _FEW * sizes.size else _TILE
        if order_in_force() is not None:
            tile = _FIXED_TILE
        token, weights = jnp.pad(token, (0, tile)), jnp.pad(weights, (0, tile))
        starts = jnp.cumsum(sizes) - sizes
        hit = jnp.argsort(sizes == 0, stable=True)  # experts that have pairs come first

        def one_expert(n: jax.Array, out: jax.Array) -> jax.Array:
            expert = hit[n]
            gate_up_of, down_of = _pick(gate_up, expert), _pick(down, expert)

            def one_tile(n: jax.Array, out: jax.Array) -> jax.Array:
                first = starts[expert] + n * tile
                rows = x[lax.dynamic_slice_in_dim(token, first, tile)]
                scale = lax.dynamic_slice_in_dim(weights, first, tile)
                with live_rows(None):  # a tile's rows are not the step's
                    both = matmul(rows, gate_up_of)
                    result = matmul(_weighted(act, both, scale), down_of)
                # Rows past the expert's last pair are the next one's, which overwrites them.
                return lax.dynamic_update_slice_in_dim(out, result, first, 0)

            tiles = (sizes[expert] + tile - 1) // tile
            filled: jax.Array = lax.fori_loop(0, tiles, one_tile, out)
            return filled

        out = jnp.zeros((pairs + tile, x.shape[1]), jnp.float32)
        done: jax.Array = lax.fori_loop(0, jnp.sum(sizes > 0), one_expert, out)
        return done[:pairs]

    return run


def _pick(stack: jax.Array, expert: jax.Array) -> jax.Array:
    """stack[expert]. XLA:CPU slices 16-bit floats by way of float32, converting all experts; as
    integers it does not. The barrier keeps that view inside the loop: outside it would be a copy.
    """
    if stack.dtype.itemsize != 2:
        picked: jax.Array = lax.dynamic_index_in_dim(stack, expert, keepdims=False)
        return picked
    stack, expert = lax.optimization_barrier((stack, expert))
    raw = lax.bitcast_convert_type(stack, jnp.uint16)
    picked = lax.dynamic_index_in_dim(raw, expert, keepdims=False)
    return lax.bitcast_convert_type(picked, stack.dtype)


def _by_ragged_dot(act: _Activation) -> _Grouped:
    def run(
        x: jax.Array,
        token: jax.Array,
        weights: jax.Array,
        sizes: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
    ) -> jax.Array:
        count, width, _, hidden = gate_up.shape
        rows = x.astype(gate_up.dtype)[token]
        both = _ragged_matmul(rows, gate_up.reshape(count, width * 2, hidden), sizes)
        return _ragged_matmul(_weighted(act, both.reshape(-1, width, 2), weights), down, sizes)

    return run


def _ragged_matmul(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """[P, E] x [X, O, E] -> f32 [P, O]: the n-th run of rows, sizes[n] long, with weight n."""
    return lax.ragged_dot_general(
        x.astype(weight.dtype),
        weight,
        sizes,
        lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0]),
        precision="highest" if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _weighted(act: _Activation, both: jax.Array, weights: jax.Array) -> jax.Array:
    """act(gate) * up * weight f32 [P, I], of [P, I, 2]. The pairs are weighted here, not after the
    last matmul, since a product that is added to something is rounded once or twice, as the
    compiler likes.
    """
    return act(both[:, :, 0]) * both[:, :, 1] * weights[:, None]

"""Mixtral 8x7B and 8x22B: Llama layers with a mixture of experts in the place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpaged.errors import ModelLoadError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.config_reader import MOST_EXPERTS, ConfigReader
from jaxpaged.models.layers import GatedMLP, matmul, param
from jaxpaged.models.llama import LlamaConfig, LlamaForCausalLM, LlamaLayer
from jaxpaged.models.moe import Experts, route
from jaxpaged.models.parallel import all_sum
from jaxpaged.models.rope import read_max_position, read_rope
from jaxpaged.models.sources import ParamSource, under, whole

ARCHITECTURES = ("MixtralForCausalLM",)
EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""The number of experts has both names: transformers 5 writes the other one for some families."""
_KV_HEADS = 8
_THETA = 1e6
_MAX_POSITION = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig(LlamaConfig):
    """Llama with mixtures of experts in some layers."""

    experts: int
    experts_per_token: int
    expert_width: int
    normalise: bool
    """Divide the weights of a token's experts by their sum."""
    dense_layers: frozenset[int] = frozenset()
    """Those that have a plain MLP."""
    shared_width: int | None = None
    """Of an expert that all tokens go through, weighted by a gate of its own."""


def read_config(fields: Mapping[str, Any], architecture: str, where: str) -> MixtureConfig:
    """Raises `ModelLoadError` for missing or impossible values, `UnsupportedModelError` for others'
    maths.
    """
    reader = ConfigReader(fields, where)
    reader.refuse_other_maths(understood=EXPERT_COUNTS)
    reader.require("hidden_act", ("silu",))
    reader.require("attention_bias", (False, None))
    dimensions = reader.dimensions(kv_heads=_KV_HEADS)
    window = fields.get("sliding_window")
    rope = read_rope(reader, default_theta=_THETA)
    max_position = read_max_position(reader, rope, _MAX_POSITION)
    return MixtureConfig(
        architecture=architecture,
        **dimensions,
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        rope=rope,
        max_position=max_position,
        tie_embeddings=reader.flag("tie_word_embeddings"),
        windows=reader.windows_alike(dimensions["num_layers"], window, max_position),
        expert_width=dimensions["intermediate_size"],
        normalise=True,
        **expert_counts(reader, experts=8, per_token=2),
    )


def expert_counts(reader: ConfigReader, *, experts: int, per_token: int) -> dict[str, Any]:
    """How many experts there are and a token is sent to, with the family's defaults."""
    given = {
        key: reader.integer(key, most=MOST_EXPERTS)
        for key in EXPERT_COUNTS
        if reader.fields.get(key)
    }
    if len(set(given.values())) > 1:
        raise ModelLoadError(f"{reader.where}: config {given} must agree.")
    experts = next(iter(given.values()), experts)
    per_token = reader.integer("num_experts_per_tok", per_token)
    if per_token > experts:
        raise ModelLoadError(
            f"{reader.where}: config num_experts_per_tok={per_token} is more than the {experts} "
            "experts."
        )
    return {"experts": experts, "experts_per_token": per_token}


class Mixture(nnx.Module):
    """Routed experts, and possibly a shared one. The router works in float32."""

    def __init__(self, config: MixtureConfig, dtype: jnp.dtype) -> None:
        exact = jnp.dtype(jnp.float32)
        self.router = param((config.experts, config.hidden_size), exact)
        self.experts = Experts(config, dtype, count=config.experts, width=config.expert_width)
        if config.shared_width is not None:
            self.shared = GatedMLP(config, dtype, width=config.shared_width, reduce=False)
            self.shared_gate = param((1, config.hidden_size), exact)
        self.has_shared = config.shared_width is not None
        self.count = config.experts_per_token
        self.normalise = config.normalise
        self.devices = config.tensor_parallel

    def __call__(self, x: jax.Array, onto: jax.Array) -> jax.Array:
        logits = matmul(x, self.router[...])
        ids, weights = route(logits, self.count, normalise=self.normalise)
        out = self.experts(x, ids, weights)
        if self.has_shared:
            # Eight equal columns, since XLA:CPU has another code path for one. The barrier keeps
            # product and sum apart: fused, they are rounded once or twice as the compiler likes.
            gate = jax.nn.sigmoid(matmul(x, jnp.tile(self.shared_gate[...], (8, 1)))[:, :1])
            out = out + lax.optimization_barrier(gate * self.shared(x))
        return onto + all_sum(out, self.devices)


class MixtureLayer(LlamaLayer):
    """A Llama layer; the MLP of some is a mixture."""

    def feed_forward(self, config: LlamaConfig, index: int, dtype: jnp.dtype) -> nnx.Module:
        assert isinstance(config, MixtureConfig)
        if index in config.dense_layers:
            return super().feed_forward(config, index, dtype)
        return Mixture(config, dtype)


class MixtralForCausalLM(LlamaForCausalLM):
    """Embedding, layers, norm and (possibly tied) head."""

    layer_type: ClassVar[type[LlamaLayer]] = MixtureLayer

    @staticmethod
    def layer_sources(config: ModelConfig, index: int) -> dict[str, ParamSource]:
        assert isinstance(config, MixtureConfig)
        prefix = f"model.layers.{index}."
        router = (config.experts, config.hidden_size)
        experts = Experts.sources(
            config,
            prefix + "block_sparse_moe.experts.",
            count=config.experts,
            width=config.expert_width,
            names=("w1", "w3", "w2"),
            fused=prefix + "mlp.experts.",
        )
        mixture = {
            "router": whole(
                prefix + "block_sparse_moe.gate.weight",
                router,
                instead=whole(prefix + "mlp.gate.weight", router),
            ),
            **under("experts", experts),
        }
        return without_mlp(config, index) | under("mlp", mixture)


def without_mlp(config: ModelConfig, index: int) -> dict[str, ParamSource]:
    """The sources of what a layer has in common with Llama's."""
    sources = LlamaForCausalLM.layer_sources(config, index)
    return {path: source for path, source in sources.items() if not path.startswith("mlp.")}

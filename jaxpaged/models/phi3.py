"""Phi-3, Phi-3.5 (mini and medium), Phi-4 and Phi-4-mini: Llama with fused projections.

The long-context models have "longrope" positions, Phi-4-mini rotates three quarters of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.config_reader import ConfigReader
from jaxpaged.models.llama import LlamaConfig, LlamaForCausalLM
from jaxpaged.models.rope import read_max_position, read_rope
from jaxpaged.models.sources import GroupedQKV, Interleaved, ParamSource, Tensor, whole

ARCHITECTURES = ("Phi3ForCausalLM",)
_CONTEXT = 4096


def read_config(fields: Mapping[str, Any], architecture: str, where: str) -> LlamaConfig:
    """Raises `ModelLoadError` for missing or impossible values, `UnsupportedModelError` for others'
    maths.
    """
    reader = ConfigReader(_longrope_spelled_out(fields), where)
    reader.refuse_other_maths()
    reader.require("hidden_act", ("silu",))
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.require(key, (False, None))
    for key in ("full_attn_mod", "interpolate_factor"):
        reader.require(key, (1, None))
    dimensions = reader.dimensions()
    rope = read_rope(reader, partial=True)
    if rope.kind not in ("default", "longrope"):
        raise UnsupportedModelError(
            f"{where}: rope_type {rope.kind!r} is not supported for this architecture; supported: "
            "default, longrope."
        )
    max_position = read_max_position(reader, rope, _CONTEXT)
    window = fields.get("sliding_window")
    return LlamaConfig(
        architecture=architecture,
        **dimensions,
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        rope=rope,
        max_position=max_position,
        tie_embeddings=reader.flag("tie_word_embeddings"),
        windows=reader.windows_alike(dimensions["num_layers"], window, max_position),
    )


def _longrope_spelled_out(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The family's defaults of what "longrope" needs, and its oldest name for it: "yarn"."""
    out = {"max_position_embeddings": _CONTEXT, **fields}
    for key in ("rope_parameters", "rope_scaling"):
        scaling = fields.get(key)
        if not isinstance(scaling, Mapping):
            continue
        names = {k: "longrope" for k in ("rope_type", "type") if scaling.get(k) == "yarn"}
        out[key] = {**scaling, **names}
        if scaling.get("original_max_position_embeddings") is None:
            out.setdefault("original_max_position_embeddings", _CONTEXT)
    return out


class Phi3ForCausalLM(LlamaForCausalLM):
    """Llama, from a checkpoint whose q, k and v, and gate and up, are one tensor each."""

    @staticmethod
    def layer_sources(config: ModelConfig, index: int) -> dict[str, ParamSource]:
        prefix = f"model.layers.{index}."
        hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        axes = ("kv_heads", "heads_of_group", "head_dim", "embed")
        return {
            "attention_norm.weight": whole(prefix + "input_layernorm.weight", (hidden,)),
            "mlp_norm.weight": whole(prefix + "post_attention_layernorm.weight", (hidden,)),
            "attention.qkv": GroupedQKV(
                tensors=_parts(f"{prefix}self_attn.qkv_proj.weight", (q, kv, kv), hidden),
                axes=axes,
                repeat=config.kv_repeat,
            ),
            "attention.out": whole(
                f"{prefix}self_attn.o_proj.weight", (hidden, q), ("embed", "heads")
            ),
            "mlp.gate_up": Interleaved(
                tensors=_parts(f"{prefix}mlp.gate_up_proj.weight", (width, width), hidden),
                axes=("mlp", "gate_up", "embed"),
            ),
            "mlp.down": whole(f"{prefix}mlp.down_proj.weight", (hidden, width), ("embed", "mlp")),
        }


def _parts(name: str, rows: tuple[int, ...], columns: int) -> tuple[Tensor, ...]:
    """Tensors that were saved as one, below each other."""
    starts = [sum(rows[:i]) for i in range(len(rows))]
    return tuple(
        Tensor(name, (count, columns), first_row=start, total_rows=sum(rows))
        for count, start in zip(rows, starts, strict=True)
    )

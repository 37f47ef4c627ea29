"""The dense Qwen family: Qwen2, Qwen2.5, QwQ (biases on q, k and v) and Qwen3 (a norm over each
head of q and k), and models distilled into them, such as DeepSeek-R1-Distill-Qwen.

The layers are Llama's, with these options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpaged.models.config_reader import FULL, SLIDING, ConfigReader
from jaxpaged.models.llama import LlamaConfig
from jaxpaged.models.rope import context_length, read_rope

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
_KV_HEADS = 32
_QWEN3_HEAD_DIM = 128
_WINDOW = 4096
_FULL_LAYERS = 28


def read_config(fields: Mapping[str, Any], architecture: str, where: str) -> LlamaConfig:
    """Raises `ModelLoadError` for missing or impossible values, `UnsupportedModelError` for others'
    maths.
    """
    reader = ConfigReader(fields, where)
    reader.refuse_other_maths(understood=("use_sliding_window",))
    reader.require("hidden_act", ("silu",))
    reader.require("use_mrope", (False, None))
    qwen3 = architecture.startswith("Qwen3")
    dimensions = reader.dimensions(kv_heads=_KV_HEADS, head_dim=_QWEN3_HEAD_DIM if qwen3 else None)
    rope = read_rope(reader, head_dim=dimensions["head_dim"])
    biased = reader.flag("attention_bias")
    return LlamaConfig(
        architecture=architecture,
        **dimensions,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=context_length(rope, reader.integer("max_position_embeddings", 32768)),
        tie_embeddings=reader.flag("tie_word_embeddings"),
        windows=qwen_windows(reader, dimensions["num_layers"]),
        qkv_bias=biased if qwen3 else True,
        out_bias=biased and qwen3,
        qk_norm=qwen3,
    )


def qwen_windows(reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """With `use_sliding_window`, the layers from `max_window_layers` on have a window."""
    window = reader.fields.get("sliding_window", _WINDOW)
    if not reader.flag("use_sliding_window"):
        window = None
    first = reader.integer("max_window_layers", _FULL_LAYERS, least=0)
    first = layers if window is None else first
    return reader.windows([FULL if i < first else SLIDING for i in range(layers)], window)

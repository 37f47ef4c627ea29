"""The dense Qwen family: Qwen2, Qwen2.5, QwQ (biases on q, k and v) and Qwen3 (a norm over each
head of q and k), and models distilled into them, such as DeepSeek-R1-Distill-Qwen.

The layers are Llama's, with these options.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxpaged.models.config_reader import FULL, SLIDING, ConfigReader
from jaxpaged.models.llama import LlamaConfig
from jaxpaged.models.rope import read_max_position, read_rope

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
_KV_HEADS = 32
_QWEN3_HEAD_DIM = 128
_WINDOW = 4096
_FULL_LAYERS = 28
_MAX_POSITION = 32768


def read_config(fields: Mapping[str, Any], architecture: str, where: str) -> LlamaConfig:
    """Raises `ModelLoadError` for missing or impossible values, `UnsupportedModelError` for others'
    maths.
    """
    reader = ConfigReader(fields, where)
    qwen3 = architecture.startswith("Qwen3")
    refuse_other_qwens(reader, qwen3=qwen3)
    reader.require("use_mrope", (False, None))
    dimensions = reader.dimensions(kv_heads=_KV_HEADS, head_dim=_QWEN3_HEAD_DIM if qwen3 else None)
    rope = read_rope(reader, head_dim=dimensions["head_dim"])
    max_position = read_max_position(reader, rope, _MAX_POSITION)
    biased = reader.flag("attention_bias")
    return LlamaConfig(
        architecture=architecture,
        **dimensions,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=max_position,
        tie_embeddings=reader.flag("tie_word_embeddings"),
        windows=qwen_windows(reader, dimensions["num_layers"], max_position),
        qkv_bias=biased if qwen3 else True,
        out_bias=biased and qwen3,
        qk_norm=qwen3,
    )


def refuse_other_qwens(
    reader: ConfigReader, *, qwen3: bool, understood: Collection[str] = ()
) -> None:
    """Refuse the maths of others. The third generation always has norms over heads, and some of its
    configs say so.
    """
    own = ("use_sliding_window", "use_qk_norm") if qwen3 else ("use_sliding_window",)
    reader.refuse_other_maths(understood=(*understood, *own))
    reader.require("hidden_act", ("silu",))
    if qwen3:
        reader.require("use_qk_norm", (True, None))


def qwen_windows(reader: ConfigReader, layers: int, max_position: int) -> tuple[int | None, ...]:
    """With `use_sliding_window`, the layers from `max_window_layers` on have a window."""
    window = reader.fields.get("sliding_window", _WINDOW)
    if not reader.flag("use_sliding_window"):
        window = None
    first = reader.integer("max_window_layers", _FULL_LAYERS, least=0)
    first = layers if window is None else first
    kinds = [FULL if i < first else SLIDING for i in range(layers)]
    return reader.windows(kinds, window, max_position)

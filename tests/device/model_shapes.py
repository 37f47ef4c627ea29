"""Dimensions of well-known models, for arithmetic only."""

from __future__ import annotations

import dataclasses

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.rope import RopeConfig

LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope=RopeConfig(500_000.0),
    max_position=8192,
    tie_embeddings=False,
)
QWEN3_0_6B = dataclasses.replace(LLAMA_3_8B, num_layers=28, num_heads=16, max_position=40_960)
OPT_13B = dataclasses.replace(
    LLAMA_3_8B, num_layers=40, num_heads=40, num_kv_heads=40, max_position=2048
)
TINY = dataclasses.replace(
    LLAMA_3_8B, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position=256
)

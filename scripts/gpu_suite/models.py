"""Llama-shaped models with random weights, made on the device: no checkpoint is read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from gpu_suite.context import Context

STD = 0.02


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    def config(self) -> dict[str, Any]:
        """Hugging Face's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "initializer_range": STD,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }

    @property
    def step_weight_bytes(self) -> int:
        """bfloat16 weights that every decode step reads: all but the rows of the embedding."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        head = self.hidden * self.vocab
        norms = self.hidden * (2 * self.layers + 1)
        return 2 * (self.layers * (attention + mlp) + head + norms)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of a bfloat16 cache, all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


LLAMA_8B = ModelShape("8B", 4096, 14336, 32, 32, 8, 128, 128_256, False)
LLAMA_1B = ModelShape("1B", 2048, 8192, 16, 32, 8, 64, 128_256, True)
TINY = ModelShape("tiny", 64, 128, 2, 4, 2, 16, 512, False)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of an engine."""

    decode_buckets: tuple[int, ...]
    prefill_tokens: int
    max_model_len: int
    blocks: int | None
    """None: as many as the memory plan finds room for."""

    @property
    def max_num_seqs(self) -> int:
        return self.decode_buckets[-1]


def open_engine(
    ctx: Context,
    shape: ModelShape,
    limits: Limits,
    backend: str,
    *,
    utilization: float,
    deterministic: bool | None = None,
    enable_prefix_caching: bool = False,
) -> Any:
    """An `LLM` of that shape, its programs compiled and warm. Times are recorded."""
    from jaxpaged import LLM
    from jaxpaged.device import model_loader

    folder = ctx.cache / f"model_{shape.name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    start = time.monotonic()
    # On the host, billions of random numbers would take minutes.
    with mock.patch.object(model_loader, "load_parameters", _random_parameters):
        llm = LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend=backend,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.prefill_tokens,
            decode_buckets=limits.decode_buckets,
            prefill_buckets=(limits.prefill_tokens,),
            num_gpu_blocks_override=limits.blocks,
            gpu_memory_utilization=utilization,
            deterministic=deterministic,
            enable_prefix_caching=enable_prefix_caching,
            generation_config="none",
            enforce_eager=True,  # warmed up below
            disable_progress=True,
        )
    built = time.monotonic()
    runner = llm.engine.runner
    runner.warm_up(lambda done, total, program: None)
    ctx.row(
        f"start {shape.name}",
        build_s=built - start,
        warm_up_s=time.monotonic() - built,
        programs=len(runner.buckets.shapes),
        blocks=runner.num_blocks,
        backend=backend,
        deterministic=runner.deterministic,
        memory=runner.memory_bytes(),
    )
    return llm


def _random_parameters(
    reader: Any,
    model: Any,
    config: Any,
    shapes: Mapping[str, Any],
    mesh: Any,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """In place of `models.loading.load_parameters`. Vectors are 1 (norms) or 0 (biases)."""
    import jax
    import jax.numpy as jnp

    from jaxpaged.models.loading import sharding_of

    sources = model.sources(config)
    makers: dict[Any, Callable[..., Any]] = {}
    params: dict[str, Any] = {}
    for number, (path, leaf) in enumerate(shapes.items()):
        sharding = sharding_of(mesh, sources[path])
        vector = len(leaf.shape) == 1
        fill = (0.0 if "bias" in path else 1.0) if vector else None
        key = (leaf.shape, leaf.dtype, sharding, fill)
        if key not in makers:

            def make(seed: Any, leaf: Any = leaf, fill: float | None = fill) -> Any:
                if fill is not None:
                    return jnp.full(leaf.shape, fill, leaf.dtype)
                values = jax.random.normal(jax.random.key(seed), leaf.shape, jnp.bfloat16)
                return (values * STD).astype(leaf.dtype)

            makers[key] = jax.jit(make, out_shardings=sharding)
        params[path] = makers[key](number)
        progress(params[path].nbytes)
    jax.block_until_ready(params)
    return params

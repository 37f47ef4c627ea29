"""Tiny checkpoints and a tiny tokenizer, made from a seed with numpy alone (no torch, no network).

The same weights can be written as a Hugging Face folder and as a GGUF file, so that the two loading
paths can be compared with each other and with transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from tests.gguf_writer import Vocabulary, write_gguf

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "There are many ways to serve a language model; paging its memory is one of them.",
    "def main(argument):\n    return [item for item in argument if item > 10]\n",
    "It's what we'd expect: they're here, and we'll see 3 of the 12 things that happened in 1984.",
    "Where the water is deep, the river is quiet. When the wind stops, the trees are still.",
    "Höhe, naïve, 中文, かな, emoji 🙂 and more words, one after another, in a long line of words.",
]

_TORCH_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def tiny_config(model_type: str = "llama", **overrides: Any) -> dict[str, Any]:
    """config.json of a 2-layer model; any field can be replaced or added."""
    name = {"llama": "Llama", "mistral": "Mistral"}[model_type]
    config: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    if model_type == "llama":
        config |= {"rope_scaling": None, "attention_bias": False, "mlp_bias": False}
    else:
        config["sliding_window"] = 32
    return config | overrides


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by Hugging Face name, in the config's torch_dtype.

    The spread of 0.2 is wide enough that greedy outputs vary from step to step.
    """
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    matrices = {"model.embed_tokens": (config["vocab_size"], hidden)}
    norms = ["model.norm"]
    biased = []
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        matrices |= {
            f"{attention}.q_proj": (q_rows, hidden),
            f"{attention}.k_proj": (kv_rows, hidden),
            f"{attention}.v_proj": (kv_rows, hidden),
            f"{attention}.o_proj": (hidden, q_rows),
            f"{mlp}.gate_proj": (inner, hidden),
            f"{mlp}.up_proj": (inner, hidden),
            f"{mlp}.down_proj": (hidden, inner),
        }
        norms += [
            f"model.layers.{i}.input_layernorm",
            f"model.layers.{i}.post_attention_layernorm",
        ]
        if config.get("attention_bias"):
            biased += [f"{attention}.{p}_proj" for p in "qkvo"]
        if config.get("mlp_bias"):
            biased += [f"{mlp}.{p}_proj" for p in ("gate", "up", "down")]
    if not config.get("tie_word_embeddings"):
        matrices["lm_head"] = (config["vocab_size"], hidden)
    spread = config["initializer_range"]
    weights = {f"{n}.weight": rng.normal(0, spread, shape) for n, shape in matrices.items()}
    weights |= {f"{n}.weight": rng.normal(1, 0.1, hidden) for n in norms}
    weights |= {f"{n}.bias": rng.normal(0, spread, matrices[n][0]) for n in biased}
    dtype = _TORCH_DTYPES[config["torch_dtype"]]
    return {name: value.astype(dtype) for name, value in weights.items()}


def tiny_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries; `SPECIAL_TOKENS` come first."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def write_tokenizer(folder: Path, vocab_size: int = 512) -> None:
    """Save the tiny tokenizer as transformers would."""
    tokenizer = tiny_tokenizer(vocab_size)
    # Merges give out before 512. Ids without a token are never drawn, so the rest is filled up.
    tokenizer.add_tokens([f"<filler {i}>" for i in range(tokenizer.get_vocab_size(), vocab_size)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tiny_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny Llama checkpoint with its tokenizer; `overrides` are config fields."""
    return _write_folder(folder, tiny_config("llama", **overrides), seed)


def tiny_mistral(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny Mistral checkpoint (sliding window 32) with its tokenizer."""
    return _write_folder(folder, tiny_config("mistral", **overrides), seed)


def _write_folder(folder: Path, config: dict[str, Any], seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file(tiny_weights(config, seed), folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, min(512, config["vocab_size"]))
    return folder


def tiny_gguf(path: Path, *, seed: int = 0, quant: str = "F32", **overrides: Any) -> Path:
    """Write the weights of `tiny_llama(seed=seed, **overrides)` as a GGUF file.

    `quant` is the GGML type of the matrices (F32, F16, BF16, Q8_0, Q4_0, Q4_1); norms stay F32.
    """
    config = tiny_config("llama", **overrides)
    weights = tiny_weights(config | {"torch_dtype": "float32"}, seed)
    return write_gguf(
        path, config, weights, quant=quant, vocabulary=tiny_vocabulary(config["vocab_size"])
    )


def tiny_vocabulary(vocab_size: int = 512) -> Vocabulary:
    """The tiny tokenizer, for `write_gguf`."""
    return Vocabulary(tiny_tokenizer(min(512, vocab_size)), SPECIAL_TOKENS, CHAT_TEMPLATE)

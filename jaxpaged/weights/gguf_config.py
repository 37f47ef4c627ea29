"""A Hugging Face style config, made from the metadata of a Llama-type GGUF file."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.weights.gguf_file import GGUFFile

ROPE_FREQS = "rope_freqs.weight"
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def hf_config_of(file: GGUFFile) -> dict[str, Any]:
    """The config of a file whose `general.architecture` is llama (Llama, Mistral, SmolLM2, ...).

    Raises `UnsupportedModelError` for other architectures and for settings that would change the
    mathematics, `ModelLoadError` for missing metadata.
    """
    architecture = file.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported: "
            "'llama'. Load the safetensors checkpoint of this model instead."
        )
    hidden = _int(file, "llama.embedding_length")
    heads = _int(file, "llama.attention.head_count")
    head_dim = _int(file, "llama.attention.key_length", hidden // heads)
    _refuse_other_maths(file, head_dim)
    window = file.get("llama.attention.sliding_window")
    name = "Mistral" if window else "Llama"
    config: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "vocab_size": _tensor_shape(file, "token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": _int(file, "llama.feed_forward_length"),
        "num_hidden_layers": _int(file, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _int(file, "llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _int(file, "llama.context_length"),
        "rms_norm_eps": _float(file, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _float(file, "llama.rope.freq_base", 10000.0),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if window:
        config["sliding_window"] = int(window)
    config["rope_scaling"] = _rope_scaling(file, head_dim, config["rope_theta"])
    for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = file.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            config[f"{key}_token_id"] = token
    if not file.quantized:
        kinds = Counter(t.type_name for t in file.tensors.values() if len(t.shape) > 1)
        config["torch_dtype"] = _TORCH_NAMES[kinds.most_common(1)[0][0]]
    return config


def generation_config_of(file: GGUFFile) -> dict[str, Any]:
    """What a generation_config.json would say: the ids that end an answer."""
    ends = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(token for token in ends if token is not None))
    return {"eos_token_id": unique} if unique else {}


def _refuse_other_maths(file: GGUFFile, head_dim: int) -> None:
    rope_dim = file.get("llama.rope.dimension_count", head_dim)
    value_dim = file.get("llama.attention.value_length", head_dim)
    problem = None
    if file.get("llama.expert_count"):
        problem = f"llama.expert_count={file.get('llama.expert_count')} (mixture of experts)"
    elif rope_dim != head_dim:
        problem = f"llama.rope.dimension_count={rope_dim} (the head has {head_dim})"
    elif value_dim != head_dim:
        problem = f"llama.attention.value_length={value_dim} (keys have {head_dim})"
    if problem is not None:
        raise UnsupportedModelError(f"{file.path}: {problem} is not supported.")


def _rope_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    if ROPE_FREQS in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    kind = file.get("llama.rope.scaling.type", "none")
    legacy = file.get("llama.rope.scale_linear", 1.0)
    factor = file.get("llama.rope.scaling.factor", legacy)
    if kind == "none" and factor == 1.0:
        return None
    if kind == "linear" or kind == "none":
        return {"rope_type": "linear", "factor": _short(factor)}
    if kind == "yarn":
        original = _int(file, "llama.rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "factor": _short(factor),
            "original_max_position_embeddings": original,
        }
    raise UnsupportedModelError(f"{file.path}: llama.rope.scaling.type={kind!r} is not supported.")


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Recover Llama 3's scaling parameters from the frequency divisors stored in the file.

    Converters store the divisors only. They are 1 for fast and `factor` for slow frequencies;
    the published models all use 1, 4 and 8192 for the rest, so that is checked, not fitted.
    """
    tensor = file.tensors[ROPE_FREQS]
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise UnsupportedModelError(
            f"{file.path}: {ROPE_FREQS} is {tensor.type_name} {tensor.shape}, expected F32 "
            f"({head_dim // 2},)."
        )
    stored = np.fromfile(file.path, np.float32, head_dim // 2, offset=tensor.offset)
    factor, low, high, original = _short(float(stored.max())), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    if not np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise UnsupportedModelError(
            f"{file.path}: {ROPE_FREQS} does not follow Llama 3's scaling (low 1, high 4, original "
            f"context {original}); other frequency tables are not supported."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _int(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(
            f"{file.path}: metadata {key!r} must be a positive integer, got {value!r}."
        )
    return value


def _float(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.get(key, default)
    if not isinstance(value, (int, float)) or not value > 0:
        raise ModelLoadError(
            f"{file.path}: metadata {key!r} must be a positive number, got {value!r}."
        )
    return _short(value)


def _short(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tensor_shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise ModelLoadError(f"{file.path} has no tensor {name!r}.")
    return file.tensors[name].shape

"""Writes GGUF files from Hugging Face style configs and weights, as llama.cpp's converters do.

Tensor names come from the table of the `gguf` package, not from the reader that the files test.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}
"""model_type -> what llama.cpp calls it."""

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level tokenizer to store with the model."""

    tokenizer: Tokenizer
    special_tokens: list[str]
    chat_template: str


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    *,
    quant: str = "F32",
    vocabulary: Vocabulary | None = None,
) -> Path:
    """Write `weights` (Hugging Face names, float32) as a GGUF file of the config's model_type.

    `quant` is the GGML type of the matrices; vectors stay F32. `config` may have its rope settings
    in the old keys or in transformers 5's `rope_parameters`.
    """
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    _add_family(writer, config)
    _add_rope(writer, config)
    if vocabulary is not None:
        _add_vocabulary(writer, vocabulary, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, value in _split_latents(_stack_experts(weights), config).items():
        stored = np.ascontiguousarray(_as_stored(name, value, config), np.float32)
        kind = gguf.GGMLQuantizationType[quant if value.ndim > 1 else "F32"]
        stem, dot, suffix = name.rpartition(".")
        ours = names.get_name(stem)
        assert ours is not None, f"{name} has no name in {architecture.name}"
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            writer.add_tensor(ours + dot + suffix, gguf.quantize(stored, kind))
        else:
            writer.add_tensor(ours + dot + suffix, gguf.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def head_dim_of(config: Mapping[str, Any]) -> int:
    size: int = config["hidden_size"] // config["num_attention_heads"]
    return config.get("head_dim") or size


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    kind, head_dim = config["model_type"], head_dim_of(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if kind == "deepseek_v3" else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if kind not in ("qwen2", "phi3", "deepseek_v2", "deepseek_v3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def _add_family(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    kind = config["model_type"]
    if kind == "mixtral" or kind == "qwen3_moe":
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if kind == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if kind in ("mistral", "gemma2", "gemma3_text") and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    if kind == "phi3":  # llama.cpp tells Phi-3 and Phi-4 apart by a zero
        writer.add_sliding_window(config["sliding_window"] or 0)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if kind.startswith("deepseek"):
        _add_deepseek(writer, config)
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_deepseek(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """V2 as files of 2024 have it, V3 as later ones: with latent sizes, groups and a gating."""
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rotary, config["v_head_dim"]
    if config["model_type"] == "deepseek_v2":
        writer.add_key_length(key)
        writer.add_value_length(value)
    else:
        writer.add_key_length(latent + rotary)
        writer.add_value_length(latent)
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)


def _add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    head_dim = head_dim_of(config)
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rotary = config.get("qk_rope_head_dim") or int(part * head_dim)
    writer.add_rope_dimension_count(rotary)
    if config["model_type"] == "phi3":
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "longrope":
        ratio = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
        writer.add_rope_scaling_attn_factors(factor)
        for tensor, key in (("long", "long_factor"), ("short", "short_factor")):
            table = np.array(rope[key], np.float32)
            assert table.shape == (rotary // 2,)
            writer.add_tensor(f"rope_factors_{tensor}.weight", table)
    elif kind == "linear" or kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    else:
        assert kind == "default", f"rope_type {kind} is not written"


def _stack_experts(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All tensors, those of experts joined to [experts, out, in]."""
    stacked: dict[str, np.ndarray] = {}
    lists: dict[str, list[np.ndarray]] = {}
    for name in sorted(weights, key=_expert_number):
        match = _EXPERT.fullmatch(name)
        if match is None:
            stacked[name] = weights[name]
        else:
            lists.setdefault(f"{match[1]}.{match[3]}", []).append(weights[name])
    return stacked | {name: np.stack(values) for name, values in lists.items()}


def _split_latents(
    weights: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """V3's projections from the latent: those of keys, transposed, apart from those of values."""
    out: dict[str, np.ndarray] = {}
    for name, value in weights.items():
        if config["model_type"] != "deepseek_v3" or not name.endswith("kv_b_proj.weight"):
            # Its suffix is no name of llama.cpp's, which calls it a bias.
            out[name.replace("e_score_correction_bias", "e_score_correction.bias")] = value
            continue
        nope, heads = config["qk_nope_head_dim"], config["num_attention_heads"]
        both = value.reshape(heads, -1, value.shape[1])
        out[name.replace("kv_b", "k_b")] = both[:, :nope].swapaxes(1, 2)
        out[name.replace("kv_b", "v_b")] = both[:, nope:]
    return out


def _expert_number(name: str) -> int:
    match = _EXPERT.fullmatch(name)
    return int(match[2]) if match else -1


def _as_stored(name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """llama.cpp's row order for q and k of its llama, and its 1 + w for Gemma's norms."""
    kind = config["model_type"]
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return value.astype(np.float32) + np.float32(1)
    if ARCHITECTURES[kind] == gguf.MODEL_ARCH.LLAMA:
        for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                halves = value.reshape(config[key], 2, head_dim_of(config) // 2, *value.shape[1:])
                return halves.swapaxes(1, 2).reshape(value.shape)
    return value


def _add_vocabulary(
    writer: gguf.GGUFWriter, vocabulary: Vocabulary, config: Mapping[str, Any]
) -> None:
    model = json.loads(vocabulary.tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = vocabulary.special_tokens
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    for i in range(len(tokens), config["vocab_size"]):
        tokens.append(f"[PAD{i}]")
        kinds.append(gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(vocabulary.chat_template)

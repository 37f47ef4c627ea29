"""The Hugging Face config of each family, from the metadata of its GGUF files."""

from __future__ import annotations

from typing import Any

from jaxpaged.weights.gguf_metadata import Metadata, shortest
from jaxpaged.weights.gguf_rope import longrope_scaling, rope_scaling

_SIGMOID = 2  # of expert_gating_func

# (experts, V3) -> (n_group, topk_group) of the published DeepSeek models. Files from before
# llama.cpp knew of groups leave them out.
_GROUPS = {(160, False): (8, 3), (256, True): (8, 4)}


def _common(meta: Metadata, name: str, model_type: str) -> dict[str, Any]:
    """The fields that all families share."""
    hidden = meta.integer("embedding_length")
    heads = meta.integer("attention.head_count")
    if meta.get("attention.key_length") is None and hidden % heads:
        raise meta.refusal(f"embedding_length={hidden} that is no multiple of head_count={heads}")
    head_dim = meta.integer("attention.key_length", hidden // heads)
    meta.require("attention.value_length", head_dim, f"keys have {head_dim}")
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
    }


def _full_rope(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """`config` with its rope scaling, for models that rotate whole heads."""
    head_dim = config["head_dim"]
    meta.require("rope.dimension_count", head_dim, f"the head has {head_dim}")
    return config | {"rope_scaling": rope_scaling(meta, head_dim, config["rope_theta"])}


def _silu(meta: Metadata, name: str, model_type: str) -> dict[str, Any]:
    config = _full_rope(meta, _common(meta, name, model_type))
    return config | {
        "hidden_act": "silu",
        "intermediate_size": meta.integer("feed_forward_length"),
    }


def llama_config(meta: Metadata) -> dict[str, Any]:
    """Llama, Mistral (with a window) and Mixtral (with experts) are one architecture there."""
    window = meta.optional_integer("attention.sliding_window")
    if meta.get("expert_count"):
        return _silu(meta, "Mixtral", "mixtral") | {
            "num_local_experts": meta.integer("expert_count"),
            "num_experts_per_tok": meta.integer("expert_used_count"),
            "sliding_window": window,
        }
    name = "Mistral" if window else "Llama"
    config = _silu(meta, name, name.lower())
    config["attention_bias"] = meta.has("blk.0.attn_q.bias")
    config["mlp_bias"] = meta.has("blk.0.ffn_up.bias")
    return config | ({"sliding_window": window} if window else {})


def qwen2_config(meta: Metadata) -> dict[str, Any]:
    return _silu(meta, "Qwen2", "qwen2") | {"use_sliding_window": False, "sliding_window": None}


def qwen3_config(meta: Metadata) -> dict[str, Any]:
    return _silu(meta, "Qwen3", "qwen3") | {
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def qwen3moe_config(meta: Metadata) -> dict[str, Any]:
    inner = meta.integer("expert_feed_forward_length")
    config = _full_rope(meta, _common(meta, "Qwen3Moe", "qwen3_moe"))
    return config | {
        "hidden_act": "silu",
        # Files whose layers all have experts may leave the dense width out; nothing uses it.
        "intermediate_size": meta.integer("feed_forward_length", inner),
        "moe_intermediate_size": inner,
        "num_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "norm_topk_prob": bool(meta.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _gemma(meta: Metadata, name: str, model_type: str, layers_of_27b: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share. Files do not store the attention scale: the 27B models alone
    divide by sqrt(hidden size / heads), which is not their head size."""
    config = _full_rope(meta, _common(meta, name, model_type))
    largest = config["num_hidden_layers"] == layers_of_27b
    per_head: int = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": meta.integer("feed_forward_length"),
        "query_pre_attn_scalar": per_head if largest else config["head_dim"],
        "attention_bias": False,
    }


def gemma1_config(meta: Metadata) -> dict[str, Any]:
    return _full_rope(meta, _common(meta, "Gemma", "gemma")) | {
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": meta.integer("feed_forward_length"),
        "attention_bias": False,
    }


def gemma2_config(meta: Metadata) -> dict[str, Any]:
    config = _gemma(meta, "Gemma2", "gemma2", layers_of_27b=46)
    meta.require("rope.freq_base_swa", config["rope_theta"], "all layers rotate alike")
    window = meta.integer("attention.sliding_window", 4096)
    caps = {
        key: meta.optional_number(key) if meta.get(key) is not None else default
        for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
    }
    layers = config["num_hidden_layers"]
    return config | caps | {"sliding_window": window, "layer_types": _layer_types(meta, layers, 2)}


def gemma3_config(meta: Metadata) -> dict[str, Any]:
    config = _gemma(meta, "Gemma3", "gemma3_text", layers_of_27b=62)
    layers = config["num_hidden_layers"]
    window = meta.optional_integer("attention.sliding_window")
    if window is None:
        # A window that no layer uses keeps the config's type.
        window, types = config["max_position_embeddings"], ["full_attention"] * layers
    else:
        types = _layer_types(meta, layers, 6)
    return config | {
        "attn_logit_softcapping": meta.optional_number("attn_logit_softcapping"),
        "final_logit_softcapping": meta.optional_number("final_logit_softcapping"),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10000.0),
        "sliding_window": window,
        "layer_types": types,
    }


def _layer_types(meta: Metadata, layers: int, period: int) -> list[str]:
    """Every `period`-th layer sees everything, unless the file lists which ones have a window."""
    pattern = meta.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int) and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise meta.refusal(f"attention.sliding_window_pattern={pattern!r:.80}")
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def phi3_config(meta: Metadata) -> dict[str, Any]:
    config = _common(meta, "Phi3", "phi3")
    head_dim, context = config["head_dim"], config["max_position_embeddings"]
    rotary = meta.integer("rope.dimension_count", head_dim)
    original = meta.integer("rope.scaling.original_context_length", context)
    return config | {
        "hidden_act": "silu",
        "intermediate_size": meta.integer("feed_forward_length"),
        **({} if rotary == head_dim else {"partial_rotary_factor": rotary / head_dim}),
        "rope_scaling": longrope_scaling(meta, rotary, context),
        "original_max_position_embeddings": original,
        "sliding_window": meta.optional_integer("attention.sliding_window"),
    }


def deepseek2_config(meta: Metadata) -> dict[str, Any]:
    """V2 scores experts with a softmax, V3 with sigmoids. Files since 2025 describe attention as it
    is computed on latents, with one KV head; the `_mla` keys then have a head's own sizes."""
    v3 = meta.get("expert_gating_func") == _SIGMOID
    heads = meta.integer("attention.head_count")
    latent, rotary = meta.integer("attention.kv_lora_rank"), meta.integer("rope.dimension_count")
    key, value = (
        meta.integer(f"attention.{part}_length_mla", meta.integer(f"attention.{part}_length"))
        for part in ("key", "value")
    )
    meta.get("attention.head_count_kv")
    theta = meta.number("rope.freq_base", 10000.0)
    scaling = rope_scaling(meta, rotary, theta)
    growth = meta.optional_number("rope.scaling.yarn_log_multiplier")
    if scaling is not None and growth is not None:
        # Published models have the same for both; the file stores a tenth of it.
        scaling["mscale"] = scaling["mscale_all_dim"] = shortest(10 * growth)
    experts = meta.integer("expert_count")
    groups, top_groups = _GROUPS.get((experts, v3), (1, 1))
    groups = meta.integer("expert_group_count", groups)
    name, model_type = ("DeepseekV3", "deepseek_v3") if v3 else ("DeepseekV2", "deepseek_v2")
    config = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": meta.integer("embedding_length"),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "q_lora_rank": meta.optional_integer("attention.q_lora_rank"),
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "intermediate_size": meta.integer("feed_forward_length"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "first_k_dense_replace": meta.optional_integer("leading_dense_block_count") or 0,
        "n_routed_experts": experts,
        "n_shared_experts": meta.integer("expert_shared_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "n_group": groups,
        "topk_group": meta.integer("expert_group_used_count", top_groups),
        "norm_topk_prob": bool(meta.get("expert_weights_norm", False)),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
    }
    if v3:
        return config | {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0,
        }
    return config | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}

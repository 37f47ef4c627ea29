"""DeepSeek V2 and V3: latent attention, groups of experts, shared experts, yarn."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
}
# Prompts of 130 and 17 tokens stand beyond and before the original context, and 60 crosses it.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
LENGTHS = (1, 17, 60, 130)


def published(fields: dict[str, Any]) -> dict[str, Any]:
    """As in the checkpoints on the hub: rope settings in two places, and settings that transformers
    no longer has.
    """
    rope = fields.pop("rope_parameters")
    for key in ("head_dim", "qk_head_dim", "mlp_bias", "rope_interleave"):
        fields.pop(key, None)
    v3 = fields["model_type"] == "deepseek_v3"
    fields |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
        "moe_layer_freq": 1,
        "ep_size": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "scoring_func": "sigmoid" if v3 else "softmax",
    }
    return fields | ({"topk_method": "noaux_tc", "num_nextn_predict_layers": 1} if v3 else {})


CASES = [
    # V2 and V2.5: a token may go to the experts of the best two of four groups.
    Case(
        name="deepseek-v2-groups",
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        config={
            **SIZES,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 16.0,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        prompts=LENGTHS,
        edit=published,
    ),
    # V2-Lite routes greedily; here with biases, all layers mixtures, and a temperature that
    # rotation and attention share unequally.
    Case(
        name="deepseek-v2-greedy",
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        config={
            **SIZES,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 0,
            "attention_bias": True,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5},
        },
        prompts=LENGTHS,
    ),
    Case(
        name="deepseek-v3",
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        config={
            **SIZES,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        prompts=LENGTHS,
        edit=published,
    ),
    # Moonlight and Kimi K2 have one group; weights as they are, pairs that stand half a head apart.
    Case(
        name="deepseek-v3-one-group",
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        config={
            **SIZES,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "q_lora_rank": None,
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "first_k_dense_replace": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
]

"""Each architecture's GGUF gives the config, names and values of its Hugging Face checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.weights.gguf_architectures import ARCHITECTURES
from jaxpaged.weights.gguf_config import hf_config_of
from jaxpaged.weights.gguf_file import GGUFFile
from jaxpaged.weights.gguf_reader import GGUFTensorReader
from tests import gguf_writer
from tests.gguf_writer import write_gguf

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 20000.0,
    "tie_word_embeddings": False,
}
_GEMMA = {
    "head_dim": 32,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 3.5,
}
_GELU = "gelu_pytorch_tanh"
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}
_LONG = {"long_factor": [1.0 + i / 4 for i in range(8)], "short_factor": [1.0] * 7 + [1.25]}

# name -> (model_type, what differs from _SIZES). Settings that GGUF does not store have the value
# that follows from the others.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 12, "num_experts_per_tok": 3, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-yarn": (
        "qwen3",
        {
            "head_dim": 16,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 11,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": ("gemma2", _GEMMA | {"sliding_window": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", _GEMMA | {"sliding_window": 8, "rope_theta": 1e6}),
    "gemma3-linear": (
        "gemma3_text",
        _GEMMA
        | {
            "sliding_window": 16,
            "final_logit_softcapping": None,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma": ("gemma", {"head_dim": 32, "tie_word_embeddings": True, "hidden_act": _GELU}),
    "deepseek2-lite": ("deepseek_v2", _DEEPSEEK | {"topk_method": "greedy", "q_lora_rank": None}),
    "deepseek2-v3": (
        "deepseek_v3",
        _DEEPSEEK
        | {
            "q_lora_rank": 32,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 24, "original_max_position_embeddings": 128}),
    "phi3-long": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_scaling": {"rope_type": "longrope", **_LONG},
        },
    ),
    "phi3-partial": (
        "phi3",
        {
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
    ),
}
_CASES = pytest.mark.parametrize("name", MODELS)

# Fields of a config that do not change what a model computes.
_IMMATERIAL = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "embd_pdrop", "eos_token_id",
    "head_dim", "initializer_range", "output_router_logits", "pad_token_id", "resid_pdrop",
    "router_aux_loss_coef", "router_jitter_noise", "transformers_version", "use_cache",
    "_sliding_window_pattern", "max_window_layers", "num_nextn_predict_layers",
    "pretraining_tp", "rope_theta",
}  # fmt: skip


Shapes = dict[str, tuple[int, ...]]


def _shapes(name: str) -> Shapes:
    """What transformers saves for a model. `test_names_are_those_that_transformers_saves` checks
    it where torch is there."""
    kind, changes = MODELS[name]
    c = {"model_type": kind} | _SIZES | changes
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for i in range(c["num_hidden_layers"]):
        parts = {f"{norm}.weight": (hidden,) for norm in norms}
        parts |= _latent_attention(c) if "kv_lora_rank" in c else _attention(c)
        parts |= _mlp(c) if i < c.get("first_k_dense_replace", 0) else _mixture(c) or _mlp(c)
        shapes |= {f"model.layers.{i}.{part}": shape for part, shape in parts.items()}
    return shapes


def _attention(c: dict[str, Any]) -> Shapes:
    kind, hidden, head = c["model_type"], c["hidden_size"], gguf_writer.head_dim_of(c)
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    parts: Shapes = {"self_attn.o_proj.weight": (hidden, q)}
    if kind == "phi3":
        return parts | {"self_attn.qkv_proj.weight": (q + 2 * kv, hidden)}
    for letter, rows in (("q", q), ("k", kv), ("v", kv)):
        parts[f"self_attn.{letter}_proj.weight"] = (rows, hidden)
        if kind == "qwen2":
            parts[f"self_attn.{letter}_proj.bias"] = (rows,)
        if kind in ("qwen3", "qwen3_moe", "gemma3_text") and letter != "v":
            parts[f"self_attn.{letter}_norm.weight"] = (head,)
    return parts


def _latent_attention(c: dict[str, Any]) -> Shapes:
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rotary, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    rank = c["q_lora_rank"]
    parts: Shapes = {
        "kv_a_proj_with_mqa": (latent + rotary, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }
    if rank is None:
        parts["q_proj"] = (heads * (nope + rotary), hidden)
    else:
        parts |= {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,)}
        parts["q_b_proj"] = (heads * (nope + rotary), rank)
    return {f"self_attn.{part}.weight": shape for part, shape in parts.items()}


def _mlp(c: dict[str, Any]) -> Shapes:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    down: Shapes = {"mlp.down_proj.weight": (hidden, inner)}
    if c["model_type"] == "phi3":
        return down | {"mlp.gate_up_proj.weight": (2 * inner, hidden)}
    return down | {f"mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}


def _mixture(c: dict[str, Any]) -> Shapes:
    """{} for models without experts."""
    counts = (c.get(f"{key}experts") for key in ("num_local_", "num_", "n_routed_"))
    experts = next((count for count in counts if count), 0)
    mixtral, hidden = c["model_type"] == "mixtral", c["hidden_size"]
    wide = c.get("moe_intermediate_size", c["intermediate_size"])
    block = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    parts: Shapes = {f"{block}.gate.weight": (experts, hidden)} if experts else {}
    if c["model_type"] == "deepseek_v3":
        parts["mlp.gate.e_score_correction_bias"] = (experts,)
    places = [(f"{block}.experts.{i}", wide) for i in range(experts)]
    if c.get("n_shared_experts"):
        places.append(("mlp.shared_experts", wide * c["n_shared_experts"]))
    for place, width in places:
        parts |= {f"{place}.{part}.weight": (width, hidden) for part in (gate, up)}
        parts[f"{place}.{down}.weight"] = (hidden, width)
    return parts


def _weights(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        tensor: rng.normal(0, 0.2, shape).astype(np.float32)
        for tensor, shape in sorted(_shapes(name).items())
    }


def _config(name: str) -> dict[str, Any]:
    """The config as published checkpoints write it."""
    kind, changes = MODELS[name]
    return {"model_type": kind, "sliding_window": None} | _SIZES | changes


def _write(path: Path, name: str, quant: str = "F32") -> GGUFFile:
    config = _config(name)
    config.setdefault("attn_logit_softcapping", None)
    return GGUFFile.open(write_gguf(path, config, _weights(name), quant=quant))


@_CASES
def test_f32_is_exact(tmp_path: Path, name: str) -> None:
    reader = GGUFTensorReader(_write(tmp_path / "m.gguf", name))
    expected = _weights(name)
    assert reader.names() == sorted(expected)
    for tensor, value in expected.items():
        assert reader.shape(tensor) == value.shape, tensor
        got = reader.read(tensor)
        assert got.dtype == np.float32
        if name.startswith("gemma") and tensor.endswith("norm.weight"):
            # 1 + w is what is stored, and what the model multiplies with
            np.testing.assert_array_equal(1 + got, 1 + value, err_msg=tensor)
        else:
            np.testing.assert_array_equal(got, value, err_msg=tensor)


@_CASES
def test_q8_0_stays_near_and_slices_agree(tmp_path: Path, name: str) -> None:
    reader = GGUFTensorReader(_write(tmp_path / "m.gguf", name, "Q8_0"))
    for tensor, value in _weights(name).items():
        got = reader.read(tensor)
        np.testing.assert_allclose(got, value, atol=np.abs(value).max() / 127, err_msg=tensor)
        for index in ((slice(1, 5),), (slice(None), slice(7, 41)), (slice(2, 8), slice(33, 35))):
            cut = index[: value.ndim]
            part = reader.read_slice(tensor, cut)
            np.testing.assert_array_equal(part, got[cut], err_msg=f"{tensor} {cut}", strict=True)


@_CASES
def test_names_are_those_that_transformers_saves(tmp_path: Path, name: str) -> None:
    model = _transformers_model(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert _shapes(name) == {key: value.shape for key, value in saved.items()}


def _transformers_model(name: str) -> Any:
    pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {k: v for k, v in _config(name).items() if k != "model_type"}
    config |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(MODELS[name][0], **config))


@_CASES
def test_config_equals_transformers(tmp_path: Path, name: str) -> None:
    expected = _transformers_model(name).config
    from transformers import AutoConfig

    ours = hf_config_of(_write(tmp_path / "m.gguf", name))
    assert ours["architectures"] == expected.architectures or expected.architectures is None
    got = AutoConfig.for_model(**{"pad_token_id": 0} | ours)
    theirs, mine = expected.to_dict(), got.to_dict()
    for key in sorted((theirs.keys() | mine.keys()) - _IMMATERIAL):
        # Some families have a switch that others lack: off and not there are the same.
        assert (mine.get(key) or None) == (theirs.get(key) or None), key
    assert gguf_writer.head_dim_of(mine) == gguf_writer.head_dim_of(theirs)


@_CASES
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """A model made of nothing but what the reader gives computes what the original does."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    original, copy = tmp_path / "original", tmp_path / "copy"
    logits = []
    file = _write(tmp_path / "m.gguf", name)
    reader = GGUFTensorReader(file)
    ids = torch.arange(60).reshape(1, -1) * 7 % 96
    for folder, config, weights in (
        (original, _transformers_model(name).config.to_dict(), _weights(name)),
        (copy, hf_config_of(file), {n: np.array(reader.read(n)) for n in reader.names()}),
    ):
        folder.mkdir()
        # Neither the pad id nor the type is GGUF's to say.
        config = config | {"pad_token_id": 0, "dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        with torch.no_grad():
            logits.append(model(ids, use_cache=False).logits.numpy())
    assert np.abs(logits[0]).max() > 0.5, "the logits must say something"
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-5)


def test_every_architecture_is_covered() -> None:
    assert {gguf.MODEL_ARCH_NAMES[a] for a in gguf_writer.ARCHITECTURES.values()} == set(
        ARCHITECTURES
    )
    assert {kind for kind, _ in MODELS.values()} == set(gguf_writer.ARCHITECTURES)


def test_slices_of_joined_projections(tmp_path: Path) -> None:
    reader = GGUFTensorReader(_write(tmp_path / "m.gguf", "deepseek2-v3", "Q8_0"))
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    whole = reader.read(name)  # 4 heads of 32 rows of keys and 16 of values, 64 columns
    assert whole.shape == reader.shape(name) == (192, 64)
    for first, last in ((0, 192), (31, 33), (47, 49), (0, 48), (100, 101), (96, 192), (7, 7)):
        for cut in (slice(None), slice(5, 41), slice(32, 33)):
            index = (slice(first, last), cut)
            np.testing.assert_array_equal(
                reader.read_slice(name, index), whole[index], f"{index}", strict=True
            )

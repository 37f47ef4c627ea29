"""Configs from GGUF metadata: what is implied by a model's size, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.weights.gguf_config import generation_config_of, hf_config_of
from jaxpaged.weights.gguf_file import GGUFFile
from jaxpaged.weights.gguf_reader import GGUFTensorReader
from tests.tiny_models import tiny_gguf


def _header(path: Path, arch: str, add: Callable[[gguf.GGUFWriter], None], **sizes: int) -> Any:
    """The config of a file with one small tensor and realistic metadata."""
    s = {"hidden": 64, "layers": 2, "heads": 4, "head_dim": 16} | sizes
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(8192)
    writer.add_embedding_length(s["hidden"])
    writer.add_block_count(s["layers"])
    writer.add_feed_forward_length(128)
    writer.add_head_count(s["heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(s["head_dim"])
    writer.add_value_length(s["head_dim"])
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return hf_config_of(GGUFFile.open(path))


@pytest.mark.parametrize(
    ("arch", "layers", "hidden", "heads", "head_dim", "scalar"),
    [
        # The published models: hidden size, heads and query_pre_attn_scalar of each.
        ("gemma2", 26, 2304, 8, 256, 256),
        ("gemma2", 42, 3584, 16, 256, 256),
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma3", 18, 640, 4, 256, 256),
        ("gemma3", 26, 1152, 4, 256, 256),
        ("gemma3", 34, 2560, 8, 256, 256),
        ("gemma3", 48, 3840, 16, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168),
    ],
)
def test_gemma_attention_scale_by_size(
    tmp_path: Path, arch: str, layers: int, hidden: int, heads: int, head_dim: int, scalar: int
) -> None:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "head_dim": head_dim}
    config = _header(tmp_path / "m.gguf", arch, lambda w: None, **sizes)
    assert config["query_pre_attn_scalar"] == scalar


def test_gemma_defaults_are_those_of_llama_cpp(tmp_path: Path) -> None:
    two = _header(tmp_path / "2.gguf", "gemma2", lambda w: None)
    assert two["sliding_window"] == 4096
    assert (two["attn_logit_softcapping"], two["final_logit_softcapping"]) == (50.0, 30.0)
    assert two["layer_types"] == ["sliding_attention", "full_attention"]
    # Gemma 3 without a window attends to everything in all layers.
    three = _header(tmp_path / "3.gguf", "gemma3", lambda w: None)
    assert three["layer_types"] == ["full_attention"] * 2
    assert (three["attn_logit_softcapping"], three["final_logit_softcapping"]) == (None, None)


@pytest.mark.parametrize(
    ("experts", "gating", "said", "expected"),
    [
        (64, None, None, ("deepseek_v2", "greedy", 1, 1)),  # V2-Lite
        (160, None, None, ("deepseek_v2", "group_limited_greedy", 8, 3)),  # V2, V2.5
        (256, 2, None, ("deepseek_v3", "noaux_tc", 8, 4)),  # V3, R1
        (384, 2, (1, 1), ("deepseek_v3", "noaux_tc", 1, 1)),  # Kimi K2
        (160, 1, (4, 2), ("deepseek_v2", "group_limited_greedy", 4, 2)),
    ],
)
def test_deepseek_groups(
    tmp_path: Path,
    experts: int,
    gating: int | None,
    said: tuple[int, int] | None,
    expected: tuple[str, str, int, int],
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_kv_lora_rank(32)
        writer.add_rope_dimension_count(4)
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        writer.add_expert_shared_count(1)
        writer.add_expert_feed_forward_length(8)
        if gating is not None:
            writer.add_uint32("deepseek2.expert_gating_func", gating)
        if said is not None:
            writer.add_expert_group_count(said[0])
            writer.add_expert_group_used_count(said[1])

    config = _header(tmp_path / "m.gguf", "deepseek2", add)
    keys = ("model_type", "topk_method", "n_group", "topk_group")
    assert tuple(config[key] for key in keys) == expected
    assert (config["qk_nope_head_dim"], config["v_head_dim"]) == (12, 16)


def test_joined_projections_must_fit(tmp_path: Path) -> None:
    def open_with(**shapes: tuple[int, ...]) -> None:
        path = tmp_path / "m.gguf"

        def add(writer: gguf.GGUFWriter) -> None:
            for part, shape in shapes.items():
                writer.add_tensor(f"blk.0.{part}.weight", np.zeros(shape, np.float32))

        _header(path, "gemma", add)  # whose metadata is complete; only the tensors matter here
        file = GGUFFile.open(path)
        file.metadata["general.architecture"] = "deepseek2"
        GGUFTensorReader(file)

    with pytest.raises(ModelLoadError, match="has no tensor 'blk.0.attn_v_b.weight'"):
        open_with(attn_k_b=(4, 32, 8))
    with pytest.raises(ModelLoadError, match="do not fit together"):
        open_with(attn_k_b=(4, 32, 8), attn_v_b=(4, 16, 31))
    with pytest.raises(ModelLoadError, match="do not fit together"):
        open_with(attn_k_b=(4, 32), attn_v_b=(4, 16, 32))
    open_with(attn_k_b=(4, 32, 8), attn_v_b=(4, 16, 32))


def test_window_patterns(tmp_path: Path) -> None:
    def every(pattern: Any) -> list[str]:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_sliding_window(512)
            writer.add_sliding_window_pattern(pattern)

        types: list[str] = _header(tmp_path / "m.gguf", "gemma3", add, layers=4)["layer_types"]
        return [kind[0] for kind in types]

    assert every(2) == ["s", "f", "s", "f"]
    assert every(1) == ["f"] * 4
    assert every([True, False, False, True]) == ["s", "f", "f", "s"]
    with pytest.raises(UnsupportedModelError, match="sliding_window_pattern"):
        every([True])


def test_phi3_attention_factor(tmp_path: Path) -> None:
    def table(factor: float | None) -> Callable[[gguf.GGUFWriter], None]:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_orig_ctx_len(4096)
            if factor is not None:
                writer.add_rope_scaling_attn_factors(factor)
            for kind in ("long", "short"):
                writer.add_tensor(f"rope_factors_{kind}.weight", np.full(8, 1.5, np.float32))

        return add

    for factor in (None, float(np.sqrt(1 + np.log(2) / np.log(4096)))):
        scaling = _header(tmp_path / "m.gguf", "phi3", table(factor))["rope_scaling"]
        assert scaling["long_factor"] == [1.5] * 8
        assert "attention_factor" not in scaling
    scaling = _header(tmp_path / "m.gguf", "phi3", table(1.25))["rope_scaling"]
    assert scaling["attention_factor"] == 1.25


@pytest.mark.parametrize(
    ("arch", "add", "message"),
    [
        ("llama", lambda w: w.add_logit_scale(0.5), "llama.logit_scale=0.5"),
        ("llama", lambda w: w.add_clamp_kqv(8.0), "clamp_kqv=8.0"),
        ("llama", lambda w: w.add_causal_attention(False), "attention.causal=False"),
        ("llama", lambda w: w.add_rope_scaling_attn_factors(1.5), "attn_factor=1.5"),
        ("llama", lambda w: w.add_uint32("llama.new_idea", 3), "llama.new_idea=3 is not known"),
        ("llama", lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), "=2"),
        ("qwen2", lambda w: w.add_sliding_window(64), "qwen2.attention.sliding_window=64"),
        ("qwen2", lambda w: w.add_pooling_type(gguf.PoolingType.LAST), "pooling_type=3"),
        ("qwen3", lambda w: w.add_rope_dimension_count(8), "rope.dimension_count=8"),
        ("gemma2", lambda w: w.add_float32("gemma2.rope.freq_base_swa", 5e5), "freq_base_swa"),
        ("phi3", lambda w: w.add_rope_scaling_attn_factors(1.5), "without rope_factors_long"),
        (
            "phi3",
            lambda w: w.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)),
            "without the other",
        ),
        (
            "qwen3",
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            "yarn without rope.scaling.original_context_length",
        ),
    ],
)
def test_other_mathematics_is_refused(
    tmp_path: Path, arch: str, add: Callable[[Any], None], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _header(tmp_path / "m.gguf", arch, add)


def test_neutral_and_harmless_settings_are_accepted(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_vocab_size(32)
        writer.add_logit_scale(1.0)
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)
        writer.add_causal_attention(True)
        writer.add_sliding_window(0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    assert _header(tmp_path / "m.gguf", "qwen3", add)["model_type"] == "qwen3"


def test_foreign_tensors_are_refused(tmp_path: Path) -> None:
    def open_with(arch: str, name: str, shape: tuple[int, ...]) -> None:
        path = tmp_path / "m.gguf"
        _header(path, arch, lambda w: w.add_tensor(name, np.zeros(shape, np.float32)))
        GGUFTensorReader(GGUFFile.open(path))

    for arch, name in (
        ("qwen3", "blk.0.attn_q.bias"),
        ("gemma3", "v.blk.0.attn_q.weight"),
        ("phi3", "blk.0.ffn_gate.weight"),
        ("qwen2", "rope_factors_long.weight"),
    ):
        with pytest.raises(ModelLoadError, match=f"'{arch}' does not use: {name}"):
            open_with(arch, name, (16,))
    with pytest.raises(ModelLoadError, match="unexpected number of dimensions"):
        open_with("llama", "blk.0.ffn_up_exps.weight", (8, 64))
    with pytest.raises(ModelLoadError, match="unexpected number of dimensions"):
        open_with("llama", "blk.0.ffn_up.weight", (2, 8, 64))


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({}, [7, 4]),
        ({"eot": 5}, [7, 5]),
        ({"eos": 4}, [4]),
        ({"eom": 6}, [7, 6, 4]),
    ],
)
def test_turn_ends_are_found_by_their_text(
    tmp_path: Path, keys: dict[str, int], ends: list[int]
) -> None:
    """Phi-3's and Gemma's files name only the token that ends a document."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["<|end|>", "a", "b", "c", "<end_of_turn>", "x", "y", "<eos>"])
        writer.add_token_types([1, 1, 1, 1, 3, 3, 3, 3])  # the first is ordinary text
        for key, token in ({"eos": 7} | keys).items():
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)

    path = tmp_path / "m.gguf"
    _header(path, "gemma3", add)
    assert generation_config_of(GGUFFile.open(path)) == {"eos_token_id": ends}


def test_tiny_gguf_is_a_llama(tmp_path: Path) -> None:
    config = hf_config_of(GGUFFile.open(tiny_gguf(tmp_path / "m.gguf")))
    assert config["architectures"] == ["LlamaForCausalLM"]

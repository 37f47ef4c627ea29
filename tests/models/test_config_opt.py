from __future__ import annotations

from typing import Any

import pytest

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.models.opt import OPTConfig, OPTForCausalLM
from jaxpaged.models.registry import find_model
from jaxpaged.models.rope import NO_ROPE

ABSENT = object()


def read(**changes: Any) -> OPTConfig:
    given = {
        "architectures": ["OPTForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        **changes,
    }
    given = {key: value for key, value in given.items() if value is not ABSENT}
    model, config = find_model(given, "here/config.json")
    assert model is OPTForCausalLM and isinstance(config, OPTConfig)
    return config


def test_defaults() -> None:
    assert read(word_embed_proj_dim=None) == OPTConfig(
        architecture="OPTForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        norm_eps=1e-5,
        rope=NO_ROPE,
        max_position=2048,
        tie_embeddings=True,
        embedding_size=64,
        activation="relu",
        bias=True,
        norm_first=True,
        final_norm=True,
        affine=True,
    )


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"word_embed_proj_dim": 32}, "embedding_size", 32),
        ({"do_layer_norm_before": False}, "norm_first", False),
        ({"do_layer_norm_before": False}, "final_norm", False),
        ({"_remove_final_layer_norm": True}, "final_norm", False),
        ({"enable_bias": False}, "bias", False),
        ({"layer_norm_elementwise_affine": False}, "affine", False),
        ({"activation_function": "gelu"}, "activation", "gelu"),
        ({"tie_word_embeddings": False}, "tie_embeddings", False),
    ],
)
def test_options(changes: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(read(**changes), name) == value


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "ffn_dim", "num_attention_heads"])
@pytest.mark.parametrize("value", [ABSENT, 0, "4"], ids=repr)
def test_sizes_of_the_wrong_kind(key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"'{key}'"):
        read(**{key: value})


def test_what_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="hidden_size=64.*num_attention_heads=5"):
        read(num_attention_heads=5)
    with pytest.raises(UnsupportedModelError, match="activation_function='swish'"):
        read(activation_function="swish")
    with pytest.raises(ModelLoadError, match="'enable_bias'.*'no'"):
        read(enable_bias="no")


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_both_ways_that_tensors_were_published(prefix: str) -> None:
    config = read(tie_word_embeddings=False, word_embed_proj_dim=32)
    sources = OPTForCausalLM.sources(config)
    saved = {tensor.name for source in sources.values() for tensor in source.tensors}
    names = {prefix + name.removeprefix("model.") for name in saved - {"lm_head.weight"}}
    names.add("lm_head.weight")
    chosen = [source.among(names) for source in sources.values()]
    assert {tensor.name for source in chosen for tensor in source.tensors} == names
    assert [source.axes for source in chosen] == [source.axes for source in sources.values()]
    assert OPTForCausalLM.ignorable(config, prefix + "decoder.version")
    assert not OPTForCausalLM.ignorable(config, "lm_head.weight")

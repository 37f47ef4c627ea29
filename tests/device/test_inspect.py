"""Logits and hidden states of a whole sequence are those that the engine's steps compute."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpaged import SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.device.inspect import Forward, forward, make_forward
from jaxpaged.device.kv_cache import cache_dtype
from jaxpaged.device.model_loader import LoadedModel, load_model
from jaxpaged.errors import InvalidRequestError
from jaxpaged.weights.source import resolve_source
from tests.e2e.support import LONG, small_llm
from tests.tiny_models import tiny_llama, tiny_mistral

LENGTHS = (1, 2, 8, 9, 63, 130)
MIXED = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
    "sliding_window": 8,
}
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 256,
}


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, 512, length).tolist()


def load(folder: Path, **settings: Any) -> LoadedModel:
    config = EngineConfig(
        model=str(folder), **{"dtype": "float32", "disable_progress": True, **settings}
    )
    return load_model(config, resolve_source(config))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_llama(Path(tmp_path_factory.mktemp("llama"))))


@pytest.mark.parametrize("kind", ["full", "mixed windows", "latent"])
def test_the_engine_has_the_same_numbers(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {}
    if kind == "full":
        tiny_llama(tmp_path)
    elif kind == "mixed windows":
        tiny_mistral(tmp_path, **MIXED)
    else:
        (tmp_path / "config.json").write_text(json.dumps(LATENT))
        settings = {"load_format": "dummy", "skip_tokenizer_init": True}
    ours = make_forward(load(tmp_path, **settings), block_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, prompt_logprobs=0)
    prompts = [prompt_of(length) for length in LENGTHS]
    with small_llm(tmp_path, **LONG, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        found = ours(prompt)
        assert found.logits.shape == (len(prompt), 512)
        wide = found.logits.astype(np.float64)
        logprobs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        assert output.prompt_logprobs is not None
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            token = prompt[position + 1]
            assert entry[token].logprob == pytest.approx(logprobs[position, token], abs=1e-5)
        assert output.outputs[0].token_ids == [int(found.logits[-1].argmax())]
        assert output.outputs[0].logprobs is not None
        drawn = next(iter(output.outputs[0].logprobs[0].values()))
        assert drawn.logprob == pytest.approx(logprobs[-1].max(), abs=1e-5)


def test_hidden_states_begin_with_the_embedding_and_end_before_the_norm(tmp_path: Path) -> None:
    weights = load_file(tiny_llama(tmp_path, num_hidden_layers=3) / "model.safetensors")
    prompt = prompt_of(20)
    found = forward(load(tmp_path), prompt)
    assert [x.shape for x in found.hidden] == [(20, 64)] * 4
    np.testing.assert_array_equal(found.hidden[0], weights["model.embed_tokens.weight"][prompt])
    last = found.hidden[-1]
    normed = last / np.sqrt((last**2).mean(axis=1, keepdims=True) + 1e-5)
    logits = (normed * weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    np.testing.assert_allclose(found.logits, logits, atol=1e-4)
    for before, after in zip(found.hidden[:-1], found.hidden[1:], strict=True):
        assert np.abs(after - before).max() > 0.1


def test_a_position_depends_on_those_before_it_only(llama: LoadedModel) -> None:
    run = make_forward(llama)
    prompt = prompt_of(40)
    whole, part = run(prompt), run(prompt[:30])
    np.testing.assert_array_equal(whole.logits[:30], part.logits)
    changed = run([*prompt[:10], 3, *prompt[11:]])
    differs = np.abs(changed.logits - whole.logits).max(axis=1) > 0
    assert differs.tolist() == [False] * 10 + [True] * 30


def test_bfloat16_is_close_to_float32(llama: LoadedModel, tmp_path: Path) -> None:
    half: Forward = forward(load(tiny_llama(tmp_path), dtype="bfloat16"), prompt_of(20))
    whole = forward(llama, prompt_of(20))
    assert half.logits.dtype == np.float32
    distance = np.abs(half.logits - whole.logits).max()
    assert 1e-4 < distance < 0.5


@pytest.mark.parametrize("kind", ["full", "latent"])
@pytest.mark.parametrize(("name", "bound"), [("int8", 0.03), ("fp8", 0.12)])
def test_an_8_bit_cache_is_close_and_the_kernels_agree(
    name: str, bound: float, kind: str, llama: LoadedModel, tmp_path: Path
) -> None:
    full = llama
    if kind == "latent":
        (tmp_path / "config.json").write_text(json.dumps(LATENT))
        full = load(tmp_path, load_format="dummy", skip_tokenizer_init=True)
    config = EngineConfig(kv_cache_dtype=name)
    narrow = dataclasses.replace(full, cache_dtype=cache_dtype(config.kv_cache_dtype, full.dtype))
    expected = forward(full, prompt_of(70)).logits
    found = forward(narrow, prompt_of(70)).logits
    kernels = forward(narrow, prompt_of(70), attention_backend="pallas_interpret").logits
    spread = expected.std()
    assert 1e-4 < np.abs(found - expected).mean() / spread < bound
    np.testing.assert_allclose(kernels, found, atol=2e-3 * spread)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "has 0 tokens, the model takes 1 to 256"),
        ([5] * 257, "has 257 tokens, the model takes 1 to 256"),
        ([5, 512], "has 512, the vocabulary is 0 to 511"),
        ([-1], "has -1, the vocabulary is 0 to 511"),
    ],
)
def test_what_the_model_cannot_take_is_refused(
    llama: LoadedModel, ids: list[int], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        forward(llama, ids)

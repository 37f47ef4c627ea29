"""Heads with more rows than there are tokens, and heads that are or are not the embedding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged import SamplingParams
from tests.e2e.support import small_llm
from tests.tiny_models import tiny_llama, tiny_tokenizer


def test_rows_without_a_token_are_never_drawn(tmp_path: Path) -> None:
    """Checkpoints pad their vocabulary: Qwen2.5 has 152,064 rows and some 151,700 tokens."""
    folder = tiny_llama(tmp_path / "m", vocab_size=512)
    tiny_tokenizer(300).save(str(folder / "tokenizer.json"))
    params = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True, seed=1, n=4)
    with small_llm(folder) as llm:
        known = llm.get_tokenizer().vocab_size
        outputs = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs
    drawn = {token for output in outputs for token in output.token_ids}
    assert known == 300 and len(drawn) > 20
    assert max(drawn) < known
    with small_llm(folder, skip_tokenizer_init=True) as llm:
        outputs = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs
    assert max(token for output in outputs for token in output.token_ids) >= known


@pytest.mark.parametrize("same", [True, False])
def test_a_head_of_its_own_wins_over_a_config_that_ties_it(tmp_path: Path, same: bool) -> None:
    """As in transformers, which goes by the values."""
    folder = tiny_llama(tmp_path / "untied")
    prompt, greedy = [[5, 6, 7, 8]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if same:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        save_file(tensors, path, {"format": "pt"})
    with small_llm(folder) as llm:
        expected = llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    with small_llm(folder) as llm:
        assert llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids == expected
        heads = len(llm.engine.runner._weights.rest)
    assert heads == (2 if same else 3)
    assert np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]) == same

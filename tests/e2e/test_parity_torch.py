"""The same tokens and logprobs as transformers on PyTorch, live, in float32."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.models.registry import find_model
from jaxpaged.models.rope import RopeConfig
from jaxpaged.outputs import LogprobDict, RequestOutput
from tests.e2e.support import LONG, Answer, small_llm
from tests.tiny_models import tiny_config, tiny_llama, tiny_mistral

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch, the oracle", allow_module_level=True)

from tests.e2e import oracle

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], int]] = {
    "untied, GQA": ("tiny_llm", {}, (1, 3, 17, 63, 64, 65, 100), 24),
    "MHA, head_dim null, llama3 rope in rope_parameters": (
        "llama",
        {
            "num_key_value_heads": 4,
            "head_dim": None,
            "rope_parameters": {"rope_theta": 500.0, **LLAMA3_ROPE},
        },
        (5, 63, 100, 150),
        50,
    ),
    "Mistral, window null, tied, MQA, head_dim 32 for hidden 64, linear rope in the old spelling": (
        "mistral",
        {
            "sliding_window": None,
            "tie_word_embeddings": True,
            "head_dim": 32,
            "num_key_value_heads": 1,
            "rope_theta": 2000.0,
            "rope_scaling": {"type": "linear", "factor": 2.5},
        },
        (2, 7, 8, 9, 10, 40, 150),
        50,
    ),
    # transformers refuses this shape for Llama, whatever head_dim says.
    "Mistral, window 32, hidden 60 with 8 heads of 16": (
        "mistral",
        {"hidden_size": 60, "num_attention_heads": 8, "num_key_value_heads": 4},
        (4, 31, 32, 33, 64, 150),
        50,
    ),
    "Mistral, window 8": ("window_llm", {}, (1, 7, 8, 9, 10, 40, 150), 50),
}
"""A shared engine, or the family and settings of its own model; prompt lengths; new tokens."""


def write_model(folder: Path, family: str, settings: dict[str, Any]) -> Path:
    """A tiny checkpoint whose config.json says exactly `settings`, null and all."""
    make = tiny_llama if family == "llama" else tiny_mistral
    make(folder, **{key: value for key, value in settings.items() if value is not None})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | settings
    if "rope_parameters" in settings:
        del config["rope_theta"]
        config.pop("rope_scaling", None)
    path.write_text(json.dumps(config))
    return folder


def random_prompts(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 512, length).tolist() for length in lengths]


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def both(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[LLM, Any, list[list[int]], int]]:
    """Our engine, the model of transformers, prompts, and how many tokens to generate."""
    name, settings, lengths, count = request.param
    prompts = random_prompts(lengths, 1)
    if name.endswith("_llm"):
        llm = request.getfixturevalue(name)
        yield llm, oracle.from_folder(llm.config.model), prompts, count
        return
    folder = write_model(tmp_path / "model", name, settings)
    with small_llm(folder, **LONG) as llm:
        yield llm, oracle.from_folder(folder), prompts, count


def test_tiny_models(both: tuple[LLM, Any, list[list[int]], int]) -> None:
    llm, model, prompts, count = both
    params = SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=5, prompt_logprobs=5
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert max(len(o.outputs[0].token_ids) for o in outputs) == count
    for output in outputs:
        check_against(model, output)
    # The check above forces our tokens on transformers; its own generate must agree, too.
    tokens, _ = oracle.greedy(model, prompts[-1], count)
    assert outputs[-1].outputs[0].token_ids == tokens


def check_against(model: Any, output: RequestOutput, tolerance: float = 1e-4) -> None:
    """Each output token is transformers' choice after the tokens before it, and every logprob of
    prompt and output, drawn or among the best five, is within the tolerance of its own."""
    done, prompt = output.outputs[0], output.prompt_token_ids
    expected = oracle.logits(model, [*prompt, *done.token_ids])[:-1]
    choices = expected.argmax(axis=-1).tolist()
    assert done.token_ids == choices[len(prompt) - 1 :]
    assert output.prompt_logprobs is not None
    assert done.logprobs is not None
    assert output.prompt_logprobs[0] is None
    entries = [*output.prompt_logprobs[1:], *done.logprobs]
    tokens = [*prompt[1:], *done.token_ids]
    wanted = oracle.log_softmax(expected)
    assert len(entries) == len(tokens) == len(wanted)
    for entry, token, row in zip(entries, tokens, wanted, strict=True):
        assert entry is not None
        check_entry(entry, token, row, tolerance)


def check_prompt(model: Any, output: RequestOutput, tolerance: float = 1e-4) -> None:
    """Logprobs of the prompt alone, and the first token after it."""
    prompt = output.prompt_token_ids
    expected = oracle.logits(model, prompt)
    wanted = oracle.log_softmax(expected)
    assert output.prompt_logprobs is not None
    entries = zip(output.prompt_logprobs[1:], prompt[1:], wanted[:-1], strict=True)
    for entry, token, row in entries:
        assert entry is not None
        check_entry(entry, token, row, tolerance)
    assert output.outputs[0].token_ids[0] == int(expected[-1].argmax())


def check_entry(entry: LogprobDict, token: int, row: Any, tolerance: float) -> None:
    assert next(iter(entry)) == token
    for other, found in entry.items():
        assert found.logprob == pytest.approx(row[other], abs=tolerance)
    best = sorted((found.logprob for found in entry.values()), reverse=True)[:5]
    assert best == pytest.approx(np.sort(row)[::-1][:5], abs=tolerance)
    assert entry[token].rank is not None
    # Near ties may swap places.
    assert np.sum(row > row[token] + tolerance) < entry[token].rank
    assert entry[token].rank <= np.sum(row >= row[token] - tolerance)


@pytest.mark.parametrize("old_key", ["rope_type", "type"])
def test_both_spellings_of_rope_settings_mean_the_same(old_key: str) -> None:
    scaling = {old_key if key == "rope_type" else key: v for key, v in LLAMA3_ROPE.items()}
    old = tiny_config("llama", rope_theta=500.0, rope_scaling=scaling)
    new = tiny_config("llama", rope_parameters={"rope_theta": 500.0, **LLAMA3_ROPE})
    del new["rope_theta"], new["rope_scaling"]
    expected = RopeConfig(500.0, "llama3", 4.0, 1.0, 4.0, 64)
    assert find_model(old, "old")[1] == find_model(new, "new")[1]
    assert find_model(old, "old")[1].rope == expected


@pytest.fixture(scope="module")
def smollm2_torch(smollm2_path: Path) -> Any:
    return oracle.from_gguf(smollm2_path)


@pytest.mark.slow
def test_smollm2_chooses_what_transformers_chooses(
    smollm2_answers: list[Answer], smollm2_torch: Any
) -> None:
    """32 chats of 64 greedy tokens. Our tokens are forced, one forward pass a chat: each must be
    the choice after those before it, which is the same statement as equal generations."""
    assert len(smollm2_answers) == 32
    for answer in smollm2_answers:
        tokens, prompt = answer.output.token_ids, answer.prompt_token_ids
        assert len(tokens) == 64
        expected = oracle.logits(smollm2_torch, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(axis=-1).tolist(), answer.case["question"]
        assert answer.output.logprobs is not None
        wanted = oracle.log_softmax(expected)
        for entry, token, row in zip(answer.output.logprobs, tokens, wanted, strict=True):
            check_entry(entry, token, row, tolerance=1e-3)


@pytest.mark.slow
def test_smollm2_generates_what_transformers_generates(
    smollm2_answers: list[Answer], smollm2_torch: Any
) -> None:
    for answer in smollm2_answers[:3]:
        tokens, _ = oracle.greedy(smollm2_torch, answer.prompt_token_ids, 64)
        assert answer.output.token_ids == tokens

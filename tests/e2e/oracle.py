"""What transformers computes on PyTorch, with eager attention. Needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from jaxpaged.config import EngineConfig
from jaxpaged.weights.reader import open_reader
from jaxpaged.weights.source import resolve_source

Floats = npt.NDArray[np.float32]


def from_folder(folder: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a Hugging Face folder, as transformers itself loads it."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def from_gguf(path: Path) -> Any:
    """A LlamaForCausalLM with the weights that our GGUF reader finds; every name must match."""
    source = resolve_source(EngineConfig(model=str(path)))
    config = LlamaConfig(**source.hf_config)
    config._attn_implementation = "eager"
    reader = open_reader(source)
    weights = {
        name: torch.from_numpy(np.array(reader.read(name), np.float32)) for name in reader.names()
    }
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights, strict=True)
    return model.eval()


def logits(model: Any, token_ids: list[int]) -> Floats:
    """[T, V]: the prediction after each token, from one forward pass without a cache."""
    with torch.no_grad():
        out = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return np.asarray(out.float().numpy(), np.float32)


def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], Floats]:
    """`count` greedy tokens of transformers itself, past any EOS, and logits [count, V]."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = out.sequences[0, len(prompt) :].tolist()
    return tokens, np.asarray(torch.cat(out.logits).numpy(), np.float32)


def log_softmax(values: Floats) -> npt.NDArray[np.float64]:
    """Over the last axis, in double precision."""
    wide = values.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result

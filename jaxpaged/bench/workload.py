"""The workloads that flags ask for, of the server's and of the offline benchmarks alike."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxpaged.bench import lengths, prompts
from jaxpaged.bench.lengths import Shape
from jaxpaged.bench.prompts import Sample
from jaxpaged.config import EngineConfig
from jaxpaged.text.tokenizer import Tokenizer, load_tokenizer
from jaxpaged.weights import embedded
from jaxpaged.weights.source import ModelSource

LONGEST = 2048
"""Tokens, prompt and output together, that sharegpt-like lengths are clipped to."""


def shapes_of(args: argparse.Namespace, count: int, max_model_len: int | None) -> list[Shape]:
    """Lengths of the dataset that the flags name; `custom` has none."""
    seed: int = args.seed
    if args.dataset_name == "random":
        return lengths.random_shapes(
            count,
            args.random_input_len,
            args.random_output_len,
            args.random_range_ratio,
            args.random_prefix_len,
            seed,
        )
    if args.dataset_name == "sharegpt-like":
        return lengths.sharegpt_shapes(count, min(LONGEST, max_model_len or LONGEST), seed)
    assert args.dataset_name == "prefix_repetition"
    return lengths.prefix_shapes(
        count,
        args.prefix_repetition_prefix_len,
        args.prefix_repetition_suffix_len,
        args.prefix_repetition_num_prefixes,
        args.prefix_repetition_output_len,
        seed,
    )


def custom_samples(
    args: argparse.Namespace, count: int, *, conversations: bool, token_ids: bool
) -> list[Sample]:
    return prompts.read_custom(
        args.dataset_path,
        count,
        args.custom_output_len,
        conversations=conversations,
        token_ids=token_ids,
    )


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a folder, a .gguf file, a hub id or the embedded model, without the model.

    Raises `ModelLoadError`.
    """
    place = str(embedded.find_file()) if name == embedded.ALIAS else name
    source = ModelSource(
        name=name, kind="dummy", path=Path(place), hf_config={}, generation_config={}
    )
    return load_tokenizer(source, EngineConfig(tokenizer=place))

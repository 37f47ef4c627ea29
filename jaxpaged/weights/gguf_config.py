"""A Hugging Face style config, made from the metadata of a GGUF file."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jaxpaged.errors import ModelLoadError, UnsupportedModelError
from jaxpaged.weights.gguf_architectures import ARCHITECTURES, Architecture
from jaxpaged.weights.gguf_file import GGUFFile
from jaxpaged.weights.gguf_metadata import Metadata

_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CONTROL = 3  # of tokenizer.ggml.token_type

# Texts that end a turn in chat formats, for files that name only the token that ends a document.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises `UnsupportedModelError` for files of an architecture that is not supported."""
    name = file.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {name!r} is not supported; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}. Load the safetensors checkpoint of this model "
            "instead."
        )
    return ARCHITECTURES[name]


def hf_config_of(file: GGUFFile) -> dict[str, Any]:
    """What config.json would say.

    Raises `UnsupportedModelError` for other architectures and for settings that would change the
    mathematics or are not known, `ModelLoadError` for missing or impossible metadata.
    """
    architecture = architecture_of(file)
    meta = Metadata(file, file.get("general.architecture"))
    config = architecture.config(meta)
    meta.refuse_unread()
    config["vocab_size"] = _vocab_size(file)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = file.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            config[f"{key}_token_id"] = token
    if not file.quantized:
        kinds = Counter(t.type_name for t in file.tensors.values() if len(t.shape) > 1)
        config["torch_dtype"] = _TORCH_NAMES[kinds.most_common(1)[0][0]]
    return config


def generation_config_of(file: GGUFFile) -> dict[str, Any]:
    """What a generation_config.json would say: the ids that end an answer."""
    ends = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if ends[1] is None:
        tokens, kinds = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
        ends += [
            i
            for i, (token, kind) in enumerate(zip(tokens or [], kinds or [], strict=False))
            if kind == _CONTROL and token in _TURN_ENDS
        ]
    unique = list(dict.fromkeys(token for token in ends if token is not None))
    return {"eos_token_id": unique} if unique else {}


def _vocab_size(file: GGUFFile) -> int:
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None:
        raise ModelLoadError(f"{file.path} has no tensor 'token_embd.weight'.")
    return tensor.shape[0]

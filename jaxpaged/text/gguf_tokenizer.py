"""Builds a `tokenizers.Tokenizer` from the vocabulary inside a GGUF file."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from jaxpaged.errors import ModelLoadError
from jaxpaged.text.gguf_splits import SPLITS
from jaxpaged.weights.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What files say about a tokenizer."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    """bos_token, eos_token, ... -> text."""
    chat_templates: dict[str, str]


def build_gguf_tokenizer(file: GGUFFile) -> TokenizerParts:
    """Byte-level BPE (`tokenizer.ggml.model` gpt2) or SentencePiece-like (llama).

    Raises `ModelLoadError` for other models, an unknown `tokenizer.ggml.pre`, or a vocabulary that
    contradicts itself.
    """
    tokens = _list(file, "tokenizer.ggml.tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ModelLoadError(f"{file.path}: vocabulary entry {twice!r} appears twice.")
    model = file.get("tokenizer.ggml.model")
    try:
        if model == "gpt2":
            backend, adds_bos = _byte_level(file, vocab)
        elif model == "llama":
            backend, adds_bos = _sentencepiece(file, vocab), True
        else:
            raise ModelLoadError(
                f"{file.path}: tokenizer.ggml.model {model!r} is not supported; supported: gpt2, "
                "llama. Give the original tokenizer's folder with tokenizer=..."
            )
        _add_special(file, backend, tokens)
    except ModelLoadError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exceptions for contradictory tables
        raise ModelLoadError(f"{file.path}: the vocabulary cannot be used: {error}") from error
    _post_process(file, backend, tokens, adds_bos=adds_bos)
    special = {
        f"{ours}_token": tokens[token]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token := _special_id(file, theirs, len(tokens))) is not None
    }
    return TokenizerParts(backend, special, _templates(file))


def _byte_level(file: GGUFFile, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    pre = file.get("tokenizer.ggml.pre", "default")
    split = SPLITS.get(pre)
    if split is None:
        raise ModelLoadError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not known, so text cannot be cut the way "
            f"the model learned it. Known: {', '.join(sorted(SPLITS))}. Give the original "
            "tokenizer's folder with tokenizer=..."
        )
    if pre == "default":
        logger.warning("%s does not say how text is cut; assuming GPT-2's rule.", file.path)
    merges = [tuple(merge.split(" ", 1)) for merge in _list(file, "tokenizer.ggml.merges")]
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in split.regexes
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _sentencepiece(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    unknown = _special_id(file, "unknown", len(vocab))
    backend = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges_from_scores(file, vocab),
            unk_token=list(vocab)[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    mark = normalizers.Replace(" ", "\u2581")
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        # As the original tokenizers and llama.cpp do: also after each special token.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), mark])
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        backend.normalizer = mark
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(file: GGUFFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union scores highest; as ranked pairs for BPE."""
    scores = _list(file, "tokenizer.ggml.scores")
    kinds = file.get("tokenizer.ggml.token_type") or [1] * len(vocab)
    if len(scores) != len(vocab) or len(kinds) != len(vocab):
        raise ModelLoadError(
            f"{file.path}: {len(vocab)} tokens, but {len(scores)} scores and {len(kinds)} types."
        )
    whole = (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)  # never made from, or part of, other pieces
    plain = {token: i for token, i in vocab.items() if kinds[i] not in whole}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in plain.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in plain and right in plain:
                ranked.append((-scores[index], plain[left], plain[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_special(file: GGUFFile, backend: Tokenizer, tokens: list[str]) -> None:
    """Control tokens are special; user-defined ones are matched whole but are ordinary text."""
    kinds = file.get("tokenizer.ggml.token_type") or []
    # Phi-3's first tokenizer (not the byte-level one of Phi-4) drops the white space that follows
    # its chat markers. Nothing in the metadata says so; llama.cpp goes by the model's name.
    drops = (
        file.get("general.architecture") == "phi3" and file.get("tokenizer.ggml.model") == "llama"
    )

    def added(token: str, *, special: bool) -> AddedToken:
        rstrip = drops and token not in _PHI3_KEEPS_SPACE
        return AddedToken(token, normalized=False, special=special, rstrip=rstrip)

    pairs = list(zip(tokens, kinds, strict=False))
    special = [t for t, kind in pairs if kind in (_CONTROL, _UNKNOWN)]
    backend.add_special_tokens([added(t, special=True) for t in special])
    whole = [t for t, kind in pairs if kind == _USER_DEFINED]
    backend.add_tokens([added(t, special=False) for t in whole])


def _post_process(file: GGUFFile, backend: Tokenizer, tokens: list[str], *, adds_bos: bool) -> None:
    template, used = "$A", []
    for name, default, form in (("bos", adds_bos, "{} $A"), ("eos", False, "{} ")):
        token = _special_id(file, name, len(tokens))
        if token is None or not file.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        used.append((tokens[token], token))
        template = form.format(tokens[token]) if name == "bos" else f"{template} {tokens[token]}"
    if used:
        backend.post_processor = TemplateProcessing(
            single=template.split(" "), pair=None, special_tokens=used
        )


def _templates(file: GGUFFile) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {"default": file.get(prefix)}
    named |= {name: file.get(f"{prefix}.{name}") for name in file.get(f"{prefix}s", [])}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _special_id(file: GGUFFile, name: str, count: int) -> int | None:
    token = file.get(f"tokenizer.ggml.{name}_token_id")
    if token is None:
        return None
    if not isinstance(token, int) or not 0 <= token < count:
        raise ModelLoadError(
            f"{file.path}: tokenizer.ggml.{name}_token_id is {token!r}; there are {count} tokens."
        )
    return token


def _list(file: GGUFFile, key: str) -> list[Any]:
    value = file.get(key)
    if not isinstance(value, list) or not value:
        raise ModelLoadError(f"{file.path} has no {key}.")
    return value

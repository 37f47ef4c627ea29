"""Tokenizers for text tests, and texts that have broken tokenizers before."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from jaxpaged.config import EngineConfig
from jaxpaged.text.tokenizer import Tokenizer as OurTokenizer
from jaxpaged.text.tokenizer import load_tokenizer
from jaxpaged.weights.source import resolve_source
from tests.tiny_models import BOS, EOS, tiny_tokenizer

TEXTS = [
    "Hello world",
    " leading and trailing ",
    "The answer is 42; in 1984 it was 3.14159 or 1,000,000.",
    "x =  5\n\n    y   =\t10\r\n",
    "def f(a, b):\n    return {'k': [a ** b, a != b]}  # comment\n",
    "it's we'll they've I'M DON'T , do n't .",
    "日本語のテキストとカタカナ、𠮷野家。",
    "简体中文和繁體中文混合",
    "مرحبا بالعالم، كيف حالك؟",
    "Привет, мир! Ґанок їжака",
    "สวัสดีชาวโลก ฉัน",
    "e\u0301 \u00e9 o\u0308 \u0bb8\u0bcd\u0bb0\u0bc0",
    "👩‍👩‍👧 🇩🇪🇯🇵 ❤️ 👍🏽 🙂",
    "   ",
    "\n",
    "\u00a0\u2003\u3000 odd spaces",
    "½ Ⅷ ² ٣ ५ 〇",
    "a" * 300,
    "\x00\x01\x7f control",
    "https://example.org/a?b=c&d=%20#e",
]


def byte_level() -> OurTokenizer:
    """The tiny byte-level BPE: every byte has a token."""
    return OurTokenizer(tiny_tokenizer(), special_tokens={"bos_token": BOS, "eos_token": EOS})


def sentencepiece_vocab() -> tuple[list[str], list[float], list[int]]:
    """A Llama-like vocabulary: (pieces, scores, token types), with all byte tokens."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(pieces)
    words = ["▁t", "er", "in", "▁a", "en", "he", "▁the", "▁w", "or", "ld", "▁world", "ll", "▁H"]
    words += ["▁He", "▁Hello", "lo", "▁wor", "▁▁", "▁the▁", "an", "▁S", "ay", "▁Say", "nd"]
    letters = [chr(c) for c in range(0x21, 0x7F)] + ["▁", "é", "中", "文"]
    for rank, piece in enumerate(words + letters):
        pieces.append(piece)
        kinds.append(1)
        scores.append(-float(rank))
    pieces.append("<|user|>")
    kinds.append(4)
    scores.append(0.0)
    return pieces, scores, kinds


def sentencepiece() -> OurTokenizer:
    """The same vocabulary with hand-written merges, as an old Llama tokenizer.json has it."""
    pieces, _, _ = sentencepiece_vocab()
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "w"), ("o", "r"), ("l", "d")]
    backend = Tokenizer(
        BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return OurTokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def metaspace() -> OurTokenizer:
    """A newer Llama tokenizer: Metaspace on both sides, no byte tokens."""
    letters = [chr(c) for c in range(0x21, 0x7F)]
    pieces = ["<unk>", "<s>", "</s>", "▁", *letters, "▁a", "▁b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return OurTokenizer(backend, special_tokens={"eos_token": "</s>"})


def from_path(path: Path, **settings: str) -> OurTokenizer:
    config = EngineConfig(model=str(path), **settings)  # type: ignore[arg-type]
    return load_tokenizer(resolve_source(config), config)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

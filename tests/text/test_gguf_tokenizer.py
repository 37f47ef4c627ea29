"""Tokenizers built from GGUF metadata give the ids that other implementations give."""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from jaxpaged.errors import ModelLoadError
from jaxpaged.text.gguf_splits import SPLITS
from jaxpaged.text.gguf_tokenizer import build_gguf_tokenizer
from jaxpaged.text.pieces import byte_alphabet
from jaxpaged.text.tokenizer import Tokenizer
from jaxpaged.weights.gguf_file import GGUFFile
from tests.text.support import TEXTS, from_path, sentencepiece_vocab
from tests.tiny_models import tiny_tokenizer

CHAT = "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"


def _corpus(seed: int = 0) -> list[str]:
    """About 700 lines: the hand-made ones, their mixtures, and random Unicode."""
    rng = random.Random(seed)
    lines = [*TEXTS, CHAT, "<|endoftext|>", "a<|im_end|>b", "<|im_end|><|im_end|> x"]
    words = " ".join(TEXTS).split(" ")
    gaps = [" ", "  ", "\n", "\t", "", " \n ", "\u00a0", "123", "  9"]
    for _ in range(400):
        lines.append("".join(rng.choice(words) + rng.choice(gaps) for _ in range(rng.randrange(9))))
    for _ in range(300):
        codes = [rng.randrange(0x20, rng.choice([0x80, 0x3000, 0x20000])) for _ in range(12)]
        lines.append("".join(chr(c) for c in codes if not 0xD800 <= c < 0xE000))
    return lines


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return from_path(smollm2_path)


def test_smollm2_equals_transformers(smollm2_path: Path, smollm2: Tokenizer) -> None:
    pytest.importorskip("torch")
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(smollm2_path))[:2])
    # transformers knows no "smollm" rule and cuts as GPT-2 does. The published tokenizer isolates
    # digits first, which shows only where several spaces stand before one.
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), theirs.pre_tokenizer]
    )
    corpus = _corpus()
    assert len(corpus) > 700
    for text in corpus:
        ids = smollm2.encode(text)
        assert ids == theirs.encode(text).ids, text
        assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert theirs.get_vocab_size() == smollm2.vocab_size == 49152


class _PlainBPE:
    """Byte-level BPE by the book: cut, then merge the lowest-ranked pair until none is left."""

    def __init__(self, file: GGUFFile) -> None:
        merges = file.get("tokenizer.ggml.merges")
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
        self.vocab = {t: i for i, t in enumerate(file.get("tokenizer.ggml.tokens"))}
        self.char = {byte: char for char, byte in byte_alphabet().items()}

    def encode(self, text: str) -> list[int]:
        return [i for word in self._cut(text) for i in self._merge(word)]

    def _cut(self, text: str) -> list[str]:
        words, start = [], 0
        for at, char in enumerate(text):
            if unicodedata.category(char) in ("Nd", "Nl", "No"):
                words += [*self._gpt2(text[start:at]), char]
                start = at + 1
        return words + self._gpt2(text[start:])

    @staticmethod
    def _gpt2(text: str) -> list[str]:
        """GPT-2's expression without a regex engine: contractions, words, signs, white space."""

        def kind(char: str) -> str:
            if char.isspace() or char in "\x1c\x1d\x1e\x1f":
                # Python counts the separators as space, Unicode's White_Space does not
                return "sign" if char in "\x1c\x1d\x1e\x1f" else "space"
            return "letter" if unicodedata.category(char)[0] == "L" else "sign"

        words, at = [], 0
        while at < len(text):
            short = [
                c for c in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(c, at)
            ]
            if short:
                words.append(short[0])
                at += len(short[0])
                continue
            end = at + (text[at] == " " and at + 1 < len(text) and kind(text[at + 1]) != "space")
            what = kind(text[end])
            while end < len(text) and kind(text[end]) == what:
                end += 1
            if what == "space" and end < len(text) and end - at > 1:
                end -= 1  # the last space belongs to the next word
            words.append(text[at:end])
            at = end
        return words

    def _merge(self, word: str) -> list[int]:
        parts = [self.char[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranks = [self.ranks.get(p, len(self.ranks)) for p in itertools.pairwise(parts)]
            at = int(np.argmin(ranks))
            if ranks[at] == len(self.ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.vocab[part] for part in parts]


@pytest.fixture(scope="module")
def plain_bpe(smollm2_path: Path) -> _PlainBPE:
    return _PlainBPE(GGUFFile.open(smollm2_path))


def test_smollm2_equals_plain_bpe(smollm2: Tokenizer, plain_bpe: _PlainBPE) -> None:
    lines = [text for text in TEXTS if len(text) < 200]
    rng = random.Random(7)
    for _ in range(300):
        lines.append(" ".join(rng.choice(lines)[: rng.randrange(20)] for _ in range(3)))
    for text in lines:
        assert smollm2.encode(text) == plain_bpe.encode(text), text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(st.sampled_from("ab Z'sté7½\n\t .中🙂"), max_size=24))
def test_smollm2_equals_plain_bpe_on_mixtures(
    smollm2: Tokenizer, plain_bpe: _PlainBPE, text: str
) -> None:
    assert smollm2.encode(text) == plain_bpe.encode(text)


def test_smollm2_digits_after_spaces(smollm2: Tokenizer) -> None:
    two_spaces, five = smollm2.encode("  "), smollm2.encode("5")
    assert len(two_spaces) == len(five) == 1
    assert smollm2.encode("x  5") == smollm2.encode("x") + two_spaces + five


def test_smollm2_specials(smollm2: Tokenizer) -> None:
    ids = smollm2.encode(CHAT)
    assert ids[0] == 1 and ids.count(2) == 1
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.decode(ids) == "user\nHi there\nassistant\n"


def _write(path: Path, *, architecture: str = "llama", **changes: Any) -> GGUFFile:
    """A GGUF file with the SentencePiece-like vocabulary; `changes` replace metadata."""
    pieces, scores, kinds = sentencepiece_vocab()
    meta: dict[str, Any] = {
        "model": "llama",
        "tokens": pieces,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    meta |= changes
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in meta.items():
        if value is None:
            continue
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile.open(path)


def _build(file: GGUFFile) -> Tokenizer:
    parts = build_gguf_tokenizer(file)
    return Tokenizer(
        parts.backend, special_tokens=parts.special_tokens, chat_templates=parts.chat_templates
    )


def _greedy_sentencepiece(text: str) -> list[int]:
    return _merge_by_score(" " + text, sentencepiece_vocab())


def _merge_by_score(text: str, vocabulary: tuple[list[str], list[float], list[int]]) -> list[int]:
    """SentencePiece by the book: join the neighbours whose union scores highest, the left first."""
    pieces, scores, kinds = vocabulary
    ids = {p: i for i, p in enumerate(pieces) if kinds[i] == 1}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[ids[a + b]], -i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    first_byte = pieces.index("<0x00>")
    out = []
    for part in parts:
        out += [ids[part]] if part in ids else [first_byte + byte for byte in part.encode()]
    return out


def test_sentencepiece_equals_the_definition(tmp_path: Path) -> None:
    tokenizer = _build(_write(tmp_path / "m.gguf"))
    texts = [
        "Hello world",
        "the the  end",
        " lead",
        "Say hello and learn",
        "caf\u00e9 中文字 🙂",
        "\n\t",
    ]
    for text in texts + TEXTS:
        expected = _greedy_sentencepiece(text)
        assert tokenizer.encode(text) == [1, *expected], text
        assert tokenizer.decode(expected) == text
    assert any(3 <= i < 259 for i in tokenizer.encode("🙂")), "byte fallback must be exercised"


def test_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    path = tmp_path / "m.gguf"
    tokenizer = _build(_write(path))
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    for text in TEXTS:
        if text[0] == " ":
            continue  # transformers adds no space there; sentencepiece itself and llama.cpp do
        ours = tokenizer.encode(text, add_special_tokens=False)
        assert ours == theirs.encode(text, add_special_tokens=False).ids, text


def _gemma_vocab() -> tuple[list[str], list[float], list[int]]:
    """A Gemma-like vocabulary: runs of white space and markup are whole, as real characters."""
    whole = ["<start_of_turn>", "<unused0>", "\n\n", "\n\n\n", "  ", "   ", "    ", "<b>", "</b>"]
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *whole]
    kinds = [3, 3, 3, 2, 3] + [4] * (len(whole) - 1)
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [6] * 256
    scores = [-1000.0] * len(pieces)
    words = ["▁t", "er", "in", "▁a", "en", "he", "▁the", "or", "ld", "▁w", "▁wor", "▁world", "lo"]
    words += ["ell", "He", "Hello", "▁▁a", "and", "an", "▁an", "▁and", "12", "ab", "abab", "aba"]
    letters = [chr(c) for c in range(0x21, 0x7F)] + ["▁", "\n", "\t", "é", "中", "文"]
    for rank, piece in enumerate(words + letters):
        pieces.append(piece)
        kinds.append(1)
        scores.append(-float(rank))
    return pieces, scores, kinds


def _write_gemma(path: Path) -> GGUFFile:
    pieces, scores, kinds = _gemma_vocab()
    return _write(
        path,
        architecture="gemma2",
        tokens=pieces,
        scores=scores,
        token_type=kinds,
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
        padding_token_id=0,
        add_space_prefix=False,
    )


def _greedy_gemma(text: str) -> list[int]:
    """The whole tokens first, the longest at each place, then merges by score in what is left."""
    pieces, _, kinds = _gemma_vocab()
    whole = sorted((p for p, kind in zip(pieces, kinds, strict=True) if kind == 4), key=len)[::-1]
    out, start, at = [], 0, 0
    while at < len(text):
        found = next((piece for piece in whole if text.startswith(piece, at)), None)
        if found is None:
            at += 1
            continue
        out += [*_merge_by_score(text[start:at], _gemma_vocab()), pieces.index(found)]
        start = at = at + len(found)
    return out + _merge_by_score(text[start:], _gemma_vocab())


def test_gemma_equals_the_definition(tmp_path: Path) -> None:
    tokenizer = _build(_write_gemma(tmp_path / "m.gguf"))
    for text in [*TEXTS, "Hello  world", "a   b     c", "x\n\n\n\n\ny", "<b>the</b> and<unused0>!"]:
        expected = _greedy_gemma(text)
        assert tokenizer.encode(text) == [2, *expected], text
        assert tokenizer.decode(expected) == text
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert len(tokenizer.encode("the<start_of_turn>the")) == 1 + 2 * 2 + 1


@given(text=st.text(st.sampled_from("ab ▁the\n12é🙂<>/"), max_size=20))
def test_gemma_equals_the_definition_on_mixtures(gemma: Tokenizer, text: str) -> None:
    assert gemma.encode(text, add_special_tokens=False) == _greedy_gemma(text)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _build(_write_gemma(tmp_path_factory.mktemp("gemma") / "m.gguf"))


def test_gemma_equals_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    path = tmp_path / "m.gguf"
    tokenizer = _build(_write_gemma(path))
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    for text in [*TEXTS, "Hello  world", "a   b", "x\n\n\ny", "<b>the</b> and"]:
        ours = tokenizer.encode(text, add_special_tokens=False)
        assert ours == theirs.encode(text, add_special_tokens=False).ids, text


def test_phi3_drops_white_space_after_markers(tmp_path: Path) -> None:
    """As its published tokenizer does, whose template has line ends after each marker."""
    pieces, scores, kinds = sentencepiece_vocab()
    pieces += ["<|endoftext|>", "<|end|>"]
    scores += [0.0, 0.0]
    kinds += [3, 3]
    changes = {"tokens": pieces, "scores": scores, "token_type": kinds}
    chat = "<|user|>\nthe<|end|>\n  <|end|> the<|endoftext|>\nthe"

    def cut(architecture: str) -> list[str]:
        file = _write(tmp_path / "m.gguf", architecture=architecture, **changes)
        return [pieces[i] for i in _build(file).encode(chat, add_special_tokens=False)]

    newline = ["▁", "<0x0A>"]
    the = ["▁the"]
    expected = ["<|user|>", *the, "<|end|>", "<|end|>", *the, "<|endoftext|>", *newline, "t", "he"]
    assert cut("phi3") == expected
    assert cut("llama")[:3] == ["<|user|>", *newline]


def test_sentencepiece_details(tmp_path: Path) -> None:
    tokenizer = _build(_write(tmp_path / "m.gguf"))
    pieces, _, _ = sentencepiece_vocab()
    assert tokenizer.special_ids == {0, 1, 2}
    user = pieces.index("<|user|>")
    assert user in tokenizer.encode("a<|user|>b"), "user-defined tokens are matched whole"
    assert "<|user|>" in tokenizer.decode([user])
    # llama.cpp and the original tokenizers put a space after each special token
    assert [pieces[i] for i in tokenizer.encode("</s>the")] == ["<s>", "</s>", "▁the"]
    bare = _build(_write(tmp_path / "n.gguf", add_bos_token=False, add_eos_token=True))
    assert bare.encode("the")[0] != 1 and bare.encode("the")[-1] == 2
    tight = _build(_write(tmp_path / "t.gguf", add_space_prefix=False))
    assert not tight.strips_leading_space
    assert [pieces[i] for i in tight.encode("the", add_special_tokens=False)] == ["t", "he"]
    assert tight.decode(tight.encode(" the")) == " the"


def _byte_level(path: Path, pre: str | None, **changes: Any) -> GGUFFile:
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return _write(
        path,
        **{
            "model": "gpt2",
            "pre": pre,
            "tokens": tokens,
            "scores": None,
            "token_type": [3] * 6 + [1] * (len(tokens) - 6),
            "merges": [" ".join(pair) for pair in model["merges"]],
            "unknown_token_id": None,
            **changes,
        },
    )


@pytest.mark.parametrize(
    ("pre", "text", "cuts"),
    [
        ("gpt-2", "it's  12 x!!\n\ny", ["it", "'s", " ", " 12", " x", "!!", "\n", "\n", "y"]),
        ("smollm", "it's  12 x", ["it", "'s", "  ", "1", "2", " x"]),
        ("llama-bpe", "It'S  1234 x!\n\ny", ["It", "'S", " ", " ", "123", "4", " x", "!\n\n", "y"]),
        ("qwen2", "a 12(b", ["a", " ", "1", "2", "(b"]),
        ("tekken", "HelloWORLD 12", ["Hello", "WORLD", " ", "1", "2"]),
        ("dbrx", "It'S  1234 x!", ["It", "'S", " ", " ", "123", "4", " x", "!"]),
        ("qwen35", "e\u0301a 12", ["e\u0301a", " ", "1", "2"]),
        ("gpt-4o", "it's HelloWORLD 1234/", ["it's", " Hello", "WORLD", " ", "123", "4", "/"]),
        (
            "deepseek-v3",
            "a.Bc 1234中かx ()\n\ny",
            ["a", ".Bc", " ", "123", "4", "中か", "x", " ()\n\n", "y"],
        ),
        (
            "deepseek-llm",
            "Ab 12\n  (x)  中",
            ["Ab", " ", "1", "2", "\n", " ", " (", "x", ")", "  ", "中"],
        ),
        # Letters with case, but for those that the list of the original does not have.
        ("deepseek-llm", "éЯꞌﬀաꞏ𝐀", ["éЯꞌﬀ", "աꞏ𝐀"]),
        ("deepseek-coder", "a b1.!\n", ["a", " b", "1", ".!", "\n"]),
    ],
)
def test_how_text_is_cut(tmp_path: Path, pre: str, text: str, cuts: list[str]) -> None:
    backend = build_gguf_tokenizer(_byte_level(tmp_path / "m.gguf", pre)).backend
    assert backend.pre_tokenizer is not None
    pieces = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == cuts


def test_expressions_equal_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tokenizers import Regex
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    known = sorted(SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys())
    assert {"llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "dbrx"} <= set(known)
    corpus = _corpus()
    for pre in known:
        ours = build_gguf_tokenizer(_byte_level(tmp_path / "m.gguf", pre)).backend.pre_tokenizer
        assert ours is not None
        theirs = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for text in corpus:
            assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), (pre, text)


def test_bos_defaults_by_kind(tmp_path: Path) -> None:
    for pre, adds in (("gpt-2", False), ("smollm", False), ("llama-bpe", True), ("tekken", True)):
        tokenizer = _build(_byte_level(tmp_path / "m.gguf", pre))
        assert (tokenizer.encode("the")[0] == tokenizer.bos_token_id) is adds, pre
    asked = _build(_byte_level(tmp_path / "m.gguf", "gpt-2", add_bos_token=True))
    assert asked.encode("the")[0] == 1


def test_unsaid_rule_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _build(_byte_level(tmp_path / "m.gguf", None))
    assert "assuming GPT-2's rule" in caplog.text


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (_byte_level, {"pre": "made-up"}, "pre 'made-up' is not known.*smollm"),
        (_byte_level, {"pre": "gpt-2", "merges": ["q q"]}, "the vocabulary cannot be used"),
        (_byte_level, {"pre": "gpt-2", "merges": None}, "no tokenizer.ggml.merges"),
        (_write, {"model": "bert"}, "model 'bert' is not supported"),
        (_write, {"tokens": ["a", "b", "a"]}, "'a' appears twice"),
        (_write, {"scores": [0.0, 1.0]}, "but 2 scores"),
        (_write, {"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        (_write, {"tokens": None}, "has no tokenizer.ggml.tokens"),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, make: Callable[..., GGUFFile], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        build_gguf_tokenizer(make(tmp_path / "m.gguf", **changes))

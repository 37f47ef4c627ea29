"""Streaming text: nothing early, nothing twice, nothing lost."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jaxpaged.text.detokenizer import IncrementalDetokenizer
from jaxpaged.text.tokenizer import Tokenizer
from tests.text.support import TEXTS, byte_level, from_path, metaspace, sentencepiece


def _stream(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), *, skip: bool = True
) -> list[str]:
    """The deltas and, last, what finish() adds."""
    stream = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*map(stream.push, ids), stream.finish()]


def _byte_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a byte."""
    of_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [of_byte[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("make", [byte_level, sentencepiece, metaspace])
def test_random_sequences(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    rng = random.Random(2)
    for round_ in range(4000):
        ids = [rng.randrange(tokenizer.vocab_size + 20) for _ in range(rng.randrange(1, 16))]
        skip = bool(round_ % 2)
        deltas = _stream(tokenizer, ids, skip=skip)
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_random_sequences_equal_the_library() -> None:
    """The joined text is byte for byte what the tokenizers library decodes at once."""
    tokenizer = byte_level()
    rng = random.Random(3)
    for _ in range(10_000):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 12))]
        assert "".join(_stream(tokenizer, ids)) == tokenizer.backend.decode(ids)


def test_random_sequences_of_byte_tokens_equal_the_library() -> None:
    """DT-02 at random: pieces and byte tokens mixed. Where the bytes are no text the library
    replaces whole runs, valid neighbours included; there ours is compared with Python's rule.
    """
    tokenizer = sentencepiece()
    rng = random.Random(5)
    texts = 0
    for _ in range(10_000):
        ids = [rng.randrange(3, tokenizer.vocab_size) for _ in range(rng.randrange(1, 6))]
        ids += _byte_tokens(tokenizer, rng.choice(["가", "é", "🙂", "ฉัน", "a"]))
        rng.shuffle(ids) if rng.random() < 0.2 else None
        deltas = _stream(tokenizer, ids)
        raw = b"".join(map(tokenizer.token_bytes, ids)).removeprefix(b" ")
        assert "".join(deltas) == raw.decode("utf-8", "replace")
        if "\ufffd" not in "".join(deltas):
            texts += 1
            assert "".join(deltas) == tokenizer.backend.decode(ids)
    assert 1000 < texts < 9000


@pytest.mark.parametrize("make", [byte_level, sentencepiece, metaspace])
def test_random_completions_continue_their_prompt(make: Callable[[], Tokenizer]) -> None:
    """DT-04: prompt and completion read as one, wherever the cut is, also within a character."""
    tokenizer = make()
    rng = random.Random(6)
    for _ in range(3000):
        ids = [rng.randrange(3, tokenizer.vocab_size) for _ in range(rng.randrange(2, 12))]
        cut = rng.randrange(1, len(ids))
        prompt = tokenizer.decode(ids[:cut])
        text = "".join(_stream(tokenizer, ids[cut:], ids[:cut]))
        # The completion goes on with a character that the prompt began (up to two bad bytes long).
        begun = len(prompt) - len(prompt.rstrip("\ufffd"))
        readings = [prompt[: len(prompt) - n] + text for n in range(min(begun, 2) + 1)]
        assert tokenizer.decode(ids) in readings


def test_real_tokenizer(smollm2_path: Path) -> None:
    tokenizer = from_path(smollm2_path)
    rng = random.Random(4)
    for text in TEXTS:
        assert "".join(_stream(tokenizer, tokenizer.encode(text))) == text
    for _ in range(500):
        ids = [rng.randrange(49152) for _ in range(20)]
        assert "".join(_stream(tokenizer, ids)) == tokenizer.backend.decode(ids)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("text", ["👩‍👩‍👧", "𠮷野家", "ฉัน", "e\u0301", "🇩🇪", "é中🙂"])
def test_one_byte_a_token(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    deltas = _stream(tokenizer, _byte_tokens(tokenizer, text))
    assert "".join(deltas) == text and deltas[-1] == ""
    assert not any("\ufffd" in delta for delta in deltas)
    # Each character appears with its own last byte, not later.
    sizes = [len(char.encode()) for char in text]
    assert [i + 1 for i, d in enumerate(deltas[:-1]) if d] == [
        sum(sizes[: i + 1]) for i in range(len(sizes))
    ]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_unfinished_tail_is_delivered_once(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    ids = _byte_tokens(tokenizer, "a🙂")[:-1]
    assert _stream(tokenizer, ids) == ["a", "", "", "", "\ufffd"]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_bad_bytes_do_not_stop_the_stream(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    good = _byte_tokens(tokenizer, "中")
    broken = [*good[:2], *_byte_tokens(tokenizer, "ok"), good[2], *good]
    assert _stream(tokenizer, broken) == ["", "", "\ufffdo", "k", "\ufffd", "", "", "中", ""]


def test_endless_bad_bytes_cost_the_same_each() -> None:
    tokenizer = byte_level()
    stream = IncrementalDetokenizer(tokenizer)
    bad = _byte_tokens(tokenizer, "中")[1]
    started = time.perf_counter()
    for _ in range(100_000):
        assert stream.push(bad) == "\ufffd"
    assert time.perf_counter() - started < 5.0  # quadratic behaviour would take minutes


def test_byte_fallback() -> None:
    tokenizer = sentencepiece()
    ids = [*_byte_tokens(tokenizer, "가"), *tokenizer.encode("a")[-1:]]
    text = "".join(_stream(tokenizer, ids))
    assert text == "가a" and not re.search("<0x", text)


@pytest.mark.parametrize("make", [sentencepiece, metaspace, byte_level])
def test_leading_space_is_relative_to_the_prompt(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    whole = tokenizer.encode("ab ab a")
    for cut in range(len(whole) + 1):
        prompt, output = whole[:cut], whole[cut:]
        deltas = _stream(tokenizer, output, prompt)
        assert tokenizer.decode(prompt) + "".join(deltas) == tokenizer.decode(whole)


def test_llama_pieces_after_a_prompt() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer.backend.token_to_id(piece) for piece in ("▁Hello", "▁world", "!")]
    prompt = tokenizer.encode("Say:")
    assert _stream(tokenizer, ids, prompt) == [" Hello", " world", "!", ""]
    assert _stream(tokenizer, ids) == ["Hello", " world", "!", ""]
    only_special = [tokenizer.backend.token_to_id("<s>")]
    assert _stream(tokenizer, ids, only_special)[0] == "Hello"


def test_prompt_that_ends_inside_a_character() -> None:
    tokenizer = byte_level()
    ids = _byte_tokens(tokenizer, "x🙂y")
    assert "".join(_stream(tokenizer, ids[3:], ids[:3])) == "🙂y"


def test_special_tokens_are_shown_on_request() -> None:
    tokenizer = byte_level()
    assert tokenizer.eos_token_id is not None
    ids = [*tokenizer.encode("a"), tokenizer.eos_token_id]
    assert "".join(_stream(tokenizer, ids)) == "a"
    assert "".join(_stream(tokenizer, ids, skip=False)) == "a<|end|>"
    # A special token does not break the character around it.
    half = _byte_tokens(tokenizer, "é")
    assert "".join(_stream(tokenizer, [half[0], tokenizer.eos_token_id, half[1]])) == "é"


def test_unknown_ids_add_nothing() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.vocab_size, *tokenizer.encode("a"), -5, 2**33]
    assert _stream(tokenizer, ids) == ["", "a", "", "", ""]

"""Forbidden words become the right token sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.text.bad_words import bad_word_sequences
from jaxpaged.text.tokenizer import Tokenizer
from tests.text.support import byte_level, from_path
from tests.tiny_models import BOS, tiny_tokenizer


def test_smollm2(smollm2_path: Path) -> None:
    tokenizer = from_path(smollm2_path)
    got = bad_word_sequences(["dog"], tokenizer)
    assert [[tokenizer.token(i) for i in ids] for ids in got] == [["dog"], [" dog"]]
    assert bad_word_sequences([" dog", "dog"], tokenizer) == got


def test_second_form_only_where_it_is_another_spelling() -> None:
    tokenizer = byte_level()
    for word in ("the", "qzx", "中", "-"):
        bare = tokenizer.encode(word, add_special_tokens=False)
        spaced = tokenizer.encode(" " + word, add_special_tokens=False)
        expected = [bare]
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            expected.append(spaced)
        assert bad_word_sequences([word], tokenizer) == expected
    forms = {word: len(bad_word_sequences([word], tokenizer)) for word in ("the", "中")}
    assert forms == {"the": 1, "中": 2}, "both branches must be exercised"


def test_words_of_spaces_and_specials() -> None:
    tokenizer = byte_level()
    for blank in ("\n", " ", "\t"):
        assert bad_word_sequences([blank], tokenizer)[0] == tokenizer.encode(blank)
    assert bad_word_sequences([BOS], tokenizer) == [[0]]


def test_word_without_tokens_is_refused() -> None:
    backend = tiny_tokenizer()
    from tokenizers.normalizers import Replace

    backend.normalizer = Replace("q", "")
    with pytest.raises(InvalidRequestError, match="'qq' has no tokens"):
        bad_word_sequences(["qq"], Tokenizer(backend, special_tokens={}))

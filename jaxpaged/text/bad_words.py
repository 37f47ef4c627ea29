"""Forbidden words as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpaged.errors import InvalidRequestError
from jaxpaged.text.tokenizer import Tokenizer


def bad_word_sequences(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences whose completion would spell one of `words`.

    Each word is tokenised as at the start of a text and as after a space; the second form is used
    only if it has as many tokens and another first one (else it is no spelling of its own). Raises
    `InvalidRequestError` for a word without tokens.
    """
    sequences: list[list[int]] = []
    for word in words:
        text = word.lstrip() or word
        bare = tokenizer.encode(text, add_special_tokens=False)
        if not bare:
            raise InvalidRequestError(
                f"bad_words: {word!r} has no tokens in this model's vocabulary.", param="bad_words"
            )
        spaced = tokenizer.encode(" " + text, add_special_tokens=False)
        forms = [bare]
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            forms.append(spaced)
        sequences += [form for form in forms if form not in sequences]
    return sequences

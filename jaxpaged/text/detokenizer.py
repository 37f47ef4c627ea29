"""Text of a growing token sequence, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxpaged.text.tokenizer import Tokenizer

_CONTEXT_BYTES = 3
"""A UTF-8 character that the prompt leaves unfinished has at most this many bytes so far."""


class IncrementalDetokenizer:
    """Text of one completion. `push` returns what each token adds; nothing is ever taken back.

    The deltas and `finish()` together equal `tokenizer.decode(output ids)`, except next to a
    prompt: a space that a tokenizer strips at the start of a text is kept, and a character that the
    prompt's last tokens began is completed. Each push costs O(bytes of the token).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._known = tokenizer.known_texts(skip_special_tokens=skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        context = self._context(prompt_token_ids)
        self._strip_next_space = tokenizer.strips_leading_space and not context
        self._decoder.decode(context)  # its text belongs to the prompt
        self._between = False
        """Between two characters, with no space to strip: what most tokens mean is known then."""
        self._note_state()

    def push(self, token_id: int) -> str:
        """New text, "" while a character is unfinished, for skipped tokens and for unknown ids."""
        if self._between:
            text = self._known.get(token_id)
            if text is not None:
                return text
        if token_id in self._skipped:
            return ""
        if self._between:
            text = self._tokenizer.whole_text(token_id)
            if text is not None:
                return text
        raw = self._tokenizer.token_bytes(token_id)
        if self._strip_next_space and raw:
            raw = raw.removeprefix(b" ")
            self._strip_next_space = False
        text = self._decoder.decode(raw)
        self._note_state()
        return text

    def finish(self) -> str:
        """What an unfinished character at the end reads as: U+FFFD, or "" when there is none."""
        return self._decoder.decode(b"", final=True)

    def _note_state(self) -> None:
        self._between = not self._strip_next_space and not self._decoder.getstate()[0]

    def _context(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt's visible text."""
        tail = b""
        for token in reversed(prompt_token_ids):
            if len(tail) >= _CONTEXT_BYTES:
                break
            if token not in self._skipped:
                tail = self._tokenizer.token_bytes(token) + tail
        return tail[-_CONTEXT_BYTES:]

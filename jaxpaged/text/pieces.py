"""What bytes a token stands for, read off a tokenizer's decoder.

All text that leaves the engine is the UTF-8 decoding of the tokens' bytes. Bytes concatenate, text
does not (characters straddle tokens), so streaming stays exact and costs O(1) a token.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from jaxpaged.errors import ModelLoadError

_SPACE_MARK = "\u2581"  # SentencePiece's visible space


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's rule).

    Bytes that print keep their own character; the others take code points from 256 up, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class PieceDecoder:
    """Turns vocabulary entries into bytes. Knows byte-level and SentencePiece-like decoders.

    Bytes that are not UTF-8 read as U+FFFD, one for each broken stretch as Unicode recommends. That
    is also what byte-level tokenizers do; Hugging Face's ByteFallback instead replaces every byte
    of a run, valid neighbours included, and would rewrite text that was streamed already.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises `ModelLoadError` for decoders whose text is not a function of each token alone."""
        self.strips_leading_space = False
        """One space at the very start of a text belongs to the tokenizer, not to the text."""
        self._bytes_of_char: dict[str, int] | None = None
        self._byte_fallback = False
        self._marks_spaces = False
        decoder = backend.decoder
        steps = _steps(json.loads(decoder.__getstate__())) if decoder is not None else []
        for step in steps:
            if not self._understand(step):
                raise ModelLoadError(
                    f"The tokenizer's decoder {step.get('type')!r} ({step!r}) is not supported; "
                    "byte-level (GPT-2) and SentencePiece-like decoders are."
                )
        if not steps:
            raise ModelLoadError("The tokenizer has no decoder; its tokens cannot become text.")

    def _understand(self, step: dict[str, Any]) -> bool:
        kind = step.get("type")
        if kind == "ByteLevel":
            self._bytes_of_char = byte_alphabet()
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Metaspace":
            self._marks_spaces = True
            self.strips_leading_space = step.get("prepend_scheme", "always") != "never"
            return bool(step.get("replacement") == _SPACE_MARK)
        elif kind == "Replace":
            self._marks_spaces = True
            pattern = step.get("pattern") == {"String": _SPACE_MARK}
            return pattern and step.get("content") == " "
        elif kind == "Strip":
            self.strips_leading_space = step.get("start") == 1
            return step.get("content") == " " and step.get("start") in (0, 1) and not step["stop"]
        else:
            return kind == "Fuse"
        return True

    def piece_bytes(self, piece: str) -> bytes:
        """The bytes of one vocabulary entry."""
        if self._bytes_of_char is not None:
            codes = [self._bytes_of_char.get(char) for char in piece]
            # Added tokens are written as plain text, which may leave the alphabet.
            known = [code for code in codes if code is not None]
            return bytes(known) if len(known) == len(codes) else piece.encode("utf-8")
        if self._byte_fallback and len(piece) == 6 and piece[:3] == "<0x" and piece[5] == ">":
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass  # an ordinary token that only looks like a byte
        return (piece.replace(_SPACE_MARK, " ") if self._marks_spaces else piece).encode("utf-8")


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]

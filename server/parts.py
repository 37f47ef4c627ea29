"""What a client is told of each choice, part by part. A stream sends the parts, an answer without
stream is their concatenation: there is no second path that could differ.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from jaxpaged.outputs import LogprobDict
from server.runs import Piece


@dataclass(slots=True)
class Part:
    """News of one choice: either text, or the end. Tokens without text come with what follows."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobDict] = field(default_factory=list)
    """One entry a token, or none at all."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Splitter:
    """Turns the pieces of a run into parts: no empty ones, and the end apart from the text (some
    clients drop the text of the chunk that has the finish_reason).
    """

    def __init__(self, n: int, *, tells_tokens: bool, needs_prompt: bool) -> None:
        """`tells_tokens`: the client gets token ids, so that tokens without text are news.

        `needs_prompt`: nothing of a prompt's choices can be told before its prompt_logprobs.
        """
        self.prompt_logprobs: dict[int, list[LogprobDict | None]] = {}
        """By prompt, as soon as they are there."""
        self._n = n
        self._tells_tokens = tells_tokens
        self._needs_prompt = needs_prompt
        self._pending: dict[int, Part] = {}
        self._early: dict[int, list[Piece]] = defaultdict(list)

    def feed(self, piece: Piece) -> list[Part]:
        place = piece.index // self._n
        pieces = [piece]
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs[place] = piece.prompt_logprobs
            pieces = [*self._early.pop(place, ()), piece]
        elif self._needs_prompt and place not in self.prompt_logprobs:
            # Another sample of the prompt was faster than the one that scores it.
            self._early[place].append(piece)
            return []
        return [part for one in pieces for part in self._parts(one)]

    def _parts(self, piece: Piece) -> list[Part]:
        part = self._pending.pop(piece.index, None)
        if part is None:
            part = Part(piece.index, piece.text, piece.token_ids, piece.logprobs or [])
        else:
            part.text = piece.text
            part.token_ids += piece.token_ids
            part.logprobs += piece.logprobs or ()
        if piece.finish_reason is None:
            if part.text or (self._tells_tokens and part.token_ids):
                return [part]
            # The lists of a part that waits grow, so they must be its own.
            own = part.token_ids is not piece.token_ids
            self._pending[piece.index] = part if own else _copy(part)
            return []
        end = Part(piece.index) if part.text else part
        end.finish_reason, end.stop_reason = piece.finish_reason, piece.stop_reason
        return [part, end] if end is not part else [end]


def _copy(part: Part) -> Part:
    return Part(part.index, part.text, list(part.token_ids), list(part.logprobs))

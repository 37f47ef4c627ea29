"""Beam search on the host: from the best next tokens of each live beam to the next live beams.

The algorithm is that of transformers' generate with num_beams and without sampling: the same live
beams, hypotheses and scores, in float32. It differs where transformers pads: beams of which there
are none (a vocabulary smaller than the width) are left out, not filled up with others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxpaged.beam_params import BeamSearchParams

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best next tokens of one live beam, best first, the lower id first among equals.

    Log-probabilities are float32 values; -inf says that there is no such token.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One result. `token_ids` has no prompt; the token that ended it is its last.

    `score` is `cumulative_logprob` (a sum in float32) divided by the number of tokens to the power
    of the length penalty. `finish_reason` is "stop" or "length", or None for a beam that was still
    live; `stop_reason` is the stop token id that ended it, None for EOS.
    """

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str | None
    stop_reason: int | None = None


@dataclass(slots=True)  # not frozen, which makes it three times as slow to make
class _Node:
    """A beam as its last token: beams share what they have in common."""

    parent: _Node | None
    token: int

    def token_ids(self) -> list[int]:
        tokens = []
        node: _Node | None = self
        while node is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


@dataclass(frozen=True, slots=True)
class _Scored:
    """`last` is None before the first token."""

    last: _Node | None
    cumulative: np.float32
    score: np.float32
    finish_reason: str | None


class BeamSearch:
    """The state of one search. Call `advance` with what each live beam may go on with until `done`.

    `eos_token_ids` are the model's; `prompt_len` and `max_model_len` are in tokens, and the prompt
    must leave room for one more.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        *,
        eos_token_ids: Collection[int],
        prompt_len: int,
        max_model_len: int,
    ) -> None:
        room = max_model_len - prompt_len
        assert room >= 1, f"no room after {prompt_len} of {max_model_len} tokens"
        self.params = params
        self.limit = room if params.max_tokens is None else min(params.max_tokens, room)
        """Most tokens that a hypothesis can have."""
        self._eos_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._ending_ids = self._eos_ids.union(params.stop_token_ids or ())
        self._live: list[_Node | None] = [None]
        self._totals: Floats = np.zeros(1, np.float32)
        """Sums of log-probabilities of the live beams."""
        self._ended: list[_Scored] = []
        """Best first, at most beam_width."""
        self._length = 0
        self._done = False

    @property
    def done(self) -> bool:
        return self._done

    @property
    def num_live(self) -> int:
        """Beams to compute next: 1 before the first step, then beam_width, 0 when done."""
        return len(self._live)

    @property
    def num_candidates(self) -> int:
        """Next tokens that each live beam must show, if the vocabulary has as many.

        However many of them end a hypothesis, beam_width others must be left to go on with.
        """
        width = self.params.beam_width
        return width + max(width, len(self._ending_ids))

    def advance(self, candidates: Sequence[Candidates]) -> list[tuple[int, int]]:
        """`advance_table` with an entry for each live beam; they need not show equally many."""
        assert not self._done, "the search is over"
        assert len(candidates) == self.num_live, f"{len(candidates)} for {self.num_live} beams"
        most = max(len(shown.token_ids) for shown in candidates)
        token_ids = np.zeros((len(candidates), most), np.int32)
        logprobs = np.full((len(candidates), most), -np.inf, np.float32)
        for place, shown in enumerate(candidates):
            token_ids[place, : len(shown.token_ids)] = shown.token_ids
            logprobs[place, : len(shown.logprobs)] = shown.logprobs
        return self.advance_table(token_ids, logprobs)

    def advance_table(self, token_ids: Ints, logprobs: Floats) -> list[tuple[int, int]]:
        """One step: the best next tokens of each live beam, as `Candidates` has them. Both arrays
        are [live beams in their order, tokens].

        Returns (index of a live beam, token) for each of the next live beams, in their order, best
        first; nothing when the search is over.
        """
        assert not self._done, "the search is over"
        width = self.params.beam_width
        self._length += 1
        at_limit = self._length >= self.limit
        owners, tokens, totals = self._ranked(token_ids, logprobs)
        places: list[int] = []
        """Of those that go on."""
        ended: list[_Scored] = []
        for place, token in enumerate(tokens):
            ends = token in self._ending_ids
            # An ending that is not among the best beam_width is lost, though others go on below it.
            if place < width and (ends or at_limit):
                last, total = _Node(self._live[owners[place]], token), totals[place]
                reason = "stop" if ends else "length"
                ended.append(_Scored(last, total, self._score(total), reason))
            elif not ends and not at_limit:
                places.append(place)
            if len(places) == width or (at_limit and place >= width):
                break
        if ended:
            self._ended = _best([*self._ended, *ended], width)
        chosen = [(owners[place], tokens[place]) for place in places]
        self._live = [_Node(self._live[owner], token) for owner, token in chosen]
        self._totals = totals[places]
        if not chosen or self._cannot_improve():
            self._done = True
            self._live, chosen = [], []
        return chosen

    def hypotheses(self) -> list[Hypothesis]:
        """The results so far, best first, at most beam_width.

        While the search runs its live beams are among them, scored at their present length; before
        the first step that is one without tokens.
        """
        live = [
            _Scored(last, total, self._score(total), None)
            for last, total in zip(self._live, self._totals, strict=False)
        ]
        best = _best([*self._ended, *live], self.params.beam_width)
        return [self._hypothesis(entry) for entry in best]

    def _ranked(self, token_ids: Ints, logprobs: Floats) -> tuple[list[int], list[int], Floats]:
        """(indices of live beams, tokens, sums of log-probabilities), best first.

        Equal sums keep the order of the beams, then that of a beam's candidates: it does not depend
        on how many candidates a beam shows.
        """
        sums = (logprobs + self._totals[:, None]).ravel()
        order = (-sums).argsort(kind="stable")
        # More cannot be wanted: beam_width that go on, and before them whatever ends.
        order = order[: self.params.beam_width + len(self._live) * len(self._ending_ids)]
        totals = sums[order]
        if not (totals.size and totals[-1] > -np.inf):
            possible = totals > -np.inf
            order, totals = order[possible], totals[possible]
        owners: list[int] = (order // token_ids.shape[1]).tolist()
        tokens: list[int] = token_ids.ravel()[order].tolist()
        return owners, tokens, totals

    def _score(self, total: np.float32) -> np.float32:
        return self._per_length(total, max(1, self._length))

    def _per_length(self, total: np.float32, length: int) -> np.float32:
        return np.float32(total / np.float32(length**self.params.length_penalty))

    def _cannot_improve(self) -> bool:
        """True if the search ends although beams are live."""
        params = self.params
        if len(self._ended) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        # Sums only fall. Divided by a power of the length they may rise again, the more the longer;
        # "never" reckons with that, False does not.
        rising = params.early_stopping == "never" and params.length_penalty > 0.0
        length = self.limit if rising else self._length
        best_possible = self._per_length(self._totals[0], length)
        return not best_possible > self._ended[-1].score

    def _hypothesis(self, entry: _Scored) -> Hypothesis:
        token_ids = [] if entry.last is None else entry.last.token_ids()
        stopped = entry.finish_reason == "stop" and token_ids[-1] not in self._eos_ids
        return Hypothesis(
            token_ids,
            float(entry.cumulative),
            float(entry.score),
            entry.finish_reason,
            token_ids[-1] if stopped else None,
        )


def _best(entries: Sequence[_Scored], count: int) -> list[_Scored]:
    """Best scores first; the older first among equals."""
    return sorted(entries, key=_descending)[:count]


def _descending(entry: _Scored) -> float:
    return -float(entry.score)

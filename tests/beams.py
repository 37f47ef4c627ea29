"""Language models made of a table, and beam searches over any model that can be called.

The model's opinion is all that a search needs, so a table of random logits, read at a place that
the last three tokens give, finds far more corners in a second than a network does.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.beam_search import BeamSearch, Candidates, Hypothesis

Floats = npt.NDArray[np.float32]
Predict = Callable[[list[list[int]]], Floats]
"""Sequences of one length -> log-probabilities [sequences, vocabulary] of what follows each."""

HAS_TORCH = importlib.util.find_spec("torch") is not None
STORED = Path(__file__).resolve().parent / "data" / "beam_reference.json"
FACTORS = (1, 7, 31)
ROWS = 97


@dataclass(frozen=True)
class Case:
    """One search over a table. `endings` is added to the logits of the ids in `eos`."""

    seed: int
    vocab: int
    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    eos: tuple[int, ...] = (1,)
    endings: float = 0.0
    prompt_len: int = 3

    @property
    def prompt(self) -> list[int]:
        rng = np.random.default_rng(self.seed + 1)
        return rng.integers(0, self.vocab, self.prompt_len).tolist()

    @property
    def params(self) -> BeamSearchParams:
        return BeamSearchParams(
            beam_width=self.width,
            max_tokens=self.max_tokens,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,  # type: ignore[arg-type]
        )

    def table(self) -> Floats:
        """Logits [ROWS, vocab]."""
        values = np.random.default_rng(self.seed).normal(0, 2, (ROWS, self.vocab))
        values[:, list(self.eos)] += self.endings
        return values.astype(np.float32)


def places(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The row of the table that speaks after each sequence."""
    return [
        sum(f * t for f, t in zip(FACTORS, reversed(s), strict=False)) % ROWS for s in sequences
    ]


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def best_candidates(logprobs: Floats, count: int) -> Candidates:
    """As the device gives them: best first, the lower id first among equals."""
    order = np.argsort(-logprobs, kind="stable")[:count]
    return Candidates(order.tolist(), logprobs[order].tolist())


def run_search(
    params: BeamSearchParams,
    prompt: list[int],
    predict: Predict,
    *,
    eos: Sequence[int],
    max_model_len: int = 10_000,
) -> list[Hypothesis]:
    """The whole search; checks on the way what holds at every step."""
    search = BeamSearch(
        params, eos_token_ids=eos, prompt_len=len(prompt), max_model_len=max_model_len
    )
    live: list[list[int]] = [[]]
    steps = 0
    while not search.done:
        assert search.num_live == len(live)
        rows = predict([prompt + tokens for tokens in live])
        shown = [best_candidates(row, search.num_candidates) for row in rows]
        live = [[*live[index], token] for index, token in search.advance(shown)]
        steps += 1
        assert all(len(tokens) == steps < search.limit for tokens in live)
        assert len({tuple(tokens) for tokens in live}) == len(live) <= params.beam_width
        scores = [h.score for h in search.hypotheses()]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) <= params.beam_width
    assert live == []
    assert search.num_live == 0
    return search.hypotheses()


def search_table(case: Case, table: Floats | None = None) -> list[Hypothesis]:
    """`table` replaces the log-probabilities [ROWS, vocab] that numpy makes of the logits."""
    logprobs = log_softmax(case.table()) if table is None else table

    def predict(sequences: list[list[int]]) -> Floats:
        return logprobs[places(sequences)]

    return run_search(case.params, case.prompt, predict, eos=case.eos)


def stored() -> dict[str, Any]:
    """What scripts/make_beam_reference.py wrote."""
    about: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return about


@dataclass(frozen=True)
class Network:
    """One search by a tiny checkpoint (a case of tests/zoo) or the embedded model, and what
    transformers made of it: generated tokens and score of each hypothesis, best first."""

    model: str
    prompt: list[int]
    params: dict[str, Any]
    token_ids: list[list[int]]
    scores: list[float]

    @property
    def beam_params(self) -> BeamSearchParams:
        return BeamSearchParams(**self.params)


def stored_networks(model: str) -> list[Network]:
    return [Network(**entry) for entry in stored()["networks"] if entry["model"] == model]

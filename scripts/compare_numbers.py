"""Errors of one implementation's numbers against another's, and what they mean. No model here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

NORMAL_IN_A_LAYER = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative errors of hidden states that rounding alone may reach."""
JUMP = 10.0
"""So many times the error before a layer is a jump."""


class CompareError(Exception):
    """Nothing could be compared; the message says why and what to do."""


@dataclass(frozen=True)
class Side:
    """What one implementation makes of a prompt."""

    logits: Floats  # [T, V]
    hidden: list[Floats]  # [T, E] after the embedding and after each layer
    tokens: list[int]
    """Greedy ones."""
    generated: Floats | None = None
    """[count, V]: the logits that they were chosen by."""


@dataclass(frozen=True)
class LayerError:
    layer: str
    max_abs: float
    relative: float
    cosine: float


@dataclass(frozen=True)
class Parting:
    """The first greedy token that differs."""

    index: int
    ours: int
    torch: int
    gap: float
    """Between torch's best two logits."""
    near_tie: bool


@dataclass
class Report:
    """Of one prompt. Lists have one entry a position; `error` is what the verdict goes by."""

    prompt: str | None
    token_ids: list[int]
    error: list[float]
    logit_error: list[float]
    logprob_error: list[float]
    kl: list[float]
    top1: list[bool]
    perplexity: dict[str, float | None]
    greedy: dict[str, list[int]]
    parting: Parting | None
    layers: list[LayerError] = field(default_factory=list)


def compare(
    prompt: str | None,
    ids: list[int],
    ours: Side,
    torch: Side,
    *,
    tolerance: float,
    with_layers: bool,
) -> Report:
    """Raises `CompareError` for models that differ in shape."""
    for what, a, b in (
        ("vocabularies of {} and {} tokens", ours.logits.shape[1], torch.logits.shape[1]),
        ("{} and {} layers", len(ours.hidden) - 1, len(torch.hidden) - 1),
        ("{} and {} hidden dimensions", ours.hidden[-1].shape[1], torch.hidden[-1].shape[1]),
    ):
        if a != b:
            raise CompareError(f"the two models differ in shape: {what.format(a, b)}.")
    difference = apart(ours.logits, torch.logits)
    a, b = log_softmax(ours.logits), log_softmax(torch.logits)
    kl = np.exp(b) * np.subtract(b, a, out=np.zeros_like(b), where=~np.isneginf(b))
    pairs = list(zip(ours.hidden, torch.hidden, strict=True)) if with_layers else []
    layers = [layer_error(place, *pair) for place, pair in enumerate(pairs)]
    return Report(
        prompt=prompt,
        token_ids=ids,
        error=(difference / largest(torch.logits)).tolist(),
        logit_error=difference.tolist(),
        logprob_error=apart(a, b).tolist(),
        kl=kl.sum(axis=1).tolist(),
        top1=(ours.logits.argmax(axis=1) == torch.logits.argmax(axis=1)).tolist(),
        perplexity={"ours": perplexity(a, ids), "torch": perplexity(b, ids)},
        greedy={"ours": ours.tokens, "torch": torch.tokens},
        parting=first_parting(ours, torch, tolerance),
        layers=layers,
    )


def apart(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Doubles:
    """[T, N] twice -> [T]: the largest difference; NaN anywhere stays NaN."""
    with np.errstate(invalid="ignore"):  # masked tokens are -inf on both sides
        wide = np.where(a == b, 0.0, np.abs(a.astype(np.float64) - b.astype(np.float64)))
    found: Doubles = wide.max(axis=1)
    return found


def largest(logits: npt.NDArray[Any]) -> Doubles:
    """[T, V] -> [T]: the largest size of a logit, at least 1; masked ones (-inf) do not count."""
    sizes: Doubles = np.abs(np.where(np.isneginf(logits), 0.0, logits.astype(np.float64)))
    return np.maximum(1.0, sizes.max(axis=1))


def log_softmax(logits: Floats) -> Doubles:
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # where all went wrong
        wide = wide - wide.max(axis=1, keepdims=True)
        result: Doubles = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


def perplexity(logprobs: Doubles, ids: list[int]) -> float | None:
    """None for a prompt of one token, which has nothing to predict."""
    if len(ids) < 2:
        return None
    return float(np.exp(-logprobs[np.arange(len(ids) - 1), ids[1:]].mean()))


def first_parting(ours: Side, torch: Side, tolerance: float) -> Parting | None:
    """A near tie is a gap that errors within the tolerance can close."""
    pairs = zip(ours.tokens, torch.tokens, strict=True)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        return None
    assert torch.generated is not None
    row = torch.generated[index].astype(np.float64)
    best = np.sort(row)[-2:]
    gap = float(best[1] - best[0])
    # The token that we took must be one of the two, or as good as them.
    behind = float(best[1] - row[ours.tokens[index]])
    allowed = 2 * tolerance * float(largest(row[None])[0])
    return Parting(index, ours.tokens[index], torch.tokens[index], gap, behind <= allowed)


def layer_error(place: int, ours: Floats, torch: Floats) -> LayerError:
    a, b = ours.astype(np.float64), torch.astype(np.float64)
    size, other = np.linalg.norm(b, axis=1), np.linalg.norm(a, axis=1)
    least = np.finfo(np.float64).tiny
    cosine = (a * b).sum(axis=1) / np.maximum(size * other, least)
    return LayerError(
        "embedding" if place == 0 else str(place - 1),
        float(apart(a, b).max()),
        float((np.linalg.norm(a - b, axis=1) / np.maximum(size, least)).max()),
        float(cosine.min()),
    )


def worst_of(prompts: Sequence[Sequence[LayerError]]) -> list[LayerError]:
    """The errors of each layer over several prompts."""
    return [
        LayerError(
            same[0].layer,
            float(np.max([one.max_abs for one in same])),
            float(np.max([one.relative for one in same])),
            float(np.min([one.cosine for one in same])),
        )
        for same in zip(*prompts, strict=True)
    ]


def first_jump(layers: Sequence[LayerError], normal: float) -> str | None:
    """The first layer with an error that is not normal and far above that of the one before."""
    before = 0.0
    for layer in layers:
        if not layer.relative <= max(normal, JUMP * before):  # NaN is a jump
            return layer.layer
        before = layer.relative
    return None


def faults(reports: Sequence[Report], tolerance: float) -> list[str]:
    """What is not equal, in the order of the prompts."""
    found = []
    for number, report in enumerate(reports):
        wrong = [i for i, error in enumerate(report.error) if not error <= tolerance]
        if wrong:
            first = wrong[0]
            found.append(
                f"prompt {number}, position {first}: a logit is off by "
                f"{report.logit_error[first]:.1e}, {report.error[first]:.1e} of the largest"
            )
        elif report.parting is not None and not report.parting.near_tie:
            one = report.parting
            found.append(
                f"prompt {number}, greedy token {one.index}: {one.ours} instead of {one.torch}, "
                f"though torch's best two logits are {one.gap:.1e} apart and the prompt agrees: "
                "look at decoding and paging"
            )
    return found

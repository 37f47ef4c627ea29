"""Prompts of given lengths: random words, fitted by a tokenizer, or random token ids; and those of
a JSONL file.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxpaged.bench.lengths import Shape
from jaxpaged.jobs import SHOWN_ERRORS, InputError

Count = Callable[[str], Awaitable[int]]
"""How many tokens a text has."""
FIT_TRIES = 12
# Frequent words: in nearly every vocabulary each is one token, with the space before it.
_FREQUENT = """
the of and to in is was for on that with as at by from his it an are be which this or had not he
but have they all were one her she there would their we him been has when who will more no if out
so what up into do any your them than then now only could time some like other these about two may
first new such man our most made over state said some through where after many way back day know
because between must never here before good year down long world own still men life being under
great last high part small place house another again found home think work school put number
water large next light head group left side far water family hand point end same real night until
law white public give always city face young body door room best keep money war power country
system word form line order name early course change land story eyes set town music paper city
table book black food car level court window moment question child street river heart morning
business air health letter army field party minute voice hour ground summer center feet road land
"""
WORDS = tuple(_FREQUENT.split())


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a benchmark: a prompt or a conversation, and how long its answer is to be."""

    prompt: str | list[int] | None
    output_tokens: int
    prompt_tokens: int | None = None
    """As planned; None where nobody has counted."""
    messages: list[dict[str, Any]] | None = None


class TextMaker:
    """Texts of an exact number of tokens."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self.largest_miss = 0
        """Most tokens by which a text differs from what was asked."""

    async def samples(self, shapes: Sequence[Shape], seed: int) -> list[Sample]:
        groups = {shape.group: shape.prefix for shape in shapes if shape.prefix}
        made = await asyncio.gather(
            *(self._fit("", n, random.Random(f"{seed} prefix {g}")) for g, n in groups.items())
        )
        prefixes = dict(zip(groups, made, strict=True))

        async def sample(index: int, shape: Shape) -> Sample:
            start, before = prefixes.get(shape.group, ("", 0)) if shape.prefix else ("", 0)
            rng = random.Random(f"{seed} {index}")
            text, tokens = await self._fit(start, before + shape.body, rng)
            self.largest_miss = max(self.largest_miss, abs(tokens - shape.prompt))
            return Sample(text, shape.output, tokens)

        return list(await asyncio.gather(*(sample(i, s) for i, s in enumerate(shapes))))

    async def _fit(self, start: str, tokens: int, rng: random.Random) -> tuple[str, int]:
        """A text that begins with `start` and has so many tokens, or nearly, and how many."""
        held = await self._count(start) if start else 0
        words = rng.choices(WORDS, k=max(1, tokens - held))
        best: tuple[str, int] | None = None
        for _ in range(FIT_TRIES):
            text = f"{start} {' '.join(words)}".lstrip()
            found = await self._count(text)
            if best is None or abs(found - tokens) < abs(best[1] - tokens):
                best = (text, found)
            excess = found - tokens
            if excess == 0:
                break
            per_word = max(1.0, (found - held) / len(words))
            change = max(1, round(abs(excess) / per_word))
            if excess < 0:
                words += rng.choices(WORDS, k=change)
            else:
                words = words[: max(1, len(words) - change)]
        assert best is not None
        return best


def id_samples(shapes: Sequence[Shape], pool: Sequence[int], seed: int) -> list[Sample]:
    """Prompts of token ids drawn from `pool`."""
    groups = {shape.group: shape.prefix for shape in shapes if shape.prefix}
    prefixes = {
        group: random.Random(f"{seed} prefix {group}").choices(pool, k=length)
        for group, length in groups.items()
    }
    samples = []
    for index, shape in enumerate(shapes):
        ids = random.Random(f"{seed} {index}").choices(pool, k=shape.body)
        if shape.prefix:
            ids = prefixes[shape.group] + ids
        samples.append(Sample(ids, shape.output, len(ids)))
    return samples


async def count_words(text: str) -> int:
    """Stands in for a tokenizer where there is none."""
    return len(text.split())


def read_custom(
    path: str, count: int, output_tokens: int, *, conversations: bool, token_ids: bool
) -> list[Sample]:
    """At most `count` samples from JSON lines with `prompt` (text or token ids) or `messages`, and
    optionally `output_tokens`; else that of the argument. Other fields are ignored.

    `conversations` and `token_ids` say what can be sent. Raises `InputError`.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"--dataset-path {path}: {error.strerror}.") from error
    samples: list[Sample] = []
    errors: list[str] = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if len(samples) == count:
            break
        if not line.strip():
            continue
        try:
            sample = _custom(msgspec.json.decode(line), output_tokens)
            if sample.messages is not None and not conversations:
                raise ValueError("messages need the chat endpoint (--backend openai-chat)")
            if isinstance(sample.prompt, list) and not token_ids:
                raise ValueError("token ids cannot be sent to the chat endpoint")
            samples.append(sample)
        except (msgspec.DecodeError, ValueError) as error:
            errors.append(f"line {number}: {error}")
    if errors:
        raise InputError(f"{path} cannot be used:\n  " + "\n  ".join(errors[:SHOWN_ERRORS]))
    if not samples:
        raise InputError(f"{path} has no prompts.")
    return samples


def _custom(line: Any, output_tokens: int) -> Sample:
    if not isinstance(line, dict):
        raise ValueError("expected an object with prompt or messages")
    prompt, messages = line.get("prompt"), line.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError("needs exactly one of prompt and messages")
    output = line.get("output_tokens", output_tokens)
    if isinstance(output, bool) or not isinstance(output, int) or output < 1:
        raise ValueError(f"output_tokens must be an integer >= 1, got {output!r}")
    if messages is not None:
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a non-empty list")
        return Sample(None, output, messages=messages)
    if isinstance(prompt, str) and prompt:
        return Sample(prompt, output)
    if not isinstance(prompt, list) or not prompt or not all(type(i) is int for i in prompt):
        raise ValueError("prompt must be a non-empty text or list of token ids")
    return Sample(prompt, output, len(prompt))

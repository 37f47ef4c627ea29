"""Lengths, arrival times and prompts."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from jaxpaged.bench import lengths
from jaxpaged.bench.arrivals import Ramp, send_times
from jaxpaged.bench.lengths import Shape
from jaxpaged.bench.prompts import WORDS, TextMaker, count_words, id_samples, read_custom
from jaxpaged.jobs import InputError


def test_sharegpt_like_lengths() -> None:
    shapes = lengths.sharegpt_shapes(4000, 2048, seed=0)
    assert all(s.body >= 1 and s.output >= 1 and s.prompt + s.output <= 2048 for s in shapes)
    assert statistics.fmean(s.body for s in shapes) == pytest.approx(161, rel=0.1)
    # Clipped at 2,048, outputs lose some of their tail.
    assert statistics.fmean(s.output for s in shapes) == pytest.approx(325, rel=0.1)
    assert statistics.median(s.body for s in shapes) == pytest.approx(161 / math.e**0.5, rel=0.1)
    assert shapes == lengths.sharegpt_shapes(4000, 2048, seed=0)
    assert shapes != lengths.sharegpt_shapes(4000, 2048, seed=1)


def test_random_lengths() -> None:
    assert lengths.random_shapes(3, 8, 5, 0.0, 2, seed=0) == [Shape(8, 5, 2)] * 3
    shapes = lengths.random_shapes(500, 100, 10, 0.5, 0, seed=0)
    assert (min(s.body for s in shapes), max(s.body for s in shapes)) == (50, 150)
    assert (min(s.output for s in shapes), max(s.output for s in shapes)) == (5, 15)
    assert min(s.body for s in lengths.random_shapes(200, 1, 1, 0.9, 0, seed=0)) == 1


def test_prefixes_are_used_equally() -> None:
    shapes = lengths.prefix_shapes(11, 4, 2, 3, 9, seed=0)
    assert Counter(s.group for s in shapes) == {0: 4, 1: 4, 2: 3}
    assert {(s.prefix, s.body, s.output, s.prompt) for s in shapes} == {(4, 2, 9, 6)}
    assert [s.group for s in shapes] != sorted(s.group for s in shapes)


def test_all_at_once() -> None:
    assert send_times(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread(burstiness: float) -> None:
    times = send_times(20_001, 10.0, burstiness, seed=0)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    # Gamma: the coefficient of variation is 1 / sqrt(shape).
    spread = statistics.stdev(gaps) / statistics.fmean(gaps)
    assert spread == pytest.approx(burstiness**-0.5, rel=0.05)


def test_ramps() -> None:
    assert Ramp("linear", 2.0, 10.0).rate(0.5) == 6.0
    assert Ramp("exponential", 1.0, 16.0).rate(0.5) == pytest.approx(4.0)
    times = send_times(2001, math.inf, 1000.0, seed=0, ramp=Ramp("linear", 1.0, 100.0))
    assert times[1] == pytest.approx(1.0, rel=0.2)
    assert times[-1] - times[-2] == pytest.approx(0.01, rel=0.2)


def test_ids_share_their_groups_prefix() -> None:
    shapes = lengths.prefix_shapes(8, 5, 3, 2, 9, seed=0)
    samples = id_samples(shapes, range(100, 200), seed=0)
    for shape, sample in zip(shapes, samples, strict=True):
        assert isinstance(sample.prompt, list)
        assert len(sample.prompt) == sample.prompt_tokens == 8
        assert set(sample.prompt) <= set(range(100, 200))
        assert sample.output_tokens == shape.output
    heads = {(s.group, tuple(p.prompt[:5])) for s, p in zip(shapes, samples, strict=True)}
    assert len(heads) == 2
    assert len({tuple(p.prompt[5:]) for p in samples}) == 8
    assert samples == id_samples(shapes, range(100, 200), seed=0)
    assert samples != id_samples(shapes, range(100, 200), seed=1)


async def _in_pieces(text: str) -> int:
    """A tokenizer that begins with a token of its own and cuts words of more than four letters."""
    return 1 + sum(1 + (len(word) > 4) for word in text.split())


def test_texts_have_exactly_the_tokens() -> None:
    maker = TextMaker(_in_pieces)
    shapes = [Shape(n, 5) for n in (2, 3, 17, 200)]
    samples = asyncio.run(maker.samples(shapes, seed=0))
    for shape, sample in zip(shapes, samples, strict=True):
        assert isinstance(sample.prompt, str)
        assert asyncio.run(_in_pieces(sample.prompt)) == shape.prompt == sample.prompt_tokens
    assert maker.largest_miss == 0
    assert samples == asyncio.run(TextMaker(_in_pieces).samples(shapes, seed=0))


def test_texts_share_their_groups_prefix() -> None:
    shapes = lengths.prefix_shapes(6, 30, 10, 2, 9, seed=0)
    samples = asyncio.run(TextMaker(count_words).samples(shapes, seed=0))
    heads = {
        (shape.group, " ".join(str(sample.prompt).split()[:30]))
        for shape, sample in zip(shapes, samples, strict=True)
    }
    assert len(heads) == 2
    assert len({sample.prompt for sample in samples}) == 6
    assert {sample.prompt_tokens for sample in samples} == {40}


def test_a_length_that_cannot_be_met_is_known() -> None:
    async def by_threes(text: str) -> int:
        return 3 * len(text.split())

    maker = TextMaker(by_threes)
    (sample,) = asyncio.run(maker.samples([Shape(10, 1)], seed=0))
    assert sample.prompt_tokens == 9
    assert maker.largest_miss == 1


def test_words_are_plain() -> None:
    assert len(set(WORDS)) > 180
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def _write(path: Path, *lines: object) -> str:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return str(path)


def test_custom_files(tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    path = _write(
        tmp_path / "a.jsonl",
        {"prompt": "hello", "other": 1},
        "",
        {"prompt": [1, 2, 3], "output_tokens": 4},
        {"messages": conversation},
        {"prompt": "never read"},
    )
    samples = read_custom(path, 3, 9, conversations=True, token_ids=True)
    assert [s.prompt for s in samples] == ["hello", [1, 2, 3], None]
    assert [s.output_tokens for s in samples] == [9, 4, 9]
    assert [s.prompt_tokens for s in samples] == [None, 3, None]
    assert samples[2].messages == conversation


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 1: .*truncated"),
        ([1], "expected an object"),
        ({}, "exactly one of prompt and messages"),
        ({"prompt": "a", "messages": []}, "exactly one of prompt and messages"),
        ({"prompt": ""}, "non-empty text or list"),
        ({"prompt": [True]}, "non-empty text or list"),
        ({"prompt": "a", "output_tokens": 0}, "output_tokens must be an integer >= 1, got 0"),
        ({"messages": []}, "messages must be a non-empty list"),
        ({"messages": [{}]}, "messages need the chat endpoint"),
        ({"prompt": [1]}, "token ids cannot be sent to the chat endpoint"),
    ],
)
def test_bad_lines_are_told_with_their_number(tmp_path: Path, line: object, reason: str) -> None:
    path = _write(tmp_path / "a.jsonl", line)
    with pytest.raises(InputError, match=reason):
        read_custom(path, 10, 9, conversations=False, token_ids=False)


def test_files_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no prompts"):
        read_custom(_write(tmp_path / "a.jsonl"), 1, 1, conversations=True, token_ids=True)
    with pytest.raises(InputError, match="No such file"):
        read_custom(str(tmp_path / "b.jsonl"), 1, 1, conversations=True, token_ids=True)

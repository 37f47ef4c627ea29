"""Stop strings: exact cuts, nothing shown too early, nothing lost, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.text.detokenizer import IncrementalDetokenizer
from jaxpaged.text.stop import StopChecker
from tests.text.support import byte_level


def _run(
    pieces: list[str], stops: list[str], *, include: bool = False, min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """(deltas, matched): one piece a token; the last delta is what finish() releases."""
    checker = StopChecker(stops, include=include, min_tokens=min_tokens)
    deltas = []
    for count, piece in enumerate(pieces, 1):
        delta, matched = checker.push(piece, count)
        deltas.append(delta)
        if matched is not None:
            assert checker.matched == matched
            break
    deltas.append(checker.finish())
    return deltas, checker.matched


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["ab", "c DE", "F gh"], ["DEF"], "abc ", "DEF"),
        (["x<", "/", "s", ">y"], ["</s>"], "x", "</s>"),
        (["END"], ["N"], "E", "N"),
        (["a", "a", "b"], ["ab"], "a", "ab"),
        (["foo", "<", "/"], ["</s>"], "foo</", None),
        (["1", "1", "2"], ["12"], "1", "12"),
        (["aab"], ["ab", "aab"], "", "aab"),
        (["a", "ab"], ["ab", "aab"], "", "aab"),
        (["xaab"], ["aab", "b"], "x", "aab"),
        (["abcd"], ["abcd", "bc"], "a", "bc"),
        (["abcd"], ["bc", "c"], "a", "bc"),
        (["never"], ["never more, by far"], "never", None),
        (["plain", " text"], ["zz"], "plain text", None),
        ([" th", "e e", "nd"], ["the end"], " ", "the end"),
        (["the cat", " the end"], ["the end"], "the cat ", "the end"),
        (["aaa", "ab"], ["aab"], "aa", "aab"),
        (["abab", "ac"], ["abac"], "ab", "abac"),
        (["x", "", "", "y"], ["xy"], "", "xy"),
        (["text"], [], "text", None),
    ],
)
def test_table(pieces: list[str], stops: list[str], text: str, matched: str | None) -> None:
    deltas, found = _run(pieces, stops)
    assert ("".join(deltas), found) == (text, matched)
    for cut in (["".join(pieces)], list("".join(pieces))):
        deltas, found = _run(cut, stops)
        assert ("".join(deltas), found) == (text, matched)


def test_include_keeps_the_stop_string_only() -> None:
    assert _run(["ab", "c DE", "F gh"], ["DEF"], include=True) == (["ab", "c ", "DEF", ""], "DEF")


def test_text_is_released_as_soon_as_it_is_safe() -> None:
    deltas, _ = _run(["<", "/", "x", "<", "/s", ">"], ["</s>"])
    assert deltas == ["", "", "</x", "", "", "", ""]


def test_stop_in_bytes_of_one_character() -> None:
    tokenizer = byte_level()
    of_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    stream = IncrementalDetokenizer(tokenizer)
    checker = StopChecker(["终"])
    shown = []
    for count, byte in enumerate("a终".encode(), 1):
        delta, matched = checker.push(stream.push(of_byte[bytes([byte])]), count)
        shown.append((delta, matched))
    assert shown == [("a", None), ("", None), ("", None), ("", "终")]


@pytest.mark.parametrize(
    ("min_tokens", "text", "matched"),
    [(0, "a", "X"), (1, "a", "X"), (2, "aXb", "X"), (3, "aXb", "X"), (4, "aXbXc", None)],
)
def test_min_tokens(min_tokens: int, text: str, matched: str | None) -> None:
    deltas, found = _run(["a", "X", "b", "X", "c"], ["X"], min_tokens=min_tokens)
    assert ("".join(deltas), found) == (text, matched)


def test_stop_that_begins_before_min_tokens_ends_after() -> None:
    deltas, matched = _run(["a", "E", "N", "D", "!"], ["END"], min_tokens=3)
    assert ("".join(deltas), matched) == ("a", "END")
    # complete within the first tokens: ignored, also when more text follows
    deltas, matched = _run(["a", "END", "x", "y"], ["END"], min_tokens=2)
    assert ("".join(deltas), matched) == ("aENDxy", None)
    # an ignored match inside held text is not found later
    deltas, matched = _run(["aX", "c"], ["aXb", "X"], min_tokens=1)
    assert ("".join(deltas), matched) == ("aXc", None)


def _by_characters(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None]:
    """The definition: look after each character whether a stop string has just been completed."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        for char in piece:
            text += char
            done = [stop for stop in stops if text.endswith(stop)]
            if done and count > min_tokens:
                stop = max(done, key=len)
                return (text if include else text[: -len(stop)]), stop
    return text, None


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text("ab<", max_size=4), max_size=10),
    stops=st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_equals_the_definition(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    deltas, matched = _run(pieces, stops, include=include, min_tokens=min_tokens)
    text, expected = _by_characters(pieces, stops, include, min_tokens)
    assert ("".join(deltas), matched) == (text, expected)
    # What was shown before the end never had to be taken back, and held text is never longer
    # than the longest stop string less one.
    shown = ""
    for count, delta in enumerate(deltas[:-1], 1):
        shown += delta
        assert text.startswith(shown)
        if matched is None:
            so_far = len("".join(pieces[:count]))
            assert so_far - len(shown) <= max(map(len, stops), default=1) - 1

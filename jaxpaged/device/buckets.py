"""The few shapes a step can have. |D| + |P| programs, never |D| x |P|.

A step without prompt chunks takes the smallest decode bucket that holds its rows. A step with
prompt chunks takes the largest decode bucket and the smallest prefill bucket that holds their
tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from jaxpaged.errors import ConfigError

ROW_MULTIPLE = 8
"""Rows come in eights: XLA:CPU multiplies single rows 50 times slower, and in other bits."""
_DECODE_GROWTH = 2
_PREFILL_GROWTH = 2
_FIRST_PREFILL = 128
_MOST_SIZES = 4
"""Of each kind: every size is a program to compile, so ladders to high limits climb faster."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class StepShape:
    """`rows` sequences (decoding, or with a prompt chunk) and `tokens` prompt tokens."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"decode[{self.rows}]" if self.tokens == 0 else f"prefill[{self.tokens}]"


@dataclass(frozen=True, slots=True)
class Buckets:
    """All step shapes of an engine, ascending."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]

    @property
    def max_rows(self) -> int:
        return self.decode[-1]

    @property
    def shapes(self) -> list[StepShape]:
        decode = [StepShape(rows, 0) for rows in self.decode]
        return decode + [StepShape(self.max_rows, tokens) for tokens in self.prefill]

    def shape_for(self, num_rows: int, num_prefill_tokens: int) -> StepShape:
        """The smallest shape that holds a step of `num_rows` sequences."""
        if num_prefill_tokens == 0:
            return StepShape(self.decode[bisect_left(self.decode, num_rows)], 0)
        index = bisect_left(self.prefill, num_prefill_tokens)
        return StepShape(self.max_rows, self.prefill[index])


def choose_buckets(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    decode: tuple[int, ...] | None = None,
    prefill: tuple[int, ...] | None = None,
    *,
    one_decode: bool = False,
) -> Buckets:
    """Buckets that end at exactly the two limits (rounded up to a multiple of 8).

    Given ones are taken as they are, rounded the same way. `one_decode` leaves only the last of the
    decode buckets: all steps then have the same rows. Raises `ConfigError` if the last is not the
    limit.
    """
    last_rows = round_up(max_num_seqs, ROW_MULTIPLE)
    last_tokens = round_up(max_num_batched_tokens, ROW_MULTIPLE)
    rows = _ladder("decode_buckets", decode, ROW_MULTIPLE, _DECODE_GROWTH, last_rows)
    return Buckets(
        rows[-1:] if one_decode else rows,
        _ladder("prefill_buckets", prefill, _FIRST_PREFILL, _PREFILL_GROWTH, last_tokens),
    )


def _ladder(
    name: str, given: tuple[int, ...] | None, first: int, growth: int, last: int
) -> tuple[int, ...]:
    if given is not None:
        rounded = tuple(sorted({round_up(size, ROW_MULTIPLE) for size in given}))
        if rounded[-1] != last:
            limit = "max_num_seqs" if name == "decode_buckets" else "max_num_batched_tokens"
            raise ConfigError(f"{name}={given!r} must end at {limit} ({last} when rounded to 8).")
        return rounded
    while first * growth ** (_MOST_SIZES - 1) < last:
        growth *= 2
    sizes = []
    while first < last:
        sizes.append(first)
        first *= growth
    return (*sizes, last)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.device.buckets import StepShape, choose_buckets, round_up
from jaxpaged.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "multiple", "expected"),
    [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (1000, 1, 1000)],
)
def test_round_up(value: int, multiple: int, expected: int) -> None:
    assert round_up(value, multiple) == expected


@pytest.mark.parametrize(
    ("seqs", "tokens", "decode", "prefill"),
    [
        (32, 1024, (8, 16, 32), (128, 256, 512, 1024)),
        (256, 8192, (8, 32, 128, 256), (128, 512, 2048, 8192)),
        (64, 4096, (8, 16, 32, 64), (128, 512, 2048, 4096)),
        (1, 1, (8,), (8,)),
        (8, 64, (8,), (64,)),
        (9, 65, (8, 16), (72,)),
        (33, 1001, (8, 16, 32, 40), (128, 256, 512, 1008)),
    ],
)
def test_ladders_end_at_the_limits(
    seqs: int, tokens: int, decode: tuple[int, ...], prefill: tuple[int, ...]
) -> None:
    buckets = choose_buckets(seqs, tokens)
    assert buckets.decode == decode
    assert buckets.prefill == prefill


@given(seqs=st.integers(1, 100_000), tokens=st.integers(1, 10_000_000))
def test_never_more_than_eight_programs(seqs: int, tokens: int) -> None:
    assert len(choose_buckets(seqs, tokens).shapes) <= 8


@given(seqs=st.integers(1, 600), tokens=st.integers(1, 20_000), data=st.data())
def test_every_step_fits_its_shape(seqs: int, tokens: int, data: st.DataObject) -> None:
    buckets = choose_buckets(seqs, tokens)
    for sizes, limit in ((buckets.decode, seqs), (buckets.prefill, tokens)):
        assert list(sizes) == sorted(set(sizes))
        assert all(size % 8 == 0 and size >= 8 for size in sizes)
        assert limit <= sizes[-1] < limit + 8, "the last is the limit, rounded up to 8"
    rows = data.draw(st.integers(1, seqs))
    prompt = data.draw(st.integers(0, tokens))
    shape = buckets.shape_for(rows, prompt)
    assert shape in buckets.shapes
    assert shape.rows >= rows and shape.tokens >= prompt
    assert (shape.tokens == 0) == (prompt == 0)
    if prompt:
        assert shape.rows == buckets.max_rows
        smaller = [size for size in buckets.prefill if size < shape.tokens]
    else:
        smaller = [size for size in buckets.decode if size < shape.rows]
    assert all(size < (prompt or rows) for size in smaller), "the smallest that holds it"


def test_the_number_of_programs_is_a_sum() -> None:
    assert len(choose_buckets(32, 1024).shapes) == 7
    shapes = choose_buckets(32, 1024).shapes
    assert len(set(shapes)) == len(shapes)
    assert {str(shape) for shape in shapes} == {
        *("decode[8]", "decode[16]", "decode[32]"),
        *("prefill[128]", "prefill[256]", "prefill[512]", "prefill[1024]"),
    }


def test_given_ladders_are_rounded_and_merged() -> None:
    buckets = choose_buckets(20, 100, decode=(1, 7, 20), prefill=(13, 100))
    assert buckets.decode == (8, 24)
    assert buckets.prefill == (16, 104)
    assert buckets.shape_for(9, 0) == StepShape(24, 0)
    assert buckets.shape_for(1, 17) == StepShape(24, 104)


@pytest.mark.parametrize(
    ("name", "given", "limit"),
    [
        ("decode_buckets", (8, 16), "max_num_seqs (32"),
        ("decode_buckets", (8, 64), "max_num_seqs (32"),
        ("prefill_buckets", (64, 512), "max_num_batched_tokens (1024"),
        ("prefill_buckets", (2048,), "max_num_batched_tokens (1024"),
    ],
)
def test_a_ladder_that_misses_the_limit_is_refused(
    name: str, given: tuple[int, ...], limit: str
) -> None:
    with pytest.raises(ConfigError) as error:
        choose_buckets(32, 1024, **{name.removesuffix("_buckets"): given})
    assert f"{name}={given}" in str(error.value)
    assert limit in str(error.value)

"""Reading streamed answers, however their bytes are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.bench.stream import EventReader, Observer, error_text, failure_text


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


STREAM = (
    b": keep-alive\n\n"
    + event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    + event({"choices": [{"delta": {"content": "Gr\u00fc\u00dfe"}, "logprobs": None}]})
    + event({"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": None}]})
    + event({"choices": [{"text": "!", "finish_reason": "stop"}], "usage": None})
    + event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "x": 1}})
    + b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.booleans())
def test_any_cut_reads_the_same(cuts: list[int], crlf: bool) -> None:
    stream = STREAM.replace(b"\n", b"\r\n") if crlf else STREAM
    observer = Observer()
    for place, (a, b) in enumerate(
        zip([0, *sorted(cuts)], [*sorted(cuts), len(stream)], strict=True)
    ):
        observer.feed(stream[a:b], float(place))
    assert "".join(observer.texts) == "Gr\u00fc\u00dfehm!"
    assert len(observer.times) == 4
    assert observer.times == sorted(observer.times)
    assert (observer.prompt_tokens, observer.output_tokens) == (3, 4)
    assert observer.verdict() is None


def test_times_are_those_of_the_bytes_that_complete_a_chunk() -> None:
    observer = Observer()
    chunk = event({"choices": [{"text": "a"}]})
    observer.feed(chunk[:9], 1.0)
    observer.feed(chunk[9:] + chunk, 2.0)
    observer.feed(event({"choices": []}), 3.0)
    observer.feed(chunk, 4.0)
    assert observer.times == [2.0, 2.0, 4.0]


def test_usage_on_every_chunk_counts_once() -> None:
    observer = Observer()
    for count in (1, 2, 3):
        usage = {"prompt_tokens": 5, "completion_tokens": count}
        observer.feed(event({"choices": [{"text": "a"}], "usage": usage}), 0.0)
    assert (observer.prompt_tokens, observer.output_tokens) == (5, 3)


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"", "status 200, but the stream had no choices."),
        (b"data: [DONE]\n\n", "status 200, but the stream had no choices."),
        (event({"choices": [], "usage": {"prompt_tokens": 1}}), "no choices"),
        (event({"choices": None}), "no choices"),
        (event({"choices": [{"text": "a"}]}), "without a finish_reason or [DONE]"),
        (event({"error": {"message": "out of blocks", "code": 500}}), "out of blocks"),
        (STREAM + event({"error": "late"}), "late"),
        (event({"choices": 3}) + STREAM, "a chunk that cannot be read"),
        (b"data: {oops\n\n" + STREAM, "{oops"),
    ],
)
def test_what_counts_as_failed(stream: bytes, reason: str) -> None:
    observer = Observer()
    observer.feed(stream, 0.0)
    verdict = observer.verdict()
    assert verdict is not None
    assert reason in verdict


def test_a_stream_without_done_but_with_a_finish_reason_is_whole() -> None:
    observer = Observer()
    observer.feed(event({"choices": [{"text": "a", "finish_reason": "length"}]}), 0.0)
    assert observer.verdict() is None


def test_events_without_a_space_and_other_fields() -> None:
    reader = EventReader()
    assert reader.feed(b"event: x\nid: 1\ndata:{}\n") == [b"{}"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"no such model","type":"x"}}', "status 404: no such model"),
        (b'{"error":"Unauthorized"}', "status 404: Unauthorized"),
        (b'{"detail":[{"loc":["body"]}]}', 'status 404: [{"loc":["body"]}]'),
        (b'{"message":"m"}', "status 404: m"),
        (b"<html>gone</html>", "status 404: <html>gone</html>"),
        (b"\xff", "status 404: \ufffd"),
        (b"", "status 404"),
        (b"{}", "status 404: {}"),
    ],
)
def test_errors_in_all_shapes(body: bytes, text: str) -> None:
    assert failure_text(404, body) == text


def test_long_errors_are_cut() -> None:
    assert len(error_text({"error": "x" * 5000})) == 500

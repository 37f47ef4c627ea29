"""Property: what a stream says, put together, is the answer without stream."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.apps import Json, ends_of, serving, texts_of
from tests.server.scripted import Script, settled

PIECES = st.sampled_from(
    ["a", "b", " a", "ab", "<", "/s>", "x</", "END", "é", "终", "🙂", "\n", "\u2028", "</s>"]
)
REPLIES = st.lists(st.lists(PIECES, max_size=12), min_size=1, max_size=3)
"""Of each sample; further ones say what the first does."""
STOPS = st.lists(st.sampled_from(["ab", "b", "</s>", "a<", "终", "ND", "\n"]), max_size=3)
MAYBE = st.sampled_from([None, False, True])

COMMON: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 20),
    "min_tokens": st.sampled_from([None, 0, 1]),
    "stop": STOPS,
    "include_stop_str_in_output": MAYBE,
    "ignore_eos": MAYBE,
    "skip_special_tokens": MAYBE,
    "echo": MAYBE,
    "return_token_ids": MAYBE,
    "return_tokens_as_token_ids": MAYBE,
}
COMPLETIONS = st.fixed_dictionaries(
    {
        **COMMON,
        "prompt": st.sampled_from(["p", "Say: é", ["p", "q"], [5, 6, 7], [[5], [6, 7]]]),
        "logprobs": st.sampled_from([None, 0, 2]),
    }
)
CHATS = st.fixed_dictionaries(
    {
        **COMMON,
        "messages": st.just([{"role": "user", "content": "Hi"}]),
        "logprobs": st.just(True),
        "top_logprobs": st.sampled_from([0, 2]),
        "continue_final_message": st.sampled_from([None, True]),
    }
)


@settings(max_examples=60)
@given(replies=REPLIES, body=COMPLETIONS, interval=st.integers(1, 4))
def test_completions(replies: list[list[str]], body: Json, interval: int) -> None:
    check("/v1/completions", replies, body, interval)


@settings(max_examples=40)
@given(replies=REPLIES, body=CHATS, interval=st.integers(1, 4))
def test_chats(replies: list[list[str]], body: Json, interval: int) -> None:
    check("/v1/chat/completions", replies, body, interval)


def check(path: str, replies: list[list[str]], body: Json, interval: int) -> None:
    async def run() -> None:
        script = Script(default=replies[0], samples=replies, special_pieces=["x"])
        async with serving(script, settings={"stream_interval": interval}) as server:
            whole = await server.ok(path, body)
            options = {"stream_options": {"include_usage": True}}
            *chunks, last = await server.chunks(path, {**body, **options})
            choices = whole["choices"]
            text = {
                c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in choices
            }
            assert texts_of(chunks) == text
            ends = {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in choices}
            assert ends_of(chunks) == ends
            for choice in choices:
                told = [
                    c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]
                ]
                assert joined_scores(told) == choice["logprobs"]
                ids = [token for c in told for token in c.get("token_ids") or ()]
                assert ids == (choice["token_ids"] or [])
                empty = [c for c in told[:-1] if not (c.get("text") or c.get("delta"))]
                # Nothing empty but what brings ids.
                assert all(c.get("token_ids") or c.get("prompt_token_ids") for c in empty)
            details = {"prompt_tokens_details": None}
            assert last["usage"] | details == whole["usage"] | details
            await settled(server.engine)

    asyncio.run(run())


def joined_scores(told: list[Json]) -> Json | None:
    lists: Json = {}
    for choice in told:
        for name, values in (choice["logprobs"] or {}).items():
            lists.setdefault(name, []).extend(values)
    return lists or None

"""Whatever comes in becomes a chat completion, or a refusal that says why: nothing else."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.errors import InvalidRequestError
from server import anthropic_input, responses_input
from server.body import decode_body
from server.errors import ApiError
from server.protocol_anthropic import MessagesRequest
from server.protocol_chat import ChatRequest
from server.protocol_responses import ResponsesRequest

WORDS = st.sampled_from(
    """
    message function_call function_call_output custom_tool_call custom_tool_call_output reasoning
    item_reference additional_tools input_text output_text text refusal input_image user assistant
    system developer tool function auto none required allowed_tools tool_use tool_result thinking
    document image enabled disabled json_schema low f c1
    """.split()  # noqa: SIM905 - a list of words is what it is
)
KEYS = st.sampled_from(
    """
    type role content text refusal name call_id arguments input output tools tool_use_id id mode
    source data title parameters input_schema description effort format summary
    """.split()  # noqa: SIM905
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=5)
ITEMS = WORDS | st.lists(OBJECTS, max_size=4) | VALUES
REFUSED = contextlib.suppress(ApiError, InvalidRequestError)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


@settings(max_examples=300)
@given(
    some(
        input=ITEMS,
        tools=ITEMS,
        tool_choice=VALUES,
        text=OBJECTS,
        reasoning=OBJECTS,
        include=st.lists(WORDS, max_size=2),
        conversation=VALUES,
        prompt=VALUES,
        top_logprobs=st.integers(-2, 3),
    )
)
def test_responses(fields: dict[str, Any]) -> None:
    with REFUSED:
        body = decode_body(msgspec.json.encode({"input": "Hi", **fields}), ResponsesRequest)
        chat = responses_input.chat_fields(body)
        decode_body(msgspec.json.encode(chat), ChatRequest)


@settings(max_examples=300)
@given(
    some(
        messages=ITEMS,
        system=ITEMS,
        tools=ITEMS,
        tool_choice=OBJECTS,
        thinking=OBJECTS,
        output_config=OBJECTS,
        stop_sequences=VALUES,
        max_tokens=st.integers(-1, 300),
    )
)
def test_messages(fields: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    body_fields = {"max_tokens": 5, "messages": turns, **fields}
    with REFUSED:
        body = decode_body(msgspec.json.encode(body_fields), MessagesRequest)
        chat = anthropic_input.chat_fields(body, 100)
        decode_body(msgspec.json.encode(chat), ChatRequest)


TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "y"}
TURNS = st.lists(
    st.tuples(st.just("user"), st.just("x") | st.lists(st.sampled_from([TEXT, RESULT])))
    | st.tuples(st.just("assistant"), st.just("x") | st.lists(st.sampled_from([TEXT, USE]))),
    min_size=1,
    max_size=6,
)


@given(TURNS)
def test_no_two_turns_of_one_role_follow_each_other(turns: list[tuple[str, Any]]) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    data = msgspec.json.encode({"max_tokens": 5, "messages": messages})
    chat = anthropic_input.chat_fields(decode_body(data, MessagesRequest), 100)["messages"]
    roles = [message["role"] for message in chat]
    assert all(a != b or a == "tool" for a, b in pairwise(roles))
    sent = [block for _, content in turns for block in ([TEXT] if content == "x" else content)]
    said = [message for message in chat if message["role"] != "tool"]
    assert sum(len(message["content"]) for message in said) == sent.count(TEXT)
    assert sum(len(message.get("tool_calls", ())) for message in chat) == sent.count(USE)
    assert roles.count("tool") == sent.count(RESULT)

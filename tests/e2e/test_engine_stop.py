"""What ends a request, in which order, and which text is left."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxpaged import SamplingParams
from jaxpaged.errors import InvalidRequestError
from tests.e2e.engine_support import (
    EOS,
    GREEDY,
    MAX_MODEL_LEN,
    PROMPT,
    SECOND_EOS,
    UNKNOWN_ID,
    drain,
    fresh_engine,
    greedy_tokens,
    piece,
    run_one,
    say,
    scripted,
    shared_llm,
)

A = 20  # any token that ends nothing


@pytest.mark.parametrize(
    ("script", "params", "count", "reason", "stop_reason"),
    [
        # EOS at the third place, max_tokens one below, at and above it (ST-06).
        ([A, A, EOS], {"max_tokens": 2}, 2, "length", None),
        ([A, A, EOS], {"max_tokens": 3}, 3, "stop", None),
        ([A, A, EOS], {"max_tokens": 4}, 3, "stop", None),
        ([A, A, SECOND_EOS], {"max_tokens": 9}, 3, "stop", None),
        ([EOS], {"max_tokens": 1}, 1, "stop", None),
        ([A, 30], {"max_tokens": 2, "stop_token_ids": [30]}, 2, "stop", 30),
        ([A, 30, 31], {"max_tokens": 9, "stop_token_ids": [31, 30]}, 2, "stop", 30),
        # An id that is both EOS and a stop id ends as EOS.
        ([A, EOS], {"max_tokens": 9, "stop_token_ids": [EOS]}, 2, "stop", None),
        # SA-09: neither of the model's EOS ids ends it, the user's own stop ids still do.
        ([A, SECOND_EOS, A], {"max_tokens": 6, "ignore_eos": True}, 6, "length", None),
        ([EOS], {"max_tokens": 3, "ignore_eos": True}, 3, "length", None),
        (
            [A, EOS, SECOND_EOS],
            {"max_tokens": 6, "ignore_eos": True, "stop_token_ids": [SECOND_EOS]},
            3,
            "stop",
            SECOND_EOS,
        ),
        # min_tokens holds EOS and stop ids back, never the length caps.
        ([EOS], {"max_tokens": 5, "min_tokens": 3}, 3, "stop", None),
        ([30], {"max_tokens": 5, "min_tokens": 2, "stop_token_ids": [30]}, 2, "stop", 30),
        ([EOS], {"max_tokens": 3, "min_tokens": 3}, 3, "stop", None),
        ([A], {"max_tokens": 4, "min_tokens": 4}, 4, "length", None),
        ([A], {"max_tokens": 1}, 1, "length", None),
    ],
)
@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
def test_tokens_that_end(
    script: list[int],
    params: dict[str, Any],
    count: int,
    reason: str,
    stop_reason: Any,
    overlap: bool,
) -> None:
    engine = scripted({"one": script}, async_scheduling=overlap)
    output = run_one(engine, PROMPT, SamplingParams(**params)).outputs[0]
    said = (script + [script[-1]] * count)[:count]
    assert output.token_ids == said
    assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)
    assert engine.stats().requests_finished == {reason: 1}


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_min_tokens_forbids_all_eos_ids_and_nothing_else(min_tokens: int) -> None:
    """SA-08: the model wants EOS most, then its second EOS, then the last id of all."""
    last = UNKNOWN_ID - 1
    bias = {EOS: 100.0, SECOND_EOS: 90.0, 30: 80.0, last: 70.0}
    params = SamplingParams(
        temperature=0.0, logit_bias=bias, min_tokens=min_tokens, max_tokens=5, stop_token_ids=[30]
    )
    output = run_one(fresh_engine(), PROMPT, params).outputs[0]
    assert output.token_ids == [last] * min_tokens + [EOS]
    assert output.finish_reason == "stop"


def test_min_tokens_without_any_eos() -> None:
    """The last id of the vocabulary is not taken for "no EOS" (an id of -1)."""
    params = dataclasses.replace(
        GREEDY, min_tokens=4, max_tokens=4, logit_bias={UNKNOWN_ID - 1: 100}
    )
    engine = fresh_engine(limits={"eos_token_ids": ()})
    assert run_one(engine, PROMPT, params).outputs[0].token_ids == [UNKNOWN_ID - 1] * 4


@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
def test_the_context_is_a_length_cap_whatever_min_tokens(overlap: bool) -> None:
    engine = fresh_engine(async_scheduling=overlap)
    room = MAX_MODEL_LEN - len(PROMPT)
    params = SamplingParams(max_tokens=500, min_tokens=500, temperature=0.0)
    with pytest.raises(InvalidRequestError, match=f"min_tokens=500.*at most {room}"):
        engine.add_request("one", PROMPT, params)
    params = dataclasses.replace(params, min_tokens=room)
    output = run_one(engine, PROMPT, params).outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (room, "length")


@pytest.mark.parametrize(
    ("length", "max_tokens", "count"),
    [(31, 1, 1), (31, 2, 1), (30, 2, 2), (30, 3, 2), (1, 31, 31), (1, 32, 31), (1, None, 31)],
)
def test_the_edges_of_the_context(length: int, max_tokens: int | None, count: int) -> None:
    """SC-08: prompt plus output is at most max_model_len; more is cut with "length"."""
    engine = fresh_engine(max_model_len=32)
    params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
    output = run_one(engine, [A] * length, params).outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (count, "length")


def test_max_tokens_none_uses_all_of_the_context() -> None:
    output = run_one(fresh_engine(), PROMPT, dataclasses.replace(GREEDY, max_tokens=None))
    assert len(output.outputs[0].token_ids) == MAX_MODEL_LEN - len(PROMPT)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("length", [1, 2, 5, 32])
def test_max_tokens_zero_scores_the_prompt(length: int) -> None:
    """Nothing is drawn, and the prompt may fill the context (32 of 32)."""
    engine = fresh_engine(max_model_len=32)
    output = run_one(engine, [A] * length, SamplingParams(max_tokens=0, prompt_logprobs=1))
    completion = output.outputs[0]
    assert (completion.token_ids, completion.text) == ([], "")
    assert completion.finish_reason == "length"
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == length
    assert engine.stats().generation_tokens == 0


# ---------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "reason", "stop_reason"),
    [
        # ST-01: the match begins or ends inside a token.
        (["ab", "c DE", "F gh", A], ["DEF"], "abc ", "stop", "DEF"),
        (["x<", "/", "s", ">y", A], ["</s>"], "x", "stop", "</s>"),
        (["END", A], ["N"], "E", "stop", "N"),
        # ST-02: held-back text comes out in the end, and overlapping starts are not missed.
        (["a", "a", "b", A], ["ab"], "a", "stop", "ab"),
        (["foo", "<", "/"], ["</s>"], "foo</", "length", None),
        (["foo", "<", EOS], ["</s>"], "foo<", "stop", None),
        (["a", "b", "x"], ["xyz"], "abx", "length", None),
        (["aab", A], ["aab", "ab"], "", "stop", "aab"),
        (["a", "a", "b", A], ["ab", "aab"], "", "stop", "aab"),
        (["a", "b", "x"], ["ab" * 50], "abx", "length", None),
        # ST-05: matching is on text, whatever the tokens.
        ([" th", "e c", "at", " th", "e e", "nd", A], ["the end"], " the cat ", "stop", "the end"),
        # The earliest completion wins.
        (["x", "y", A], ["ya", "xy"], "", "stop", "xy"),
    ],
)
@pytest.mark.parametrize("overlap", [True, False], ids=["async", "sync"])
def test_stop_strings(
    pieces: list[str | int],
    stop: list[str],
    text: str,
    reason: str,
    stop_reason: str | None,
    overlap: bool,
) -> None:
    count = pieces.index(A) if A in pieces else len(pieces)
    max_tokens = 20 if A in pieces or EOS in pieces else len(pieces)
    params = SamplingParams(stop=stop, max_tokens=max_tokens)
    output = say(pieces, params, async_scheduling=overlap).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text, reason, stop_reason)
    assert len(output.token_ids) == count


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    """What is shown is never taken back, so a partial match is not shown before it is decided."""
    engine = scripted(
        {"one": [piece(p) for p in ("foo", "<", "/", "s", "a", "x<", "/", "s", ">y")]}
    )
    engine.add_request("one", PROMPT, SamplingParams(stop="</s>", max_tokens=30))
    texts = []
    while engine.has_unfinished_requests():
        texts += [out.outputs[0].text for out in engine.step()]
    assert texts == ["foo"] * 4 + ["foo</sa"] + ["foo</sax"] * 4


def test_a_character_of_several_tokens_as_stop() -> None:
    """ST-05: "终" comes as three byte tokens."""
    alphabet = shared_llm().get_tokenizer().encode("终", add_special_tokens=False)
    assert len(alphabet) == 3
    output = say(["a", *alphabet, A], SamplingParams(stop="终", max_tokens=9)).outputs[0]
    assert (output.text, output.stop_reason, len(output.token_ids)) == ("a", "终", 4)


def test_a_stop_string_at_max_tokens_is_a_stop() -> None:
    """ST-06: also in the statistics, though the length cap was seen first."""
    engine = scripted({"one": [piece("ab"), piece("x"), piece("END")]})
    output = run_one(engine, PROMPT, SamplingParams(stop="END", max_tokens=3)).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("abx", "stop", "END")
    assert engine.stats().requests_finished == {"stop": 1}


def test_an_unfinished_character_that_completes_a_stop_string() -> None:
    """A cut-off character reads as U+FFFD at the end of the text only."""
    first = shared_llm().get_tokenizer().encode("终", add_special_tokens=False)[0]
    engine = scripted({"one": [piece("a"), first]})
    output = run_one(engine, PROMPT, SamplingParams(stop="\ufffd", max_tokens=2)).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "\ufffd")
    assert engine.stats().requests_finished == {"stop": 1}
    output = say(["a", first], SamplingParams(max_tokens=2)).outputs[0]
    assert output.text == "a\ufffd"


@pytest.mark.parametrize(
    ("pieces", "params", "text"),
    [
        (["ab", "END", A], {"stop": "N"}, "abEN"),
        (["ab", "END", A], {"stop": "END"}, "abEND"),
        (["ab", "END", A], {"stop_token_ids": "END"}, "abEND"),
        (["ab", EOS], {}, "ab"),
    ],
)
def test_include_stop_str_in_output(pieces: list[str], params: dict[str, Any], text: str) -> None:
    if "stop_token_ids" in params:
        params = {"stop_token_ids": [piece(params["stop_token_ids"])]}
    kept = say(pieces, SamplingParams(max_tokens=9, include_stop_str_in_output=True, **params))
    assert kept.outputs[0].text == text
    cut = say(pieces, SamplingParams(max_tokens=9, **params))
    assert cut.outputs[0].text == ("abE" if params.get("stop") == "N" else "ab")
    assert cut.outputs[0].token_ids == kept.outputs[0].token_ids


def test_stop_strings_wait_for_min_tokens() -> None:
    """SA-08: one that is complete before does not count, not even later."""
    params = SamplingParams(stop="x", min_tokens=2, max_tokens=9)
    output = say(["x", "a", "b", "x", A], params).outputs[0]
    assert (output.text, output.stop_reason, len(output.token_ids)) == ("xab", "x", 4)
    output = say(["a", "x", "x", A], params).outputs[0]
    assert (output.text, len(output.token_ids)) == ("ax", 3)


# ---------------------------------------------------------------- text


def test_text_is_the_decoding_of_the_tokens() -> None:
    engine = fresh_engine()
    for i in range(12):
        params = SamplingParams(
            seed=i, max_tokens=20, ignore_eos=True, skip_special_tokens=bool(i % 2)
        )
        engine.add_request(str(i), [A, A + i, A], params)
    tokenizer = shared_llm().get_tokenizer()
    special = 0
    for key, result in drain(engine).items():
        output = result.outputs[0]
        skip = bool(int(key) % 2)
        assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=skip)
        special += len(tokenizer.special_ids.intersection(output.token_ids))
    assert special > 0, "no special token was drawn"


def test_detokenize_false_leaves_the_text_out() -> None:
    params = dataclasses.replace(GREEDY, detokenize=False)
    output = run_one(fresh_engine(), PROMPT, params).outputs[0]
    assert output.text == "" and output.token_ids == greedy_tokens(tuple(PROMPT))
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_an_id_the_tokenizer_does_not_have() -> None:
    """DT-05: given, it has no text; wanted most, it is not drawn; and everybody goes on."""
    engine = fresh_engine()
    forced = SamplingParams(
        temperature=0.0, max_tokens=3, logit_bias={UNKNOWN_ID: 100}, logprobs=5, prompt_logprobs=2
    )
    engine.add_request("unknown", [UNKNOWN_ID, A, UNKNOWN_ID], forced)
    engine.add_request("other", PROMPT, GREEDY)
    done = drain(engine)
    output = done["unknown"].outputs[0]
    assert len(output.token_ids) == 3 and UNKNOWN_ID not in output.token_ids
    scored = done["unknown"].prompt_logprobs
    assert scored is not None and scored[2] is not None
    assert scored[2][UNKNOWN_ID].decoded_token == ""
    assert done["other"].outputs[0].token_ids == greedy_tokens(tuple(PROMPT))


# ---------------------------------------------------------------- forcing and seeds


def test_logit_bias_forces_a_token() -> None:
    """SA-07: the id that was asked for, and string keys as JSON has them."""
    for bias in ({7: 100}, {"7": 100}, {7: 101}):
        params = SamplingParams(max_tokens=2, logit_bias=bias, seed=0, ignore_eos=True)
        assert run_one(fresh_engine(), [A], params).outputs[0].token_ids == [7, 7]
    params = SamplingParams(max_tokens=20, logit_bias={7: -101}, seed=0, allowed_token_ids=[7, 8])
    assert run_one(fresh_engine(), [A], params).outputs[0].token_ids == [8] * 20


SEEDS = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]


def test_seeds_over_their_whole_range() -> None:
    """SA-11: all 64 bits count; equal seeds give equal tokens, others do not."""
    engine = fresh_engine()
    for run in ("a", "b"):
        for i, seed in enumerate(SEEDS):
            params = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True)
            engine.add_request(f"{run}{i}", PROMPT, params)
    done = drain(engine)
    drawn = [done[f"a{i}"].outputs[0].token_ids for i in range(len(SEEDS))]
    assert drawn == [done[f"b{i}"].outputs[0].token_ids for i in range(len(SEEDS))]
    # -2**63 and 2**63 are the same 64 bits.
    assert len({tuple(tokens) for tokens in drawn}) == len(SEEDS) - 1
    for seed in (1.5, "7", 2**64, -(2**63) - 1, True):
        with pytest.raises(InvalidRequestError, match="seed"):
            SamplingParams(seed=seed)  # type: ignore[arg-type]


def test_requests_without_seed_differ() -> None:
    engine = fresh_engine()
    for i, seed in enumerate([None, None, -1, -1]):
        params = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True)
        engine.add_request(str(i), PROMPT, params)
    drawn = {tuple(out.outputs[0].token_ids) for out in drain(engine).values()}
    assert len(drawn) == 4

"""Text of streams: deltas join to what the offline engine says, and nothing shows too early.

The engine is the real one, its tokens come from a script (tests/server/scripted.py).
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from jaxpaged.engine import Engine
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import SamplingParams
from tests.server.scripted import Script, running, scripted_engine, settled
from tests.tiny_models import EOS, tiny_tokenizer

FLAG = "\U0001f1e9\U0001f1ea"
CASES: list[tuple[list[str], dict[str, Any], str, str, str | None]] = [
    # (pieces, parameters, text, finish_reason, stop_reason)
    # ST-01
    (["ab", "c DE", "F gh", "!"], {"stop": ["DEF"]}, "abc ", "stop", "DEF"),
    (["x<", "/", "s", ">y", "!"], {"stop": ["</s>"]}, "x", "stop", "</s>"),
    (["END", "!"], {"stop": ["N"]}, "E", "stop", "N"),
    # ST-02
    (["a", "a", "b", "!"], {"stop": ["ab"]}, "a", "stop", "ab"),
    (["1", "1", "2", "!"], {"stop": ["12"]}, "1", "stop", "12"),
    (["foo", "<", "/"], {"stop": ["</s>"], "max_tokens": 3}, "foo</", "length", None),
    (["foo", "<"], {"stop": ["</s>"]}, "foo<", "stop", None),
    (["never", " seen"], {"stop": ["zz"]}, "never seen", "stop", None),
    (["aab", "!"], {"stop": ["aab", "ab"]}, "", "stop", "aab"),
    (["a", "a", "b", "!"], {"stop": ["ab", "aab"]}, "", "stop", "aab"),
    (["short"], {"stop": ["short" * 20]}, "short", "stop", None),
    # ST-05
    ([" th", "e c", "at", " th", "e e", "nd", "!"], {"stop": ["the end"]}, " the cat ", "stop",
     "the end"),
    # ST-06
    (["a", "b", "c"], {"max_tokens": 2}, "ab", "length", None),
    (["a", "b", "c"], {"max_tokens": 3}, "abc", "length", None),
    (["a", "b", "c"], {"max_tokens": 4}, "abc", "stop", None),
    (["a", "b", "c"], {"max_tokens": 5}, "abc", "stop", None),
    (["a", "b", "c"], {"max_tokens": 3, "stop": ["bc"]}, "a", "stop", "bc"),
    (["a", "b", "c"], {"max_tokens": 2, "stop": ["bc"]}, "ab", "length", None),
    (["a", "b", "c"], {"stop": ["b"], "include_stop_str_in_output": True}, "ab", "stop", "b"),
]  # fmt: skip


def _run(engine: Engine, request_id: str, prompt: Any, params: SamplingParams) -> RequestOutput:
    engine.add_request(request_id, prompt, params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finished
    return outputs[-1]


def _params(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, **fields})


async def _stream(
    engine: Any, request_id: str, prompt: Any, params: SamplingParams, interval: int
) -> tuple[list[list[str]], list[CompletionOutput], RequestOutput]:
    """Deltas and last output of each sample, and the first output."""
    deltas: list[list[str]] = [[] for _ in range(params.n)]
    last: dict[int, CompletionOutput] = {}
    first = None
    stream = await engine.submit(request_id, prompt, params, stream_interval=interval)
    try:
        async for output in stream:
            first = first or output
            for completion in output.outputs:
                deltas[completion.index].append(completion.text)
                last[completion.index] = completion
    finally:
        stream.close()
    assert first is not None
    return deltas, [last[i] for i in range(params.n)], first


def test_stop_strings_and_finish_reasons_streamed_and_not() -> None:
    pieces = {piece for case in CASES for piece in case[0]}
    script = Script(special_pieces=sorted(pieces))
    for i, (reply, *_) in enumerate(CASES):
        script.reply(f"case {i};", reply)

    async def run() -> None:
        engine = scripted_engine(script)
        async with running(script) as streaming:
            for i, (_, fields, text, reason, stop_reason) in enumerate(CASES):
                params = _params(fields)
                whole = _run(engine, str(i), f"case {i};", params).outputs[0]
                found = (whole.text, whole.finish_reason, whole.stop_reason)
                assert found == (text, reason, stop_reason), CASES[i]
                for interval in (1, 2, 9):
                    key = f"{i}-{interval}"
                    ((deltas,), (last,), _) = await _stream(
                        streaming, key, f"case {i};", params, interval
                    )
                    assert "".join(deltas) == text, (CASES[i], interval)
                    assert (last.finish_reason, last.stop_reason) == (reason, stop_reason)
            await settled(streaming)

    asyncio.run(run())


def test_aborted_streams_say_so_and_keep_what_was_held() -> None:
    """ST-06: text that was held back as a possible stop string is not lost by an abort."""
    engine = scripted_engine(Script(["foo", "<"], special_pieces=["<"]))
    engine.add_request("one", "x", SamplingParams(stop=["<!"], ignore_eos=True, max_tokens=50))
    texts: list[str] = []
    while len(texts) < 2:
        texts += [output.outputs[0].text for output in engine.step()]
    assert texts == ["foo", "foo"]
    engine.abort("one")
    ends = []
    while engine.has_unfinished_requests() or not ends:
        ends += [output.outputs[0] for output in engine.step()]
    assert (ends[-1].text, ends[-1].finish_reason) == ("foo<", "abort")


def test_random_tokens_streamed_equal_the_offline_text() -> None:
    """DT-01: characters cut between tokens, broken bytes, ids without text, several samples."""
    rng = random.Random(7)
    vocabulary = tiny_tokenizer().get_vocab_size()
    # Few ids, so that stop strings occur; above the vocabulary there is no text.
    ids = [rng.randrange(6, vocabulary) for _ in range(30)] + [vocabulary + 3, 900]
    script = Script(default=[10])
    requests: list[tuple[str, SamplingParams]] = []
    tokenizer = script.make_tokenizer()
    for i in range(150):
        reply = [rng.choice(ids) for _ in range(rng.randrange(1, 20))]
        if i % 3 == 0:
            text = rng.choice(["👩‍👩‍👧", "𠮷野家", "ฉัน", "e\u0301", FLAG, "終わり"])
            reply[1:1] = tokenizer.encode(text, add_special_tokens=False)
        script.reply(f"case {i};", reply)
        said = tokenizer.decode(reply)
        starts = [rng.randrange(max(len(said), 1)) for _ in range(i % 4)]
        stops = [said[at : at + rng.randrange(1, 5)] for at in starts]
        requests.append(
            (
                f"case {i};",
                SamplingParams(
                    stop=[s for s in stops if s],
                    max_tokens=rng.randrange(1, 24),
                    n=1 + i % 2,
                    include_stop_str_in_output=bool(i % 5 == 0),
                ),
            )
        )

    async def run() -> None:
        engine = scripted_engine(script)
        async with running(script) as streaming:
            tasks = [
                _stream(streaming, str(i), prompt, params, 1 + i % 3)
                for i, (prompt, params) in enumerate(requests)
            ]
            streamed = await asyncio.gather(*tasks)
            reasons: set[str | None] = set()
            for (prompt, params), (deltas, lasts, _) in zip(requests, streamed, strict=True):
                whole = _run(engine, prompt, prompt, params)
                for completion, parts, last in zip(whole.outputs, deltas, lasts, strict=True):
                    assert "".join(parts) == completion.text
                    assert last.finish_reason == completion.finish_reason
                    assert last.stop_reason == completion.stop_reason
                    if completion.stop_reason is None:
                        assert completion.text == tokenizer.decode(
                            [t for t in completion.token_ids if t != tokenizer.eos_token_id]
                        )
                    elif not params.include_stop_str_in_output:
                        assert completion.stop_reason not in completion.text
                    reasons.add(str(completion.stop_reason and "string") + str(last.finish_reason))
            assert reasons == {"stringstop", "Nonestop", "Nonelength"}
            await settled(streaming)

    asyncio.run(run())


@pytest.mark.parametrize("text", ["👩‍👩‍👧", "𠮷野家", "ฉัน", "e\u0301", FLAG])
def test_no_replacement_character_before_the_end(text: str) -> None:
    """DT-01: one only, at the end, where max_tokens cuts a character."""
    script = Script()
    tokenizer = script.make_tokenizer()
    of_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [of_byte[bytes([byte])] for byte in text.encode()]
    script.reply("Say", ids)

    async def run() -> None:
        async with running(script) as engine:
            for cut in range(1, len(ids) + 1):
                ((deltas,), (last,), _) = await _stream(
                    engine, str(cut), "Say it", SamplingParams(max_tokens=cut), 1
                )
                assert not any("\ufffd" in delta for delta in deltas[:-1])
                assert "".join(deltas) == bytes(text.encode()[:cut]).decode("utf-8", "replace")
                assert last.finish_reason == "length"

    asyncio.run(run())


@pytest.mark.parametrize("prompt", ["Say:", " Say: ", "Say:\n", "  ", "𠮷 ,", "do n't", f"a{EOS}"])
def test_a_prompt_and_its_completion_join(prompt: str) -> None:
    """DT-04: what echo shows is the prompt as it was given, and then what follows it."""
    reply = " Hello world ! , n't \n"
    engine = scripted_engine(Script(reply))
    output = _run(engine, "one", prompt, SamplingParams(max_tokens=40))
    assert output.prompt == prompt
    assert output.outputs[0].text == reply
    tokenizer = Script(reply).make_tokenizer()
    both = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    assert tokenizer.decode(both, skip_special_tokens=False) == prompt + reply
    by_ids = _run(engine, "two", output.prompt_token_ids, SamplingParams(max_tokens=40))
    assert (by_ids.outputs[0].text, by_ids.prompt_token_ids) == (reply, output.prompt_token_ids)


def test_ids_the_tokenizer_does_not_have() -> None:
    """DT-05: drawn, among the likeliest, or in the prompt: no text, and the neighbours go on."""
    script = Script(special_pieces=["one ", "two"])
    script.reply("odd", [900, 10, 901])
    script.reply("good", ["one ", "two"])
    script.top = lambda token, position: [(token, -0.5), (902, -1.0), (11, -2.0)]

    async def run() -> None:
        async with running(script) as engine:
            unknown = {"prompt_token_ids": [903, *engine.tokenizer.encode("odd"), 903]}
            params = SamplingParams(max_tokens=9, logprobs=3, prompt_logprobs=2)
            odd, good = await asyncio.gather(
                _stream(engine, "a", unknown, params, 1),
                _stream(engine, "b", "good", SamplingParams(max_tokens=9), 1),
            )
            assert "".join(good[0][0]) == "one two" and good[1][0].finish_reason == "stop"
            assert engine.tokenizer is not None
            assert "".join(odd[0][0]) == engine.tokenizer.token(10)
            scored = odd[2].prompt_logprobs
            assert scored is not None and scored[-1] is not None
            assert scored[-1][903].decoded_token == scored[-1][902].decoded_token == ""
            assert odd[2].outputs[0].logprobs is not None
            assert odd[2].outputs[0].logprobs[0][900].decoded_token == ""
            await settled(engine)

    asyncio.run(run())

"""Log-probabilities in both shapes: which entries, of which tokens, at which offsets."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from tokenizers.processors import TemplateProcessing

from jaxpaged.text.tokenizer import Tokenizer
from tests.server.apps import Json, Server, drive
from tests.server.scripted import Script
from tests.tiny_models import BOS, EOS

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
PIECES = ["Once", " upon", " a", " time"]


class BosScript(Script):
    """Its tokenizer puts a BOS in front of texts."""

    def make_tokenizer(self) -> Tokenizer:
        tokenizer = super().make_tokenizer()
        bos = tokenizer.backend.token_to_id(BOS)
        tokenizer.backend.post_processor = TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, bos)]
        )
        return tokenizer


async def legacy(server: Server, body: Json) -> list[Json]:
    """The choices, after proof that a stream's logprobs add up to the same."""
    whole = await server.ok(PATH, body)
    if not body.get("echo"):  # OpenAI's types do not know the null of a prompt's first token
        Completion.model_validate(whole)
    sums: dict[int, Json] = {}
    for chunk in await server.chunks(PATH, body):
        for choice in chunk["choices"]:
            if choice["logprobs"] is not None:
                lists = [sums.setdefault(choice["index"], {}), choice["logprobs"]]
                for name, values in lists[1].items():
                    lists[0].setdefault(name, []).extend(values)
    for choice in whole["choices"]:
        assert choice["logprobs"] == sums.get(choice["index"])
    choices: list[Json] = whole["choices"]
    return choices


async def content(server: Server, body: Json) -> list[Json]:
    """The entries of the first choice of a chat, likewise."""
    whole = await server.ok(CHAT, {"messages": HI, **body})
    ChatCompletion.model_validate(whole)
    told: list[Json] = []
    for chunk in await server.chunks(CHAT, {"messages": HI, **body}):
        for choice in chunk["choices"]:
            if choice["logprobs"] is not None and choice["index"] == 0:
                told += choice["logprobs"]["content"]
    assert whole["choices"][0]["logprobs"] == {"content": told}
    return told


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_the_legacy_shape(count: int) -> None:  # LP-02
    def top(token: int, position: int) -> list[tuple[int, float]]:
        # Single characters, which all read differently.
        return [(token, -0.5), *((50 + i, -1.0 - i) for i in range(19))]

    async def test(server: Server) -> None:
        choices = await legacy(server, {"prompt": "p", "logprobs": count, "n": 2})
        for choice in choices:
            scores = choice["logprobs"]
            assert scores["tokens"] == [*PIECES, EOS]
            assert scores["text_offset"] == [0, 4, 9, 11, 16]
            assert choice["text"] == "Once upon a time"
            for token, value, top in zip(
                scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True
            ):
                assert len(top) == max(count, 1)  # the drawn token is the likeliest
                assert top[token] == value == max(top.values())

    drive(test, Script(default=PIECES, top=top))


def test_the_drawn_token_is_always_there() -> None:  # LP-02, LP-05
    def top(token: int, position: int) -> list[tuple[int, float]]:
        return [(300, -0.25), (301, -0.5), (token, -1.5)]

    async def test(server: Server) -> None:
        (choice,) = await legacy(server, {"prompt": "p", "logprobs": 2, "max_tokens": 3})
        for token, value, entry in zip(
            choice["logprobs"]["tokens"],
            choice["logprobs"]["token_logprobs"],
            choice["logprobs"]["top_logprobs"],
            strict=True,
        ):
            assert value == entry[token] == -1.5 and len(entry) == 3
        for entry in await content(server, {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}):
            assert entry["logprob"] == -1.5
            assert [other["logprob"] for other in entry["top_logprobs"]] == [-0.25, -0.5]

    drive(test, Script(default=PIECES, top=top))


@pytest.mark.parametrize("top", [None, 0, 3, 20])
def test_the_chat_shape(top: int | None) -> None:  # LP-02
    async def test(server: Server) -> None:
        body = {"logprobs": True, "top_logprobs": top, "n": 2}
        entries = await content(server, body)
        assert [entry["token"] for entry in entries] == [*PIECES, EOS]
        for entry in entries:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert bytes(entry["bytes"]).decode() == entry["token"]
            assert len(entry["top_logprobs"]) == (top or 0)
            if top:
                first = {k: v for k, v in entry.items() if k != "top_logprobs"}
                assert entry["top_logprobs"][0] == first
                values = [other["logprob"] for other in entry["top_logprobs"]]
                assert values == sorted(values, reverse=True)

    drive(test, Script(default=PIECES))


@pytest.mark.parametrize("fields", [{}, {"logprobs": None}, {"logprobs": False, "top_logprobs": 0}])
def test_no_logprobs(fields: Json) -> None:  # LP-02
    async def test(server: Server) -> None:
        whole = await server.ok(CHAT, {"messages": HI, **fields})
        assert whole["choices"][0]["logprobs"] is None
        if not fields.get("top_logprobs"):
            plain = await legacy(server, {"prompt": "p"})
            assert plain[0]["logprobs"] is None

    drive(test, Script(default=PIECES))


def test_a_reply_that_ends_at_once() -> None:  # LP-02
    async def test(server: Server) -> None:
        (choice,) = await legacy(server, {"prompt": "p", "logprobs": 1})
        assert choice["text"] == "" and choice["logprobs"]["tokens"] == [EOS]
        assert [entry["token"] for entry in await content(server, {"logprobs": True})] == [EOS]

    drive(test, Script(default=[]))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATH, {"logprobs": 21}, "logprobs"),
        (PATH, {"logprobs": -1}, "logprobs"),  # the whole vocabulary, of which 20 are allowed
        (PATH, {"logprobs": -2}, "logprobs"),
        (PATH, {"logprobs": True}, "logprobs"),
        (PATH, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (PATH, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": 3}, "logprobs"),
    ],
)
def test_limits(path: str, fields: Json, param: str) -> None:  # LP-02
    async def test(server: Server) -> None:
        error = await server.refused(path, {"prompt": "p", "messages": HI, **fields})
        assert error["param"] == param

    drive(test, Script())


def test_tokens_that_read_alike() -> None:  # LP-03
    # Single bytes of a character all read as U+FFFD; two of them are among the likeliest.
    async def test(server: Server) -> None:
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None
        first, second = (next(i for i in range(512) if tokenizer.token_bytes(i) == b) for b in
                         (b"\xe7", b"\xbb"))  # fmt: skip

        def top(token: int, position: int) -> list[tuple[int, float]]:
            return [(second, -0.25), (first, -0.5), *((300 + i, -1.0 - i) for i in range(3))]

        script.top, script.default = top, [first]
        (choice,) = await legacy(server, {"prompt": "p", "logprobs": 5, "max_tokens": 1})
        assert choice["logprobs"]["tokens"] == ["\ufffd"]
        assert choice["logprobs"]["token_logprobs"] == [-0.5]
        assert choice["logprobs"]["top_logprobs"][0]["\ufffd"] == -0.25  # the larger one
        assert len(choice["logprobs"]["top_logprobs"][0]) == 4
        (entry,) = await content(server, {"logprobs": True, "top_logprobs": 5, "max_tokens": 1})
        assert entry["bytes"] == [0xE7]
        assert [o["bytes"] for o in entry["top_logprobs"][:2]] == [[0xBB], [0xE7]]
        assert len(entry["top_logprobs"]) == 5
        script.default = [second]  # now the drawn one is the likelier
        (choice,) = await legacy(server, {"prompt": "p", "logprobs": 5, "max_tokens": 1})
        assert choice["logprobs"]["top_logprobs"][0]["\ufffd"] == -0.25
        script.default = [first]
        ids = {"return_tokens_as_token_ids": True, "max_tokens": 1}
        (choice,) = await legacy(server, {"prompt": "p", "logprobs": 5, **ids})
        assert choice["logprobs"]["tokens"] == [f"token_id:{first}"]
        assert len(choice["logprobs"]["top_logprobs"][0]) == 5
        (entry,) = await content(server, {"logprobs": True, "top_logprobs": 1, **ids})
        assert entry["token"] == f"token_id:{first}" and entry["bytes"] == [0xE7]
        assert entry["top_logprobs"][0]["token"] == f"token_id:{second}"

    script = Script()
    drive(test, script)


def test_token_ids_for_all_requests() -> None:
    async def test(server: Server) -> None:
        (choice,) = await legacy(server, {"prompt": "p", "logprobs": 0, "max_tokens": 1})
        assert choice["logprobs"]["tokens"][0].startswith("token_id:")
        plain = {"prompt": "p", "logprobs": 0, "return_tokens_as_token_ids": False}
        (choice,) = await legacy(server, plain)
        assert choice["logprobs"]["tokens"] == [*PIECES, EOS]

    drive(test, Script(default=PIECES), settings={"return_tokens_as_token_ids": True})


def test_minus_infinity_is_a_number() -> None:
    def top(token: int, position: int) -> list[tuple[int, float]]:
        return [(token, -0.5), (300, -math.inf), (301, -math.inf)]

    async def test(server: Server) -> None:
        (choice,) = await legacy(server, {"prompt": "p", "logprobs": 2, "max_tokens": 1})
        assert sorted(choice["logprobs"]["top_logprobs"][0].values()) == [-9999.0, -0.5]
        (entry,) = await content(server, {"logprobs": True, "top_logprobs": 2, "max_tokens": 1})
        assert [o["logprob"] for o in entry["top_logprobs"]] == [-0.5, -9999.0]
        whole = await server.ok(PATH, {"prompt": "pq", "prompt_logprobs": 2, "max_tokens": 1})
        values = [v["logprob"] for v in whole["choices"][0]["prompt_logprobs"][1].values()]
        assert sorted(values) == [-9999.0, -0.5]

    script = Script(default=PIECES, top=top)
    drive(test, script)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_echo_and_logprobs(max_tokens: int, logprobs: int | None) -> None:  # AP-06
    async def test(server: Server) -> None:
        prompts = ["The cat sat", "x", "And another one"]
        body = {
            "prompt": prompts,
            "echo": True,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "temperature": 0,
        }
        whole = await server.ok(PATH, body)
        choices = await legacy(server, body)
        assert whole["usage"]["completion_tokens"] == 3 * max_tokens
        for prompt, choice in zip(prompts, choices, strict=True):
            reply = "".join(PIECES[:max_tokens])
            assert choice["text"] == prompt + reply
            assert choice["finish_reason"] == "length" and choice["prompt_logprobs"] is None
            scores = choice["logprobs"]
            if logprobs is None:
                assert scores is None
                continue
            count = len(await server.engine.tokenize(prompt)) + max_tokens
            assert [len(values) for values in scores.values()] == [count] * 4
            offsets = [*scores["text_offset"], len(choice["text"])]
            for i, token in enumerate(scores["tokens"]):
                assert choice["text"][offsets[i] : offsets[i + 1]] == token
            assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
            for value, top in zip(
                scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True
            ):
                assert value in top.values() and value == max(top.values())

    drive(test, Script(default=PIECES))


def test_as_lm_eval_asks() -> None:  # AP-06
    async def test(server: Server) -> None:
        ids = await server.engine.tokenize("The cat sat on the mat")
        body = {
            "model": "tiny",
            "prompt": [ids, ids[:5]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        for prompt, choice in zip([ids, ids[:5]], await legacy(server, body), strict=True):
            scores = choice["logprobs"]
            assert len(scores["token_logprobs"]) == len(prompt) + 1
            sliced = scores["token_logprobs"][1:-1]
            for value, top in zip(sliced, scores["top_logprobs"][1:-1], strict=True):
                assert value == max(top.values())

    drive(test, Script(default=PIECES))


def test_offsets_of_hidden_tokens_and_bytes() -> None:
    async def test(server: Server) -> None:
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None
        # A special token is not in the text; the bytes of one character share a place.
        (choice,) = await legacy(server, {"prompt": "p", "logprobs": 0, "max_tokens": 20})
        scores = choice["logprobs"]
        assert choice["text"] == "é终x"
        at = dict(zip(scores["tokens"], scores["text_offset"], strict=True))
        assert scores["tokens"][-2:] == ["x", EOS] and at["x"] == 2 and at[EOS] == 3
        assert set(scores["text_offset"]) == {0, 1, 2, 3}
        # Shown special tokens take their place.
        shown = {"prompt": "p", "logprobs": 0, "max_tokens": 20, "skip_special_tokens": False}
        (choice,) = await legacy(server, shown)
        assert choice["text"] == f"é{BOS}终x"
        at = dict(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
        assert at[BOS] == 1 and at["x"] == 2 + len(BOS)

    script = Script()

    async def with_script(server: Server) -> None:
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None and tokenizer.bos_token_id is not None
        parts: list[list[int]] = [tokenizer.encode(text) for text in ("é", "终", "x")]
        script.default = [*parts[0], tokenizer.bos_token_id, *parts[1], *parts[2]]
        await test(server)

    drive(with_script, script)


def test_offsets_behind_an_added_bos() -> None:  # AP-06
    async def test(server: Server) -> None:
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None
        body = {"prompt": "The cat", "logprobs": 0, "echo": True, "max_tokens": 1}
        (choice,) = await legacy(server, body)
        scores = choice["logprobs"]
        assert choice["text"] == "The catOnce" and scores["tokens"][0] == BOS
        assert scores["text_offset"][:2] == [0, 0] and scores["text_offset"][-1] == len("The cat")
        offsets = [*scores["text_offset"], len(choice["text"])]
        for i, token in enumerate(scores["tokens"][1:], start=1):
            assert choice["text"][offsets[i] : offsets[i + 1]] == token
        # As ids the same prompt reads the same; a BOS in the text itself is shown.
        ids = tokenizer.encode("The cat")
        assert await legacy(server, {**body, "prompt": ids}) == [choice]
        (shown,) = await legacy(server, {**body, "prompt": f"{BOS}The cat"})
        assert shown["text"] == f"{BOS}The catOnce"
        assert shown["logprobs"]["text_offset"][:2] == [0, len(BOS)]

    drive(test, BosScript(default=PIECES))


def test_one_bos_only() -> None:  # CH-06
    async def test(server: Server) -> None:
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None
        assert tokenizer.encode("x")[0] == tokenizer.bos_token_id
        for special in (None, True, False):
            body = {"messages": HI, "return_token_ids": True, "add_special_tokens": special}
            ids = (await server.ok(CHAT, body))["prompt_token_ids"]
            assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
            assert ids == (await server.ok("/tokenize", {"messages": HI}))["tokens"]
        bare = {"prompt": "x", "add_special_tokens": False, "return_token_ids": True}
        (choice,) = (await server.ok(PATH, bare))["choices"]
        assert tokenizer.bos_token_id not in choice["prompt_token_ids"]

    drive(test, BosScript(default=PIECES))


def test_prompt_logprobs() -> None:
    async def test(server: Server) -> None:
        ids = await server.engine.tokenize("The cat")
        body = {"prompt": "The cat", "prompt_logprobs": 2, "max_tokens": 2, "n": 2}
        whole = await server.ok(PATH, body)
        for choice in whole["choices"]:
            assert choice["logprobs"] is None
            first, *others = choice["prompt_logprobs"]
            assert first is None and len(others) == len(ids) - 1
            for token, entry in zip(ids[1:], others, strict=True):
                assert entry[str(token)]["rank"] == 1 and len(entry) == 2
                assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
        chat = await server.ok(CHAT, {"messages": HI, "prompt_logprobs": 0})
        assert chat["prompt_logprobs"][0] is None
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        scored = await server.ok(CHAT, {"messages": HI, "prompt_logprobs": 0, "max_tokens": 0})
        assert scored["usage"]["completion_tokens"] == 0
        assert scored["choices"][0]["message"]["content"] == ""

    drive(test, Script(default=PIECES))


def test_one_definition_everywhere() -> None:  # LP-05
    async def test(server: Server) -> None:
        tokens = await server.engine.tokenize("p")
        for fields in ({}, {"temperature": 0.5, "top_k": 2, "logit_bias": {"5": 3}}):
            body: dict[str, Any] = {
                "prompt": "p",
                "logprobs": 3,
                "return_token_ids": True,
                **fields,
            }
            (choice,) = await legacy(server, body)
            again = {
                "prompt": tokens + choice["token_ids"],
                "echo": True,
                "logprobs": 3,
                "max_tokens": 0,
            }
            (scored,) = await legacy(server, again)
            # The scripted model's values depend on token and position alone.
            assert len(scored["logprobs"]["tokens"]) == len(tokens) + len(choice["token_ids"])
            assert scored["logprobs"]["tokens"][len(tokens) :] == choice["logprobs"]["tokens"]

    drive(test, Script(default=PIECES))

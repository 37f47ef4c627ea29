"""/tokenize, /detokenize, /tokenizer_info and /v1/models."""

from __future__ import annotations

import pytest
from openai.types import Model

from jaxpaged.config import EngineConfig
from tests.server.apps import MODEL, Json, Server, drive
from tests.server.scripted import Script
from tests.tiny_models import BOS, CHAT_TEMPLATE, EOS

HI = [{"role": "user", "content": "Hi"}]
TEXTS = ["", "a", "The quick brown fox", "é 终 🙂", f"{BOS}x"]


@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(text: str) -> None:
    async def test(server: Server) -> None:
        body = {"prompt": text, "return_token_strs": True, "model": MODEL}
        answer = await server.ok("/tokenize", body)
        assert answer["tokens"] == await server.engine.tokenize(text)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 256
        assert (await server.ok("/detokenize", {"tokens": answer["tokens"]})) == {"prompt": text}
        plain = await server.ok("/tokenize", {"prompt": text})
        assert plain["tokens"] == answer["tokens"] and plain["token_strs"] is None

    drive(test, Script())


def test_a_conversation() -> None:  # CH-06
    async def test(server: Server) -> None:
        whole = await server.ok(
            "/v1/chat/completions", {"messages": HI, "return_token_ids": True, "max_tokens": 1}
        )
        answer = await server.ok("/tokenize", {"messages": HI})
        assert answer["tokens"] == whole["prompt_token_ids"]
        text = (await server.ok("/detokenize", {"tokens": answer["tokens"]}))["prompt"]
        assert text == f"{BOS}<|user|>\nHi{EOS}\n<|assistant|>\n"
        bare = await server.ok("/tokenize", {"messages": HI, "add_generation_prompt": False})
        assert bare["count"] < answer["count"]

    drive(test, Script())


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {}, 400, None),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1, True]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1024]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "x"}, 404, "model"),
    ],
)
def test_bad_bodies(path: str, body: Json, status: int, param: str | None) -> None:
    async def test(server: Server) -> None:
        assert (await server.refused(path, body, status))["param"] == param

    drive(test, Script())


def test_what_the_tokenizer_is() -> None:
    async def test(server: Server) -> None:
        info = (await server.request("GET", "/tokenizer_info")).json()
        assert (info["bos_token"], info["eos_token"]) == (BOS, EOS)
        assert info["chat_template"] == CHAT_TEMPLATE and info["add_bos_token"] is False
        assert info["model_max_length"] == 256

    async def nothing(server: Server) -> None:
        assert (await server.request("GET", "/tokenizer_info")).status_code == 404

    drive(test, Script())
    drive(nothing, Script(), settings={"enable_tokenizer_info_endpoint": False})


def test_without_a_tokenizer() -> None:
    async def test(server: Server) -> None:
        for path, body in (
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
            ("/v1/chat/completions", {"messages": HI}),
        ):
            assert "no tokenizer" in (await server.refused(path, body))["message"]
        response = await server.request("GET", "/tokenizer_info")
        assert response.status_code == 400

    drive(test, Script(default=[1]), config=EngineConfig(skip_tokenizer_init=True))


def test_the_models() -> None:  # AP-08
    async def test(server: Server) -> None:
        answer = (await server.request("GET", "/v1/models")).json()
        assert answer["object"] == "list"
        assert [card["id"] for card in answer["data"]] == [MODEL, "other/name"]
        for card in answer["data"]:
            Model.model_validate(card)
            assert card["object"] == "model" and card["owned_by"] == "jaxpaged"
            assert card["root"] == server.engine.info.model and card["parent"] is None
            assert card["max_model_len"] == 256 and card["created"] == server.context.created
            assert card["permission"][0]["object"] == "model_permission"
        for path in ("/v1/models/tiny", "/v1/models/other/name", "/v1/models/other%2Fname"):
            response = await server.request("GET", path)
            assert response.status_code == 200 and response.json() in answer["data"]
        for path in ("/v1/models/unknown", "/v1/models/other"):
            response = await server.request("GET", path)
            error = response.json()["error"]
            assert response.status_code == 404 and error["type"] == "NotFoundError"
            assert "Valid aliases: tiny, other/name." in error["message"]

    drive(test, Script())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_name_is_answered_as_asked(path: str) -> None:
    async def test(server: Server) -> None:
        for asked, told in (("other/name", "other/name"), (None, MODEL), (MODEL, MODEL)):
            body = {"model": asked, "prompt": "p", "messages": HI, "max_tokens": 1}
            assert (await server.ok(path, body))["model"] == told
        error = await server.refused(path, {**body, "model": "gpt-4"}, 404)
        assert error["message"] == (
            "The model `gpt-4` does not exist. Valid aliases: tiny, other/name."
        )
        assert (error["type"], error["param"]) == ("NotFoundError", "model")

    drive(test, Script())

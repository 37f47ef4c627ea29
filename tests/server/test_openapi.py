"""/openapi.json: valid, complete, and true."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from server.openapi import document
from server.routes import ROUTES
from tests.server.apps import Server, drive

UNLISTED = ("/", "/static/{name}", "/debug/live")
"""The page's own, which no client calls."""
ALIASES = ("/metrics/",)


@pytest.mark.parametrize("guarded", [False, True])
def test_it_is_valid(guarded: bool) -> None:
    whole = json.loads(json.dumps(document(guarded=guarded, root_path="/llm")))
    OPENAPI_31_VALIDATOR.validate(whole)
    for schema in whole["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(whole)
    for mention in {part.split('"')[0] for part in text.split('"$ref": "')[1:]}:
        assert mention.removeprefix("#/components/schemas/") in whole["components"]["schemas"]
    ids = [
        operation["operationId"] for path in whole["paths"].values() for operation in path.values()
    ]
    assert len(ids) == len(set(ids))


def test_it_describes_every_route() -> None:
    described = {
        (method.upper(), path)
        for path, methods in document()["paths"].items()
        for method in methods
    }
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in ROUTES
        for method in route.methods or ()
        if method != "HEAD"
        and route.path not in UNLISTED + ALIASES
        # What is not stored cannot be fetched: these only say so.
        and not route.path.startswith("/v1/responses/")
    }
    assert described == routes


def test_it_is_served() -> None:
    async def test(server: Server) -> None:
        response = await server.request(
            "GET", "/openapi.json", headers={"authorization": "Bearer k"}
        )
        assert response.json() == json.loads(json.dumps(document(guarded=True)))
        security = {
            path: operation["security"]
            for path, methods in response.json()["paths"].items()
            for operation in methods.values()
        }
        assert security["/health"] == [] and security["/v1/completions"] == [{"bearer": []}]

    drive(test, settings={"api_key": ("k",)})


def test_examples_follow_the_schemas() -> None:
    schemas = document()["components"]["schemas"]
    root = {"components": {"schemas": schemas}}

    def valid(name: str, value: Any) -> bool:
        schema = {**root, "$ref": f"#/components/schemas/{name}"}
        return not list(jsonschema.Draft202012Validator(schema).iter_errors(value))

    assert valid("CompletionRequest", {"prompt": [[1, 2]], "stop": ["a"], "logit_bias": {"5": 1}})
    assert not valid("CompletionRequest", {"prompt": ["a", 1]})
    assert not valid("CompletionRequest", {"prompt": "p", "temperature": 3})
    assert not valid("CompletionRequest", {})
    assert valid("ChatRequest", {"messages": [{"role": "user", "content": "x"}], "tools": []})
    assert not valid("ChatRequest", {"messages": []})

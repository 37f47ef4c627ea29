"""GET /openapi.json: the table of operations as an OpenAPI document."""

from __future__ import annotations

import re
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpaged import __version__
from server.context import context_of
from server.operations import OPERATIONS, Operation, Schema

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")


async def openapi(request: Request) -> Response:
    settings = context_of(request).settings
    guarded = bool(settings.api_key or settings.api_key_file)
    return Response(
        encoded(guarded=guarded, root_path=settings.root_path), media_type="application/json"
    )


@lru_cache(maxsize=8)
def encoded(*, guarded: bool, root_path: str) -> bytes:
    return msgspec.json.encode(document(guarded=guarded, root_path=root_path))


def document(*, guarded: bool = False, root_path: str = "") -> dict[str, Any]:
    """`guarded`: the server has API keys."""
    kinds = _structs()
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        described = _describe(operation, schema_of, guarded=guarded)
        paths.setdefault(operation.path, {})[operation.method] = described
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxpaged",
            "version": __version__,
            "description": "A language model behind OpenAI's API, served by jaxpaged.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": root_path or "/"}],
        "tags": [{"name": name} for name in dict.fromkeys(o.tag for o in OPERATIONS)],
        "paths": paths,
        "components": {"schemas": components},
    }
    if guarded:
        schemes = {"bearer": {"type": "http", "scheme": "bearer"}}
        whole["components"]["securitySchemes"] = schemes
    return whole


def _structs() -> list[type[Any]]:
    mentioned = [kind for o in OPERATIONS for kind in (o.body, o.answer, o.events, o.error)]
    return list(dict.fromkeys(kind for kind in mentioned if isinstance(kind, type)))


def _describe(
    operation: Operation, schema_of: dict[type[Any], Schema], *, guarded: bool
) -> dict[str, Any]:
    def schema(kind: type[Any] | Schema) -> Schema:
        return schema_of[kind] if isinstance(kind, type) else kind

    words = re.findall(r"[a-z]+", operation.path.lower())
    described: dict[str, Any] = {
        "operationId": "_".join([operation.method, *words]),
        "summary": operation.summary,
        "tags": [operation.tag],
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(operation.path)
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        content = {"application/json": {"schema": schema(operation.body)}}
        described["requestBody"] = {"required": True, "content": content}
    answer: dict[str, Any] = {"description": "OK"}
    if operation.answer is not None:
        answer["content"] = {operation.media_type: {"schema": schema(operation.answer)}}
    if operation.events is not None:
        payload = {"anyOf": [schema(operation.events), schema(operation.error)]}
        events = _event_schema(payload, ends_with_done=isinstance(operation.events, type))
        answer["content"]["text/event-stream"] = {"schema": events}
    responses = {"200": answer}
    key = guarded and not operation.open
    for status in (*operation.errors, *((401,) if key else ())):
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema(operation.error)}},
        }
    described["responses"] = responses
    if guarded:
        described["security"] = [{"bearer": []}] if key else []
    return described


def _event_schema(payload: Schema, *, ends_with_done: bool) -> Schema:
    """Of each event, as tools that read streams take it in versions of OpenAPI before 3.2."""
    data: Schema = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": payload,
    }
    if ends_with_done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {
        "type": "object",
        "description": "With stream=true: one of the events, its data a line of JSON.",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": data},
    }


ROUTES = [Route("/openapi.json", openapi)]

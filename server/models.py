"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.context import Context, context_of
from server.errors import json_response
from server.protocol_models import ModelCard, ModelList, ModelPermission


async def list_models(request: Request) -> Response:
    context = context_of(request)
    return json_response(ModelList(data=[_card(context, name) for name in context.served_names]))


async def one_model(request: Request) -> Response:
    """Raises `ApiError` 404 for a name that is not served. Names may hold slashes."""
    context = context_of(request)
    return json_response(_card(context, context.model_named(request.path_params["id"])))


def _card(context: Context, name: str) -> ModelCard:
    info = context.engine.info
    permission = ModelPermission(id=f"modelperm-{name}", created=context.created)
    return ModelCard(
        id=name,
        created=context.created,
        root=info.model,
        max_model_len=info.max_model_len,
        permission=[permission],
    )


ROUTES = [
    Route("/v1/models", list_models),
    Route("/v1/models/{id:path}", one_model),
]

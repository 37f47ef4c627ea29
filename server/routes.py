"""Every route of the server."""

from __future__ import annotations

from starlette.routing import Route

from server import (
    anthropic,
    chat,
    completions,
    health,
    live,
    metrics,
    models,
    openapi,
    page,
    responses,
    tokens,
)

ROUTES: list[Route] = [
    *models.ROUTES,
    *openapi.ROUTES,
    *chat.ROUTES,
    *completions.ROUTES,
    *responses.ROUTES,
    *anthropic.ROUTES,
    *tokens.ROUTES,
    *health.ROUTES,
    *metrics.ROUTES,
    *live.ROUTES,
    *page.ROUTES,
]

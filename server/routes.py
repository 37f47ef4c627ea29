"""Every route of the server."""

from __future__ import annotations

from starlette.routing import Route

from server import (
    health,
    live,
    metrics,
    page,
)

ROUTES: list[Route] = [
    *health.ROUTES,
    *metrics.ROUTES,
    *page.ROUTES,
    *live.ROUTES,
]

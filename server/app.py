"""The ASGI application: the routes, and the layers around them from the outside in."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpaged.errors import JaxpagedError
from server.answers import refusal, route_path
from server.auth import Auth, load_keys
from server.context import Context
from server.errors import ApiError, as_api_error
from server.middleware import BodyLimit, LastResort, Paths, RequestIds, WhileLoading
from server.observe import Observe
from server.routes import ROUTES


def create_app(context: Context, routes: Sequence[Route] = ROUTES) -> Starlette:
    """The application for a context; `app.state.context` is that.

    Raises `ConfigError` if the file of API keys cannot be used.
    """
    settings = context.settings
    limit = settings.max_request_bytes
    assert isinstance(limit, int)
    layers = [
        Middleware(LastResort),
        Middleware(Paths, settings.root_path),
        Middleware(RequestIds, echo=settings.enable_request_id_headers),
        Middleware(Observe, context, {route.endpoint: route.path for route in reversed(routes)}),
        Middleware(
            Auth,
            load_keys(settings),
            metrics_auth=settings.metrics_auth,
            has_page=not settings.disable_page,
        ),
        Middleware(WhileLoading, context),
        Middleware(BodyLimit, limit),
    ]
    if settings.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
        layers.insert(4, cors)  # refusals need its headers too, or a page cannot read them
    app = Starlette(
        routes=routes,
        middleware=layers,
        exception_handlers={
            ApiError: _on_error,
            JaxpagedError: _on_error,
            HTTPException: _on_http_exception,
        },
    )
    app.router.redirect_slashes = False  # `Paths` knows better
    app.state.context = context
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    return refusal(request.scope, as_api_error(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = route_path(request.scope)
    shown = path if len(path) <= 200 else f"{path[:200]}..."
    message = error.detail
    if error.status_code == 404:
        message = f"There is no {shown} here.{_where_instead(request, path)}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{shown} does not take {request.method[:20]}, only {allowed}."
    response = refusal(request.scope, ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


def _where_instead(request: Request, path: str) -> str:
    """Clients that look for another server's endpoint, or have the base URL wrong, see by it."""
    paths = [route.path for route in request.app.routes if "{" not in route.path]
    ends_alike = [known for known in paths if len(path) > 1 and known.endswith(path)]
    near = ends_alike or difflib.get_close_matches(path[:200], paths, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    endpoints = [known for known in dict.fromkeys(paths) if known.startswith("/v1/")]
    if not endpoints:
        return hint
    return f"{hint} There are: {', '.join(endpoints)}."

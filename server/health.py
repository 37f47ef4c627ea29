"""What supervisors and balancers ask. Answered from the event loop's own memory: no load, and no
step that hangs, delays it.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpaged import __version__
from server.answers import refusal
from server.context import Context, context_of
from server.errors import ApiError, json_response

_RETRY = {"loading": 5, "draining": 30, "stalled": 30, "dead": 30, "closed": 30}
"""Seconds after which it may be worth to ask again."""


def status_of(context: Context) -> tuple[str, str]:
    """ready, loading, draining, stalled, dead or closed; and more about it."""
    engine = context.engine
    if engine.status in ("dead", "closed"):
        return engine.status, "the engine has ended"
    seconds = engine.seconds_in_step
    if seconds > context.settings.request_stall_timeout:
        return "stalled", f"one step has been running for {seconds:.0f} s"
    if engine.status == "loading":
        if engine.progress is None:
            return "loading", "reading the model"
        return "loading", "{}/{} programs compiled".format(*engine.progress)
    if engine.status == "draining":
        return "draining", f"{engine.num_unfinished} requests to end"
    return engine.status, ""


async def health(request: Request) -> Response:
    """200 unless this process should be restarted: also while it loads or drains."""
    status, detail = status_of(context_of(request))
    if status in ("dead", "closed", "stalled"):
        error = ApiError(503, f"The engine is {status}: {detail}.", retry_after=_RETRY[status])
        return refusal(request.scope, error)
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    """200 if a request would be taken."""
    status, detail = status_of(context_of(request))
    headers = {} if status == "ready" else {"Retry-After": str(_RETRY[status])}
    body = {"status": status, "detail": detail}
    progress = context_of(request).engine.progress
    if status == "loading" and progress is not None:
        body["programs"] = "{}/{}".format(*progress)
    return json_response(body, 503 if headers else 200, headers)


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def load(request: Request) -> Response:
    """Requests being answered, not counting this one."""
    return json_response({"server_load": context_of(request).in_flight})


ROUTES = [
    Route("/health", health),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/ready", ready),
    Route("/version", version),
    Route("/load", load),
]

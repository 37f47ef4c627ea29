"""The web page: a few static files under a strict content security policy.

The page needs no key (it asks for one); everything that it calls does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.context import context_of
from server.errors import ApiError

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # What a model writes can then not become markup, whatever mistake the page makes.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Small files: a browser asks each time whether they changed, and a new version shows at once.
    "Cache-Control": "no-cache",
}

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    media_type: str
    etag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """Every file of the page by its name. Read once; nothing else can be asked for by a path."""
    found = {}
    for entry in files("server").joinpath("static").iterdir():
        media_type = _MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[entry.name] = StaticFile(body, media_type, etag)
    return found


def _answer(request: Request, name: str) -> Response:
    file = None if context_of(request).settings.disable_page else static_files().get(name)
    if file is None:
        raise ApiError(404, "Not Found")
    headers = {**_HEADERS, "ETag": file.etag}
    known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or f"W/{file.etag}" in known:  # weak: a proxy has compressed it
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


async def page(request: Request) -> Response:
    return _answer(request, "index.html")


async def static(request: Request) -> Response:
    return _answer(request, request.path_params["name"])


ROUTES = [
    Route("/", page, methods=["GET", "HEAD"]),
    Route("/static/{name}", static, methods=["GET", "HEAD"]),
]

"""API keys. With any set, all but a short list of paths needs one: what is new is guarded too."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpaged.checks import Broken
from jaxpaged.errors import ConfigError
from server.answers import route_path, send_error, state_of
from server.errors import ApiError
from server.settings import ServerConfig, api_key, split_key

PROBES = frozenset({"/health", "/ready", "/ping"})
"""What supervisors ask; they have no key."""
_READ = frozenset({"GET", "HEAD"})
_INCORRECT = "Incorrect API key provided."
_MISSING = "No API key was provided. Send it as the header 'Authorization: Bearer KEY'."


@dataclass(frozen=True)
class Key:
    """A key by its digest: the key itself is not kept."""

    name: str
    digest: bytes

    @classmethod
    def of(cls, text: str, place: int) -> Key:
        name, key = split_key(text)
        return cls(name or f"key{place}", _digest(key.encode()))


def load_keys(settings: ServerConfig) -> tuple[Key, ...]:
    """All keys, of the settings and of the file. Raises `ConfigError`."""
    texts = [*(settings.api_key or ())]
    if settings.api_key_file is not None:
        texts += _read_keys(settings.api_key_file)
    return tuple(Key.of(text, place) for place, text in enumerate(texts, start=1))


def _read_keys(name: str) -> list[str]:
    try:
        content = Path(name).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"api_key_file {name}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"api_key_file {name}: not a text in UTF-8.") from error
    found = []
    for number, line in enumerate(content.splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            found.append(api_key(text))
        except Broken as broken:
            raise ConfigError(
                f"api_key_file {name}: line {number} must have {broken.rule}."
            ) from None
    if not found:  # the server would be open to all
        raise ConfigError(f"api_key_file {name}: there is no key in it.")
    return found


class Auth:
    """ASGI middleware: 401 for every request without a valid key, unless `is_open`.

    Without keys it lets everything pass. The name of the key goes to the request's state.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[Key], *, metrics_auth: bool, has_page: bool
    ) -> None:
        self._app = app
        self._keys = tuple(keys)
        self._metrics_auth = metrics_auth
        self._has_page = has_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._keys or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        tokens = presented(scope)
        name = self._name_of(tokens)
        if name is not None:
            state_of(scope)["key_name"] = name
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        elif not self.is_open(scope["method"], route_path(scope)):
            error = ApiError(
                401,
                _INCORRECT if tokens else _MISSING,
                type="invalid_request_error",
                code="invalid_api_key",
            )
            await send_error(error, scope, receive, send, {"WWW-Authenticate": "Bearer"})
            return
        await self._app(scope, receive, send)

    def is_open(self, method: str, path: str) -> bool:
        """Whether a request needs no key. `path` is normal, and without the root path."""
        if method == "OPTIONS":  # browsers ask, without the key, whether they may send it
            return True
        if method not in _READ:
            return method == "POST" and path == "/ping"
        if path in PROBES or (path == "/metrics" and not self._metrics_auth):
            return True
        return self._has_page and (path == "/" or path.startswith("/static/"))

    def _name_of(self, tokens: Sequence[bytes]) -> str | None:
        found = None
        for token in tokens:
            digest = _digest(token)
            for key in self._keys:  # all of them: the time must not tell which one was right
                if secrets.compare_digest(digest, key.digest):
                    found = key.name
        return found


def presented(scope: Scope) -> list[bytes]:
    """What the request presents as keys: bearer tokens, and x-api-key as Anthropic's clients do."""
    tokens = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            tokens.append(value.strip())
        elif name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and rest:
                tokens.append(rest.strip())
    return tokens


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

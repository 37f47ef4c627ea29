"""How `jaxpaged chat` talks to a server: OpenAI's API, streamed, and errors in plain words."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from jaxpaged.bench.stream import Chunk, decode_chunk, error_text, failure_text
from jaxpaged.errors import JaxpagedError

if TYPE_CHECKING:  # not for --help
    import httpx

URL = "http://127.0.0.1:8000/v1"
# Whatever could move the cursor, set a title or write to the clipboard: C0 and C1 controls but line
# feed and tab, and characters that reverse the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class ChatError(JaxpagedError, RuntimeError):
    """The server did not answer, or refused to."""


def clean(text: str) -> str:
    """`text` without what a terminal would obey: what a model or a server says is not trusted.

    Of an escape sequence the rest stays, as plain text.
    """
    return _CONTROL.sub("", text)


class Connection:
    """The server. Use it as a context manager; all methods raise `ChatError`."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        import httpx

        self.url = url.rstrip("/")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        try:
            if urlsplit(self.url).path == "":
                self.url += "/v1"
            self._http = httpx.Client(headers=headers, timeout=httpx.Timeout(timeout, connect=10))
        except (ValueError, httpx.InvalidURL) as error:
            raise ChatError(f"--url {url}: {error}") from error

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        with closing(self._request("GET", "/models", None)) as answer:
            self._read(answer)
            _check_status(answer, f"{self.url}/models")
            try:
                return str(answer.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ChatError(
                    f"{self.url}/models lists no model; name one with --model."
                ) from None

    def stream(self, body: dict[str, Any]) -> Generator[Chunk]:
        """The chunks of a streamed chat."""
        import httpx

        with closing(self._request("POST", "/chat/completions", body)) as answer:
            if answer.status_code != 200:
                self._read(answer)
                _check_status(answer, "the server")
            try:
                for line in answer.iter_lines():
                    if line.startswith("data:") and (text := line[5:].strip()) != "[DONE]":
                        yield _chunk(text)
            except httpx.HTTPError as error:
                raise ChatError(f"the answer broke off: {error or type(error).__name__}") from error

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        import httpx

        try:
            request = self._http.build_request(method, self.url + path, json=body)
            return self._http.send(request, stream=True)
        except httpx.ConnectError as error:
            raise ChatError(
                f"no server at {self.url} ({error}). `jaxpaged serve MODEL` starts one at {URL}; "
                "--url names another."
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ChatError(f"{self.url}{path}: {error or type(error).__name__}") from error

    def _read(self, answer: httpx.Response) -> None:
        import httpx

        try:
            answer.read()
        except httpx.HTTPError as error:
            raise ChatError(f"the answer broke off: {error or type(error).__name__}") from error


def _check_status(answer: httpx.Response, who: str) -> None:
    if answer.status_code != 200:
        hint = "; give a key with --api-key" if answer.status_code == 401 else ""
        raise ChatError(clean(f"{who}: {failure_text(answer.status_code, answer.content)}{hint}"))


def _chunk(text: str) -> Chunk:
    try:
        chunk = decode_chunk(text)
    except msgspec.DecodeError:
        raise ChatError(clean(f"the server sent what is no chunk: {text[:200]}")) from None
    if chunk.error is not None:
        raise ChatError(clean(error_text(chunk.error)))
    return chunk

"""API keys: everything is guarded but a short list, whatever the path looks like."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

from jaxpaged.errors import ConfigError
from server import auth
from server.auth import Auth, Key, load_keys
from server.settings import ServerConfig
from tests.server.live import MODEL, Live, live_server

KEY, OTHER = "k-1234", "k-5678"
GUARDED = "/v1/models"


def config(**settings: object) -> ServerConfig:
    settings = {"served_model_name": (MODEL,), "api_key": (KEY, f"alice:{OTHER}"), **settings}
    return ServerConfig.from_dict(settings)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(settings=config()) as running:
        yield running


def raw_status(live: Live, method: str, target: str, *headers: str) -> int:
    """The status for a request line as it is: clients clean paths up."""
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", "Content-Length: 0"]
    data = "\r\n".join([*lines, *headers, "", ""]).encode("utf-8")
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(data)
        answer = connection.makefile("rb").readline()
    return int(answer.split()[1])


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}"


def requests_of(live: Live) -> list[tuple[str, str]]:
    """(method, path) of everything that the application answers."""
    app = live.server.config.app
    found = []
    for route in app.routes:  # type: ignore[union-attr]
        assert isinstance(route, Route), f"{route} is a kind of route that this test does not know"
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        found += [(method, path) for method in sorted(route.methods or ())]
    return found


OPEN = {
    *((method, path) for method in ("GET", "HEAD") for path in ("/health", "/ready", "/ping")),
    ("POST", "/ping"),
    *((method, path) for method in ("GET", "HEAD") for path in ("/", "/static/x")),
}
"""What needs no key."""


def test_every_route_but_the_open_ones_needs_a_key(live: Live) -> None:
    requests = requests_of(live)
    assert len(requests) > 20
    seen_open = set()
    for method, path in requests:
        status = raw_status(live, method, path)
        if (method, path.rstrip("/") or "/") in OPEN:
            assert status != 401, (method, path)
            seen_open.add((method, path.rstrip("/") or "/"))
        else:
            assert status == 401, (method, path)
    assert seen_open == OPEN


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [bearer("wrong")],
        [bearer(KEY.upper())],
        [bearer(f"{KEY}x")],
        [bearer(KEY[:-1])],
        [bearer("")],
        ["Authorization: Bearer"],
        [f"Authorization: {KEY}"],
        [f"Authorization: Basic {KEY}"],
        [f"Authorization: Bearer: {KEY}"],
        [f"Authorization: Bearer alice:{OTHER}"],
        [f"Authorization: Bearer {KEY} {KEY}"],
        [f"Authorization: BearerX {KEY}"],
        ["Authorization: Bearer schlüssel"],
        ["x-api-key: wrong"],
        ["x-api-key:"],
        [f"api-key: {KEY}"],
        [f"Cookie: api_key={KEY}"],
    ],
)
def test_wrong_keys(live: Live, headers: list[str]) -> None:
    assert raw_status(live, "GET", GUARDED, *headers) == 401


@pytest.mark.parametrize(
    "headers",
    [
        [bearer(KEY)],
        [bearer(OTHER)],
        [f"Authorization: bearer {KEY}"],  # names of schemes have no case
        [f"Authorization: Bearer  {KEY}"],  # and one or more spaces after them
        [f"x-api-key: {KEY}"],
        ["Authorization: Basic abc", f"x-api-key: {OTHER}"],
        [bearer("wrong"), bearer(KEY)],
    ],
)
def test_right_keys(live: Live, headers: list[str]) -> None:
    assert raw_status(live, "GET", GUARDED, *headers) == 200


@pytest.mark.parametrize(
    "target",
    [
        "/v1/../v1/models",
        "//v1/models",
        "/v1//models",
        "/V1/models",
        "/v1/models%2f",
        "/v1/models/",
        "/health/../v1/models",
        "/health/%2e%2e/v1/models",
        "/static/../v1/models",
        "/static/..%2fv1/models",
        "/%2e/v1/models",
        "/v1/models?api_key=" + KEY,
        "/v1/models;/health",
        "/v1/models%00/health",
        "/health%2f..%2fv1%2fmodels",
        "/HEALTH",
        "/healthz",
        "/metricsx",
        "http://x/v1/models",
        "/nowhere",
    ],
)
def test_tricks_with_the_path(live: Live, target: str) -> None:
    if target.startswith("/static/"):  # the page's files are open; what is not one is not found
        assert raw_status(live, "GET", target) == 404
    else:
        assert raw_status(live, "GET", target) == 401
    assert raw_status(live, "GET", target, bearer(KEY)) in (200, 404)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "TRACE", "FOO"])
def test_open_paths_are_open_for_reading_only(live: Live, method: str) -> None:
    for path in ("/health", "/ready", "/", "/static/x"):
        assert raw_status(live, method, path) == 401
    assert raw_status(live, method, "/ping") == (200 if method == "POST" else 401)


def test_what_a_refused_client_is_told(live: Live) -> None:
    answer = httpx.get(live.base_url + GUARDED, headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json() == {
        "error": {
            "message": "Incorrect API key provided.",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }
    none = httpx.get(live.base_url + GUARDED).json()["error"]
    assert none["code"] == "invalid_api_key"
    assert "Authorization: Bearer KEY" in none["message"]


def test_anthropics_clients_get_their_shape(live: Live) -> None:
    answer = httpx.post(f"{live.base_url}/v1/messages", json={})
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"


def test_a_refused_body_does_not_disturb_the_next_request(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        refused = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n"
        connection.sendall(refused + b"GET /v1/models HTTP/1.1\r\n" * 8000)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = connection.makefile("rb").read()
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"401", b"200"]


def test_preflights_need_no_key(live: Live) -> None:
    for _, path in requests_of(live):
        assert raw_status(live, "OPTIONS", path) == 405  # no origin is allowed: nothing to say


def test_metrics_can_be_open() -> None:
    with live_server(settings=config(metrics_auth=False)) as live:
        for path in ("/metrics", "/metrics/"):
            assert raw_status(live, "GET", path) == 200
            assert raw_status(live, "GET", path, bearer("wrong")) == 200
        assert raw_status(live, "GET", "/metricsx") == 401


def test_without_a_page_nothing_is_open_for_it() -> None:
    with live_server(settings=config(disable_page=True)) as live:
        for path in ("/metrics", "/metrics/", "/", "/static/x"):
            assert raw_status(live, "GET", path) == 401
        assert raw_status(live, "GET", "/metrics", bearer(KEY)) == 200
        assert raw_status(live, "GET", "/", bearer(KEY)) == 404
        assert raw_status(live, "GET", "/health") == 200


def test_under_a_root_path() -> None:
    with live_server(settings=config(root_path="/llm")) as live:
        for prefix in ("", "/llm", "//llm", "/llm/"):
            assert raw_status(live, "GET", f"{prefix}/health") == 200
            assert raw_status(live, "GET", f"{prefix}/v1/models") == 401
            assert raw_status(live, "GET", f"{prefix}/v1/models", bearer(KEY)) == 200
        for target in ("/llm/llm/v1/models", "/llm/health/v1/models", "/health/llm/v1/models"):
            assert raw_status(live, "GET", target) == 401
        assert raw_status(live, "GET", "/llmx/health") == 401


def test_without_keys_all_is_open() -> None:
    with live_server() as live:
        assert raw_status(live, "GET", GUARDED) == 200


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# who may\n\n  bob:k1  \nk2\n")
    keys = load_keys(ServerConfig(api_key=("k0",), api_key_file=str(path)))
    assert keys == (Key.of("k0", 1), Key.of("bob:k1", 2), Key.of("k2", 3))
    assert [key.name for key in keys] == ["key1", "bob", "key3"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\n# none\n", "there is no key in it"),
        (b"ok\ns3cret key\n", "line 2 must have keys of 1 to 1024 printable ASCII"),
        (b"s3cret\xff\n", "not a text in UTF-8"),
    ],
    ids=["none", "spaces", "latin-1"],
)
def test_bad_files_of_keys(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as error:
        load_keys(ServerConfig(api_key_file=str(path)))
    assert "s3cret" not in str(error.value)
    with pytest.raises(ConfigError, match="No such file"):
        load_keys(ServerConfig(api_key_file=str(tmp_path / "missing")))


def test_every_key_is_compared_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(auth.secrets, "compare_digest", compare)
    keys = [Key.of(text, place) for place, text in enumerate(("a:1", "b:2", "c:3"))]
    guard = Auth(None, keys, metrics_auth=False, has_page=True)  # type: ignore[arg-type]
    assert guard._name_of([b"1"]) == "a"
    assert len(compared) == 3
    assert all(len(a) == len(b) == 32 for a, b in compared)

"""The layers around the routes: paths, ids, limits, errors, what is counted and logged."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from server.app import create_app
from server.context import Context
from server.errors import ApiError
from server.metrics import HttpMetrics
from server.settings import ServerConfig
from tests.server.live import MODEL, Live, live_server, until
from tests.server.scripted import Script, running

COMPLETION = {"prompt": "hi", "max_tokens": 2}
SECRET = "secret-of-the-house"


def config(**settings: Any) -> ServerConfig:
    return ServerConfig.from_dict({"served_model_name": (MODEL, "org/tiny"), **settings})


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(settings=config(max_request_bytes=50_000)) as running:
        yield running


def talk(live: Live, *parts: bytes) -> bytes:
    """Everything that the server answers on one connection; the last request should close it."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
        return connection.makefile("rb").read()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3}) ", answers)]


# ---------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/v1/models/", "/v1//models", "//v1/models//", "/v1/models/scripted"),
        *("/v1/models/org%2Ftiny", "/v1/models/org/tiny", "/v1/models/org/tiny/", "/metrics/"),
    ],
)
def test_every_spelling_of_a_path_answers_and_none_redirects(live: Live, path: str) -> None:
    answer = talk(live, get(path, "Connection: close"))
    assert statuses(answer) == [200]
    if path != "/metrics/":
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        card = body["data"][0] if "data" in body else body
        assert {"id", "object", "created", "owned_by"} <= card.keys()


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/completions/", "//v1/completions", "/v1//completions//"]
)
def test_a_post_keeps_its_body(live: Live, path: str) -> None:
    answer = httpx.post(live.base_url + path, json=COMPLETION)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 2


def test_unknown_paths_say_what_there_is(live: Live) -> None:
    answer = httpx.post(f"{live.base_url}/v1/chat/completion", json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("NotFoundError", 404, None)
    message = error["message"]
    assert "There is no /v1/chat/completion here." in message
    assert "Did you mean /v1/chat/completions?" in message
    assert "/v1/models" in message
    # A base URL without /v1.
    message = httpx.post(f"{live.base_url}/chat/completions", json={}).json()["error"]["message"]
    assert "Did you mean /v1/chat/completions?" in message


def test_wrong_methods_say_which_is_right(live: Live) -> None:
    answer = httpx.get(f"{live.base_url}/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["message"] == "/v1/completions does not take GET, only POST."


def test_long_paths_are_cut_in_the_answer(live: Live) -> None:
    answer = httpx.get(f"{live.base_url}/{'x' * 5000}")
    assert answer.status_code == 404
    assert len(answer.content) < 1500


def test_anthropics_clients_get_their_shape(live: Live) -> None:
    answer = httpx.get(f"{live.base_url}/v1/messages")
    assert answer.status_code == 405
    assert answer.json()["type"] == "error"


# ---------------------------------------------------------------------- bodies


def test_a_body_that_announces_too_much_is_refused_unread(live: Live) -> None:
    # No body is sent: the answer must not wait for it.
    answer = talk(live, post("/v1/completions", b"", "Content-Length: 50001"))
    assert statuses(answer) == [400]  # two lengths: h11 refuses that
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 50001\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    answer = talk(live, head)
    assert statuses(answer) == [413]
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("RequestTooLargeError", 413)
    assert "larger than 50000 bytes" in error["message"]


@pytest.mark.parametrize("length", ["9" * 18, "9" * 20, "0" * 30 + "50001", "9" * 5000])
def test_absurd_lengths(live: Live, length: str) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
    answer = talk(live, head.encode() + b"Connection: close\r\n\r\n")
    assert statuses(answer) in ([413], [400])


def test_a_body_that_grows_too_long_is_refused_on_the_way(live: Live) -> None:
    chunk = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(head + chunk * 10)
        answers = connection.makefile("rb")
        assert answers.readline().split()[1] == b"413"  # long before the end
        connection.sendall(chunk * 10 + b"0\r\n\r\n" + get("/version", "Connection: close"))
        rest = answers.read()
    assert statuses(rest) == [200]


@pytest.mark.parametrize("size", [50_001, 500_000])
def test_the_next_request_begins_where_it_should(live: Live, size: int) -> None:
    body = (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * (size // 33 + 1))[:size]
    answers = talk(
        live, post("/v1/completions", body), get("/version"), get("/health", "Connection: close")
    )
    assert statuses(answers) == [413, 200, 200]


def test_a_body_of_just_the_limit_is_read(live: Live) -> None:
    body = json.dumps(COMPLETION).encode().ljust(50_000)
    answers = talk(live, post("/v1/completions", body, "Connection: close"))
    assert statuses(answers) == [200]


@pytest.mark.parametrize("chunked", [False, True])
def test_clients_that_offer_http2_keep_their_body(live: Live, *, chunked: bool) -> None:
    # Java's HttpClient does so with every request.
    body = json.dumps(COMPLETION).encode()
    upgrade = (
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    )
    if chunked:
        head = "\r\n".join(
            [
                *("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"),
                *("Transfer-Encoding: chunked", *upgrade, "", ""),
            ]
        )
        first, second = body[:7], body[7:]
        parts = [head.encode(), b"%x\r\n%b\r\n" % (len(first), first)]
        parts += [b"%x\r\n%b\r\n0\r\n\r\n" % (len(second), second)]
    else:
        parts = [post("/v1/completions", body, *upgrade)]
    answers = talk(live, *parts, get("/version", "Connection: close"))
    assert statuses(answers) == [200, 200]
    assert b'"completion_tokens":2' in answers


def test_a_websocket_is_not_offered(live: Live) -> None:
    answer = talk(
        live,
        get(
            "/v1/models", "Upgrade: websocket", "Connection: Upgrade, close", "Sec-WebSocket-Key: x"
        ),
    )
    assert statuses(answer) == [200]


# ---------------------------------------------------------------------- clients that are odd


def test_a_client_that_sends_half_a_request_holds_nobody_up(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as slow:
        for part in (b"POST /v1/compl", b"etions HTTP/1.1\r\nHost: x\r\nContent-Ty"):
            slow.sendall(part)
            assert httpx.get(f"{live.base_url}/version").status_code == 200
        body = json.dumps(COMPLETION).encode()
        slow.sendall(b"pe: application/json\r\nConnection: close\r\n")
        slow.sendall(b"Content-Length: %d\r\n\r\n" % len(body))
        for place in range(len(body)):
            slow.sendall(body[place : place + 1])
        assert statuses(slow.makefile("rb").read()) == [200]


@pytest.mark.parametrize("half", [False, True], ids=["closed", "half-closed"])
def test_a_client_that_leaves_frees_what_it_held(*, half: bool) -> None:
    # Half-closed counts as gone: a client that was killed looks just the same.
    gate = threading.Event()
    with live_server(Script(gate=gate)) as live:
        try:
            leaving = socket.create_connection(("127.0.0.1", live.port), timeout=30)
            leaving.sendall(post("/v1/completions", json.dumps(COMPLETION).encode()))
            until(lambda: live.engine.num_unfinished == 1)
            if half:
                leaving.shutdown(socket.SHUT_WR)
            else:
                leaving.close()
            until(lambda: live.context.in_flight == 0)
        finally:
            gate.set()
        live.settle()
        leaving.close()
        assert httpx.get(f"{live.base_url}/version").status_code == 200


def test_a_client_that_leaves_before_its_body_is_whole(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as leaving:
        whole = post("/v1/completions", json.dumps(COMPLETION).encode())
        leaving.sendall(whole[:-5])
        until(lambda: live.context.in_flight == 1)
    until(lambda: live.context.in_flight == 0)
    live.settle()


# ---------------------------------------------------------------------- limits on what is in them

HUGE = {
    "n 129": {"prompt": "x", "n": 129},
    "n 10**6": {"prompt": "x", "n": 10**6},
    "n 10**9": {"prompt": "x", "n": 10**9},
    "best_of": {"prompt": "x", "best_of": 10**6},
    "prompts": {"prompt": [""] * 10**6},
    "stop": {"prompt": "x", "stop": ["a"] * 10**6},
    "logit_bias": {"prompt": "x", "logit_bias": {str(i): 1 for i in range(10**6)}},
}


@pytest.fixture(scope="module")
def roomy() -> Iterator[Live]:
    with live_server(settings=config()) as running:
        yield running


def memory_mib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 // 2**20


@pytest.mark.parametrize("name", HUGE)
def test_absurd_amounts_are_refused_at_once(roomy: Live, name: str) -> None:
    body = json.dumps(HUGE[name] | {"max_tokens": 1}).encode()
    assert len(body) < 16 * 2**20
    before = memory_mib()
    answer = httpx.post(
        f"{roomy.base_url}/v1/completions",
        content=body,
        headers={"Content-Type": "application/json"},
        timeout=30,
    )
    assert answer.status_code in (400, 413)
    assert len(answer.content) < 2000
    assert answer.elapsed.total_seconds() < 5  # a second, on a machine with nothing else to do
    assert memory_mib() - before < 250  # the test's own copies among them
    roomy.settle()


def test_the_largest_n_is_served(roomy: Live) -> None:
    body = {"prompt": "x", "n": 128, "max_tokens": 1}
    answer = httpx.post(f"{roomy.base_url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 128


def test_too_many_tools_are_refused(roomy: Live) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}] * 10**5
    messages = [{"role": "user", "content": "x"}]
    answer = httpx.post(
        f"{roomy.base_url}/v1/chat/completions",
        json={"messages": messages, "tools": tools},
        timeout=30,
    )
    assert answer.status_code == 400
    assert "256" in answer.json()["error"]["message"]


# ---------------------------------------------------------------------- ids and CORS


def test_ids_of_requests() -> None:
    with live_server(settings=config(enable_request_id_headers=True)) as live:
        url = f"{live.base_url}/v1/completions"
        answer = httpx.post(url, json=COMPLETION, headers={"X-Request-Id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
        assert answer.json()["id"] == "cmpl-abc-1"
        for bad in ("", "a b", "x" * 129, "a\tb", 'a"'):
            answer = httpx.post(url, json=COMPLETION, headers={"X-Request-Id": bad})
            made = answer.headers["x-request-id"]
            assert re.fullmatch("[0-9a-f]{32}", made)
            assert answer.json()["id"] == f"cmpl-{made}"
        assert "x-request-id" in httpx.get(f"{live.base_url}/nowhere").headers


def test_ids_are_sent_back_only_if_asked(live: Live) -> None:
    assert "x-request-id" not in httpx.get(f"{live.base_url}/v1/models").headers


PREFLIGHT = {
    "Origin": "https://app.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}


def test_pages_of_allowed_origins_may_call() -> None:
    settings = config(allowed_origins=("https://app.example",), api_key=("k",))
    with live_server(settings=settings) as live:
        url = f"{live.base_url}/v1/models"
        answer = httpx.options(url, headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
        refused = httpx.get(url, headers={"Origin": "https://app.example"})
        assert refused.status_code == 401  # the page must be able to read why
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        other = httpx.options(url, headers=PREFLIGHT | {"Origin": "https://evil.example"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


def test_no_page_of_elsewhere_may_call_by_default(live: Live) -> None:
    answer = httpx.options(f"{live.base_url}/v1/models", headers=PREFLIGHT)
    assert answer.status_code == 405
    answer = httpx.get(f"{live.base_url}/v1/models", headers={"Origin": "https://app.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


# ---------------------------------------------------------------------- while loading


def test_while_the_model_loads() -> None:
    gate = threading.Event()
    with live_server(load_gate=gate, wait_ready=False) as live:
        try:
            answer = httpx.post(f"{live.base_url}/v1/completions", json=COMPLETION)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "5"
            assert "still loading" in answer.json()["error"]["message"]
            for path in ("/v1/models", "/tokenizer_info", "/nowhere"):
                assert httpx.get(live.base_url + path).status_code == 503
            for path in ("/health", "/ping", "/version", "/load", "/metrics"):
                assert httpx.get(live.base_url + path).status_code == 200, path
        finally:
            gate.set()
        live.run(live.engine.wait_ready())
        assert httpx.get(f"{live.base_url}/v1/models").status_code == 200


# ---------------------------------------------------------------------- what handlers raise


async def _raise(request: Request) -> Response:
    kind = request.query_params["kind"]
    if kind == "api":
        raise ApiError(429, "Slow down.", retry_after=1.2)
    if kind == "late":

        async def body() -> AsyncIterator[bytes]:
            yield b"begun"
            raise RuntimeError(SECRET)

        return StreamingResponse(body())
    raise RuntimeError(SECRET)


async def _meet(request: Request) -> Response:
    request.app.state.context.seen.append(request.app.state.context.in_flight)
    return Response(await request.body())


@asynccontextmanager
async def app_client(**settings: Any) -> AsyncIterator[tuple[Context, httpx.AsyncClient]]:
    """The application with two routes of the test's own, called without a socket."""
    async with running(Script()) as engine:
        context = Context(engine=engine, settings=config(**settings), http=HttpMetrics())
        context.seen = []  # type: ignore[attr-defined]
        routes = [
            Route("/raise", _raise),
            Route("/v1/meet/{name}", _meet, methods=["POST"]),
        ]
        transport = httpx.ASGITransport(create_app(context, routes))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            yield context, client


def test_errors_become_answers(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with app_client() as (_, client):
            answer = await client.get("/raise?kind=api")
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "2"
            assert answer.json()["error"]["message"] == "Slow down."
            answer = await client.get("/raise?kind=bug")
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "InternalServerError"
            assert SECRET not in answer.text

    asyncio.run(check())
    assert any(record.exc_info for record in caplog.records), "the log must say what happened"


def test_an_answer_that_breaks_off_is_no_whole_one(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[dict[str, Any]] = []

    async def check() -> None:
        async with app_client() as (context, client):
            app = client._transport.app  # type: ignore[attr-defined]
            scope = {
                **{"type": "http", "method": "GET", "path": "/raise", "headers": []},
                "query_string": b"kind=late",
            }

            async def receive() -> dict[str, Any]:
                await asyncio.sleep(60)
                raise AssertionError

            async def send(message: Any) -> None:
                sent.append(message)

            await app(scope, receive, send)
            assert context.in_flight == 0

    asyncio.run(check())
    assert [m.get("body") for m in sent if m["type"] == "http.response.body"] == [b"begun"]
    assert sent[-1]["more_body"], "the connection is closed in the middle"


# ---------------------------------------------------------------------- counted and logged


def test_requests_are_counted_by_the_template_of_their_route() -> None:
    async def check() -> None:
        async with app_client() as (context, client):
            observed: list[tuple[Any, ...]] = []
            context.http.observe = lambda *args: observed.append(args)  # type: ignore[method-assign]
            await client.post("/v1/meet/someone", content=b"12345")
            await client.get("/v1/meet/someone")
            await client.get("/nowhere")
            assert context.seen == [1]  # type: ignore[attr-defined]
            assert context.in_flight == 0
            met, wrong, nowhere = observed
            assert met[:3] == ("/v1/meet/{name}", "POST", 200)
            assert met[4:] == (5, 5)
            assert 0 <= met[3] < 10
            assert wrong[:3] == ("/v1/meet/{name}", "GET", 405)
            assert nowhere[:3] == (None, "GET", 404)

    asyncio.run(check())


def test_metrics_show_them(live: Live) -> None:
    httpx.get(f"{live.base_url}/v1/models/org/tiny")
    text = httpx.get(f"{live.base_url}/metrics").text
    assert 'http_requests_total{handler="/v1/models/{id:path}",method="GET",status="2xx"}' in text


def test_requests_are_logged_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="server.observe")

    async def check(**settings: Any) -> None:
        async with app_client(api_key=("alice:k-123",), **settings) as (_, client):
            headers = {"X-Request-Id": "id-7", "Authorization": "Bearer k-123"}
            await client.post("/v1/meet/x", content=b"12345", headers=headers)
            await client.post("/v1/meet/x", headers={"Authorization": "Bearer k-wrong"})

    asyncio.run(check())
    assert caplog.messages == []
    asyncio.run(check(enable_log_requests=True))
    assert caplog.messages[0] == "Request id-7: POST /v1/meet/x from 127.0.0.1"
    assert caplog.messages[1].startswith("Request id-7 ended: status 200, key alice, 5 bytes in,")
    assert "status 401, key none" in caplog.messages[3]
    assert "k-" not in caplog.text


def test_gateways_are_told_the_load(live: Live) -> None:
    headers = {"endpoint-load-metrics-format": "TEXT"}
    answer = httpx.post(f"{live.base_url}/v1/completions", json=COMPLETION, headers=headers)
    assert "kv_cache_usage_perc" in answer.headers["endpoint-load-metrics"]


def test_a_path_cannot_write_lines_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    settings = ServerConfig(enable_log_requests=True, api_key=("alice:KEY",))
    with live_server(settings=settings) as live, caplog.at_level("INFO"):
        path = "/v1/x%0A2026-11-30%20CRITICAL%20FAKE%1b[31m"
        assert httpx.post(live.base_url + path).status_code == 401
    told = [r.getMessage() for r in caplog.records if "FAKE" in r.getMessage()]
    assert told
    assert not any("\n" in line or "\x1b" in line for line in told)

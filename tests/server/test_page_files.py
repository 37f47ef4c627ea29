"""The page's files as they are served: headers, caching, and what must not be in them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.context import Context
from server.metrics import HttpMetrics
from server.page import CONTENT_SECURITY_POLICY, static_files
from server.settings import ServerConfig
from tests.server.scripted import Script, scripted_async_engine

STATIC = Path(__file__).resolve().parents[2] / "server" / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))


def client(**settings: object) -> TestClient:
    engine = scripted_async_engine(Script())  # never started: the page needs no engine
    context = Context(engine, ServerConfig(**settings), HttpMetrics())
    root_path = str(settings.get("root_path", ""))
    return TestClient(create_app(context), root_path=root_path)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def page_tags() -> list[tuple[str, dict[str, str | None]]]:
    return Tags((STATIC / "index.html").read_text(encoding="utf-8")).found


def test_every_file_comes_with_the_policy_and_a_type_that_is_not_guessed() -> None:
    http = client()
    assert {path.name for path in STATIC.iterdir()} == static_files().keys()
    types = {
        "html": "text/html",
        "js": "text/javascript",
        "css": "text/css",
        "svg": "image/svg+xml",
    }
    for path in ["/", *(f"/static/{name}" for name in static_files())]:
        response = http.get(path)
        assert response.status_code == 200, path
        headers = response.headers
        assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-cache"
        kind = "html" if path == "/" else path.rpartition(".")[2]
        assert headers["content-type"].partition(";")[0] == types[kind]


def test_the_policy_allows_nothing_inline_and_no_other_host() -> None:
    rules = dict(rule.split(" ", 1) for rule in CONTENT_SECURITY_POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in CONTENT_SECURITY_POLICY and "*" not in CONTENT_SECURITY_POLICY


@pytest.mark.parametrize("path", ["/", "/static/main.js"])
def test_a_file_that_has_not_changed_is_not_sent_again(path: str) -> None:
    http = client()
    first = http.get(path)
    tag = first.headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', tag)
    for known in (tag, f'"other", {tag}', f"W/{tag}"):
        again = http.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
    assert http.get(path, headers={"If-None-Match": '"other"'}).content == first.content


@pytest.mark.parametrize("path", ["/", "/static/style.css"])
def test_head_tells_what_get_would(path: str) -> None:
    http = client()
    head, get = http.head(path), http.get(path)
    assert head.status_code == 200
    assert head.headers == get.headers


@pytest.mark.parametrize(
    "name",
    ["none.js", "..%2fpage.py", "%2e%2e%2fpage.py", "..%5cpage.py", "main.js%00", "%00", "Main.js"],
)
def test_nothing_else_can_be_had(name: str) -> None:
    response = client().get(f"/static/{name}")
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/json"


def test_it_can_be_turned_off() -> None:
    http = client(disable_page=True)
    for path in ("/", "/static/main.js"):
        assert http.get(path).status_code == 404
    assert client(disable_page=False).get("/").status_code == 200


def test_it_needs_no_key_and_knows_none() -> None:
    http = client(api_key=("sesame",), disable_page=False)
    assert http.get("/").status_code == http.get("/static/api.js").status_code == 200
    assert http.get("/v1/models").status_code == 401
    # Without a page there is nothing to be let in to.
    assert client(api_key=("sesame",), disable_page=True).get("/").status_code == 401


def test_it_works_below_a_root_path() -> None:
    http = client(root_path="/llm")
    assert http.get("/llm/").status_code == 200
    assert http.get("/llm/static/main.js").status_code == 200


def test_the_page_refers_to_its_own_files_by_relative_paths_only() -> None:
    refs = [a[k] for _, a in page_tags() for k in ("src", "href") if a.get(k) is not None]
    files = [ref for ref in refs if ref is not None and not ref.startswith("#")]
    assert len(files) >= 4
    for ref in files:
        assert urljoin("http://host/llm/", ref).startswith("http://host/llm/static/"), ref
        assert ref.removeprefix("static/") in static_files()


def test_no_script_or_style_is_written_into_the_page() -> None:
    for tag, attributes in page_tags():
        assert tag != "style" and "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")], tag
        assert tag != "script" or attributes.get("src")


def test_every_control_has_a_name() -> None:
    text = (STATIC / "index.html").read_text(encoding="utf-8")
    labelled = set(re.findall(r'for="([\w-]+)"', text))
    for label in re.findall(r"<label.*?</label>", text, re.DOTALL):
        labelled |= set(re.findall(r'id="([\w-]+)"', label))
    for tag, attributes in page_tags():
        if tag in ("input", "textarea", "select"):
            assert attributes["id"] in labelled, attributes


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_never_make_markup_or_code_out_of_text(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|Function\("
    assert not re.findall(banned, source)
    # Nothing from elsewhere, and a key is never part of an address.
    assert not re.findall(r"""["'`]https?://""", source)
    assert not re.findall(r"[?&](api_)?key=", source)


def test_every_id_that_a_script_asks_for_is_in_the_page() -> None:
    ids = [attributes["id"] for _, attributes in page_tags() if "id" in attributes]
    assert len(ids) == len(set(ids))
    asked = {
        name
        for path in SCRIPTS
        for name in re.findall(r'byId\("([\w-]+)"\)', path.read_text(encoding="utf-8"))
    }
    assert len(asked) > 30
    assert asked <= set(ids)


def test_every_imported_script_is_there() -> None:
    for path in SCRIPTS:
        for name in re.findall(r'from "(.*)";', path.read_text(encoding="utf-8")):
            assert re.fullmatch(r"\./[a-z]+\.js", name) and (STATIC / name).is_file(), name

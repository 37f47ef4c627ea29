"""The page in a real browser: it chats, shows the memory as it is, and lets nothing out or in."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from server.settings import ServerConfig
from tests.server.live import MODEL, Live, live_server
from tests.server.metrics_support import parsed, value
from tests.server.scripted import Script

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = Path("/usr/bin/chromium")
SECONDS = 30.0
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed"
    ),
    pytest.mark.skipif(not CHROMIUM.is_file(), reason=f"there is no {CHROMIUM}"),
]

MARKDOWN = """# Title

Some **bold** and *slanted* text with `code` and [a link](https://example.org/path).

1. first
2. second
   - inner

```python
x = "<b>&amp;</b>"
y = 2
```

| planet | moons |
|--------|------:|
| Earth  | 1     |

> quoted

Done."""

ATTACK = """<img src=x onerror="window.hit=1"> <script>window.hit=2</script>

[a](javascript:window.hit=3) [b](JaVaScRiPt:window.hit=4) [c](data:text/html,<script>1</script>)
[d](  javascript:window.hit=5) [e](//evil.example/x) [f](https:javascript:1)
<javascript:window.hit=6>
![g](https://evil.example/pixel.png) [h](http://ok.example/"onmouseover="window.hit=7)

```html" onclick="window.hit=8
<iframe src="javascript:window.hit=9"></iframe>
```

| <b onclick=1>x</b> | y |
|---|---|
| <style>*{display:none}</style> | <svg onload=window.hit=10> |

<a href="javascript:window.hit=11">raw</a>"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, live: Live, *, expected: str | None = None, **options: Any
) -> Iterator[Page]:
    """The page, watched: whatever the console says that is not `expected` fails the test."""
    options.setdefault("viewport", {"width": 1280, "height": 800})
    context = browser.new_context(**options)
    context.set_default_timeout(SECONDS * 1000)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.add_init_script(
        "document.addEventListener('securitypolicyviolation', (event) =>"
        " console.error('violation of ' + event.violatedDirective));"
    )
    try:
        page.goto(f"{live.base_url}/")
        yield page
        own = (live.base_url, "data:", "blob:")
        assert [url for url in requested if not url.startswith(own)] == []
        allowed = re.compile(expected or "(?!)")
        known = "willReadFrequently"  # of the tests themselves, which look at the canvas
        assert [text for text in said if known not in text and not allowed.search(text)] == []
    finally:
        context.close()


def wait_live(page: Page) -> None:
    page.wait_for_selector("#live-state[data-kind=live]")


def say(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_answered(page: Page, number: int = 1) -> None:
    page.wait_for_function(
        "(n) => document.querySelectorAll('.answer:not([aria-busy])').length === n", arg=number
    )


def poll(reached: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def shown_counts(page: Page) -> dict[str, int]:
    numbers = page.eval_on_selector_all(
        "#legend [data-state]",
        "all => all.map(e => [e.dataset.state, e.querySelector('.number').textContent])",
    )
    return {state: int(number.replace("\u202f", "")) for state, number in numbers}


def drawn_counts(page: Page) -> dict[str, int]:
    """What the canvas itself shows, by the colour in the corner of each cell."""
    found = page.evaluate(
        """async () => {
          const { readColours } = await import('./static/grid.js');
          const canvas = document.getElementById('grid-cells');
          const pen = canvas.getContext('2d');
          const colours = Object.entries(readColours());
          const blocks = Number(document.getElementById('grid').dataset.blocks);
          const pitch = Number(document.getElementById('grid').dataset.pitch);
          const columns = Math.floor(canvas.clientWidth / pitch);
          const scale = devicePixelRatio;
          const counts = {};
          for (let i = 0; i < blocks; i += 1) {
            const x = (i % columns) * pitch, y = Math.floor(i / columns) * pitch;
            const [r, g, b] = pen.getImageData((x + 1) * scale, (y + 1) * scale, 1, 1).data;
            const hit = colours.find(([, c]) => c === `rgb(${r}, ${g}, ${b})`);
            const name = hit ? hit[0] : 'unknown';
            counts[name] = (counts[name] ?? 0) + 1;
          }
          return counts;
        }"""
    )
    assert isinstance(found, dict)
    return found


# ---------------------------------------------------------------- the chat


def test_an_answer_streams_in_and_is_shown_as_markdown(browser: Browser) -> None:
    script = Script(default=MARKDOWN, step_seconds=0.005)
    with live_server(script, max_model_len=2048) as live, opened(browser, live) as page:
        assert page.input_value("#model") == MODEL
        say(page, "Hello")
        page.wait_for_selector(".answer[aria-busy] strong")  # before it is complete
        wait_answered(page)
        body = page.locator(".answer .body")
        assert body.locator("h3").inner_text() == "Title"
        assert body.locator("em").inner_text() == "slanted"
        assert body.locator("ol > li").all_inner_texts()[0] == "first"
        assert body.locator("ol > li ul > li").all_inner_texts() == ["inner"]
        assert body.locator("pre").inner_text() == 'x = "<b>&amp;</b>"\ny = 2'
        assert body.locator("figcaption span").inner_text() == "python"
        assert body.locator("td.right").inner_text() == "1"
        assert body.locator("blockquote").inner_text() == "quoted"
        link = body.locator("a")
        assert link.get_attribute("href") == "https://example.org/path"
        assert link.get_attribute("rel") == "noopener noreferrer"
        facts = page.inner_text(".answer .facts")
        tokens = int(re.search(r"^(\d+) tokens", facts)[1])  # type: ignore[index]
        # One byte is a token here; the end of the answer is one too.
        assert tokens == len(live.context.engine.tokenizer.encode(MARKDOWN)) + 1  # type: ignore[union-attr]
        assert re.search(r"[\d.]+ tokens/s · first after [\d.]+ s · prompt \d+$", facts)
        # What is read out is the whole answer, a piece at a time, and that it has ended.
        told = page.locator("#announcer p").all_inner_texts()
        assert told[0] == "Title" and told[-2:] == ["Done.", "The answer is complete."]


def test_the_next_turn_reuses_the_blocks_of_the_one_before(browser: Browser) -> None:
    with live_server(max_model_len=1024) as live, opened(browser, live) as page:
        wait_live(page)
        say(page, "Tell me about the sea, at some length.")
        wait_answered(page, 1)
        say(page, "And the sky?")
        wait_answered(page, 2)
        facts = page.inner_text(".answer:last-child .facts")
        cached = int(re.search(r"(\d+) of them cached", facts)[1])  # type: ignore[index]
        assert cached >= 32
        page.wait_for_selector("#events .hit")
        assert "Prefix hit: " in page.inner_text("#events")
        assert page.inner_text("#gauge-hits").endswith("%")


def test_settings_are_sent_as_they_are(browser: Browser) -> None:
    with live_server() as live, opened(browser, live) as page:
        page.click("#sampling-box summary")
        for name, text in {
            **{"temperature": "0.7", "top-p": "0.9", "top-k": "40", "seed": "12"},
            **{"max-tokens": "20", "system": "Be brief."},
        }.items():
            page.fill(f"#{name}", text)
        with page.expect_request("**/v1/chat/completions") as request:
            say(page, "Hi")
        body = request.value.post_data_json
        assert body == {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **{"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 12},
            "max_completion_tokens": 20,
        }
        wait_answered(page)
        assert page.inner_text(".answer .note") == "Cut off at the token limit."
        # Left empty they are left to the server.
        for name in ("temperature", "top-p", "top-k", "seed", "max-tokens", "system"):
            page.fill(f"#{name}", "")
        with page.expect_request("**/v1/chat/completions") as request:
            say(page, "Again")
        wait_answered(page, 2)
        assert request.value.post_data_json.keys() == {
            *("model", "messages", "stream", "stream_options")
        }
        assert [m["role"] for m in request.value.post_data_json["messages"]] == [
            *("user", "assistant", "user")
        ]
        page.fill("#temperature", "9")
        say(page, "Too hot")  # the browser says what is wrong, and nothing is sent
        assert page.evaluate("document.activeElement.id") == "temperature"
        assert page.locator(".message.user").count() == 2


def test_retry_edit_and_new_chat(browser: Browser) -> None:
    script = Script(default="plain answer", replies={"apples": "about apples"})
    with live_server(script) as live, opened(browser, live) as page:
        say(page, "pears?")
        wait_answered(page)
        page.click(".answer button:has-text('Retry')")
        wait_answered(page)
        say(page, "more?")
        wait_answered(page, 2)
        page.click(".message.user >> nth=0 >> button:has-text('Edit')")
        page.press(".edit textarea", "Escape")
        assert page.locator(".message").count() == 4
        page.click(".message.user >> nth=0 >> button:has-text('Edit')")
        page.fill(".edit textarea", "apples?")
        with page.expect_request("**/v1/chat/completions") as request:
            page.press(".edit textarea", "Enter")
        assert len(request.value.post_data_json["messages"]) == 1
        wait_answered(page, 1)
        assert page.inner_text(".answer .body") == "about apples"
        assert page.inner_text(".said") == "apples?"
        page.click("#new-chat")
        assert page.locator(".message").count() == 0
        assert page.is_visible("#welcome")
        page.click("#welcome button >> nth=0")
        wait_answered(page)


def test_errors_come_in_words_and_can_be_retried(browser: Browser) -> None:
    failing = [True]

    def fail(_: int) -> BaseException | None:
        return RuntimeError("device lost") if failing.pop(0) else None

    script = Script(fail_read=lambda step: fail(step) if failing else None)
    with (
        live_server(script, num_blocks=33) as live,
        opened(browser, live, expected="Failed to load resource.*400") as page,
    ):
        say(page, "Hello")
        page.wait_for_selector(".answer .error")
        assert "failed" in page.inner_text(".answer .error span")
        page.click(".answer .error button")
        wait_answered(page)
        page.wait_for_selector(".answer .body p")
        assert page.locator(".answer .error:visible").count() == 0
        say(page, "x" * 400)  # more than there is room for
        page.wait_for_selector(".answer .error:visible")
        assert "maximum context length" in page.inner_text(".answer .error:visible span")


def test_a_lost_connection_is_told(browser: Browser) -> None:
    with (
        live_server() as live,
        opened(browser, live, expected="ERR_|Failed to load resource") as page,
    ):
        page.route("**/v1/chat/completions", lambda route: route.abort())
        say(page, "Hello")
        page.wait_for_selector(".answer .error:visible")
        assert "cannot be reached" in page.inner_text(".answer .error span")
        page.unroute("**/v1/chat/completions")
        body = 'data: {"choices":[{"delta":{"content":"half of i"}}]}\n\n'
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
        )
        page.click(".answer .error button")
        page.wait_for_selector(".answer .error:visible")
        assert "lost before the answer was complete" in page.inner_text(".answer .error span")
        assert page.inner_text(".answer .body") == "half of i"


# ---------------------------------------------------------------- what the model may not do


def test_what_a_model_writes_is_text_and_nothing_else(browser: Browser) -> None:
    with (
        live_server(Script(default=ATTACK), max_model_len=2048) as live,
        opened(browser, live) as page,  # which also sees whatever the policy had to stop
    ):
        say(page, "Attack")
        wait_answered(page)
        page.hover(".answer .body a >> nth=0")
        assert page.evaluate("window.hit") is None
        tags = page.eval_on_selector_all(
            ".answer .body *", "all => [...new Set(all.map(e => e.localName))].sort()"
        )
        assert set(tags) <= {
            *("p", "a", "figure", "figcaption", "span", "button", "pre", "code"),
            *("div", "table", "thead", "tbody", "tr", "th", "td", "br"),
        }
        names = page.eval_on_selector_all(
            ".answer .body *", "all => all.flatMap(e => e.getAttributeNames())"
        )
        assert set(names) <= {*("href", "rel", "target", "class", "type", "tabindex", "aria-label")}
        links = page.eval_on_selector_all(".answer .body a", "all => all.map(e => e.href)")
        assert links
        for link in links:
            assert re.match(r"https?://(evil|ok)\.example/", link), link
        text = page.inner_text(".answer .body")
        assert '<img src=x onerror="window.hit=1">' in text
        assert "[a](javascript:window.hit=3)" in text
        assert '<iframe src="javascript:window.hit=9"></iframe>' in text


def test_the_page_itself_could_not_make_markup_of_text(browser: Browser) -> None:
    with live_server() as live, opened(browser, live, expected="violation|TrustedHTML") as page:
        # Added as a script of the page would do it; what a test evaluates is under no policy.
        refused = page.evaluate(
            """() => {
              try { document.body.innerHTML = '<b>x</b>'; return false; }
              catch { return true; }
            }"""
        )
        assert refused


# ---------------------------------------------------------------- the memory


def test_stop_frees_the_blocks_and_everybody_agrees_on_it(browser: Browser) -> None:
    script = Script(step_seconds=0.01, end=False)
    with (
        live_server(script, num_blocks=257, max_model_len=800) as live,
        opened(browser, live) as page,
        httpx.Client(base_url=live.base_url, timeout=SECONDS) as http,
    ):
        wait_live(page)
        say(page, "Go on and on")
        page.wait_for_selector("#requests .request .tag:visible")
        assert page.inner_text("#requests .tag") == "yours"
        poll(lambda: shown_counts(page)["held"] > 10, "no blocks are held")
        page.click("#stop")
        live.settle()
        poll(lambda: shown_counts(page)["held"] == 0, "the grid still shows blocks as held")
        wait_answered(page)
        assert page.inner_text(".answer .note") == "Stopped."
        assert page.inner_text(".answer .body") != ""
        assert page.inner_text("#requests-more") == "No request is running."
        counts = shown_counts(page)
        assert counts == http.get("/debug/blocks").json()["counts"]
        assert drawn_counts(page) == {k: n for k, n in counts.items() if n}
        metrics = parsed(http.get("/metrics").content)
        for state in ("free", "cached", "held", "shared"):
            assert value(metrics, "jaxpaged:kv_blocks", state=state) == counts[state]
        assert value(metrics, "vllm:kv_cache_usage_perc") == 0
        assert page.inner_text("#gauge-kv") == "0%"
        # Escape does the same.
        say(page, "And again")
        page.wait_for_selector("#stop:visible")
        page.keyboard.press("Escape")
        wait_answered(page, 2)
        live.settle()


def test_the_grid_and_the_tables_show_what_is_held(browser: Browser) -> None:
    script = Script(step_seconds=0.02, end=False)
    with (
        live_server(script, num_blocks=129, max_model_len=400) as live,
        opened(browser, live) as page,
        httpx.Client(base_url=live.base_url, timeout=SECONDS) as http,
    ):
        wait_live(page)
        body = {"model": MODEL, "prompt": "x" * 50, "stream": True, "n": 3, "max_tokens": 300}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            page.wait_for_selector("#requests .request >> nth=2")
            assert page.locator("#requests .tag:visible").count() == 0
            page.click("#pause")
            page.wait_for_selector("#live-state[data-kind=idle]")
        counts = shown_counts(page)
        assert counts["shared"] == 12 and counts["held"] >= 3
        assert drawn_counts(page) == {k: n for k, n in counts.items() if n}
        tables = page.eval_on_selector_all(
            "#requests .request",
            "all => all.map(e => [...e.querySelectorAll('.block')]"
            ".map(b => [Number(b.textContent), b.className]))",
        )
        assert len(tables) == 3
        for table in tables:
            assert [block for block, _ in table[:12]] == [block for block, _ in tables[0][:12]]
            assert all("shared" in kind for _, kind in table[:12])
            assert all("held" in kind for _, kind in table[12:])
        assert len({block for table in tables for block, _ in table}) == sum(
            counts[state] for state in ("held", "shared")
        )
        # Pointing at one block finds it in every table, and in words.
        block = tables[0][0][0]
        page.hover("#requests .pages li >> nth=0")
        assert page.locator("#requests li.chosen").count() == 3
        said = page.inner_text("#inspector")
        assert said.startswith(f"Block {block} is shared by 3: …") and "tokens 0–3" in said
        assert page.get_attribute("#links path", "d").count("M") == 1  # type: ignore[union-attr]
        page.hover("#requests .request-head >> nth=1")
        shown = page.get_attribute("#links path", "d") or ""
        assert shown.count("M") == len(tables[1])
        page.mouse.move(2, 2)
        poll(lambda: page.get_attribute("#links path", "d") == "", "the lines stay")
        # It goes on from how things are now.
        live.settle()
        page.click("#pause")
        wait_live(page)
        poll(lambda: shown_counts(page)["held"] == 0, "it has not caught up")


def test_the_pages_copy_follows_every_change(browser: Browser) -> None:
    """The script that the page runs, on a recording of real events, against the engine's view."""
    from server.live_wire import change, whole
    from tests.server.test_live_wire import over_the_wire, record

    views = record((None, 9), 40)
    told = [over_the_wire(change(a, b)) for a, b in pairwise(views)]
    expected = over_the_wire(whole(views[-2]))
    with live_server() as live, opened(browser, live) as page:
        seen = page.evaluate(
            """async ({ start, changes }) => {
              const { Pool } = await import('./static/pool.js');
              const pool = new Pool();
              pool.replace(start);
              let hits = 0, admitted = 0, preempted = 0;
              for (const change of changes) {
                const effect = pool.change(change);
                hits += effect.hits.length;
                admitted += effect.admitted.length;
                preempted += effect.preempted.length;
              }
              return { states: pool.states.join(''), shared: Object.fromEntries(pool.shared),
                requests: [...pool.requests.values()], counts: pool.counts, hits, admitted,
                preempted };
            }""",
            {"start": over_the_wire(whole(views[0])), "changes": told[:-1]},
        )
    for name in ("states", "shared", "requests", "counts"):
        assert seen[name] == expected[name], name
    assert expected["requests"]
    assert seen["hits"] == sum(len(t["hits"]) for t in told[:-1]) > 0
    assert seen["admitted"] >= 30 and seen["preempted"] > 0


@pytest.mark.parametrize("num_blocks", [9, 50_001])
def test_the_grid_of_a_tiny_and_of_a_huge_pool(browser: Browser, num_blocks: int) -> None:
    with (
        live_server(num_blocks=num_blocks, max_model_len=32) as live,
        opened(browser, live) as page,
    ):
        wait_live(page)
        say(page, "Hi")
        wait_answered(page)
        poll(lambda: shown_counts(page)["cached"] > 0, "nothing is cached")
        assert sum(shown_counts(page).values()) == num_blocks
        box = page.locator("#grid").bounding_box()
        assert box is not None and box["height"] <= 330
        page.focus("#grid")
        page.keyboard.press("End")
        assert page.inner_text("#inspector").startswith(f"Block {num_blocks - 1} is free")
        page.keyboard.press("Home")
        assert "null block" in page.inner_text("#inspector")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#inspector").startswith("Block 1 is free, and cached")


def test_hits_and_preemptions_are_told_as_they_happen(browser: Browser) -> None:
    script = Script(step_seconds=0.03, end=False)
    with (
        live_server(script, num_blocks=40, max_model_len=150) as live,
        opened(browser, live) as page,
    ):
        wait_live(page)
        say(page, "The first of several equal prompts")
        page.wait_for_selector("#requests .request")
        body = {"model": MODEL, "prompt": ["x" * 60] * 3, "max_tokens": 60}
        response = httpx.post(f"{live.base_url}/v1/completions", json=body, timeout=SECONDS)
        assert response.status_code == 200
        live.settle()
        page.wait_for_selector("#events .preempt")
        told = page.inner_text("#events")
        assert re.search(r"Prefix hit: \d+ blocks \(.*\) taken over as they were\.", told)
        assert re.search(r"….{8} #\d was let in: 60 prompt tokens, (none|56) of them cached", told)
        assert re.search(
            r"was preempted: its blocks went back|preemptions? between two looks", told
        )
        preempted = live.context.engine.stats().preemptions
        poll(lambda: page.inner_text("#gauge-preemptions") == str(preempted), "another number")
        assert preempted > 0


def test_sample_prompts_share_their_beginning(browser: Browser) -> None:
    script = Script(step_seconds=0.005, end=False)
    with (
        live_server(script, num_blocks=600, max_model_len=800) as live,
        opened(browser, live) as page,
    ):
        wait_live(page)
        page.fill("#traffic-count", "4")
        page.press("#traffic-count", "Enter")
        page.wait_for_selector("#requests .request >> nth=3")
        poll(lambda: shown_counts(page)["shared"] > 20, "nothing is shared")
        assert "4 answers to come" in page.inner_text("#traffic-note")
        page.click("#traffic-stop")
        live.settle()
        poll(lambda: shown_counts(page)["held"] == 0, "the grid still shows blocks as held")


def test_nobody_looks_at_the_engine_when_the_page_cannot_be_seen(browser: Browser) -> None:
    with live_server() as live, opened(browser, live) as page:
        wait_live(page)
        page.click("#pause")
        page.wait_for_selector("#live-state[data-kind=idle]")
        poll(lambda: not feed_of(live).is_looking, "the server still looks")
        page.click("#pause")
        wait_live(page)
        assert feed_of(live).is_looking
        page.evaluate(
            "Object.defineProperty(document, 'hidden', { value: true });"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        poll(lambda: not feed_of(live).is_looking, "the server still looks")


def test_a_counter_of_copies_is_shown_once_the_engine_reports_it(browser: Browser) -> None:
    with live_server() as live, opened(browser, live) as page:
        wait_live(page)
        assert not page.is_visible("#tile-copies")
        start = httpx.get(f"{live.base_url}/debug/blocks", timeout=SECONDS).json()
        start["counters"]["copies"] = 2
        events = f"event: whole\ndata: {json.dumps(start)}\n\n"
        more = {k: start[k] for k in ("seconds", "status", "running", "waiting", "counts")}
        more |= {"counters": {**start["counters"], "copies": 5}, "requests": {}}
        more |= {"blocks": [], "shared": {}, "hits": [], "evicted": []}
        events += f"event: change\ndata: {json.dumps(more)}\n\n"
        page.route(
            "**/debug/live",
            lambda route: route.fulfill(content_type="text/event-stream", body=events),
        )
        page.click("#pause")
        page.click("#pause")
        page.wait_for_selector("#tile-copies:visible")
        assert page.inner_text("#gauge-copies") == "5"
        assert "3 blocks copied on write." in page.inner_text("#events")


def test_it_says_that_the_model_loads(browser: Browser) -> None:
    gate = threading.Event()
    try:
        with (
            live_server(wait_ready=False, load_gate=gate) as live,
            opened(browser, live, expected="Failed to load resource.*503") as page,
        ):
            page.wait_for_selector("#live-state[data-kind=wait]")
            poll(
                lambda: "loading, 1 of 8 programs compiled" in page.inner_text("#live-text"),
                "the page does not say how far it is",
            )
            gate.set()
            wait_live(page)
            page.wait_for_function("!document.getElementById('model').disabled")
            say(page, "Hello")
            wait_answered(page)
            assert page.inner_text(".answer .body") != ""
    finally:
        gate.set()


# ---------------------------------------------------------------- keys, looks, keyboard


def test_it_asks_for_the_key_and_keeps_it_to_itself(browser: Browser) -> None:
    settings = ServerConfig(served_model_name=(MODEL,), api_key=("sesame",))
    with (
        live_server(settings=settings) as live,
        opened(browser, live, expected="Failed to load resource.*401") as page,
    ):
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_function("document.getElementById('key-note').textContent !== ''")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "sesame")
        page.click("#key-form button[type=submit]")
        wait_live(page)
        say(page, "Hello")
        wait_answered(page)
        assert page.inner_text(".answer .body") != ""
        assert page.evaluate("Object.values({...sessionStorage})") == ["sesame"]
        assert page.evaluate("Object.values({...localStorage})") == []
        assert not [url for url in asked if "sesame" in url]
        page.reload()
        wait_live(page)  # without being asked again
        page.click("#forget-key")
        page.wait_for_selector("#key-dialog[open]")
        page.click("#key-cancel")
        poll(lambda: page.inner_text("#live-text") == "needs a key", "it asks in a loop")
        assert not page.is_visible("#key-dialog")


def test_everything_can_be_done_with_the_keyboard(browser: Browser) -> None:
    with live_server(Script(step_seconds=0.005)) as live, opened(browser, live) as page:
        wait_live(page)
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.keyboard.type("Line one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("line two")
        page.keyboard.press("Enter")
        wait_answered(page)
        assert page.inner_text(".said") == "Line one\nline two"
        page.keyboard.press("Control+Home")
        page.evaluate("document.activeElement.blur()")
        reached: set[str] = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            focus = page.evaluate(
                """() => {
                  const e = document.activeElement;
                  if (e === document.body) return null;
                  const outline = getComputedStyle(e).outlineStyle;
                  return [e.id || e.textContent.trim(), outline];
                }"""
            )
            if focus is None:
                continue
            name, outline = focus
            assert outline != "none", f"no focus ring on {name}"
            if name in reached:
                break
            reached.add(name)
        assert reached >= {
            *("Skip to the message box", "model", "theme", "new-chat", "Copy", "Edit", "Retry"),
            *("prompt", "send", "pause", "grid", "traffic-count", "Sampling and system prompt"),
        }


def test_the_tables_can_be_read_with_the_keyboard(browser: Browser) -> None:
    script = Script(step_seconds=0.02, end=False)
    with (
        live_server(script, num_blocks=257, max_model_len=800) as live,
        opened(browser, live) as page,
    ):
        wait_live(page)
        say(page, "Hello there, this is a prompt of a few pages")
        page.wait_for_selector("#requests .pages li >> nth=4")
        page.focus("#requests .request-head")
        assert (page.get_attribute("#links path", "d") or "").count("M") >= 4
        page.keyboard.press("Enter")
        assert page.get_attribute("#requests .request-head", "aria-pressed") == "true"
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        found = re.fullmatch(r"Page 1: block (\d+), held", label)
        assert found is not None, label
        assert page.inner_text("#inspector").startswith(f"Block {found[1]} is held by …")
        page.click("#stop")
        live.settle()


def test_light_and_dark_and_the_choice_between_them(browser: Browser) -> None:
    def ground(page: Page) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3])

    with live_server() as live:
        for scheme in ("light", "dark"):
            with opened(browser, live, color_scheme=scheme) as page:
                wait_live(page)
                assert (ground(page) < 200) == (scheme == "dark")
                assert drawn_counts(page) == {"null": 1, "free": 255}
                other = "light" if scheme == "dark" else "dark"
                while page.inner_text("#theme-name") != other:
                    page.click("#theme")
                assert (ground(page) < 200) == (other == "dark")
                assert drawn_counts(page) == {"null": 1, "free": 255}
                page.reload()
                wait_live(page)
                assert page.inner_text("#theme-name") == other


def test_on_a_phone_one_side_at_a_time_and_nothing_sticks_out(browser: Browser) -> None:
    script = Script(default=MARKDOWN + "\n" + "long" * 60, step_seconds=0.003)
    size = {"width": 375, "height": 667}
    with (
        live_server(script, max_model_len=2048) as live,
        opened(browser, live, viewport=size, has_touch=True) as page,
    ):

        def assert_fits() -> None:
            assert page.evaluate("document.documentElement.scrollWidth") <= 375
            wide = page.evaluate(
                """() => [...document.querySelectorAll('body *')].filter((e) => {
                  const box = e.getBoundingClientRect();
                  const inside = e.closest('pre, .table, .off-screen, svg');
                  return box.width > 0 && box.right > innerWidth + 0.5 && !inside;
                }).map((e) => e.outerHTML.slice(0, 80))"""
            )
            assert wide == []

        assert page.is_visible("#prompt") and not page.is_visible("#grid")
        assert_fits()
        page.fill("#prompt", "Hello")
        page.tap("#send")
        page.tap("#tab-memory")
        wait_live(page)
        assert page.is_visible("#grid") and not page.is_visible("#prompt")
        page.wait_for_selector("#requests .request")
        assert_fits()
        page.tap("#tab-chat")
        wait_answered(page)
        assert_fits()
        poll(lambda: not feed_of(live).is_looking, "it looks though the side is hidden")


def test_with_less_motion_nothing_moves(browser: Browser) -> None:
    with live_server() as live, opened(browser, live, reduced_motion="reduce") as page:
        wait_live(page)
        for number in (1, 2):
            say(page, "The same words again and again")
            wait_answered(page, number)
        page.wait_for_selector("#events .hit")
        names = page.evaluate(
            "document.getAnimations({ subtree: true }).map((a) => a.animationName ?? '?')"
        )
        assert names == []


# ---------------------------------------------------------------- the scripts by themselves


def test_events_are_parsed_however_they_are_cut(browser: Browser) -> None:
    stream = (
        '\ufeff: comment\n\ndata: {"a": "é\U0001f600"}\n\nevent: change\r\ndata: one\r\n'
        "data:two\r\n\r\ndata\r\r\nevent: ignored\n\nid: 7\nretry: 10\ndata:  spaced\n\ndata: cut"
    )
    expected = [
        {"event": "message", "data": '{"a": "é\U0001f600"}'},
        {"event": "change", "data": "one\ntwo"},
        {"event": "message", "data": ""},
        {"event": "message", "data": " spaced"},
    ]
    with live_server() as live, opened(browser, live) as page:
        found = page.evaluate(
            """async (bytes) => {
              const { readEvents } = await import('./static/sse.js');
              const all = [];
              for (const size of [1, 2, 3, 5, 7, 1000]) {
                const body = new ReadableStream({
                  start(controller) {
                    for (let i = 0; i < bytes.length; i += size) {
                      controller.enqueue(new Uint8Array(bytes.slice(i, i + size)));
                    }
                    controller.close();
                  },
                });
                const events = [];
                for await (const event of readEvents(body)) events.push(event);
                all.push(events);
              }
              return all;
            }""",
            list(stream.encode()),
        )
    assert found == [expected] * 6


RENDER = """async (cases) => {
  const { MarkdownStream } = await import('./static/markdown.js');
  const render = (pieces) => {
    const root = document.createElement('div');
    const stream = new MarkdownStream(root);
    for (const piece of pieces) stream.push(piece);
    stream.end();
    return root;
  };
  const plain = (node) => node.nodeType === 3 ? node.data : node.localName === 'figcaption' ? ''
    : `<${node.localName}>${[...node.childNodes].map(plain).join('')}</${node.localName}>`;
  return cases.map((text) => {
    const whole = [...render([text]).childNodes].map(plain).join('');
    const cut = [...render([...text]).childNodes].map(plain).join('');
    return [whole, cut];
  });
}"""

CASES = {
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "a *b **c** d* e": "<p>a <em>b <strong>c</strong> d</em> e</p>",
    "***both*** and **bold *it***": "<p><strong><em>both</em></strong> and <strong>bold <em>it</em></strong></p>",  # noqa: E501
    "2 * 3 * 4 and snake_case_name": "<p>2 * 3 * 4 and snake_case_name</p>",
    "**open and `open": "<p>**open and `open</p>",
    r"\*not\* \`code\`": "<p>*not* `code`</p>",
    "``a ` b`` ~~gone~~ ~ x": "<p><code>a ` b</code> <del>gone</del> ~ x</p>",
    "see https://a.example/x_y_(z). ok": "<p>see <a>https://a.example/x_y_(z</a>). ok</p>",
    "[t *e*](https://a.example) [no](ftp://x)": "<p><a>t <em>e</em></a> [no](ftp://x)</p>",
    "[one [two](http://a.example) x": "<p>[one <a>two</a> x</p>",
    "![pic](https://a.example/p.png)": "<p><a>pic</a></p>",
    "# A\n## B ##\n###### C\n#no": "<h3>A</h3><h4>B</h4><h6>C</h6><p>#no</p>",
    "- a\n- b\n\n- c\ntext": "<ul><li><p>a</p></li><li><p>b</p></li><li><p>c\ntext</p></li></ul>",
    "3. a\n4. b\n\ntext": "<ol><li><p>a</p></li><li><p>b</p></li></ol><p>text</p>",
    "1. a\n   - b\n     c\n2. d": "<ol><li><p>a</p><ul><li><p>b\nc</p></li></ul></li><li><p>d</p></li></ol>",  # noqa: E501
    "1. a\n   ```\n   x\n\n   # y\n   ```\n2. b": "<ol><li><p>a</p><figure><pre><code>x\n\n# y</code></pre></figure></li><li><p>b</p></li></ol>",  # noqa: E501
    "- a\n* * *\nb": "<ul><li><p>a</p></li></ul><hr></hr><p>b</p>",
    "```py\nif x:\n    y\n\n``\n```\nz": "<figure><pre><code>if x:\n    y\n\n``</code></pre></figure><p>z</p>",  # noqa: E501
    "~~~\n```\n~~~~": "<figure><pre><code>```</code></pre></figure>",
    "```\nnever closed\n  x": "<figure><pre><code>never closed\n  x</code></pre></figure>",
    "> a\n> > b\nc\n\nd": "<blockquote><p>a</p><blockquote><p>b\nc</p></blockquote></blockquote><p>d</p>",  # noqa: E501
    "|a|b|\n|-|:-:|\n|1|x \\| y|\n|2|\n\nend": "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>x | y</td></tr><tr><td>2</td><td></td></tr></tbody></table></div><p>end</p>",  # noqa: E501
    "a | b\nc | d": "<p>a | b\nc | d</p>",
    "line  \nbreak\r\nnext": "<p>line<br></br>break\nnext</p>",
    "> " * 30 + "deep": "<blockquote>" * 8 + "<p>" + "> " * 22 + "deep</p>" + "</blockquote>" * 8,
    "<b>x</b> &amp; <!-- y -->": "<p><b>x</b> &amp; <!-- y --></p>",
}


def test_markdown_is_the_same_whole_and_by_the_character(browser: Browser) -> None:
    with live_server() as live, opened(browser, live) as page:
        found = page.evaluate(RENDER, list(CASES))
    for (text, expected), (whole, cut) in zip(CASES.items(), found, strict=True):
        assert whole == expected, text
        assert cut == expected, text


@pytest.mark.parametrize(
    "unit",
    [
        *("word ", "**b ", "*a _b ", "[[[", "](", "`a``b", "\\", "http://x.example "),
        *("x\n", "- item\n", "> q\n", "|a|b|\n", "```\n", "1. a\n  - b\n"),
    ],
)
def test_long_answers_of_any_kind_stay_cheap(browser: Browser, unit: str) -> None:
    """60,000 characters in pieces of 60: quadratic work would take minutes."""
    with live_server() as live, opened(browser, live) as page:
        took, length = page.evaluate(
            """async (unit) => {
              const { AnswerMessage } = await import('./static/message.js');
              const nothing = () => {};
              const message = new AnswerMessage({ onRetry: nothing, onGrow: nothing,
                announce: nothing });
              const text = unit.repeat(Math.ceil(60000 / unit.length));
              const began = performance.now();
              for (let i = 0; i < text.length; i += 60) {
                message.write(text.slice(i, i + 60));
                if (i % 600 === 0) await new Promise(requestAnimationFrame);
              }
              message.end();
              return [performance.now() - began, message.element.textContent.length];
            }""",
            unit,
        )
    assert length > 10_000
    assert took < 15_000, f"{took:.0f} ms"


def feed_of(live: Live) -> Any:
    return live.server.config.app.state.live_feed  # type: ignore[union-attr]

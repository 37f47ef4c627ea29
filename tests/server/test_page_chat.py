"""The chat of the page in a real browser, and what a model may not do in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.server.browser import (
    MARKDOWN,
    browser,
    needs_browser,
    opened,
    say,
    wait_answered,
    wait_live,
)
from tests.server.live import MODEL, live_server
from tests.server.scripted import Script

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]  # a fixture
pytestmark = needs_browser

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
        opened(browser, live, expected="Failed to load resource.*(400|500)") as page,
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

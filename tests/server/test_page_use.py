"""Keys, keyboard, colours and small screens: the page in a real browser."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from server.settings import ServerConfig
from tests.server.browser import (
    MARKDOWN,
    browser,
    drawn_counts,
    feed_of,
    needs_browser,
    opened,
    poll,
    say,
    wait_answered,
    wait_live,
)
from tests.server.live import MODEL, live_server
from tests.server.scripted import Script

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser"]  # a fixture
pytestmark = needs_browser


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
        page.wait_for_selector("#key-note:not(:empty)")
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
        reached: dict[int, str] = {}
        for _ in range(60):
            page.keyboard.press("Tab")
            focus = page.evaluate(
                """() => {
                  const e = document.activeElement;
                  if (e === document.body) return null;
                  const outline = getComputedStyle(e).outlineStyle;
                  const place = [...document.querySelectorAll('*')].indexOf(e);
                  return [place, e.id || e.textContent.trim(), outline];
                }"""
            )
            if focus is None:
                continue
            place, name, outline = focus
            assert outline != "none", f"no focus ring on {name}"
            if place in reached:
                break
            reached[place] = name
        assert set(reached.values()) >= {
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


def test_it_works_below_a_root_path(browser: Browser) -> None:
    settings = ServerConfig(served_model_name=(MODEL,), root_path="/some/where")
    with (
        live_server(settings=settings) as live,
        opened(browser, live, path="/some/where/") as page,
    ):
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        wait_live(page)
        say(page, "Hello")
        wait_answered(page)
        assert page.inner_text(".answer .body") != ""
        assert asked and all(url.startswith(f"{live.base_url}/some/where/") for url in asked)


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

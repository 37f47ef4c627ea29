"""The memory side of the page in a real browser, against the engine and its metrics."""

from __future__ import annotations

import json
import re
import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.server.browser import (
    SECONDS,
    browser,
    drawn_counts,
    feed_of,
    needs_browser,
    opened,
    poll,
    say,
    shown_counts,
    wait_answered,
    wait_live,
)
from tests.server.live import MODEL, live_server
from tests.server.metrics_support import parsed, value
from tests.server.scripted import Script

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]  # a fixture
pytestmark = needs_browser


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
        assert re.search(r"Prefix hit: \d+ blocks \(.*\) used again\.", told)
        assert re.search(
            r"….{8} #\d was let in: 60 prompt tokens, (none|56|60) of them cached", told
        )
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


def test_copies_on_write_are_shown(browser: Browser) -> None:
    with live_server(Script(end=False, step_seconds=0.02)) as live, opened(browser, live) as page:
        wait_live(page)
        assert page.inner_text("#gauge-copies") == "0"
        body = {"prompt": [5] * 6, "n": 3, "max_tokens": 30, "ignore_eos": True}
        httpx.post(f"{live.base_url}/v1/completions", json=body, timeout=SECONDS).raise_for_status()
        # Three share the block that the prompt does not fill, and the last to write keeps it.
        page.wait_for_function("() => document.querySelector('#gauge-copies').innerText === '2'")
        told = page.inner_text("#events")
        assert re.search(r"Copied on write: 2 blocks \(2 to \d+, 2 to \d+\)\.", told)
        assert "6 prompt tokens, none of them cached; 3 sequences share them." in told
        assert "Prefix hit" not in told
        assert page.get_attribute("#gauge-copies", "title") == "2 sequences began as a fork"
        # A prompt that is cached as a whole has a copy of its last block.
        httpx.post(f"{live.base_url}/v1/completions", json={**body, "n": 1}, timeout=SECONDS)
        page.wait_for_function("() => document.querySelector('#gauge-copies').innerText === '3'")
        told = page.inner_text("#events")
        assert "6 prompt tokens, 5 of them cached." in told
        assert re.search(r"Copied on write: block \d+ to \d+\.", told)


def test_more_copies_than_can_be_named(browser: Browser) -> None:
    with live_server() as live, opened(browser, live) as page:
        wait_live(page)
        start = httpx.get(f"{live.base_url}/debug/blocks", timeout=SECONDS).json()
        start["counters"]["copied_blocks"] = 2
        events = f"event: whole\ndata: {json.dumps(start)}\n\n"
        more = {k: start[k] for k in ("seconds", "status", "running", "waiting", "counts")}
        more |= {"counters": {**start["counters"], "copied_blocks": 12}, "requests": {}}
        more |= {"blocks": [], "shared": {}, "hits": [], "evicted": []}
        more |= {"copies": [[i, i + 20] for i in range(1, 9)]}
        events += f"event: change\ndata: {json.dumps(more)}\n\n"
        page.route(
            "**/debug/live",
            lambda route: route.fulfill(content_type="text/event-stream", body=events),
        )
        page.click("#pause")
        page.click("#pause")
        page.wait_for_function("() => document.querySelector('#gauge-copies').innerText === '12'")
        named = "(3 to 23, 4 to 24, 5 to 25, 6 to 26, 7 to 27, 8 to 28, …)"
        assert f"Copied on write: 10 blocks {named}." in page.inner_text("#events")


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
            page.wait_for_selector("#model:enabled")
            say(page, "Hello")
            wait_answered(page)
            assert page.inner_text(".answer .body") != ""
    finally:
        gate.set()

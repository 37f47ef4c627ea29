"""A real browser for tests of the page: Debian's chromium, driven by playwright."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.live import Live, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = Path("/usr/bin/chromium")
SECONDS = 30.0

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
"""An answer with every kind of markup."""

needs_browser = [
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed"
    ),
    pytest.mark.skipif(not CHROMIUM.is_file(), reason=f"there is no {CHROMIUM}"),
]


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
    browser: Browser, live: Live, *, path: str = "/", expected: str | None = None, **options: Any
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
        page.goto(live.base_url + path)
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
    until(reached, SECONDS, what)


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
          const columns = Number(document.getElementById('grid').dataset.columns);
          const scale = devicePixelRatio;
          const counts = {};
          for (let i = 0; i < blocks; i += 1) {
            const x = 2 + (i % columns) * pitch, y = 2 + Math.floor(i / columns) * pitch;
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


def feed_of(live: Live) -> Any:
    return live.server.config.app.state.live_feed  # type: ignore[union-attr]

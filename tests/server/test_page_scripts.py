"""The page's scripts by themselves, in a real browser: the parser of events, and markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.server.browser import browser, needs_browser, opened
from tests.server.live import live_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]  # a fixture
pytestmark = needs_browser


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


UNITS = (
    *("word ", "**b ", "*a _b ", "[[[", "](", "`a``b", "\\", "http://x.example "),
    *("x\n", "- item\n", "> q\n", "|a|b|\n", "```\n", "1. a\n  - b\n"),
)


def test_long_answers_of_any_kind_stay_cheap(browser: Browser) -> None:
    """40,000 characters in pieces of 50: quadratic work would take minutes."""
    with live_server() as live, opened(browser, live) as page:
        for unit in UNITS:
            took, length = page.evaluate(
                """async (unit) => {
                  const { AnswerMessage } = await import('./static/message.js');
                  const nothing = () => {};
                  const callbacks = { onRetry: nothing, onGrow: nothing, announce: nothing };
                  const message = new AnswerMessage(callbacks);
                  const text = unit.repeat(Math.ceil(40000 / unit.length));
                  const began = performance.now();
                  for (let i = 0; i < text.length; i += 50) {
                    message.write(text.slice(i, i + 50));
                    if (i % 1000 === 0) await new Promise(requestAnimationFrame);
                  }
                  message.end();
                  return [performance.now() - began, message.element.textContent.length];
                }""",
                unit,
            )
            assert length > 5_000, unit
            assert took < 8_000, f"{unit!r}: {took:.0f} ms"

"""Draws when the host and the device did what, as an SVG."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

_COLOURS = {
    "plan": "#4e79a7",
    "pack": "#76b7b2",
    "launch": "#e15759",
    "read": "#d7dde2",
    "finish": "#59a14f",
    "tell": "#edc948",
}
_DEVICE = ("#9c755f", "#bab0ac")
_WORDS = {
    "plan": "schedule",
    "pack": "pack",
    "launch": "launch",
    "read": "wait for the results",
    "finish": "finish: tokens, texts, stop strings",
    "tell": "build outputs",
}
_WIDTH, _LEFT, _LANE = 1100.0, 70.0, 34.0


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds. `number` is that of the step, for what belongs to one for certain."""

    name: str
    number: int
    start: float
    end: float


def draw(path: Path, spans: list[Span], title: str, *, first: int, count: int) -> None:
    """`count` steps from number `first` on: a lane for the device, one for the engine's thread, and
    one that shows some milliseconds of the latter enlarged.
    """
    device = {span.number: span for span in spans if span.name == "device"}
    begin, end = device[first].start, device[first + count - 1].end
    body = [_text(_LEFT, 18, title, 14)]
    body += _lanes(spans, begin, end, 30.0)
    # The host's work between two waits, enlarged.
    read = next(s for s in spans if s.name == "read" and s.number == first + 1)
    work = [s for s in spans if s.name != "device" and read.end <= s.start < read.end + 0.02]
    until = next((s.start for s in work if s.name == "read"), read.end + 0.01)
    pad = 0.15 * (until - read.end)
    top = 30.0 + 2 * _LANE + 60.0
    body.append(
        _text(_LEFT, top - 8, f"enlarged: the host between two waits, {_ms(until - read.end)}", 12)
    )
    body += _lanes(spans, read.end - pad, until + pad, top)
    body += _legend(top + 2 * _LANE + 48.0)
    height = top + 2 * _LANE + 70.0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" font-family="sans-serif">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _lanes(spans: list[Span], begin: float, end: float, top: float) -> list[str]:
    scale = (_WIDTH - _LEFT - 20) / (end - begin)
    body = [
        _text(8, top + 21, "device", 12),
        _text(8, top + _LANE + 21, "host", 12),
    ]
    for span in spans:
        left, right = max(span.start, begin), min(span.end, end)
        if right <= left:
            continue
        lane = 0 if span.name == "device" else 1
        colour = _DEVICE[span.number % 2] if lane == 0 else _COLOURS[span.name]
        x, width = _LEFT + (left - begin) * scale, max((right - left) * scale, 0.5)
        y = top + lane * _LANE
        what = f"step {span.number}" if span.number >= 0 else ""
        words = f"{_WORDS.get(span.name, 'runs')} {what} {_ms(span.end - span.start)}"
        body.append(
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_LANE - 6:.0f}" '
            f'fill="{colour}"><title>{escape(words)}</title></rect>'
        )
        if lane == 0 and width > 50:
            body.append(_text(x + 4, y + 18, f"step {span.number}", 11, "white"))
        elif span.name in ("launch", "read") and span.number >= 0 and width > 14:
            mark = f"launch {span.number}" if span.name == "launch" else f"wait for {span.number}"
            if width > 7 * len(mark):
                body.append(_text(x + 3, y + 18, mark, 10, "black"))
    axis = top + 2 * _LANE + 4
    step = _tick(end - begin)
    at = 0.0
    while at <= end - begin:
        x = _LEFT + at * scale
        body.append(f'<path d="M{x:.1f} {axis - 6:.1f}v5" stroke="#888"/>')
        body.append(_text(x - 8, axis + 10, f"{1e3 * at:.4g}", 10, "#555"))
        at += step
    body.append(_text(_WIDTH - 34, axis + 10, "ms", 10, "#555"))
    return body


def _tick(length: float) -> float:
    for step in (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5):
        if length / step <= 12:
            return step
    return 1.0


def _legend(y: float) -> list[str]:
    body, x = [], _LEFT
    for name, words in _WORDS.items():
        body.append(f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" ')
        body[-1] += f'fill="{_COLOURS[name]}"/>'
        body.append(_text(x + 16, y, words, 11))
        x += 34 + 6.2 * len(words)
    return body


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _text(x: float, y: float, words: str, size: int, colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}">{escape(words)}</text>'
    )

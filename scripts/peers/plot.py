"""The figures of a run as bars, a panel a metric."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.engines import OURS
from peers.summary import Record, Row, engines, rows

COLOURS = {
    "jaxpaged": "#1b6ca8",
    "vllm": "#8d99ae",
    "openvino": "#b8a9c9",
    "transformers": "#c9b79c",
}
COLUMNS = 4


def plot(records: Sequence[Record], path: Path) -> None:
    """Writes a PNG. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, panels = engines(records), rows(records)
    lines = -(-len(panels) // COLUMNS)
    figure, axes = pyplot.subplots(
        lines, COLUMNS, figsize=(3.4 * COLUMNS, 2.7 * lines + 0.7), squeeze=False
    )
    flat = [axis for line in axes for axis in line]
    for axis, row in zip(flat, panels, strict=False):
        _panel(axis, row, names)
    for axis in flat[len(panels) :]:
        axis.set_visible(False)
    run = next(record for record in records if record["kind"] == "run")
    figure.suptitle(
        f"{run['model']}, bfloat16, {run['cpus']} threads, {run['date']}. Bars: medians; points:"
        " rounds; dashed: what is aimed at.",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, row: Row, names: Sequence[str]) -> None:
    shown = [name for name in names if name in row.values]
    medians = [row.median(name) or 0.0 for name in shown]
    axis.bar(shown, medians, color=[COLOURS[name] for name in shown], width=0.7)
    for place, name in enumerate(shown):
        axis.plot([place] * len(row.values[name]), row.values[name], "k.", markersize=3)
        label = f"{medians[place]:,.{row.metric.digits}f}"
        axis.annotate(
            label,
            (place, max(row.values[name])),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    aim = _aim(row)
    if aim is not None:
        axis.axhline(aim, color="#c0392b", linestyle="--", linewidth=1)
    axis.set_title(f"{row.metric.title}\n{'more' if row.metric.higher else 'less'} is better")
    axis.title.set_fontsize(9)
    axis.tick_params(labelsize=7)
    axis.margins(y=0.18)
    axis.set_ylim(bottom=0)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _aim(row: Row) -> float | None:
    """What we would have to have, in the metric's unit."""
    metric = row.metric
    if metric.limit is not None:
        return metric.limit
    medians = [row.median(name) or 0.0 for name in row.values if name != OURS]
    if metric.ratio is None or not medians:
        return None
    return metric.ratio * (max if metric.higher else min)(medians)

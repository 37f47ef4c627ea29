"""The figures as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paging.tables import WORKLOADS, Report

COLOURS = {"sharegpt": "#1b6ca8", "alpaca": "#c9b79c"}
Figures = Mapping[str, Mapping[str, Any]]


def plot(reports: Mapping[str, Report], path: Path) -> None:
    """Writes a PNG of the sections that there are. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: list[tuple[str, str, str, float]] = []
    """Section, figure, title, factor."""
    if "systems" in reports:
        panels += [
            ("systems", "running", "requests running", 1),
            ("systems", "waste", "slots without a token, %", 100),
            ("systems", "output_per_second", "tokens/s by the model of a step's cost", 1),
        ]
    if "device" in reports:
        panels.append(("device", "output_per_second", "tokens/s measured", 1))
    if "blocks" in reports:
        panels.append(("blocks", "waste", "waste by block size, %", 100))
    if "watermark" in reports:
        panels.append(("watermark", "preemptions", "preemptions by watermark", 1))
        panels.append(("watermark", "output_per_second", "tokens/s by watermark (model)", 1))
    columns = 3
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.6 * columns, 3.2 * lines), squeeze=False
    )
    flat = [axis for line in axes for axis in line]
    for axis, (section, key, title, factor) in zip(flat, panels, strict=False):
        _bars(axis, reports[section]["results"], key, factor)
        axis.set_title(title, fontsize=10)
    for axis in flat[len(panels) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _bars(axis: Any, results: Mapping[str, Figures], key: str, factor: float) -> None:
    """A group of bars a system, a bar a workload."""
    wide = 0.8 / len(results)
    names: list[str] = []
    for place, (workload, figures) in enumerate(results.items()):
        names = list(figures)
        values = [factor * float(figures[name][key]) for name in names]
        at = [index + (place - (len(results) - 1) / 2) * wide for index in range(len(names))]
        label = WORKLOADS[workload]
        bars = axis.bar(at, values, wide, label=label, color=COLOURS[workload])
        axis.bar_label(bars, [f"{v:,.0f}" if v >= 10 else f"{v:.1f}" for v in values], fontsize=6)
    axis.set_xticks(range(len(names)), [n.replace("reserve ", "") for n in names], fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    axis.margins(y=0.25)
    axis.legend(fontsize=7, frameon=False, ncols=2)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)

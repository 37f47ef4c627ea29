"""The table of a run: medians, ratios to the best peer of the same round, and what was reached."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.engines import CLASSES, OURS
from peers.metrics import METRICS, Metric

Record = Mapping[str, Any]
"""A line of the results: a measurement of one engine in one round (0: the first start)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of a run."""

    metric: Metric
    values: dict[str, list[float]]
    """Of each engine, by round."""
    ratios: list[float]
    """Our figure to that of the best peer, of the rounds that have both."""
    best: str
    """The peer that was best in most of them."""

    def median(self, engine: str) -> float | None:
        return statistics.median(self.values[engine]) if engine in self.values else None

    def reached(self) -> bool | None:
        """None where nothing is aimed at, or nothing is known."""
        metric, ours = self.metric, self.median(OURS)
        if metric.limit is not None and ours is not None:
            return ours <= metric.limit
        if metric.ratio is None or not self.ratios:
            return None
        ratio = statistics.median(self.ratios)
        return ratio >= metric.ratio if metric.higher else ratio <= metric.ratio

    def aim(self) -> str:
        if self.metric.limit is not None:
            return f"≤ {self.metric.limit:,.0f}"
        if self.metric.ratio is None:
            return ""
        return f"{'≥' if self.metric.higher else '≤'} {self.metric.ratio:.1f} x"


def measurements(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "measurement"]


def engines(records: Iterable[Record]) -> list[str]:
    """Those that gave a figure."""
    found = {record["engine"] for record in measurements(records) if record["figures"]}
    return [name for name in CLASSES if name in found]


def rows(records: Iterable[Record]) -> list[Row]:
    """Of each metric that jaxpaged or a peer has a figure of."""
    by_metric: dict[str, dict[int, dict[str, float]]] = {}
    for record in measurements(records):
        for name, value in record["figures"].items():
            turns = by_metric.setdefault(name, {})
            turns.setdefault(record["round"], {})[record["engine"]] = value
    return [_row(metric, by_metric[metric.name]) for metric in METRICS if metric.name in by_metric]


def _row(metric: Metric, turns: Mapping[int, Mapping[str, float]]) -> Row:
    values: dict[str, list[float]] = {}
    ratios, best = [], Counter[str]()
    for _, of_turn in sorted(turns.items()):
        for engine, value in of_turn.items():
            values.setdefault(engine, []).append(value)
        peers = {engine: value for engine, value in of_turn.items() if engine != OURS}
        if OURS in of_turn and peers:
            first = (max if metric.higher else min)(peers, key=lambda name: peers[name])
            ratios.append(of_turn[OURS] / peers[first])
            best[first] += 1
    return Row(metric, values, ratios, best.most_common(1)[0][0] if best else "")


def markdown(records: Sequence[Record]) -> str:
    """The table, and below it what it has to be read with."""
    run = next(record for record in records if record["kind"] == "run")
    names = engines(records)
    heads = ["", *names, "ratio to the best peer", "best peer", "aim", ""]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for row in rows(records):
        metric = row.metric
        cells = [metric.title]
        for name in names:
            median = row.median(name)
            cells.append("-" if median is None else f"{median:,.{metric.digits}f}")
        cells.append(_ratio(row.ratios))
        verdict = {None: "", True: "reached", False: "not reached"}[row.reached()]
        cells += [row.best, row.aim(), verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *notes(run, records), ""])


def _ratio(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.2f}{spread}"


def notes(run: Record, records: Sequence[Record]) -> list[str]:
    """Where, when and of what the figures are, and what failed."""
    turns = {record["round"] for record in measurements(records)} - {0}
    others = max((record["others"] for record in measurements(records)), default=0.0)
    text = ["Tiny sizes, to try the script: no figure here says anything."] if run["quick"] else []
    text += [
        f"Medians of {len(turns)} round{'s' * (len(turns) != 1)}, engines in turn; the ratio is the"
        " median, in brackets the least and the most, over the rounds.",
        f"`{run['command']}`, {run['date']}, commit {run['commit'] or 'unknown'}.",
        f"{run['machine']}, {run['cpus']} used; {' '.join(run['cpu_features']) or 'no SIMD known'};"
        f" load average at the beginning {run['load']:.1f}; during a measurement other processes"
        f" took {others:.2f} cores at most.",
        ". ".join(_versions(records)) + ".",
        *_agreement(records),
        *(f"Not measured: {name}: {why}" for name, why in run["missing"].items()),
    ]
    failed: dict[tuple[str, str], list[int]] = {}
    for record in measurements(records):
        if record["error"]:
            reason = record["error"].splitlines()[0]
            failed.setdefault((record["engine"], reason), []).append(record["round"])
    for (name, reason), rounds in failed.items():
        text.append(f"Failed: {name}, round {', '.join(map(str, rounds))}: {reason}")
    return [f"- {line}" for line in text]


def _versions(records: Sequence[Record]) -> list[str]:
    found: dict[str, str] = {}
    for record in measurements(records):
        if record["versions"]:
            parts = [f"{name} {version}" for name, version in record["versions"].items()]
            found[record["engine"]] = ", ".join(parts)
    return [found[name] for name in CLASSES if name in found] or ["No versions known"]


def _agreement(records: Sequence[Record]) -> list[str]:
    """How far the greedy answers to one prompt are the same: engines that ran other weights, or
    computed something else, would differ from the first token on.
    """
    answers = {r["engine"]: r["sample"] for r in measurements(records) if r["sample"]}
    ours = answers.pop(OURS, None)
    if not ours or not answers:
        return []
    parts = []
    for name, answer in answers.items():
        alike = 0
        while alike < len(ours) and answer[alike] == ours[alike]:
            alike += 1
        parts.append(f"{name} {alike}")
    return [
        f"Greedy answers to one prompt of random ids, tokens until they part from ours"
        f" (of {len(ours)}): {', '.join(parts)}."
    ]

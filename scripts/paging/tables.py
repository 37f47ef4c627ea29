"""The figures as Markdown: a section of the README beside the JSON files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]
WORKLOADS = {"sharegpt": "ShareGPT-like", "alpaca": "Alpaca-like"}
TITLES = {
    "systems": "Memory managers",
    "blocks": "Block sizes",
    "watermark": "Watermarks",
    "device": "Memory managers, on a real model",
    "attention": "Block sizes, on a real device",
}


def readme(reports: Mapping[str, Report]) -> str:
    """All sections that there are, each with its command."""
    parts = ["# Paging against itself\n\nWritten by `scripts/bench_paging.py`; what it means is in"]
    parts[0] += " [docs/paging.md](../../paging.md).\n"
    for section, report in reports.items():
        told = f"`{report['command']}`, commit {report['commit']}, {report['date']}"
        if section in ("device", "attention"):
            told += f", {report['machine']}"
        parts.append(f"## {TITLES[section]}\n\n{told}\n\n{_FORMATS[section](report)}")
    return "\n".join(parts)


def simulated(report: Report) -> str:
    """Sections without a device."""
    lines = []
    for name, results in report["results"].items():
        base = next(iter(results.values()))
        if "reserve max" in results:
            base = results["reserve max"]
        rows = [
            [
                system,
                f"{r['running']:.1f}",
                f"{100 * r['waste']:.1f}",
                f"{r['preemptions']:,}",
                f"{r['recomputed_tokens']:,}",
                f"{r['steps']:,}",
                f"{r['tokens_per_step']:.1f}",
                f"{r['output_per_second']:,.0f}",
                f"{r['output_per_second'] / base['output_per_second']:.2f}",
                f"{r['whole_output_per_second']:,.0f}",
            ]
            for system, r in results.items()
        ]
        head = [
            WORKLOADS[name],
            "running",
            "waste, %",
            "preempted",
            "tokens recomputed",
            "steps",
            "tokens a step",
            "tokens/s by the model",
            "ratio",
            "whole run",
        ]
        lines.append(table(head, rows))
    return "\n".join(lines)


def on_device(report: Report) -> str:
    lines = []
    for name, results in report["results"].items():
        base = results["reserve max"]["output_per_second"]
        cpu = results["reserve max"]["output_per_cpu_second"]
        rows = [
            [
                system,
                f"{r['running']:.1f}",
                f"{100 * r['waste']:.1f}",
                f"{r['preemptions']:,}",
                f"{r['steps']:,}",
                ", ".join(f"{s:.1f}" for s in r["seconds"]),
                f"{r['output_per_second']:,.0f}",
                f"{r['output_per_second'] / base:.2f}",
                f"{r['output_per_cpu_second'] / cpu:.2f}",
            ]
            for system, r in results.items()
        ]
        head = [
            WORKLOADS[name],
            "running",
            "waste, %",
            "preempted",
            "steps",
            "seconds",
            "tokens/s",
            "ratio",
            "ratio by CPU time",
        ]
        lines.append(table(head, rows))
    return "\n".join(lines)


def attention(report: Report) -> str:
    results = report["results"]
    base = results["sizes"].get("16") or next(iter(results["sizes"].values()))
    rows = [
        [
            size,
            f"{r['median_ms']:.2f}",
            f"{r['min_ms']:.2f}",
            f"{r['cpu_ms']:.2f}",
            f"{base['cpu_ms'] / r['cpu_ms']:.2f}",
        ]
        for size, r in results["sizes"].items()
    ]
    told = (
        f"{results['backend']}, {results['dtype']}: all layers' attention of SmolLM2-135M for "
        f"{results['rows']} sequences of {results['context']} tokens, ms.\n\n"
    )
    return told + table(["block size", "median", "least", "CPU", "speed by CPU time, 16 = 1"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


_FORMATS = {
    "systems": simulated,
    "blocks": simulated,
    "watermark": simulated,
    "device": on_device,
    "attention": attention,
}

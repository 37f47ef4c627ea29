"""The table at the end of a run: what matters of its rows, beside what was aimed at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_suite.results import FILE, read_rows

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    value: str
    target: str = ""
    met: bool | None = None
    """None: there is no target, or nothing to judge by."""


def lines_of(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[Line]]]:
    """Titles and their lines, in the order of the report."""
    good = [row for row in rows if row["status"] == "ok"]
    return [
        ("Ceilings", _ceilings(good)),
        ("Correctness", _correctness(rows)),
        ("Decode attention", _decode(_of(good, "decode"))),
        ("Whole decode step", _steps(good)),
        ("Serving", _serving(good)),
        ("Deterministic", _deterministic(_of(rows, "deterministic"))),
        ("Prefill attention", _prefill(_of(good, "prefill"))),
        ("Writing", _writing(_of(good, "write"))),
        ("Ablations (time over the engine's own choice)", _ablations(_of(good, "ablations"))),
        ("Not measured", _missing(rows)),
        ("Seconds", _seconds(rows)),
    ]


def _of(rows: Iterable[dict[str, Any]], section: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["section"] == section]


def _ceilings(rows: Iterable[dict[str, Any]]) -> list[Line]:
    lines = []
    for row in _of(rows, "ceilings"):
        if "tbps" in row:
            lines.append(Line(row["name"], f"{row['tbps']:.3g} TB/s"))
        elif "tflops" in row:
            lines.append(Line(row["name"], f"{row['tflops']:.4g} TFLOP/s"))
        elif row["name"] == "environment":
            versions = ", ".join(f"{k} {v}" for k, v in row["versions"].items())
            lines.append(Line("device", str(row["nvidia_smi"] or row["device"])))
            lines.append(Line("versions", f"Python {row['python']}, {versions}"))
            lines.append(Line("commit", f"{row['commit']}, {row['date']}"))
    return lines


def _correctness(rows: Iterable[dict[str, Any]]) -> list[Line]:
    lines = []
    counts: dict[str, int] = {}
    for row in _of(rows, "correctness"):
        if row["status"] in ("start", "end") or row["name"] == "compiled":
            continue
        counts[row["status"]] = counts.get(row["status"], 0) + 1
        if row["status"] == "wrong":
            error = row.get("relative_error", row.get("error_over_half_step"))
            same = "" if row.get("repeats_bit_for_bit", True) else ", not the same twice"
            lines.append(Line(row["name"], f"WRONG: error {_number(error)}{same}", "", False))
        elif row["status"] == "error":
            lines.append(Line(row["name"], f"ERROR: {row['error'][:160]}", "", False))
        elif row["status"] == "unsupported":
            lines.append(Line(row["name"], f"refused: {row['reason'][:120]}"))
    total = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    bad = any(counts.get(status) for status in ("wrong", "error"))
    none = not counts.get("ok")
    return [Line("cases", total or "none ran", "all ok", None if none else not bad), *lines]


def decode_target(row: dict[str, Any]) -> tuple[str, bool | None]:
    """What a decode row is measured by."""
    if row.get("backend") != "pallas_triton" or row.get("order") != "random":
        return "", None
    if row["batch"] == 1 and row["context"] <= 4096 and row["cache"] == "bfloat16":
        return "<= 12 us", row["us"] <= 12
    share, size = row.get("of_read"), row["kv_bytes"]
    if share is None or size < 64 * MIB:
        return "", None
    if size >= 256 * MIB:
        return ">= 85 % (stretch 92 %)", share >= 0.85
    if size <= 128 * MIB:
        return ">= 70 %", share >= 0.70
    return "", None


def _decode(rows: Iterable[dict[str, Any]]) -> list[Line]:
    lines = []
    for row in rows:
        if "excess" in row:
            met = row["excess"] <= 0.05
            lines.append(Line(row["name"], f"{100 * row['excess']:+.1f} %", "<= +5 %", met))
        elif "tbps" in row:
            value = f"{row['us']:.1f} us, {row['tbps']:.3g} TB/s"
            if row.get("of_read") is not None:
                value += f", {100 * row['of_read']:.1f} % of read"
            name = f"{row['name']} ({row['kv_bytes'] / MIB:.0f} MiB)"
            lines.append(Line(name, value, *decode_target(row)))
        elif "us" in row:
            lines.append(Line(row["name"], f"{row['us']:.1f} us"))
    return lines


def _steps(rows: Iterable[dict[str, Any]]) -> list[Line]:
    lines = []
    for row in rows:
        if "ms" not in row:
            continue
        value = f"{row['ms']:.3g} ms, {row['tokens_per_s']:.0f} tok/s"
        met, target = None, ""
        if row.get("of_floor") is not None:
            value += f", {100 * row['of_floor']:.1f} % of the byte floor"
            if row["section"] == "step":
                target, met = ">= 80 %", row["of_floor"] >= 0.8
        lines.append(Line(row["name"], f"{value}; launch {row['launch_ms']:.2f} ms", target, met))
    return lines


def _serving(rows: Iterable[dict[str, Any]]) -> list[Line]:
    lines = []
    for row in rows:
        if "decode_tokens_per_s" not in row:
            continue
        value = (
            f"{row['tokens_per_s']:.0f} tok/s, decoding {row['decode_tokens_per_s']:.0f} tok/s, "
            f"first tokens {row['first_token_s']:.2f} s"
        )
        target, met = "", None
        if "host_gap" in row:
            value += f", host gap {100 * row['host_gap']:.1f} %, {row['compiles']} compiles"
            target = "gap <= 2 %, 0 compiles"
            met = row["host_gap"] <= 0.02 and row["compiles"] == 0
        lines.append(Line(row["name"], value, target, met))
    return lines


def _deterministic(rows: Iterable[dict[str, Any]]) -> list[Line]:
    lines = []
    for row in rows:
        if "same_bits" in row:
            value = (
                f"{row['same_bits']} of {row['requests']} to the last bit, "
                f"{row['same_tokens']} in their tokens"
            )
            if row["same_bits"] < row["requests"]:
                value += f"; logprobs differ by {_number(row['logprob_error'])}"
            all_same = row["same_bits"] == row["requests"]
            target, met = ("all", all_same) if row["deterministic"] else ("", None)
            lines.append(Line(row["name"], value, target, met))
        elif "cost" in row:
            value = (
                f"{100 * row['cost']:.1f} %: {row['tokens_per_s']:.0f} tok/s, without it "
                f"{row['tokens_per_s_without']:.0f} ({row['work']})"
            )
            lines.append(Line(row["name"], value, "<= 15 %", row["cost"] <= 0.15))
    return lines


def _prefill(rows: Iterable[dict[str, Any]]) -> list[Line]:
    lines = []
    for row in rows:
        if "tflops" not in row:
            continue
        value = f"{row['us']:.0f} us, {row['tflops']:.4g} TFLOP/s"
        share = row.get("of_matmul")
        target, met = "", None
        if share is not None:
            value += f", {100 * share:.1f} % of matmul"
            single = [c for c in row.get("chunks", []) if c[1] == 2048]
            if single and row["backend"] == "pallas_triton" and " block_rows" not in row["name"]:
                target, met = ">= 60 %", share >= 0.6
        lines.append(Line(row["name"], value, target, met))
    return lines


def _writing(rows: Iterable[dict[str, Any]]) -> list[Line]:
    return [
        Line(row["name"], f"{row['us']:.1f} us, {row['gbps']:.4g} GB/s")
        for row in rows
        if "gbps" in row
    ]


def _ablations(rows: Iterable[dict[str, Any]]) -> list[Line]:
    return [
        Line(row["name"].removesuffix(": times the base"), f"x {row['ratio']:.3f}")
        for row in rows
        if "ratio" in row
    ]


def _missing(rows: Iterable[dict[str, Any]]) -> list[Line]:
    lines = []
    for row in rows:
        if row["section"] == "correctness" and row["name"] != row["section"]:
            continue  # told above
        if row["status"] in ("error", "unsupported", "skipped"):
            why = str(row.get("error") or row.get("reason") or "")
            name = (
                row["name"] if row["name"] == row["section"] else f"{row['section']}: {row['name']}"
            )
            lines.append(Line(name, f"{row['status']}: {why[:160]}"))
    return lines


def _seconds(rows: Iterable[dict[str, Any]]) -> list[Line]:
    lines = []
    for row in rows:
        if row["status"] == "end":
            lines.append(Line(row["section"], f"{row['seconds']:.1f}"))
        elif row["section"] == "run" and row["name"] == "elapsed":
            lines.append(Line("whole run", f"{row['seconds']:.1f}"))
    return lines


def _number(value: Any) -> str:
    return "NaN" if value is None else f"{value:.3g}"


def as_markdown(sections: Sequence[tuple[str, list[Line]]], *, dry: bool) -> str:
    parts = ["# GPU suite\n"]
    if dry:
        parts.append("A dry run on CPU: it proves that the code runs, and measures nothing.\n")
    for title, lines in sections:
        if not lines:
            continue
        parts.append(f"## {title}\n\n| what | value | target | met |\n| --- | --- | --- | --- |")
        parts += [
            f"| {_cell(line.what)} | {_cell(line.value)} | {line.target} | {_met(line, dry=dry)} |"
            for line in lines
        ]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def _met(line: Line, *, dry: bool) -> str:
    if line.met is None or (dry and line.target != "all ok"):
        return ""
    return "yes" if line.met else "NO"


def exit_status(rows: Iterable[dict[str, Any]]) -> int:
    """1 if a kernel was wrong or failed where it should have worked, or bits depended on what they
    must not depend on; 2 if there was no device.
    """
    listed = list(rows)
    if any(row["section"] == "run" and row["name"] == "device" for row in listed):
        return 2
    bad = {"correctness": ("wrong", "error"), "deterministic": ("wrong",)}
    return int(any(row["status"] in bad.get(row["section"], ()) for row in listed))


def summarise(folder: Path, *, dry: bool) -> tuple[str, int]:
    """Writes summary.md; returns its text and the exit status."""
    rows = read_rows(folder / FILE)
    text = as_markdown(lines_of(rows), dry=dry)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    return text, exit_status(rows)

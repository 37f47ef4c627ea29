"""The suite of measurements for a GPU: a dry run of it, and what it does when things fail."""

from __future__ import annotations

import importlib
import json
import os
import re
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.outputs import EngineStats
from pallas_kernels.tuning import load_table

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
NAMES = (
    *("backends", "cases", "compiling", "context", "correctness", "decode_case"),
    *("deterministic", "models"),
    *("results", "sections", "summary", "supervisor", "timing", "worker"),
)
MIB = 2**20


@pytest.fixture(scope="module")
def suite() -> Iterator[dict[str, ModuleType]]:
    """Its modules by name, imported as the scripts import them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield {name: importlib.import_module(f"gpu_suite.{name}") for name in NAMES}


def context(suite: dict[str, ModuleType], folder: Path, section: str = "correctness") -> Any:
    now = time.monotonic()
    results = suite["results"].Results(folder, now)
    return suite["context"].Context(section, results, now + 600, True, folder / "cache")


# ------------------------------------------------------------------ the whole of it


def bench(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(SCRIPTS / "gpu_suite.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.slow
def test_a_dry_run_goes_through_every_section(suite: dict[str, ModuleType], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = bench("--budget", "580", "--out", str(out), "--dry")
    log = (out / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    rows = suite["results"].read_rows(out / "results.jsonl")
    bad = [row for row in rows if row["status"] in ("error", "wrong", "unsupported")]
    assert bad == []
    assert [row["section"] for row in rows if row["status"] == "end"] == list(
        suite["sections"].DEFAULT
    )
    measured = {row["section"] for row in rows if row["status"] == "ok"}
    assert set(suite["sections"].DEFAULT) - {"peer"} <= measured  # the peer needs torch
    skipped = [row for row in rows if row["status"] == "skipped"]
    assert {row["section"] for row in skipped} <= {"peer"}, skipped
    assert done.stdout.strip() == (out / "summary.md").read_text().strip()
    files = list(out.rglob("*"))
    assert len(files) <= 8
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", path.name) for path in files)
    assert load_table(out / "tuning_table.json").entries


def test_one_section_alone_on_cpu_that_is_not_dry_says_so(tmp_path: Path) -> None:
    done = bench("--out", str(tmp_path / "out"), "--sections", "ceilings", timeout=120)
    assert done.returncode == 2
    assert "JAX sees no GPU but cpu" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sections", "decode,nothing"], "'nothing' is none of ceilings"),
        (["--tune", "--sections", "decode"], "leave out --sections"),
        (["--budget", "0"], "--budget must be above 0"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = bench("--out", str(tmp_path / "out"), *arguments, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr


# ------------------------------------------------------------------ crashes, hangs, lost devices


def fake_worker(tmp_path: Path, behaviour: str) -> str:
    """An interpreter that, asked to run a worker, starts the first section, then misbehaves."""
    code = f"""\
    #!{sys.executable}
    import json, sys, time
    options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
    first = options["--sections"].split(",")[0].split("=")[0]
    file = open(options["--out"] + "/results.jsonl", "a")
    def row(status):
        line = dict(at_s=0, section=first, name=first, status=status, seconds=0)
        print(json.dumps(line), file=file, flush=True)
    row("start")
    {behaviour}
    """
    path = tmp_path / "python"
    path.write_text(textwrap.dedent(code))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def supervised(
    suite: dict[str, ModuleType],
    patch: pytest.MonkeyPatch,
    folder: Path,
    behaviour: str,
    names: list[str],
    budget: float = 100.0,
) -> list[dict[str, Any]]:
    supervisor = suite["supervisor"]
    patch.setattr(supervisor.sys, "executable", fake_worker(folder, behaviour))
    out = folder / "out"
    supervisor.Supervisor(out, budget, False, folder / "cache").run(names)
    rows: list[dict[str, Any]] = suite["results"].read_rows(out / "results.jsonl")
    return rows


def test_a_crash_is_recorded_and_the_sections_after_it_run(
    suite: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    behaviour = "row('end') if first == 'decode' else sys.exit(7)"
    names = ["ceilings", "correctness", "decode"]
    rows = supervised(suite, monkeypatch, tmp_path, behaviour, names)
    found = [(row["section"], row["status"]) for row in rows if row["section"] != "run"]
    assert found == [
        *(("ceilings", "start"), ("ceilings", "error")),
        *(("correctness", "start"), ("correctness", "error")),
        *(("decode", "start"), ("decode", "end")),
    ]
    assert rows[2]["error"] == "the process ended with status 7"


def test_a_hang_is_killed_when_its_time_is_over(
    suite: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(suite["supervisor"], "GRACE", 0.5)
    monkeypatch.setattr(suite["supervisor"], "limit", lambda section, names, budget: 1.0)
    behaviour = "time.sleep(60 if first == 'engine' else 0); row('end')"
    begun = time.monotonic()
    rows = supervised(suite, monkeypatch, tmp_path, behaviour, ["engine", "peer"])
    assert time.monotonic() - begun < 30
    killed = [row for row in rows if row["status"] == "error"]
    assert [row["section"] for row in killed] == ["engine"]
    assert "over its time" in killed[0]["error"]
    assert ("peer", "end") in [(row["section"], row["status"]) for row in rows]


def test_what_there_is_no_time_for_is_skipped(
    suite: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = supervised(suite, monkeypatch, tmp_path, "row('end')", ["step", "engine"], budget=20.0)
    found = [(row["section"], row["status"]) for row in rows if row["section"] != "run"]
    assert found == [("step", "skipped"), ("engine", "skipped")]


def test_an_exception_of_a_section_stays_in_it(
    suite: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ctx = context(suite, tmp_path)

    def broken(ctx: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(suite["correctness"], "run", broken)
    suite["worker"].run_section(ctx, "correctness")
    rows = ctx.results.rows(status=None)
    assert [row["status"] for row in rows] == ["start", "error", "end"]
    assert "out of order" in rows[1]["traceback"]
    assert suite["summary"].exit_status(rows) == 1


def test_a_device_that_does_not_answer_ends_the_process(
    suite: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ctx = context(suite, tmp_path)
    ctx.dry = False
    monkeypatch.setattr(suite["context"], "PATIENCE", 0.2)
    statuses: list[int] = []
    monkeypatch.setattr(suite["context"].os, "_exit", statuses.append)
    with ctx.watch("quick"):
        pass
    with ctx.watch("slow"):
        time.sleep(1.0)
    assert statuses == [suite["context"].HUNG]
    assert [row["name"] for row in ctx.results.rows(status="error")] == ["slow"]


def test_a_lost_device_asks_for_a_new_process(
    suite: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(ctx: Any) -> None:
        ctx.fail("decode", RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal access"))

    monkeypatch.setattr(suite["correctness"], "run", broken)
    monkeypatch.setattr(suite["worker"], "prepare_jax", lambda cache: "gpu")
    now = time.monotonic()
    arguments = [
        *("--sections", "correctness=90,decode=90", "--until", str(now + 99)),
        *("--origin", str(now), "--out", str(tmp_path), "--cache", str(tmp_path)),
    ]
    status = suite["worker"].main(arguments)
    assert status == suite["worker"].DEVICE_LOST
    rows = suite["results"].read_rows(tmp_path / "results.jsonl")
    assert [row["section"] for row in rows if row["status"] == "start"] == ["correctness"]


# ------------------------------------------------------------------ numbers


def test_a_wrong_kernel_is_found(
    suite: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    correctness = suite["correctness"]
    case = correctness.DRY["decode"][0]
    monkeypatch.setattr(correctness, "DRY", {"decode": (case,)})

    def almost(backend: str, what: str, **options: Any) -> Any:
        right = suite["backends"].kernel(backend, what, **options)
        return lambda *arrays, **settings: right(*arrays, **settings) * 1.05

    for kernel, status in ((suite["backends"].kernel, "ok"), (almost, "wrong")):
        monkeypatch.setattr(correctness, "kernel", kernel)
        folder = tmp_path / status
        folder.mkdir()
        ctx = context(suite, folder)
        correctness.run(ctx)
        rows = ctx.results.rows(status=None)
        assert [r["status"] for r in rows if r["name"] == "decode bf16"] == [status]
        assert suite["summary"].exit_status(rows) == int(status == "wrong")


@pytest.mark.parametrize("flag", [True, False])
def test_bits_that_differ_are_wrong_where_they_must_not(
    suite: dict[str, ModuleType], tmp_path: Path, flag: bool
) -> None:
    report = suite["deterministic"]._report
    alone = {0: ((5, 6), (-1.0, -2.0)), 3: ((7, 8), (-1.0, -3.0))}
    moved = {**alone, 3: ((7, 9), (-1.25, -0.5)), 9: ((1, 1), (0.0, 0.0))}
    stats = EngineStats(preemptions=2)
    ctx = context(suite, tmp_path, "deterministic")
    report(ctx, "all", alone, alone, stats, "batch 9", flag=flag)
    report(ctx, "some", alone, moved, stats, "preempted", flag=flag)
    rows = ctx.results.rows(status=None)
    assert [row["status"] for row in rows] == ["ok", "wrong" if flag else "ok"]
    assert (rows[1]["same_bits"], rows[1]["same_tokens"], rows[1]["requests"]) == (1, 1, 2)
    assert rows[1]["logprob_error"] == 0.25, "the second token is another one"
    assert suite["summary"].exit_status(rows) == int(flag)
    (lines,) = (ls for title, ls in suite["summary"].lines_of(rows) if title == "Deterministic")
    assert [line.met for line in lines] == ([True, False] if flag else [None, None])
    assert "logprobs differ by 0.25" in lines[1].value
    report(ctx, "none", alone, alone, stats, "hit", flag=flag)
    assert ctx.results.rows(status="error")[0]["error"].startswith("nothing was hit")


@pytest.mark.parametrize("cache", [None, "int8", "fp8"])
def test_cases_are_poisoned_outside_their_sequences(
    suite: dict[str, ModuleType], cache: str | None
) -> None:
    cases = suite["cases"]
    case = cases.make_case(
        np.random.default_rng(0), (5, 9), group=2, kv_heads=2, dim=8, block_size=4, cache=cache
    )
    used = np.concatenate([case.slots(0), case.slots(1)])
    assert len(set(used)) == 14
    values = np.asarray(case.kv.k, np.float64)
    if cache is not None:
        values = values * np.asarray(case.kv.k_scale)[..., None]
    assert np.isfinite(values[used]).all()
    assert np.isnan(np.delete(values, used, axis=0)).all()
    np.testing.assert_allclose(values[case.slots(1)], case.keys[1], rtol=1e-6)


def test_the_expected_attention_is_that_of_a_loop(suite: dict[str, ModuleType]) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 4, 8), (6, 2, 8), (6, 2, 8)))
    out = suite["cases"].attend(q, k, v, np.array([2, 5]), scale=0.5, window=3, soft_cap=2.0)
    for token, position in enumerate((2, 5)):
        for head in range(4):
            seen = range(max(0, position - 2), position + 1)
            scores = [2.0 * np.tanh(q[token, head] @ k[i, head // 2] * 0.5 / 2.0) for i in seen]
            weights = np.exp(scores) / np.exp(scores).sum()
            expected = sum(w * v[i, head // 2] for w, i in zip(weights, seen, strict=True))
            np.testing.assert_allclose(out[token, head], expected)


def test_tiles_hold_every_token_once(suite: dict[str, ModuleType]) -> None:
    chunks = ((0, 10), (33, 1), (4, 8))
    tiles, tokens = suite["cases"].make_tiles(chunks, 4)
    assert tokens >= 19
    assert int(tiles.count) == 3 + 1 + 2
    found = [
        (int(row), int(position) + i)
        for row, position, length in zip(tiles.row, tiles.position, tiles.length, strict=True)
        for i in range(int(length))
    ]
    assert found == [(r, p + i) for r, (p, n) in enumerate(chunks) for i in range(n)]
    places = np.asarray(tiles.token_tile)
    starts = np.asarray(tiles.start)[places // 4] + places % 4
    assert starts[:19].tolist() == list(range(19))


@pytest.mark.parametrize("order", ["random", "sorted", "identity"])
def test_every_call_of_a_loop_reads_other_blocks(suite: dict[str, ModuleType], order: str) -> None:
    decode_case = suite["decode_case"]
    case = decode_case.DecodeCase(3, 40, kv_heads=2, dim=16, block_size=8, order=order)
    sets = decode_case.regions(case, dry=True)
    assert sets == decode_case.DRY_POOL_TOKENS // 8 // 15
    tables, seen = decode_case.first_tables(case, dry=True), set()
    for _ in range(sets):
        seen |= set(tables.ravel().tolist())
        tables = decode_case.next_tables(case, tables, dry=True)
    assert len(seen) == sets * 15
    assert max(seen) < decode_case.DRY_POOL_TOKENS // 8
    np.testing.assert_array_equal(tables, decode_case.first_tables(case, dry=True))


def test_the_timed_loop_calls_again_and_again_and_feeds_on_results(
    suite: dict[str, ModuleType],
) -> None:
    timing = suite["timing"]
    run = jax.jit(timing.loop(lambda zero, held: held + 1.0 + zero, 5))
    assert float(run(jnp.zeros(()), jnp.zeros(()))) == 5.0
    q, out = jnp.ones((2, 3), jnp.bfloat16), jnp.full((2, 3), 7.0, jnp.bfloat16)
    fed = jax.jit(timing.feed)(q, jnp.zeros((), jnp.float32), out)
    np.testing.assert_array_equal(np.asarray(fed), np.asarray(q))
    other = jax.jit(timing.feed)(q, jnp.ones((), jnp.float32), out)  # it does depend on `out`
    assert float(other[0, 0]) == 8.0


def test_model_shapes_have_the_parameters_of_their_names(suite: dict[str, ModuleType]) -> None:
    models = suite["models"]
    embedding = 2 * 128_256
    assert models.LLAMA_8B.step_weight_bytes + embedding * 4096 == 2 * 8_030_261_248
    assert models.LLAMA_1B.step_weight_bytes == 2 * 1_235_814_400
    assert models.LLAMA_8B.kv_bytes_per_token == 131_072


# ------------------------------------------------------------------ the table


def decode_row(**changes: Any) -> dict[str, Any]:
    row = {
        **{"backend": "pallas_triton", "order": "random", "batch": 32, "context": 4096},
        **{"cache": "bfloat16", "us": 150.0, "of_read": 0.86, "kv_bytes": 512 * MIB},
    }
    return row | changes


@pytest.mark.parametrize(
    ("changes", "target", "met"),
    [
        ({}, ">= 85 % (stretch 92 %)", True),
        ({"of_read": 0.84}, ">= 85 % (stretch 92 %)", False),
        ({"kv_bytes": 128 * MIB, "of_read": 0.71}, ">= 70 %", True),
        ({"kv_bytes": 64 * MIB, "of_read": 0.69}, ">= 70 %", False),
        ({"kv_bytes": 32 * MIB}, "", None),
        ({"batch": 1, "us": 12.0}, "<= 12 us", True),
        ({"batch": 1, "us": 12.1}, "<= 12 us", False),
        ({"of_read": None}, "", None),
        ({"order": "identity"}, "", None),
        ({"backend": "xla"}, "", None),
    ],
)
def test_decode_rows_are_judged_by_their_size(
    suite: dict[str, ModuleType], changes: dict[str, Any], target: str, met: bool | None
) -> None:
    assert suite["summary"].decode_target(decode_row(**changes)) == (target, met)


def test_the_table_is_made_of_what_a_cut_off_run_left(
    suite: dict[str, ModuleType], tmp_path: Path
) -> None:
    results = suite["results"].Results(tmp_path, time.monotonic())
    results.row("ceilings", "read", tbps=4.4)
    results.row("decode", "B32 | x", tbps=3.9, **decode_row())
    results.row("decode", "paged over contiguous", excess=0.07)
    results.row("step", "step", "error", error="RuntimeError('no memory')")
    results.row("engine", "serve", "skipped", reason="no time left")
    with results.path.open("a") as file:
        file.write('{"section": "dec')
    text, status = suite["summary"].summarise(tmp_path, dry=False)
    assert status == 0
    assert "| B32 / x (512 MiB) | 150.0 us, 3.9 TB/s, 86.0 % of read |" in text
    assert "| paged over contiguous | +7.0 % | <= +5 % | NO |" in text
    assert "RuntimeError('no memory')" in text
    assert "no time left" in text
    assert "none ran" in text


def test_numbers_that_json_lacks_become_null(suite: dict[str, ModuleType], tmp_path: Path) -> None:
    results = suite["results"].Results(tmp_path, time.monotonic())
    results.row("decode", "x", us=float("nan"), error_of=np.float32(0.5), shape=(1, 2))
    row = json.loads(results.path.read_text())
    assert (row["us"], row["error_of"], row["shape"]) == (None, 0.5, [1, 2])


def test_shares_grow_when_few_sections_are_asked_for(suite: dict[str, ModuleType]) -> None:
    sections = suite["sections"]
    tune = sections.BY_NAME["tune"]
    assert sections.limit(tune, ["tune"], 300.0) == 300.0
    assert sections.limit(tune, sections.DEFAULT, sections.BUDGET) == tune.share

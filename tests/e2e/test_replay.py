"""Recordings are replayed to the same decisions and tokens, and every change to one is found."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import LLM, AsyncEngine, EngineConfig, SamplingParams
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.cli import main
from jaxpaged.engine import Engine
from jaxpaged.record.format import Record
from jaxpaged.record.reader import RecordingError, read_sessions
from jaxpaged.record.recording import Recording
from jaxpaged.replay.run import Result, replay_on
from tests.e2e.engine_support import (
    GREEDY,
    SETTINGS,
    FaultyRunner,
    drain,
    fresh_engine,
    model_folder,
)
from tests.tiny_models import tiny_llama

ROOT = Path(__file__).resolve().parent.parent.parent
HEADER: Record = {
    "kind": "header",
    "format": 1,
    "versions": {},
    "device": {},
    "settings": {},
    "model": {},
}
POOL = {"num_blocks": 18}
DRAWN = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
EAGER = {"enforce_eager": True, "check_integrity": False}


def recorded_by(path: Path, use: Callable[[Engine], None], **options: Any) -> Engine:
    """An engine whose every act is in the file."""
    engine = fresh_engine(**options)
    recording = Recording(str(path))
    recording.begin(HEADER)
    engine.observer = recording
    try:
        use(engine)
        recording.closed()
    finally:
        recording.stop()
        engine.observer = None
    return engine


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def busy(engine: Engine) -> None:
    """A bit of everything: forks, beams, stop strings, seeds, cached prefixes, requests that leave
    in the midst of it, and more of them than the pool holds.
    """
    add = engine.add_request
    add("three", [11, 12, 13, 14, 15, 16, 17], dataclasses.replace(DRAWN, n=3, logprobs=2))
    add("seeded", [21] * 9, dataclasses.replace(DRAWN, seed=2**63 + 5, top_k=40, top_p=0.9))
    steps(engine, 2)
    add(
        "prompt", "The quick brown fox", dataclasses.replace(DRAWN, prompt_logprobs=1, max_tokens=3)
    )
    add("leaves", [31, 32, 33], dataclasses.replace(DRAWN, max_tokens=40))
    add("beams", [41, 42, 43, 44, 45], BeamSearchParams(beam_width=2, max_tokens=8))
    steps(engine, 5)
    engine.abort(["leaves", "nobody"])
    add("again", [11, 12, 13, 14, 15, 16, 17, 18], DRAWN, cache_salt="salt", delta_interval=3)
    add("biased", [51], dataclasses.replace(DRAWN, logit_bias={7: -5.0}, stop=["e", "th"], n=2))
    steps(engine, 3)
    engine.discard(["again"])
    add("again", [11, 12, 13, 14, 15, 16, 17, 18], GREEDY)
    drain(engine)
    assert engine.reset_prefix_cache()
    add("last", [11, 12, 13, 14, 15, 16, 17, 18], GREEDY)
    drain(engine)


def replayed(path: Path, *, decisions: bool = True, **options: Any) -> Result:
    (session,) = read_sessions(str(path))
    return replay_on(fresh_engine(**options), session, decisions=decisions)


def records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def changed(path: Path, new: list[Record]) -> Path:
    """A copy of a recording with other records."""
    other = path.with_name("changed.jsonl")
    lines = [json.dumps(record, separators=(",", ":")) for record in new]
    other.write_text("\n".join(lines) + "\n")
    return other


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`busy` in a pool that is too small for it."""
    path = tmp_path_factory.mktemp("recordings") / "busy.jsonl"
    engine = recorded_by(path, busy, **POOL)
    assert engine.stats().preemptions > 0
    assert engine.stats().forks > 0
    return path


# ---------------------------------------------------------------------- equal


def test_an_undisturbed_replay_is_equal(recording: Path) -> None:
    result = replayed(recording, **POOL)
    assert (result.difference, result.notes) == (None, [])
    kinds = [record["kind"] for record in records(recording)]
    assert result.num_requests == kinds.count("add") == 9
    assert result.num_steps == kinds.count("read") > 30
    assert result.num_tokens > 100


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_order_of_arrival_and_priority(tmp_path: Path, policy: str, async_scheduling: bool) -> None:
    options = {**POOL, "policy": policy, "async_scheduling": async_scheduling}

    def use(engine: Engine) -> None:
        now = time.monotonic()
        for i in range(6):
            # Neither the order of adding nor of priority alone decides.
            engine.add_request(
                f"r{i}", [60 + i] * 10, DRAWN, priority=i % 2, arrival_time=now + 0.01 * (5 - i)
            )
            engine.step()
        drain(engine)

    engine = recorded_by(tmp_path / "file", use, **options)
    assert engine.stats().preemptions > 0
    result = replayed(tmp_path / "file", **options)
    assert (result.difference, result.num_requests) == (None, 6)


def test_in_another_pool_the_tokens_are_the_same(recording: Path) -> None:
    (first,) = (r for r in records(recording) if r["kind"] == "plan" and r["step"] == 0)
    for blocks in (17, 60):
        pool = {**POOL, "num_blocks": blocks}
        result = replayed(recording, decisions=False, **pool)
        assert (result.difference, result.notes) == (None, [])
        assert result.num_requests == 9
        assert result.num_tokens > 100
        difference = replayed(recording, **pool).difference
        assert difference is not None
        assert first["rows"]


def test_a_sleep_is_replayed_and_new_weights_end_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def use(engine: Engine) -> None:
        engine.add_request("a", [1, 2, 3], GREEDY)
        steps(engine, 3)
        engine.sleep(running="recompute")
        engine.step()
        engine.wake()
        engine.add_request("b", [4, 5, 6], GREEDY)
        drain(engine)

    recorded_by(path, use)
    result = replayed(path)
    assert (result.difference, result.notes, result.num_requests) == (None, [], 2)
    lines = records(path)
    place = next(i for i, r in enumerate(lines) if r["kind"] == "event")
    assert lines[place]["name"] == "sleep"
    lines[place]["name"] = "update_weights"
    for decisions in (True, False):
        result = replayed(changed(path, lines), decisions=decisions)
        assert result.difference is None
        (note,) = result.notes
        assert note.startswith(f"Line {place + 1} of the recording (update_weights) cannot be")


# ---------------------------------------------------------------------- changes


def find(lines: list[Record], kind: str, step: int) -> Record:
    return next(r for r in lines if r["kind"] == kind and r["step"] == step)


def name_of(lines: list[Record], number: int) -> str:
    names = (pair for r in lines if r["kind"] == "plan" for pair in r.get("names", ()))
    return next(sequence for n, sequence in names if n == number)


def told(sequence: str) -> str:
    sample, _, request = sequence.partition("_")
    return f"request {request!r}" + ("" if sample == "0" else f" (sample {sample})")


@pytest.mark.parametrize("decisions", [True, False])
@pytest.mark.parametrize("step", [0, 7, 20])
def test_a_changed_token_is_found(recording: Path, step: int, decisions: bool) -> None:
    lines = records(recording)
    read = find(lines, "read", step)
    number, token = read["tokens"][-1]
    plan = find(lines, "plan", step)
    (row,) = (row for row in plan["rows"] if row[0] == number)
    read["tokens"][-1][1] = token + 1
    found = replayed(changed(recording, lines), decisions=decisions, **POOL).difference
    place = f"step {step}, {told(name_of(lines, number))}, position {row[1] + row[2]}, token: "
    when = "" if decisions else f" (in step {step})"
    assert found is not None
    assert found.startswith(f"{place}recorded {token + 1}{when}, now {token}")
    if decisions:
        assert found.endswith(f"(line {lines.index(read) + 1} of the recording).")


def test_changed_decisions_are_found(recording: Path) -> None:
    def start(plan: Record) -> str:
        plan["rows"][0][1] += 1
        return "first position: recorded "

    def swap(plan: Record) -> str:
        plan["rows"][0], plan["rows"][1] = plan["rows"][1], plan["rows"][0]
        return "row: recorded request "

    def lose(plan: Record) -> str:
        plan["rows"].pop()
        return f"row {len(plan['rows'])}: recorded nobody, now request "

    def preempt(plan: Record) -> str:
        plan["preempted"] = [plan["rows"][0][0]]
        return "preempted: recorded request "

    def copy(plan: Record) -> str:
        plan["copies"] = [[3, 4]]
        return "blocks copied (from, to): recorded [[3, 4]], now []"

    for change in (start, swap, lose, preempt, copy):
        lines = records(recording)
        text = change(find(lines, "plan", 9))
        found = replayed(changed(recording, lines), **POOL).difference
        assert found is not None
        assert found.startswith("step 9, ")
        assert text in found


def test_a_changed_block_is_found(recording: Path) -> None:
    lines = records(recording)
    plan = next(r for r in lines if r["kind"] == "plan" and any(len(w) > 4 for w in r["rows"][1:]))
    row = next(row for row in plan["rows"][1:] if len(row) > 4)
    group, index, *blocks = row[4][-1]
    assert group == 0
    row[4][-1][-1] += 1
    index += len(blocks) - 1
    found = replayed(changed(recording, lines), **POOL).difference
    assert found is not None
    assert found.startswith(
        f"step {plan['step']}, {told(name_of(lines, row[0]))}, position {4 * index}, block {index} "
        f"of its table: recorded {blocks[-1] + 1}, now {blocks[-1]} (line "
    )


@pytest.mark.parametrize("decisions", [True, False])
def test_a_changed_prompt_is_found(recording: Path, decisions: bool) -> None:
    lines = records(recording)
    (add,) = (r for r in lines if r["kind"] == "add" and r["request"] == "seeded")
    add["prompt"][-1] += 100
    found = replayed(changed(recording, lines), decisions=decisions, **POOL).difference
    assert found is not None
    assert "request 'seeded', position 9, token: recorded" in found
    assert found.startswith("step 0, ")


def test_a_changed_seed_or_parameter_is_found(recording: Path) -> None:
    for change in ({"seed": 6}, {"params": {"top_k": 1}}):
        lines = records(recording)
        (add,) = (r for r in lines if r["kind"] == "add" and r["request"] == "seeded")
        params = add["params"] | change.pop("params", {})  # type: ignore[operator]
        add |= {**change, "params": params}
        found = replayed(changed(recording, lines), **POOL).difference
        assert found is not None
        assert "request 'seeded', position " in found


def test_changed_beams_and_endings_are_found(recording: Path) -> None:
    lines = records(recording)
    beams = next(r for r in lines if r["kind"] == "beams")
    beams["next"][-1][1] += 1
    for decisions in (True, False):
        found = replayed(changed(recording, lines), decisions=decisions, **POOL).difference
        assert found is not None
        assert "request 'beams', position 5, " in found
    lines = records(recording)
    end = next(r for r in lines if r["kind"] == "end" and r["reason"] == "length")
    end["reason"] = "stop"
    for decisions, text in (
        (True, "recorded ends by 'stop', now"),
        (False, "recorded 'stop' after"),
    ):
        found = replayed(changed(recording, lines), decisions=decisions, **POOL).difference
        assert found is not None
        assert told(end["sequence"]) in found
        assert text in found


def test_missing_and_extra_records_are_found(recording: Path) -> None:
    for kind in ("plan", "read", "end", "stepped", "abort", "add"):
        lines = records(recording)
        place = next(i for i, r in enumerate(lines) if r["kind"] == kind and i > 20)
        for new in (lines[:place] + lines[place + 1 :], lines[:place] + lines[place - 1 :]):
            assert outcome(changed(recording, new)) is not None


def outcome(path: Path) -> str | None:
    """The difference, or why the recording could not be replayed."""
    try:
        return replayed(path, **POOL).difference
    except RecordingError as error:  # a request that is added twice
        return str(error)


# ---------------------------------------------------------------------- endings that come early


def test_any_part_of_a_recording_can_be_replayed(recording: Path, tmp_path: Path) -> None:
    whole = recording.read_bytes()
    for share in (0.3, 0.6, 0.99):
        part = tmp_path / f"part-{share}"
        part.write_bytes(whole[: whole.index(b"\n", int(len(whole) * share)) - 3])
        for decisions in (True, False):
            result = replayed(part, decisions=decisions, **POOL)
            assert result.difference is None
            assert result.notes == [
                "The last line of the recording is cut off and was left out: whoever wrote it "
                "ended at once."
            ]
            assert result.num_steps > 2


@pytest.mark.parametrize("method", ["launch", "read"])
def test_after_a_failed_step_nothing_is_compared(tmp_path: Path, method: str) -> None:
    def fault() -> None:
        raise RuntimeError("a fault")

    def use(engine: Engine) -> None:
        engine.runner = FaultyRunner(engine.runner, method, 3, fault)  # type: ignore[assignment]
        for i in range(3):
            engine.add_request(f"r{i}", [5, 6, i], GREEDY)
        drain(engine)
        engine.add_request("after", [7, 8], GREEDY)
        drain(engine)

    path = tmp_path / "file"
    engine = recorded_by(path, use)
    assert engine.stats().failed_steps > 0
    result = replayed(path)
    assert result.difference is None
    (note,) = result.notes
    assert "RuntimeError: a fault" in note
    assert "this run does not fail there" in note
    result = replayed(path, decisions=False)
    assert (result.difference, result.num_requests) == (None, 4)
    assert len(result.notes) == 1

    (session,) = read_sessions(str(path))
    again = fresh_engine()
    again.runner = FaultyRunner(again.runner, method, 3, fault)  # type: ignore[assignment]
    result = replay_on(again, session, decisions=True)
    assert result.difference is None
    assert "fails there as well" in result.notes[0]
    # The other way about: only this run fails.
    healthy = tmp_path / "healthy"
    recorded_by(
        healthy, lambda engine: engine.add_request("r", [5, 6], GREEDY) or steps(engine, 12)
    )
    (session,) = read_sessions(str(healthy))
    for decisions in (True, False):
        again = fresh_engine()
        again.runner = FaultyRunner(again.runner, method, 3, fault)  # type: ignore[assignment]
        found = replay_on(again, session, decisions=decisions).difference
        assert found is not None
        assert "a step fails" in found
        assert "a fault" in found


# ---------------------------------------------------------------------- the command


def record_tiny(path: Path, **options: Any) -> LLM:
    """A recording of a whole engine, whose process may go on."""
    settings = SETTINGS | {"num_gpu_blocks_override": 24, "max_model_len": 64, "record": str(path)}
    with LLM(str(model_folder()), **(settings | options)) as llm:
        llm.generate([[i] * 10 for i in range(2, 9)], DRAWN, use_tqdm=False)
        assert llm.stats().preemptions > 0
    return llm


@pytest.fixture(scope="module")
def tiny_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "tiny.jsonl"
    record_tiny(path)
    return path


def replay_command(path: Path, *flags: str, code: int) -> tuple[str, str]:
    """Standard output and error of the command in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "jaxpaged", "replay", str(path), "--disable-progress", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == code, run.stderr
    return run.stdout, run.stderr


def test_another_process_finds_no_difference(tiny_recording: Path) -> None:
    out, err = replay_command(tiny_recording, code=0)
    assert out.startswith("Equal: 7 requests, ")
    assert out.endswith(" steps, 112 tokens.\n")
    assert "recorded" not in err


def test_another_process_finds_the_difference(tiny_recording: Path) -> None:
    lines = records(tiny_recording)
    read = find(lines, "read", 5)
    number, token = read["tokens"][0]
    read["tokens"][0][1] = token + 1
    out, err = replay_command(changed(tiny_recording, lines), code=1)
    assert out == ""
    request = told(name_of(lines, number))
    assert f"difference: step 5, {request}, position " in err
    assert f"token: recorded {token + 1}, now {token} (line {lines.index(read) + 1} of" in err


def run_here(capsys: pytest.CaptureFixture[str], path: Path, *flags: str) -> tuple[int, str, str]:
    status = main(["replay", str(path), "--disable-progress", *flags])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_settings_that_decide_leave_the_tokens(
    tiny_recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--num-gpu-blocks-override", "17", "--no-async-scheduling", "--enforce-eager")
    status, out, err = run_here(capsys, tiny_recording, *flags)
    assert status == 0, err
    assert out.endswith(" steps, 112 tokens.\n")
    for text in ("num_gpu_blocks_override=17 (recorded 24)", "async_scheduling=False (recorded"):
        assert text in err
    status, out, err = run_here(capsys, tiny_recording, "--num-gpu-blocks-override", "24")
    assert (status, "Only tokens" in err) == (0, False)


def test_a_pool_in_which_a_request_cannot_end(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def use(engine: Engine) -> None:
        engine.add_request("long", [5] * 10, DRAWN)
        drain(engine)

    recorded_by(path, use)
    found = replayed(path, decisions=False, num_blocks=4).difference
    assert found is not None
    assert found.startswith(
        "request 'long', ending: recorded 'length' after 16 tokens, now 'error'"
    )
    assert " after 3 (" in found
    with pytest.raises(RecordingError, match="line 2: request 'long' is refused by this engine"):
        replayed(path, decisions=False, num_blocks=3)


def test_recordings_of_something_else(
    tiny_recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_llama(tmp_path / "other", seed=5)
    status, _, err = run_here(capsys, tiny_recording, "--model", str(other))
    assert status == 2
    assert "is not the one that was recorded: its weights and its tokenizer differ." in err
    lines = records(tiny_recording)
    lines[0]["settings"]["flux_capacitor"] = True
    status, _, err = run_here(capsys, changed(tiny_recording, lines))
    assert status == 2
    assert "with the setting 'flux_capacitor', which this build does not have" in err
    lines = records(tiny_recording)
    lines[1]["params"]["flux"] = 1
    status, _, err = run_here(capsys, changed(tiny_recording, lines))
    assert status == 2
    assert "line 2: request '0' is refused by this engine: Unknown sampling parameter 'flux'" in err
    lines = records(tiny_recording)
    del lines[4]["requests" if "requests" in lines[4] else "prompt"]
    status, _, err = run_here(capsys, changed(tiny_recording, lines))
    assert status == 2
    assert "line 5: the 'add' record has no proper 'prompt'" in err
    status, _, err = run_here(capsys, tiny_recording, "--session", "2")
    assert (status, f"{tiny_recording} holds 1, counted from 1" in err) == (2, True)


def test_a_moved_model_and_other_versions(
    tiny_recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(model_folder())
    lines = records(tiny_recording)
    lines[0]["settings"]["model"] = "/no/such/folder"
    lines[0]["versions"]["jax"] = "0.0.1"
    lines[0]["device"]["processor"] = "Z80"
    status, out, err = run_here(capsys, changed(tiny_recording, lines), "--model", str(moved))
    assert (status, out.startswith("Equal: 7 requests")) == (0, True), err
    assert "note: versions jax: recorded '0.0.1', now " in err
    assert "note: device processor: recorded 'Z80', now " in err


def test_sessions_of_several_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    record_tiny(path)
    record_tiny(path, seed=7)
    text = path.read_text().splitlines()
    second = [i for i, line in enumerate(text) if line.startswith('{"kind":"header"')][1]
    read = next(i for i in range(second, len(text)) if '"kind":"read"' in text[i])
    text[read] = text[read].replace("]]", "0]]")
    path.write_text("\n".join(text) + "\n")
    status, out, err = run_here(capsys, path)
    assert (status, out) == (1, "")
    assert "session 2: difference: step 0, request '" in err
    assert f"(line {read + 1} of the recording)" in err
    status, out, _ = run_here(capsys, path, "--session", "1")
    assert (status, out.startswith("Equal: 7 requests")) == (0, True)


def test_a_recording_holds_no_secrets_but_the_prompts(tiny_recording: Path) -> None:
    text = tiny_recording.read_text()
    assert os.environ["JAXPAGED_CACHE_DIR"] + "/xla" not in text
    settings = records(tiny_recording)[0]["settings"]
    assert "record" not in settings
    assert (settings["num_gpu_blocks_override"], settings["max_model_len"]) == (24, 64)


# ---------------------------------------------------------------------- other ways to record


def test_the_engine_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    settings = SETTINGS | {"num_gpu_blocks_override": 24, "max_model_len": 64, "record": str(path)}

    async def serve() -> None:
        engine = AsyncEngine(EngineConfig(model=str(model_folder()), **settings))
        engine.start()
        await engine.wait_ready()

        async def client(number: int) -> int:
            params = dataclasses.replace(DRAWN, n=1 + number % 2)
            stream = await engine.submit(f"r{number}", [number + 3] * 9, params, stream_interval=2)
            outputs = 0
            async for _ in stream:
                outputs += 1
                if number == 4 and outputs == 2:
                    stream.close()  # the client is gone
                    break
            return outputs

        await asyncio.gather(*(client(number) for number in range(8)))
        await engine.close()

    asyncio.run(serve())
    kinds = [record["kind"] for record in records(path)]
    assert (kinds.count("add"), kinds[-1]) == (8, "close")
    assert "abort" in kinds or "discard" in kinds
    status, out, err = run_here(capsys, path)
    assert status == 0, err
    assert out.startswith("Equal: 8 requests, ")


def test_a_process_that_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    script = f"""
from jaxpaged import LLM, SamplingParams
llm = LLM({str(model_folder())!r}, record={str(path)!r}, **{SETTINGS | EAGER!r})
params = SamplingParams(max_tokens=100, ignore_eos=True)
while True:
    llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    deadline = time.monotonic() + 300
    while not path.exists() or path.stat().st_size < 20_000:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = path.read_bytes().splitlines()
    assert b'"kind":"close"' not in lines[-1]
    status, out, err = run_here(capsys, path, "--enforce-eager")
    assert status == 0, err
    assert out.startswith("Equal: ")


def test_the_real_model(tmp_path: Path, smollm2_path: Path) -> None:
    path = tmp_path / "file"
    flags = [
        *("--model", str(smollm2_path), "--dtype", "float32", "--disable-progress"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "96"),
        *("--decode-buckets", "8", "--prefill-buckets", "64", "--num-gpu-blocks-override", "7"),
        *("--record", str(path), "--max-tokens", "24", "--n", "2", "--logprobs", "1"),
    ]
    prompts = ["Once upon a time", "The capital of France is", "def main():", "1, 2, 3, 4,"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    run = subprocess.run(
        [sys.executable, "scripts/generate.py", *words, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert any("preempted" in record for record in records(path))
    out, _ = replay_command(path, code=0)
    assert out.startswith("Equal: 4 requests, ")
    text = path.read_text()
    assert "Once upon a time" not in text  # token ids are enough

"""`jaxpaged run-batch` over the scripted engine and the server's own app."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import cli, run_batch
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.engine_thread import Build, Progress
from jaxpaged.errors import EngineDeadError
from tests.server.scripted import Script, scripted_engine

ROOT = Path(__file__).resolve().parent.parent
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def builder(script: Script, made: list[Engine] | None = None, **limits: Any) -> Build:
    def build(config: EngineConfig, progress: Progress) -> Engine:
        engine = scripted_engine(script, config, **limits)
        if made is not None:
            made.append(engine)
        return engine

    return build


def run(source: Path | str, out: Path | str, build: Build, *more: str) -> int:
    words = ["run-batch", "-i", str(source), "-o", str(out), "--disable-progress", *more]
    return run_batch.run(cli.build_parser().parse_args(words), build=build)


def line(custom_id: Any, url: str = TEXT, **body: Any) -> dict[str, Any]:
    if not body:
        body = {"prompt": "hi", "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def results(path: Path) -> dict[str | None, dict[str, Any]]:
    found = [json.loads(text) for text in path.read_text(encoding="utf-8").split("\n")[:-1]]
    return {result["custom_id"]: result for result in found}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_completions_and_chats(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(default="one two")
    script.reply("what", "an answer")
    source = write(
        tmp_path / "in.jsonl",
        line("text", prompt="hi", max_tokens=50),
        "",
        line("chat", CHAT, messages=[{"role": "user", "content": "what?"}], logprobs=True),
        line("two", prompt=["a", "b"], n=2, max_tokens=1, model="smollm2-135m-instruct"),
    )
    assert run(source, out, builder(script)) == 0
    found = results(out)
    assert set(found) == {"text", "chat", "two"}
    for result in found.values():
        assert list(result) == ["id", "custom_id", "response", "error"]
        assert result["error"] is None
        assert list(result["response"]) == ["status_code", "request_id", "body"]
        assert result["response"]["status_code"] == 200
        request_id = result["response"]["request_id"]
        assert result["id"] == f"batch_req_{request_id}"
        assert result["response"]["body"]["id"].endswith(request_id)
    assert found["text"]["response"]["body"]["choices"][0]["text"] == "one two"
    chat = found["chat"]["response"]["body"]["choices"][0]
    assert chat["message"]["content"] == "an answer"
    assert len(chat["logprobs"]["content"]) > 1
    assert [c["index"] for c in found["two"]["response"]["body"]["choices"]] == [0, 1, 2, 3]
    summary = capsys.readouterr().err
    assert "requests     3 in " in summary
    assert "(0 failed)" in summary


def test_beam_searches(tmp_path: Path, out: Path) -> None:
    search = {"use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 4}
    source = write(
        tmp_path / "in.jsonl",
        line("text", prompt="hi", **search),
        line("chat", CHAT, messages=[{"role": "user", "content": "what?"}], **search),
        line("bad", prompt="hi", **search, top_p=0.5),
    )
    assert run(source, out, builder(Script(default="one two"))) == 1
    found = {name: result["response"] for name, result in results(out).items()}
    for name in ("text", "chat"):
        assert found[name]["status_code"] == 200
        assert [c["index"] for c in found[name]["body"]["choices"]] == [0, 1]
        assert found[name]["body"]["usage"]["completion_tokens"] == 8
    assert found["bad"]["status_code"] == 400
    assert found["bad"]["body"]["error"]["param"] == "top_p"


@pytest.mark.parametrize(
    ("bad", "code", "reason"),
    [
        ("{oops", "invalid_json", "line 2: not JSON"),
        ("[1]", "invalid_json", "expected a JSON object"),
        ("[" * 5000, "invalid_json", "not JSON"),
        (line(None), "invalid_custom_id", "custom_id must be a non-empty string"),
        (line("a"), "duplicate_custom_id", "'a' was there before"),
        (line("b") | {"method": "GET"}, "invalid_method", "method must be POST"),
        (line("b", "/v1/embeddings"), "invalid_url", "url must be one of /v1/chat/completions, "),
        (line("b") | {"url": ["x"]}, "invalid_url", "url must be one of"),
        (line("b") | {"body": "x"}, "invalid_body", "body must be an object"),
        (line("b", prompt="a", stream=True), "invalid_body", "body.stream: results are whole"),
    ],
)
def test_a_line_that_is_no_request(
    tmp_path: Path, out: Path, bad: Any, code: str, reason: str
) -> None:
    source = write(tmp_path / "in.jsonl", line("a"), bad, line("z"))
    assert run(source, out, builder(Script())) == 1
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert len(lines) == 3
    (failed,) = [result for result in lines if result["error"] is not None]
    assert failed["response"] is None
    assert failed["error"]["code"] == code
    assert reason in failed["error"]["message"]
    good = {result["custom_id"] for result in lines if result["error"] is None}
    assert good == {"a", "z"}


def test_requests_that_the_server_refuses(tmp_path: Path, out: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        line("hot", prompt="a", temperature=9),
        line("model", prompt="a", model="gpt-5"),
        line("long", prompt="a " * 600),
        line("half", prompt="\ud800"),
        line("fine"),
    )
    assert run(source, out, builder(Script())) == 1
    found = results(out)
    statuses = {name: found[name]["response"]["status_code"] for name in found}
    assert statuses == {"hot": 400, "model": 404, "long": 400, "half": 400, "fine": 200}
    assert all(result["error"] is None for result in found.values())
    assert "temperature" in found["hot"]["response"]["body"]["error"]["message"]
    assert "`gpt-5` does not exist" in found["model"]["response"]["body"]["error"]["message"]


def test_served_model_names(tmp_path: Path, out: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a", prompt="x", model="gpt-5"))
    assert run(source, out, builder(Script()), "--served-model-name", "other", "gpt-5") == 0
    assert results(out)["a"]["response"]["body"]["model"] == "gpt-5"


def test_odd_names_and_texts(tmp_path: Path, out: Path) -> None:
    script = Script(default="Gr\u00fc\u00dfe \U0001f600")
    names = ["\U0001f600", "a\u2028b", "x" * 1000]
    source = write(tmp_path / "in.jsonl", *(line(name) for name in names))
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes().replace(b"\n", b"\r\n"))
    assert run(source, out, builder(script)) == 0
    assert set(results(out)) == set(names)
    assert "\U0001f600" in out.read_text(encoding="utf-8")  # UTF-8, not escapes


def test_half_a_surrogate_pair_as_a_name(tmp_path: Path, out: Path) -> None:
    source = write(tmp_path / "in.jsonl", '{"custom_id": "\\ud800", "method": "POST"}')
    assert run(source, out, builder(Script())) == 1
    assert set(results(out)) == {"\ud800"}


def test_the_window_is_bounded_and_filled(tmp_path: Path, out: Path) -> None:
    """Many lines are not all read ahead, and results come while lines are still to be read."""
    gate = threading.Event()
    made: list[Engine] = []
    read_end, write_end = os.pipe()
    fed = 0

    def feed() -> None:
        nonlocal fed
        with os.fdopen(write_end, "wb", buffering=0) as pipe:
            for number in range(3000):
                body = {"prompt": "x", "max_tokens": 1, "user": "x" * 2000}
                pipe.write(json.dumps(line(str(number), **body)).encode() + b"\n")
                fed += 1

    def open_the_gate() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (made and made[0].stats().num_running):
            time.sleep(0.01)
        last = -1
        while fed != last:  # until nobody reads on
            last = fed
            time.sleep(0.2)
        stuck.append(fed)
        gate.set()

    stuck: list[int] = []
    threads = [threading.Thread(target=t, daemon=True) for t in (feed, open_the_gate)]
    for thread in threads:
        thread.start()
    build = builder(Script(gate=gate), made, max_num_seqs=2)
    try:
        assert run(f"/dev/fd/{read_end}", out, build) == 0
    finally:
        os.close(read_end)
    for thread in threads:
        thread.join(30)
    # 4 x 2 requests, one line read ahead, and what the pipe and one read of it hold.
    assert 8 < stuck[0] < 300
    assert len(results(out)) == 3000


def test_results_come_as_they_finish(tmp_path: Path, out: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        line("long", prompt="a", max_tokens=60, ignore_eos=True),
        line("short", prompt="b", max_tokens=1),
    )
    assert run(source, out, builder(Script(step_seconds=0.02))) == 0
    order = [json.loads(text)["custom_id"] for text in out.read_text().splitlines()]
    assert order == ["short", "long"]


def test_a_failed_step_fails_its_requests_only(tmp_path: Path, out: Path) -> None:
    def fail(step: int) -> BaseException | None:
        return RuntimeError("the device is hot") if step == 2 else None

    source = write(tmp_path / "in.jsonl", *(line(str(i)) for i in range(20)))
    assert run(source, out, builder(Script(fail_read=fail), max_num_seqs=2)) == 1
    statuses = [result["response"]["status_code"] for result in results(out).values()]
    assert len(statuses) == 20
    assert 1 <= statuses.count(500) <= 4
    assert statuses.count(200) == 20 - statuses.count(500)


def test_a_dead_engine_ends_the_run_and_keeps_results(
    tmp_path: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def die(step: int) -> BaseException | None:
        return SystemExit(1) if step == 40 else None

    source = write(tmp_path / "in.jsonl", *(line(str(i)) for i in range(200)))
    with pytest.raises(EngineDeadError):
        run(source, out, builder(Script(fail_read=die), max_num_seqs=2))
    found = results(out)
    assert 1 < len(found) < 200
    assert {result["response"]["status_code"] for result in found.values()} == {200}


def test_standard_input_and_output() -> None:
    code = """
import sys
from tests.test_run_batch import builder, run
from tests.server.scripted import Script
sys.exit(run("-", "-", builder(Script(default="one"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        input="\n".join(json.dumps(line(str(i))) for i in range(3)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(text) for text in done.stdout.splitlines()]
    assert {result["custom_id"] for result in found} == {"0", "1", "2"}


def test_ctrl_c_keeps_what_was_written(out: Path) -> None:
    code = f"""
import sys
from jaxpaged import run_batch, cli
from tests.test_run_batch import builder
from tests.server.scripted import Script
build = builder(Script(step_seconds=0.01))
run = run_batch.run
run_batch.run = lambda args: run(args, build=build)
sys.exit(cli.main(["run-batch", "-i", "-", "-o", {str(out)!r}, "--disable-progress"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(line("first")) + "\n")
        process.stdin.flush()  # and it stays open: the program waits for more
        deadline = time.monotonic() + 90
        while not out.exists() or not out.read_text():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        _, err = process.communicate()
    finally:
        process.kill()
    assert set(results(out)) == {"first"}
    assert "interrupted" in err
    assert "Traceback" not in err
    assert "Fatal" not in err


def test_ctrl_c_while_the_model_loads(tmp_path: Path, out: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"))
    code = f"""
import sys, threading
from tests.test_run_batch import run

def build(config, progress):
    sys.stderr.write("loading\\n")
    sys.stderr.flush()
    threading.Event().wait()

sys.exit(run({str(source)!r}, {str(out)!r}, build))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == "interrupted\n"
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-i", "https://host/in.jsonl", "-o", "x"], "URLs are not supported"),
        (["-i", "{tmp}/none.jsonl", "-o", "x"], "No such file or directory"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/in.jsonl"], "the file that prompts are read from"),
        (["-i", "{tmp}/in.jsonl", "-o", "{tmp}/no/x"], "No such file or directory"),
        (["-i", "{tmp}/in.jsonl", "-o", "x", "--block-size", "0"], "block_size must be"),
    ],
)
def test_arguments_that_cannot_be(
    tmp_path: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    words = [word.replace("{tmp}", str(tmp_path)) for word in arguments]
    assert cli.main(["run-batch", *words]) == 2
    assert reason in capsys.readouterr().err


def test_an_output_that_fills_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", *(line(str(i)) for i in range(50)))
    parse = cli.build_parser().parse_args
    words = ["run-batch", "-i", str(source), "-o", "/dev/full", "--disable-progress"]
    with pytest.raises(OSError, match="-o /dev/full: No space left on device; 0 results"):
        run_batch.run(parse(words), build=builder(Script()))


def test_nothing_to_do(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write(tmp_path / "in.jsonl", "", " "), out, builder(Script())) == 0
    assert not out.exists()
    assert "requests     0 in" in capsys.readouterr().err

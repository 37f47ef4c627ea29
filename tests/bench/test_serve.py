"""`jaxpaged bench serve` from its arguments to its table, against a scripted OpenAI server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.cli import main
from tests.bench.mini_server import MODEL, MiniServer, Reply, Seen, serving, text_chunks

ROOT = Path(__file__).resolve().parents[2]


def two_tokens(seen: Seen) -> Reply:
    return Reply(text_chunks("a", "b", chat="chat" in seen.path))


def words(text: str) -> int:
    return len(text.split())


def bench(server: MiniServer, *more: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, "--disable-tqdm", *more])


def saved(folder: Path) -> dict[str, Any]:
    (path,) = folder.iterdir()
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAXPAGED_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_completions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with serving(MiniServer(two_tokens, count=words)) as server:
        status = bench(
            server,
            *("--num-prompts", "5", "--random-input-len", "12", "--random-output-len", "2"),
            *("--ignore-eos", "--save-result", "--save-detailed", "--result-dir", str(tmp_path)),
            *("--goodput", "ttft:20000", "e2el:20000", "--metadata", "machine=here", "run=1"),
        )
    assert status == 0
    rows = capsys.readouterr().out.splitlines()
    assert "Successful requests:                     5" in rows
    assert "Total input tokens:                      35" in rows
    assert "Total generated tokens:                  10" in rows
    assert len(server.seen) == 5
    assert {seen.path for seen in server.seen} == {"/v1/completions"}
    for seen in server.seen:
        prompt = seen.body.pop("prompt")
        assert words(prompt) == 12
        assert seen.body == {
            "model": MODEL,
            "repetition_penalty": 1.0,
            "max_tokens": 2,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    assert "authorization" not in server.seen[0].headers
    result = saved(tmp_path)
    assert (result["completed"], result["failed"], result["interrupted"]) == (5, 0, False)
    assert result["machine"] == "here"
    assert result["model_id"] == MODEL
    assert result["request_rate"] == "inf"
    assert result["generated_texts"] == ["ab"] * 5
    assert result["output_lens"] == [2] * 5
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert all(len(gaps) == 1 for gaps in result["itls"])
    assert result["mean_ttft_ms"] == pytest.approx(1000 * sum(result["ttfts"]) / 5)
    assert result["mean_e2el_ms"] == pytest.approx(1000 * sum(result["latencies"]) / 5)
    gaps = [gap for request in result["itls"] for gap in request]
    assert result["mean_itl_ms"] == pytest.approx(1000 * sum(gaps) / 5)


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(MiniServer(two_tokens, count=words)) as server:
        status = bench(
            server,
            *("--backend", "openai-chat", "--num-prompts", "2", "--random-input-len", "3"),
            *("--api-key", "secret", "--header", "X-Team=blue", "--temperature", "0"),
            *("--extra-body", '{"seed": 1}', "--top-k", "5"),
        )
    assert status == 0
    assert "P99 E2EL (ms):" in capsys.readouterr().out
    seen = server.seen[0]
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["authorization"] == "Bearer secret"
    assert seen.headers["x-team"] == "blue"
    (message,) = seen.body.pop("messages")
    assert message["role"] == "user"
    (part,) = message["content"]
    assert (part["type"], words(part["text"])) == ("text", 3)
    assert seen.body == {
        "model": MODEL,
        "max_completion_tokens": 128,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "top_k": 5,
        "seed": 1,
    }
    # What the template adds is not counted in a chat's length; the server's BOS is in a text's.
    assert {body["add_special_tokens"] for body in server.tokenized} == {False}


def test_null_leaves_a_field_out() -> None:
    with serving(MiniServer(two_tokens, count=words)) as server:
        bench(server, "--num-prompts", "1", "--extra-body", '{"repetition_penalty": null}')
    assert "repetition_penalty" not in server.seen[0].body


@pytest.mark.parametrize("variable", ["JAXPAGED_API_KEY", "OPENAI_API_KEY"])
def test_keys_from_the_environment(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "from-env")
    with serving(MiniServer(two_tokens, count=words)) as server:
        bench(server, "--num-prompts", "1")
    assert server.seen[0].headers["authorization"] == "Bearer from-env"


def test_failures_are_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    replies = iter(
        [
            Reply(text_chunks("a", "b", chat=False)),
            Reply(status=503, body={"error": {"message": "queue full"}}),
            Reply(status=503, body={"error": {"message": "queue full"}}),
            Reply(status=500, body="oh no"),
            Reply(["data: [DONE]\n\n"]),  # 200, without any choice
            Reply([{"choices": [{"text": "a"}]}, {"error": {"message": "died"}}]),
        ]
    )
    with serving(MiniServer(lambda _: next(replies), count=words)) as server:
        status = bench(server, "--num-prompts", "6", "--max-concurrency", "1")
    assert status == 1
    out, err = capsys.readouterr()
    assert "Successful requests:                     1" in out
    assert "Failed requests:                         5" in out
    assert "Maximum request concurrency:             1" in out
    assert "failed, 2 x: status 503: queue full" in err
    assert "failed, 1 x: status 500: oh no" in err
    assert "failed, 1 x: status 200, but the stream had no choices." in err
    assert "failed, 1 x: died" in err


def test_max_concurrency_is_reached_and_kept(tmp_path: Path) -> None:
    server = MiniServer(two_tokens, count=words)

    def answer(seen: Seen) -> Reply:
        # Nobody is answered before three more are there: with fewer at once this would hang.
        wanted = (len(server.seen) + 2) // 3 * 3
        reply = two_tokens(seen)
        reply.hold = lambda: len(server.seen) >= wanted
        return reply

    server.answer = answer
    with serving(server):
        more = ("--max-concurrency", "3", "--save-result", "--result-dir", str(tmp_path))
        assert bench(server, "--num-prompts", "9", *more) == 0
    assert server.most_running <= 3
    assert saved(tmp_path)["max_concurrent_requests"] == 3


def test_warm_ups_have_prompts_of_their_own() -> None:
    with serving(MiniServer(two_tokens, count=words)) as server:
        status = bench(
            server,
            *("--num-prompts", "2", "--num-warmups", "3", "--ready-check-timeout-sec", "20"),
        )
    assert status == 0
    prompts = [seen.body["prompt"] for seen in server.seen]
    assert len(prompts) == len(set(prompts)) == 2 + 3 + 1


def test_the_ready_check_waits(capsys: pytest.CaptureFixture[str]) -> None:
    replies = iter([Reply(status=503, body={"error": "loading"}), *[None] * 3])
    server = MiniServer(lambda seen: next(replies) or two_tokens(seen), count=words)
    with serving(server):
        assert bench(server, "--num-prompts", "2", "--ready-check-timeout-sec", "20") == 0
    assert "Successful requests:                     2" in capsys.readouterr().out
    assert len(server.seen) == 4


def test_a_server_that_does_not_get_ready(capsys: pytest.CaptureFixture[str]) -> None:
    server = MiniServer(lambda _: Reply(status=503, body={"error": "loading"}), count=words)
    with serving(server):
        assert bench(server, "--num-prompts", "1", "--ready-check-timeout-sec", "0.01") == 1
    assert "no request succeeded within 0.01 s: status 503: loading" in capsys.readouterr().err


def test_a_server_that_hangs(capsys: pytest.CaptureFixture[str]) -> None:
    hanging = Reply([{"choices": [{"text": "a"}]}], hang=True)
    with serving(MiniServer(lambda _: hanging, count=words)) as server:
        status = bench(server, "--num-prompts", "2", "--request-timeout-sec", "0.2")
    assert status == 1
    assert "failed, 2 x: the server sent nothing for 0.2 s" in capsys.readouterr().err


def test_without_tokenize_token_ids_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(MiniServer(two_tokens)) as server:
        assert bench(server, "--num-prompts", "2", "--random-input-len", "9") == 0
    probe, *rest = [seen.body["prompt"] for seen in server.seen]
    assert len(probe) == 4
    assert [len(ids) for ids in rest] == [9, 9]


def test_without_anything_words_stand_for_tokens(caplog: pytest.LogCaptureFixture) -> None:
    def texts_only(seen: Seen) -> Reply:
        if not isinstance(seen.body["prompt"], str):
            return Reply(status=400, body={"error": {"message": "prompt must be text"}})
        return two_tokens(seen)

    with serving(MiniServer(texts_only)) as server:
        assert bench(server, "--num-prompts", "1", "--random-input-len", "9") == 0
    assert words(server.seen[-1].body["prompt"]) == 9
    assert "their lengths are only about right" in caplog.text


def test_without_usage(capsys: pytest.CaptureFixture[str]) -> None:
    silent = Reply(text_chunks("a", "b", "c", chat=False, usage=False))
    with serving(MiniServer(lambda _: silent, count=words)) as server:
        assert bench(server, "--num-prompts", "2", "--random-input-len", "4") == 0
    out, err = capsys.readouterr()
    assert "Total input tokens:                      8" in out
    assert "Total generated tokens:                  6" in out
    assert "2 answers came without usage" in err


def test_usage_counts_several_tokens_a_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    chunky = Reply(text_chunks("abc", "def", chat=False, tokens=6))
    with serving(MiniServer(lambda _: chunky, count=words)) as server:
        assert bench(server, "--num-prompts", "1") == 0
    assert "Total generated tokens:                  6" in capsys.readouterr().out


def test_sharegpt_like_lengths_fit_the_server() -> None:
    server = MiniServer(two_tokens, count=words, models=[{"id": "m", "max_model_len": 50}])
    with serving(server):
        assert bench(server, "--dataset-name", "sharegpt-like", "--num-prompts", "30") == 0
    for seen in server.seen:
        assert words(seen.body["prompt"]) + seen.body["max_tokens"] <= 50
    assert len({seen.body["max_tokens"] for seen in server.seen}) > 5


def test_prefixes_are_shared() -> None:
    with serving(MiniServer(two_tokens, count=words)) as server:
        bench(
            server,
            *("--dataset-name", "prefix_repetition", "--num-prompts", "6"),
            *("--prefix-repetition-prefix-len", "20", "--prefix-repetition-suffix-len", "5"),
            *("--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "3"),
        )
    prompts = [seen.body["prompt"].split() for seen in server.seen]
    assert {len(prompt) for prompt in prompts} == {25}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 2
    assert {seen.body["max_tokens"] for seen in server.seen} == {3}


def test_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "prompts.jsonl"
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path.write_text(
        json.dumps({"messages": conversation, "output_tokens": 3})
        + "\n"
        + json.dumps({"prompt": "hi"})
    )
    with serving(MiniServer(two_tokens)) as server:
        status = bench(
            server,
            *("--backend", "openai-chat", "--dataset-name", "custom"),
            *("--dataset-path", str(path), "--custom-output-len", "4", "--max-concurrency", "1"),
        )
    assert status == 0
    first, second = (seen.body for seen in server.seen)
    assert (first["messages"], first["max_completion_tokens"]) == (conversation, 3)
    assert second["messages"][0]["content"] == [{"type": "text", "text": "hi"}]
    assert second["max_completion_tokens"] == 4
    assert "has 2 prompts only" in caplog.text


def test_results_are_appended(tmp_path: Path) -> None:
    with serving(MiniServer(two_tokens, count=words)) as server:
        for _ in range(2):
            more = ("--append-result", "--result-dir", str(tmp_path), "--result-filename", "r")
            assert bench(server, "--num-prompts", "1", *more) == 0
    lines = (tmp_path / "r").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [1, 1]


def test_a_result_that_cannot_be_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with serving(MiniServer(two_tokens, count=words)) as server:
        bench(server, "--num-prompts", "1", "--save-result", "--result-dir", f"{tmp_path}/file/x")
    out, err = capsys.readouterr()
    assert "Successful requests:" in out
    assert "the result was not saved" in err


def test_base_urls_may_end_in_v1() -> None:
    with serving(MiniServer(two_tokens, count=words)) as server:
        url = server.url + "/v1/"
        assert main(["bench", "serve", "--base-url", url, "--num-prompts", "1"]) == 0
    assert server.seen[0].path == "/v1/completions"


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(MiniServer(two_tokens, count=words, models=None)) as server:
        assert bench(server, "--num-prompts", "1") == 1
        assert "/v1/models: status 404" in capsys.readouterr().err
        assert bench(server, "--num-prompts", "1", "--model", "mine") == 0
        assert server.seen[-1].body["model"] == "mine"
        more = ("--model", "mine", "--served-model-name", "theirs")
        assert bench(server, "--num-prompts", "1", *more) == 0
        assert server.seen[-1].body["model"] == "theirs"


def test_nobody_there(unused_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--port", str(unused_port)]) == 1
    err = capsys.readouterr().err
    assert f"http://127.0.0.1:{unused_port}: Connection refused" in err
    assert "`jaxpaged serve MODEL` starts one" in err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--backend", "openai", "--endpoint", "/v1/chat/completions"], "does not fit"),
        (["--endpoint", "v1/completions"], "must begin with /"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-path", "x"], "is read with --dataset-name custom only"),
        (["--ramp-up-strategy", "linear"], "need each other"),
        (["--goodput", "itl:3"], "must be one of ttft, tpot, e2el"),
        (["--goodput", "ttft:-3"], "expected a number > 0"),
        (["--base-url", "nowhere"], "must be http://"),
    ],
)
def test_flags_that_do_not_fit(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) in (1, 2)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--num-prompts", "0"], "expected an integer >= 1, got '0'"),
        (["--request-rate", "0"], "expected a number > 0, or inf"),
        (["--random-range-ratio", "1"], "expected a number in [0, 1)"),
        (["--percentile-metrics", "ttft,x"], "expected some of ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "101"], "expected numbers in [0, 100]"),
        (["--extra-body", "[]"], "expected a JSON object"),
        (["--metadata", "x"], "expected NAME=VALUE, got 'x'"),
        (["--goodput", "ttft=3"], "expected METRIC:MS, got 'ttft=3'"),
    ],
)
def test_flags_that_are_wrong(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "serve", *flags])
    assert left.value.code == 2
    assert reason in capsys.readouterr().err


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    server = MiniServer(two_tokens, count=words)

    def answer(seen: Seen) -> Reply:
        reply = two_tokens(seen)
        if len(server.seen) > 3:
            reply.hold = lambda: False
        return reply

    server.answer = answer
    with serving(server):
        command = [sys.executable, "-m", "jaxpaged", "bench", "serve", "--base-url", server.url]
        more = ["--num-prompts", "9", "--max-concurrency", "2", "--random-input-len", "4"]
        process = subprocess.Popen(
            [*command, *more, "--save-result", "--result-dir", str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            deadline = time.monotonic() + 60
            while len(server.seen) < 5:
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Successful requests:                     3" in out
    assert "interrupted: 6 requests had not ended" in err
    assert "Traceback" not in err
    result = saved(tmp_path)
    assert (result["completed"], result["interrupted"]) == (3, True)


def test_measuring_brings_no_jax() -> None:
    with serving(MiniServer(two_tokens, count=words)) as server:
        code = f"""
import sys
from jaxpaged.cli import main
assert main(["bench", "serve", "--base-url", "{server.url}", "--num-prompts", "1"]) == 0
assert not {{"jax", "jaxlib", "flax", "torch"}} & set(sys.modules)
"""
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert run.returncode == 0, run.stderr

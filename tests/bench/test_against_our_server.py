"""Our clients against our server, with the scripted engine in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxpaged.cli import main
from server.settings import ServerConfig
from tests.server.live import live_server
from tests.server.scripted import Script


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_server(Script(default="so it goes", end=False)) as live:
        status = main(
            [
                *(
                    "bench",
                    "serve",
                    "--base-url",
                    live.base_url,
                    "--backend",
                    backend,
                    "--disable-tqdm",
                ),
                *("--num-prompts", "12", "--random-input-len", "30", "--random-output-len", "20"),
                *("--random-range-ratio", "0.5", "--ignore-eos", "--max-concurrency", "4"),
                *("--save-result", "--save-detailed", "--result-dir", str(tmp_path)),
            ]
        )
        live.settle()
    assert status == 0, capsys.readouterr().err
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert result["completed"] == 12
    assert result["max_concurrent_requests"] <= 4
    lengths = result["output_lens"]
    assert min(lengths) >= 10 and max(lengths) <= 30 and len(set(lengths)) > 3
    assert all(text.startswith("so it goes") for text in result["generated_texts"])
    if backend == "openai":  # a chat's template adds to it
        assert min(result["input_lens"]) >= 15 and max(result["input_lens"]) <= 45
    # A chunk a token, unless some became ready together; a chat begins with one that has the role,
    # and ends with one that has the finish_reason.
    chunks = [len(gaps) + 1 for gaps in result["itls"]]
    assert all(1 < n <= tokens + 2 for n, tokens in zip(chunks, lengths, strict=True))


def test_requests_that_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with live_server() as live:
        status = main(
            [
                *("bench", "serve", "--base-url", live.base_url, "--num-prompts", "2"),
                *("--random-input-len", "300", "--random-output-len", "5", "--disable-tqdm"),
            ]
        )
        live.settle()
    assert status == 1
    assert "maximum context length is 256 tokens" in capsys.readouterr().err


def test_chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGED_API_KEY", "me:sk-secret")
    settings = ServerConfig(api_key=("me:sk-secret", "you:sk-other"))
    with live_server(Script(default="hello there"), settings) as live:
        assert main(["chat", "--url", live.base_url, "-q", "hi"]) == 0
        assert capsys.readouterr().out == "hello there\n"
        assert main(["chat", "--url", live.base_url, "-q", "hi", "--api-key", "wrong"]) == 1
        assert "status 401" in capsys.readouterr().err
        live.settle()

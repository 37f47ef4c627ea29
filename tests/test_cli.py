"""`jaxpaged generate` from arguments to JSON lines, on an engine that only repeats its prompts."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

import jaxpaged
from jaxpaged.cli import main
from jaxpaged.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput
from jaxpaged.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent


class EchoLLM:
    """Stands in for LLM: each completion repeats the prompt, one token a character."""

    made: list[EchoLLM]
    defaults = SamplingParams()
    raises: BaseException | None = None

    def __init__(self, model: str, **config: Any) -> None:
        self.model, self.config = model, config
        self.calls: list[tuple[str, list[Any], list[SamplingParams]]] = []
        self.closed = False
        self.made.append(self)

    def __enter__(self) -> EchoLLM:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True

    def default_sampling_params(self) -> SamplingParams:
        return self.defaults

    def generate(
        self, prompts: list[Any], params: list[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        if self.raises is not None:
            raise self.raises
        self.calls.append(("generate", prompts, params))
        texts = [p if isinstance(p, str) else p.get("prompt") for p in prompts]
        return [self.answer(t, p) for t, p in zip(texts, params, strict=True)]

    def chat(
        self, messages: list[Any], params: list[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        self.calls.append(("chat", messages, params))
        texts = [f"<{conversation[-1]['content']}>" for conversation in messages]
        return [self.answer(t, p) for t, p in zip(texts, params, strict=True)]

    def answer(self, text: str | None, params: SamplingParams) -> RequestOutput:
        ids = [ord(c) for c in text or "?"]
        fails = text == "fail"
        table = [{i: Logprob(-0.5, 1, chr(i)), 7: Logprob(float("-inf"), 2, "x")} for i in ids]
        outputs = [
            CompletionOutput(
                index=index,
                text="".join(map(chr, ids)) + str(index),
                token_ids=ids,
                finish_reason="error" if fails else "stop",
                error="it broke" if fails else None,
                logprobs=None if params.logprobs is None else table,
            )
            for index in range(params.n)
        ]
        scores = None if params.prompt_logprobs is None else [None, *table[1:]]
        return RequestOutput("0", text, ids, outputs, True, 2, scores)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_blocks=101, block_size=16, peak_blocks_used=25, kv_waste=0.125, preemptions=3
        )


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[EchoLLM]:
    class Fresh(EchoLLM):
        made: list[EchoLLM] = []  # noqa: RUF012 # one list a test

    monkeypatch.setitem(vars(jaxpaged), "LLM", Fresh)
    return Fresh


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[Any], str]:
    """Status, records on stdout, and stderr."""
    status = main(["generate", *words])
    out, err = capsys.readouterr()
    return status, [json.loads(line) for line in out.splitlines()], err


def test_prompts_from_flags(capsys: pytest.CaptureFixture[str], engine: type[EchoLLM]) -> None:
    words = ["--model", "m", "--prompt", "ab", "--prompt", "c", "--max-num-seqs", "3"]
    status, records, err = run(capsys, *words, "--max-tokens", "5")
    assert status == 0
    assert records[0] == {
        "index": 0,
        "prompt": "ab",
        "text": "ab0",
        "token_ids": [97, 98],
        "finish_reason": "stop",
        "stop_reason": None,
        "num_prompt_tokens": 2,
        "num_cached_tokens": 2,
    }
    assert [record["index"] for record in records] == [0, 1]
    (llm,) = engine.made
    assert (llm.model, llm.config) == ("m", {"max_num_seqs": 3})
    assert llm.calls[0][2][0].max_tokens == 5
    assert llm.closed
    assert "requests     2 in " in err
    assert "(2 stop)" in err
    assert "prompt       3 tokens" in err
    assert "output       3 tokens" in err
    assert "KV blocks    25 of 100 at the peak (25.0%), 16 tokens each" in err
    assert "KV waste     12.5%" in err
    assert "preemptions  3" in err


def test_file_in_order_with_everything_mixed(
    capsys: pytest.CaptureFixture[str], engine: type[EchoLLM], tmp_path: Path
) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "one"}]},
        {"prompt": "two", "cache_salt": "s", "params": {"max_tokens": 2}},
        {"prompt_token_ids": [5, 6]},
        {"messages": [{"role": "user", "content": "four"}], "params": {"seed": 4}},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    words = ["--prompt-file", str(source), "--out", str(out), "--sampling-seed", "9"]
    status, records, _ = run(capsys, *words)
    assert (status, records) == (0, [])
    written = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [r["prompt"] for r in written] == ["<one>", "two", None, "<four>"]
    assert [r["index"] for r in written] == [0, 1, 2, 3]
    generate, chat = engine.made[0].calls
    assert generate[1] == [{"prompt": "two", "cache_salt": "s"}, {"prompt_token_ids": [5, 6]}]
    assert [p.max_tokens for p in generate[2]] == [2, 16]
    assert [p.seed for p in chat[2]] == [9, 4]


@pytest.mark.parametrize(
    ("words", "data", "prompts"),
    [
        ([], "eins\nzwö\n", ["eins", "zwö"]),
        (["--chat"], "eins\n", ["<eins>"]),
        (["--prompt-file", "-"], '{"prompt": "eins"}\n', ["eins"]),
    ],
)
def test_standard_input(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    data: str,
    prompts: list[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data.encode())))
    status, records, _ = run(capsys, *words)
    assert status == 0
    assert [record["prompt"] for record in records] == prompts


def test_the_models_defaults_lose_to_flags_and_flags_to_lines(
    capsys: pytest.CaptureFixture[str],
    engine: type[EchoLLM],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(engine, "defaults", SamplingParams(temperature=0.6, top_p=0.9, top_k=20))
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a", "params": {"top_k": 1}}\n{"prompt": "b"}\n')
    words = ["--prompt-file", str(source), "--top-p", "1", "--top-k", "5"]
    assert run(capsys, *words)[0] == 0
    first, second = engine.made[0].calls[0][2]
    assert (first.temperature, first.top_p, first.top_k) == (0.6, 1.0, 1)
    assert (second.temperature, second.top_p, second.top_k) == (0.6, 1.0, 5)


def test_a_clash_with_the_models_defaults_runs_nothing(
    capsys: pytest.CaptureFixture[str], engine: type[EchoLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "defaults", SamplingParams(max_tokens=4))
    status, records, err = run(capsys, "--prompt", "a", "--min-tokens", "5")
    assert (status, records, engine.made[0].calls) == (2, [], [])
    assert "--prompt number 1, with the model's defaults: min_tokens" in err
    assert engine.made[0].closed


def test_several_completions_and_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "ab", "--n", "2", "--logprobs", "1", "--prompt-logprobs", "1"]
    _, (record,), _ = run(capsys, *words)
    assert [c["text"] for c in record["outputs"]] == ["ab0", "ab1"]
    assert record["text"] == "ab0"
    drawn, other = record["logprobs"][0]
    assert drawn == {"token_id": 97, "logprob": -0.5, "rank": 1, "token": "a"}
    assert other["logprob"] is None  # JSON has no -Infinity
    assert record["prompt_logprobs"][0] is None
    assert len(record["prompt_logprobs"]) == 2


def test_one_failed_request_fails_the_run_but_not_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, records, err = run(capsys, "--prompt", "fail", "--prompt", "fine")
    assert status == 1
    assert (records[0]["finish_reason"], records[0]["error"]) == ("error", "it broke")
    assert "error" not in records[1]
    assert "(1 error, 1 stop)" in err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--prompt", "a", "--block-size", "0"], "block_size must be an integer >= 1"),
        (["--prompt", "a", "--top-p", "7"], "top_p must be a number in (0, 1]"),
        (["--prompt-file", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["--prompt-file", os.devnull], "there are no prompts"),
        (["--prompt", "a", "--out", "no/such/folder/x"], "--out no/such/folder/x: No such file"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], engine: type[EchoLLM], words: list[str], reason: str
) -> None:
    status, records, err = run(capsys, *words)
    assert (status, records, engine.made) == (2, [], [])
    assert err.startswith("error: ")
    assert reason in err


def test_a_bad_line_is_named_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], engine: type[EchoLLM], tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b", "params": {"n": 0}}\n')
    status, _, err = run(capsys, "--prompt-file", str(source))
    assert (status, engine.made) == (2, [])
    assert "line 2: n must be an integer in [1, 16384], got 0." in err


def test_results_do_not_overwrite_their_prompts(
    capsys: pytest.CaptureFixture[str], engine: type[EchoLLM], tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    status, _, err = run(capsys, "--prompt-file", str(source), "--out", str(link))
    assert (status, engine.made) == (2, [])
    assert "is the file that prompts are read from" in err
    assert source.read_text() == '{"prompt": "a"}\n'


def test_an_earlier_result_survives_a_failed_run(
    capsys: pytest.CaptureFixture[str], engine: type[EchoLLM], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("earlier\n")
    engine.raises = KeyboardInterrupt()
    status, _, err = run(capsys, "--prompt", "a", "--out", str(out))
    assert (status, err) == (130, "interrupted\n")
    assert engine.made[0].closed
    assert out.read_text() == "earlier\n"


def test_two_sources_of_prompts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--prompt", "a", "--prompt-file", "b"])
    assert exit_.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_traceback() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); import jaxpaged, test_cli\n"
        "test_cli.EchoLLM.made = []; vars(jaxpaged)['LLM'] = test_cli.EchoLLM\n"
        "sys.exit(test_cli.main(['generate', '--prompt', 'x' * 300000]))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    try:
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writing)
    assert (run.returncode, run.stderr) == (1, "")


def test_the_script_is_a_door_to_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "scripts/generate.py", "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert run.stdout.startswith("usage: jaxpaged generate")
    assert "--gpu-memory-utilization" in run.stdout


def test_version_and_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "jaxpaged", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert run.stdout == f"jaxpaged {jaxpaged.__version__}\n"

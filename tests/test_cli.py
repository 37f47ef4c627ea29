"""`jaxpaged generate` from arguments to JSON lines, on an engine that only repeats its prompts, and
`jaxpaged convert`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxpaged
import jaxpaged.convert
from jaxpaged import batch
from jaxpaged.cli import main
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput
from jaxpaged.progress import progress_bar
from jaxpaged.sampling_params import SamplingParams
from tests.tiny_models import tiny_llama

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Call:
    """Arguments of one `EchoLLM.generate`."""

    prompts: list[dict[str, Any]]
    params: list[SamplingParams]
    priority: list[int]


class EchoLLM:
    """Stands in for LLM: each completion repeats the prompt, one token a character.

    The last prompt finishes first, but where `order` says otherwise.
    """

    made: list[EchoLLM]
    defaults = SamplingParams()
    order: list[int] | None = None
    raises: BaseException | None = None
    """What `generate` ends with once everything in `order` is finished."""

    def __init__(self, model: str, **config: Any) -> None:
        self.model, self.config = model, config
        self.calls: list[Call] = []
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

    def render_chat(self, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
        if messages[-1]["role"] == "nobody":
            raise InvalidRequestError("The chat template refused the messages: nobody", "messages")
        text = f"<{messages[-1]['content']}>"
        return text, [ord(c) for c in text]

    def generate(
        self,
        prompts: list[dict[str, Any]],
        params: list[SamplingParams],
        *,
        use_tqdm: bool,
        priority: list[int],
        on_finished: Callable[[int, RequestOutput], None],
    ) -> list[RequestOutput]:
        self.calls.append(Call(prompts, params, priority))
        for i, prompt in enumerate(prompts):
            if len(prompt.get("prompt", "")) == 13:  # what an engine finds when it adds a request
                where = f"prompt {i}: " if len(prompts) > 1 else ""
                error = InvalidRequestError("13 tokens are too many.", "prompt")
                raise InvalidRequestError(f"{where}{error}", error.param, i) from error
        outputs = [self.answer(p, s) for p, s in zip(prompts, params, strict=True)]
        for i in reversed(range(len(prompts))) if self.order is None else self.order:
            on_finished(i, outputs[i])
        if self.raises is not None:
            raise self.raises
        return outputs

    def answer(self, prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        text = prompt.get("prompt")
        ids = prompt["prompt_token_ids"] if text is None else [ord(c) for c in text]
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
    assert llm.calls[0].params[0].max_tokens == 5
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
        {"messages": [{"role": "user", "content": "one"}], "cache_salt": "t"},
        {"prompt": "two", "cache_salt": "s", "params": {"max_tokens": 2}, "priority": -1},
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
    (call,) = engine.made[0].calls  # one batch, whatever the kinds
    assert call.prompts == [
        {"prompt_token_ids": [ord(c) for c in "<one>"], "cache_salt": "t"},
        {"prompt": "two", "cache_salt": "s"},
        {"prompt_token_ids": [5, 6]},
        {"prompt_token_ids": [ord(c) for c in "<four>"]},
    ]
    assert [p.max_tokens for p in call.params] == [16, 2, 16, 16]
    assert [p.seed for p in call.params] == [9, 9, 9, 4]
    assert call.priority == [0, -1, 0, 0]


def test_a_conversation_that_cannot_be_rendered_runs_nothing(
    capsys: pytest.CaptureFixture[str], engine: type[EchoLLM], tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "nobody", "content": "b"}]}\n')
    status, _, err = run(capsys, "--prompt-file", str(source), "--out", str(out))
    assert (status, engine.made[0].calls) == (2, [])
    assert err == "error: line 3: The chat template refused the messages: nobody\n"
    assert not out.exists()


@pytest.mark.parametrize("others", [0, 1])
def test_what_only_the_model_knows_names_the_prompt(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, others: int
) -> None:
    bad = "thirteen char"
    words = [word for text in [*["fine"] * others, bad] for word in ("--prompt", text)]
    status, records, err = run(capsys, *words)
    assert (status, records) == (2, [])
    assert err == f"error: --prompt number {1 + others}: 13 tokens are too many.\n"
    source = tmp_path / "in.jsonl"
    source.write_text("\n" + '{"prompt": "a"}\n' * others + json.dumps({"prompt": bad}))
    status, records, err = run(capsys, "--prompt-file", str(source))
    assert (status, records) == (2, [])
    assert err == f"error: line {2 + others}: 13 tokens are too many.\n"


def test_a_result_is_written_once_all_before_it_are(
    engine: type[EchoLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    seen = []

    class Watched(batch.ResultWriter):
        def add(self, place: int, output: RequestOutput) -> None:
            super().add(place, output)
            seen.append((place, out.read_text().count("\n") if out.exists() else None))

    monkeypatch.setattr(batch, "ResultWriter", Watched)
    monkeypatch.setattr(engine, "order", [2, 0, 3, 1])
    words = [word for text in "abcd" for word in ("--prompt", text)]
    assert main(["generate", *words, "--out", str(out)]) == 0
    assert seen == [(2, None), (0, 1), (3, 1), (1, 4)]
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == [0, 1, 2, 3]


@pytest.mark.parametrize("file", [True, False])
def test_a_run_that_ends_early_keeps_what_is_done(
    capsys: pytest.CaptureFixture[str], engine: type[EchoLLM], tmp_path: Path, file: bool
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("earlier\n" * 9)
    engine.order, engine.raises = [1, 3, 0], KeyboardInterrupt()
    words = [word for text in "abcd" for word in ("--prompt", text)]
    status, records, err = run(capsys, *words, *(["--out", str(out)] if file else []))
    assert (status, err) == (130, "interrupted\n")
    if file:
        records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["prompt"] for record in records] == ["a", "b"]


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
    first, second = engine.made[0].calls[0].params
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
        (["--prompt", "a", "--beam-width", "65"], "beam_width must be an integer in [1, 64]"),
        (["--prompt", "a", "--beam-width", "2", "--top-k", "7"], "beam search parameter 'top_k'"),
        (["--prompt", "a", "--length-penalty", "2"], "give the run --beam-width"),
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
    engine.order, engine.raises = [], KeyboardInterrupt()
    status, _, err = run(capsys, "--prompt", "a", "--out", str(out))
    assert (status, err) == (130, "interrupted\n")
    assert engine.made[0].closed
    assert out.read_text() == "earlier\n"


def test_a_run_without_results_leaves_no_file(
    capsys: pytest.CaptureFixture[str], engine: type[EchoLLM], tmp_path: Path
) -> None:
    engine.order, engine.raises = [], KeyboardInterrupt()
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    for out in (tmp_path / "out.jsonl", link):
        assert run(capsys, "--prompt", "a", "--out", str(out))[0] == 130
    assert list(tmp_path.iterdir()) == [link]


def test_a_reader_at_the_end_of_a_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        assert main(["generate", "--prompt", "a", "--out", str(pipe)]) == 0
        assert json.loads(reader.communicate(timeout=60)[0])["prompt"] == "a"


def test_none_reaches_the_engine(capsys: pytest.CaptureFixture[str], engine: type[EchoLLM]) -> None:
    words = ["--max-model-len", "none", "--kv-cache-memory-bytes", "none", "--revision", "none"]
    assert run(capsys, "--prompt", "a", *words, "--max-tokens", "none")[0] == 0
    config = {"max_model_len": None, "kv_cache_memory_bytes": None, "revision": None}
    assert engine.made[0].config == config
    assert engine.made[0].calls[0].params[0].max_tokens is None


def test_two_sources_of_prompts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--prompt", "a", "--prompt-file", "b"])
    assert exit_.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


ECHO = (
    "import sys; sys.path.insert(0, 'tests'); import jaxpaged, test_cli\n"
    "test_cli.EchoLLM.made = []; vars(jaxpaged)['LLM'] = test_cli.EchoLLM\n"
    "sys.exit(test_cli.main(['generate', *sys.argv[1:]]))"
)
"""The command as a process of its own, on an `EchoLLM`."""


def shell(tail: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command with `words` and what the shell makes of `tail`, such as a redirection."""
    return subprocess.run(
        ["sh", "-c", f'"$@" {tail}', "sh", sys.executable, "-c", ECHO, *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_reader_that_leaves_is_no_traceback(size: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        run = subprocess.run(
            [sys.executable, "-c", ECHO, "--prompt", "x" * size],
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize(
    ("tail", "name"), [(">/dev/full", "standard output"), ("--out /dev/full", "--out /dev/full")]
)
def test_a_full_disk_is_a_clear_error(tail: str, name: str, size: int) -> None:
    result = shell(tail, "--prompt", "x" * size)
    assert result.returncode == 1
    assert result.stderr == f"error: {name}: No space left on device; 0 results were written.\n"


def test_a_disk_that_fills_up_keeps_what_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["--prompt", "first", "--prompt", "x" * 10_000, "--prompt", "third"]
    # A limit on the size of files, of 2 blocks of 512 bytes, stands for the disk's end.
    limited = ["sh", "-c", 'trap "" XFSZ; ulimit -f 2; exec "$@"', "sh", sys.executable, "-B"]
    result = subprocess.run(
        [*limited, "-c", ECHO, *words, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == f"error: --out {out}: File too large; 1 results were written.\n"
    assert json.loads(out.read_text().splitlines()[0])["prompt"] == "first"


@pytest.mark.parametrize(
    ("tail", "words", "reason"),
    [
        ("<&-", [], "there are no prompts: standard input is closed; use --prompt"),
        ("<&-", ["--prompt-file", "-"], "there are no prompts: standard input is closed"),
        (">&-", ["--prompt", "a"], "standard output is closed; use --out"),
        ("0>/dev/null", [], "standard input: "),
    ],
)
def test_closed_streams_are_clear_errors(tail: str, words: list[str], reason: str) -> None:
    result = shell(tail, *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {reason}")
    assert result.stderr.count("\n") == 1


def test_closed_streams_that_are_not_needed(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = shell("<&- >&- 2>&-", "--prompt", "a", "--out", str(out))
    assert result.returncode == 0
    assert json.loads(out.read_text())["prompt"] == "a"


def test_a_progress_bar_and_results_share_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    engine = EchoLLM.__new__(EchoLLM)
    outputs = [engine.answer({"prompt": text}, SamplingParams()) for text in "ab"]
    with progress_bar(total=2, desc="bar") as bar, batch.ResultWriter(None) as results:
        for place, output in enumerate(outputs):
            results.add(place, output)
            bar.update()
    # A result begins where the cursor went back to, not behind the bar.
    before = [part.rpartition("\r")[2] for part in screen.getvalue().split('{"index"')[:-1]]
    assert before == ["", ""]
    assert screen.getvalue().count("bar:") >= 3


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


class TestConvert:
    def test_arguments_reach_the_converter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        monkeypatch.setattr(
            jaxpaged.convert, "convert", lambda *args, **settings: calls.append((args, settings))
        )
        assert main(["convert", "a", "b"]) == 0
        flags = "--to safetensors --dtype bfloat16 --max-shard-size 1GiB --revision v1"
        assert main(["convert", "a", "b", *flags.split(), "--disable-progress"]) == 0
        defaults = {"to": None, "dtype": "auto", "max_shard_size": "5GB", "revision": None}
        given = {
            "to": "safetensors",
            "dtype": "bfloat16",
            "max_shard_size": "1GiB",
            "revision": "v1",
        }
        assert calls == [
            (("a", "b"), defaults | {"progress": True}),
            (("a", "b"), given | {"progress": False}),
        ]

    def test_from_files_to_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        src = tiny_llama(tmp_path / "src")
        assert main(["convert", str(src), str(tmp_path / "one")]) == 0
        assert "Converting: 100%" in capsys.readouterr().err
        two = str(tmp_path / "two")
        assert main(["convert", str(tmp_path / "one"), two, "--disable-progress"]) == 0
        output = capsys.readouterr()
        assert (output.out, output.err) == ("", "")
        weights = "model.safetensors"
        before, after = (load_file(folder / weights) for folder in (src, tmp_path / "two"))
        assert before.keys() == after.keys()
        for name, value in before.items():
            np.testing.assert_array_equal(value, after[name], strict=True)

    def test_errors(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        src = str(tiny_llama(tmp_path / "src"))
        assert main(["convert", src, src]) == 2
        assert "src exists and is not empty" in capsys.readouterr().err
        assert main(["convert", str(tmp_path / "x" / "y"), str(tmp_path / "dst")]) == 2
        assert "neither an existing path nor a hub id" in capsys.readouterr().err
        with pytest.raises(SystemExit) as caught:
            main(["convert", src, str(tmp_path / "dst"), "--dtype", "int8"])
        assert caught.value.code == 2
        free = shutil.disk_usage(tmp_path)._replace(free=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
        assert main(["convert", src, str(tmp_path / "dst")]) == 1
        assert "error: There is not enough room" in capsys.readouterr().err
        assert os.listdir(tmp_path) == ["src"]

    @pytest.mark.parametrize(
        ("number", "status", "last"),
        [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")],
    )
    @pytest.mark.parametrize("to", ["orbax", "safetensors"])
    def test_signals_while_writing_leave_nothing(
        self, tmp_path: Path, to: str, number: signal.Signals, status: int, last: str
    ) -> None:
        """A real process and a real signal, sent when the first bytes are there."""
        src = tiny_llama(tmp_path / "src", architectures=["Other"])  # so any tensors will do
        large = {f"w{i}": np.zeros((4096, 4096), np.float32) for i in range(8)}  # 512 MiB
        save_file(large, src / "model.safetensors")
        command = [sys.executable, "-m", "jaxpaged", "convert", str(src), str(tmp_path / "dst")]
        command += ["--to", to]
        run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        begun = ".dst.*.partial/" + ("orbax/*" if to == "orbax" else "*")
        while not any(tmp_path.glob(begun)) and time.monotonic() < deadline:
            time.sleep(0.001)
        run.send_signal(number)
        _, errors = run.communicate(timeout=60)
        assert run.returncode == status, errors
        assert errors.endswith(last)
        assert os.listdir(tmp_path) == ["src"]

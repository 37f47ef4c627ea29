"""`jaxpaged generate` on a real engine: what the stand-in of test_cli.py takes for granted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jaxpaged
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.cli import main
from tests.e2e.engine_support import GREEDY, MAX_MODEL_LEN, VOCAB, assert_idle, shared_llm


class Lent:
    """The shared engine in place of a new one, which the command may not close."""

    def __init__(self, model: str, **config: Any) -> None:
        pass

    def __enter__(self) -> jaxpaged.LLM:
        return shared_llm()

    def __exit__(self, *_: object) -> None:
        assert_idle(shared_llm().engine)


@pytest.fixture(autouse=True)
def _lend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(jaxpaged), "LLM", Lent)


def generate(folder: Path, *lines: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """The status, and what is in the file of results."""
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    words = ["--prompt-file", str(source), "--out", str(out), "--disable-progress"]
    status = main(["generate", *words, "--temperature", "0", "--ignore-eos"])
    return status, [
        json.loads(line) for line in out.read_text().splitlines()
    ] if status == 0 else []


def test_beam_searches(tmp_path: Path) -> None:
    llm = shared_llm()
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    own = {"beam_width": 2, "length_penalty": 0.5, "early_stopping": True}
    lines = [{"prompt": "the quick"}, {"prompt": "brown fox", "params": own, "priority": 1}]
    source.write_text("\n".join(map(json.dumps, lines)))
    words = ["--prompt-file", str(source), "--out", str(out), "--disable-progress"]
    words += ["--beam-width", "3", "--early-stopping", "never", "--max-tokens", "5"]
    assert main(["generate", *words, "--temperature", "0.7"]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    common: dict[str, Any] = {"max_tokens": 5, "temperature": 0.7}
    searches = [
        BeamSearchParams(beam_width=3, early_stopping="never", **common),
        BeamSearchParams(**own, **common),
    ]
    wanted = llm.beam_search([line["prompt"] for line in lines], searches, use_tqdm=False)
    for record, want in zip(records, wanted, strict=True):
        shown = [(o["text"], o["token_ids"], o["score"]) for o in record["outputs"]]
        assert shown == [(o.text, o.token_ids, o.score) for o in want.outputs]
        assert [o["cumulative_logprob"] for o in record["outputs"]] == [
            o.cumulative_logprob for o in want.outputs
        ]
        assert record["text"] == want.outputs[0].text


def test_all_kinds_of_prompts_in_one_run(tmp_path: Path) -> None:
    llm = shared_llm()
    chat = [{"role": "user", "content": "hello there"}]
    ids = llm.get_tokenizer().encode("the quick brown fox")
    params = {"max_tokens": 8}
    status, records = generate(
        tmp_path,
        {"messages": chat, "params": params, "cache_salt": "s"},
        {"prompt": "the quick brown fox", "params": params, "priority": 3},
        {"prompt_token_ids": ids, "params": params},
        {"messages": chat, "params": {"max_tokens": 2}},
    )
    assert status == 0
    text, chat_ids = llm.render_chat(chat)
    assert [r["prompt"] for r in records] == [text, "the quick brown fox", None, text]
    assert [r["num_prompt_tokens"] for r in records] == [
        len(chat_ids),
        len(ids),
        len(ids),
        len(chat_ids),
    ]
    (answer,) = llm.chat(chat, GREEDY, use_tqdm=False)
    (completion,) = llm.generate([ids], GREEDY, use_tqdm=False)
    wants = [answer, completion, completion]
    assert [r["token_ids"] for r in records[:3]] == [w.outputs[0].token_ids for w in wants]
    assert records[3]["token_ids"] == answer.outputs[0].token_ids[:2]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"prompt_token_ids": [5] * MAX_MODEL_LEN}, "maximum context length is 128 tokens"),
        ({"prompt_token_ids": [VOCAB]}, "token id 512, outside the model's vocabulary"),
        ({"prompt": ""}, "The prompt is empty"),
        ({"prompt": "a", "params": {"logprobs": 21}}, "more than max_logprobs=20 allows"),
        ({"prompt": "a", "cache_salt": "s" * 2000}, "cache_salt must be"),
        ({"messages": [{"role": "user", "content": 5}]}, "content must be text"),
    ],
)
def test_what_the_model_cannot_take_names_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: dict[str, Any], reason: str
) -> None:
    status, _ = generate(tmp_path, {"prompt": "good"}, line, {"prompt": "good"})
    err = capsys.readouterr().err
    assert status == 2
    assert err.startswith("error: line 2: ")
    assert reason in err
    assert "prompt 1" not in err
    assert not (tmp_path / "out.jsonl").exists()

"""`LLM`: what goes in, what comes out, and how it ends."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpaged import LLM, EngineConfig, RequestOutput, SamplingParams
from jaxpaged.errors import ConfigError, EngineDeadError, InvalidRequestError
from tests.e2e.engine_support import (
    GREEDY,
    PROMPT,
    SETTINGS,
    FaultyRunner,
    assert_idle,
    folder,
    fresh_engine,
    greedy_tokens,
    model_folder,
    shared_llm,
)
from tests.tiny_models import EOS as EOS_TEXT
from tests.tiny_models import tiny_gguf, tiny_llama


def make(model: Path | None = None, **settings: Any) -> LLM:
    """An LLM whose programs come from the cache, or that compiles none."""
    return LLM(config=EngineConfig(model=str(model or model_folder()), **(SETTINGS | settings)))


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    assert_idle(llm.engine)
    return outputs


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outputs]


# ---------------------------------------------------------------- prompts and results


def test_every_form_of_prompt() -> None:
    llm = shared_llm()
    text = "the quick brown fox"
    ids = llm.get_tokenizer().encode(text)
    want = greedy_tokens(tuple(ids))
    forms: list[tuple[Any, str | None]] = [
        (text, text),
        ([text], text),
        ({"prompt": text}, text),
        (ids, None),
        ([ids], None),
        (tuple(ids), None),
        (np.array(ids), None),
        ([np.array(ids)], None),
        (np.array([ids]), None),
        ([{"prompt_token_ids": ids, "cache_salt": "x"}], None),
    ]
    for prompt, shown in forms:
        (output,) = generate(llm, prompt)
        assert output.outputs[0].token_ids == want
        assert (output.prompt, output.prompt_token_ids) == (shown, ids)
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_results_come_in_the_order_of_the_prompts() -> None:
    """Short ones end first, which must not show."""
    llm = shared_llm()
    prompts = [[20 + i, 30, 31] for i in range(20)]
    params = [dataclasses.replace(GREEDY, max_tokens=1 + (7 * i) % 11) for i in range(20)]
    outputs = generate(llm, prompts, params)
    assert [out.prompt_token_ids for out in outputs] == prompts
    assert [len(ids) for ids in ids_of(outputs)] == [p.max_tokens for p in params]
    for prompt, ids in zip(prompts, ids_of(outputs), strict=True):
        assert ids == greedy_tokens(tuple(prompt), 11)[: len(ids)]
    assert all(out.finished for out in outputs)
    assert len({out.request_id for out in outputs}) == 20


def test_no_params_mean_the_defaults() -> None:
    llm = shared_llm()
    assert llm.default_sampling_params() == SamplingParams()
    (output,) = generate(llm, [PROMPT], None)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_two_thousand_prompts() -> None:
    """SC-11: eight at a time, one step each."""
    llm = shared_llm()
    before = llm.stats()
    outputs = generate(
        llm,
        [[11 + i % 300, 12, 13] for i in range(2000)],
        dataclasses.replace(GREEDY, max_tokens=1),
    )
    assert len(outputs) == 2000 and all(len(ids) == 1 for ids in ids_of(outputs))
    after = llm.stats()
    assert after.generation_tokens - before.generation_tokens == 2000
    assert after.steps - before.steps <= 2000 // 8 + 1


def test_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = shared_llm()
    for policy, order in (("priority", [2, 0, 3, 1]), ("fcfs", [0, 1, 2, 3])):
        engine = fresh_engine(policy=policy, max_num_seqs=1)
        monkeypatch.setattr(llm, "engine", engine)
        ended: list[int] = []
        step = engine.step

        def recording(
            step: Any = step, ended: list[int] = ended, **options: Any
        ) -> list[RequestOutput]:
            outputs: list[RequestOutput] = step(**options)
            ended.extend(out.prompt_token_ids[0] for out in outputs if out.finished)
            return outputs

        monkeypatch.setattr(engine, "step", recording)
        generate(llm, [[40], [41], [42], [43]], priority=[1, 9, -5, 1])
        assert [token - 40 for token in ended] == order


# ---------------------------------------------------------------- chat

MESSAGES = [{"role": "user", "content": "the dog"}]
RENDERED = f"<|begin|><|user|>\nthe dog{EOS_TEXT}\n<|assistant|>\n"


def test_chat() -> None:
    llm = shared_llm()
    tokenizer = llm.get_tokenizer()
    (one,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    assert one.prompt == RENDERED
    assert one.prompt_token_ids == tokenizer.encode(RENDERED, add_special_tokens=False)
    assert one.outputs[0].token_ids == greedy_tokens(tuple(one.prompt_token_ids))
    (again,) = llm.generate(RENDERED, GREEDY, use_tqdm=False)
    assert again.prompt_token_ids == one.prompt_token_ids, "one BOS on either road (CH-06)"
    other = [*MESSAGES, {"role": "assistant", "content": "sleeps"}, MESSAGES[0]]
    params = [GREEDY, dataclasses.replace(GREEDY, max_tokens=3)]
    batch = llm.chat([MESSAGES, other], params, use_tqdm=False)
    assert batch[0].outputs == one.outputs
    assert "sleeps" in (batch[1].prompt or "") and len(batch[1].outputs[0].token_ids) == 3


def test_chat_options() -> None:
    llm = shared_llm()

    def prompt(messages: Any, **options: Any) -> str:
        (out,) = llm.chat(messages, GREEDY, use_tqdm=False, **options)
        assert out.prompt is not None
        return out.prompt

    assert prompt(MESSAGES, add_generation_prompt=False) == RENDERED.removesuffix("<|assistant|>\n")
    begun = [*MESSAGES, {"role": "assistant", "content": "It sl"}]
    assert prompt(begun, add_generation_prompt=False, continue_final_message=True).endswith("It sl")
    template = "{{ messages[0]['content'] }} {{ mood }} {{ tools | length }}"
    rendered = prompt(
        MESSAGES,
        chat_template=template,
        chat_template_kwargs={"mood": "calm"},
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    assert rendered == "the dog calm 1"


def test_chat_errors() -> None:
    llm = shared_llm()
    with pytest.raises(InvalidRequestError, match="conversation 1"):
        llm.chat([MESSAGES, [{"role": "user"}]], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="1 sampling_params.*2 prompts"):
        llm.chat([MESSAGES, MESSAGES], [GREEDY], use_tqdm=False)
    assert_idle(llm.engine)


# ---------------------------------------------------------------- progress and interrupts


def test_the_progress_bar_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    llm = shared_llm()
    llm.generate([PROMPT] * 3, GREEDY, use_tqdm=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Processed prompts" in err and "3/3" in err
    assert "input:" in err and "output:" in err and "toks/s" in err
    llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("method", "number"), [("pack", 0), ("launch", 1), ("launch", 5), ("read", 0), ("read", 4)]
)
def test_an_interrupt_discards_the_call_and_nothing_else(
    method: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = shared_llm()
    engine = llm.engine

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "runner", FaultyRunner(engine.runner, method, number, interrupt))  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[40 + i, 50] for i in range(30)], GREEDY, use_tqdm=False)
    assert_idle(engine)
    assert engine.step() == []
    assert ids_of(generate(llm, [PROMPT])) == [greedy_tokens(tuple(PROMPT))]
    assert llm.reset_prefix_cache()


def test_failed_requests_are_results_not_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = shared_llm()
    engine = llm.engine

    def fail() -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(engine, "runner", FaultyRunner(engine.runner, "read", 2, fail))  # type: ignore[arg-type]
    prompts = [[40 + i, 50, 51] for i in range(12)]
    outputs = generate(llm, prompts)
    reasons = [out.outputs[0].finish_reason for out in outputs]
    assert reasons == ["error"] * 8 + ["length"] * 4
    assert all("injected" in (out.outputs[0].error or "") for out in outputs[:8])
    assert ids_of(outputs[8:]) == [greedy_tokens(tuple(prompt)) for prompt in prompts[8:]]


# ---------------------------------------------------------------- life and death


def test_close_gives_the_memory_back() -> None:
    shared_llm()
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    with make() as llm:
        held = sum(array.nbytes for array in jax.live_arrays()) - before
        pools = 2 * 2 * 100 * 4 * 2 * 16 * 4
        assert held > pools
        (output,) = generate(llm, [PROMPT])
        llm.engine.add_request("running", PROMPT, GREEDY)
        llm.engine.step()
    assert output.outputs[0].token_ids == greedy_tokens(tuple(PROMPT))
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) <= before
    for call in (
        lambda: llm.generate([PROMPT], GREEDY),
        lambda: llm.chat(MESSAGES, GREEDY),
        lambda: llm.engine.step(),
        lambda: llm.engine.add_request("x", PROMPT),
    ):
        with pytest.raises(EngineDeadError, match="closed"):
            call()
    llm.close()
    assert llm.stats().requests_finished["abort"] == 1


def test_three_models_in_one_process() -> None:
    first = shared_llm()
    second_folder = tiny_llama(folder("second"), seed=1)
    third_folder = tiny_llama(folder("third"), seed=2)
    with make(second_folder) as second, make(third_folder) as third:
        wants = [ids_of(generate(llm, [PROMPT])) for llm in (first, second, third)]
        assert wants[0] != wants[1] != wants[2] != wants[0]
        for i, llm in enumerate((first, second, third)):
            llm.engine.add_request(str(i), PROMPT, GREEDY)
        done: dict[str, RequestOutput] = {}
        while len(done) < 3:
            for llm in (third, first, second):
                done |= {out.request_id: out for out in llm.engine.step() if out.finished}
        assert [[done[str(i)].outputs[0].token_ids] for i in range(3)] == wants
    assert ids_of(generate(first, [PROMPT])) == wants[0]


def test_settings_by_name() -> None:
    with LLM(model_folder(), enforce_eager=True, **SETTINGS) as llm:  # type: ignore[arg-type]
        assert llm.config.block_size == 4 and llm.config.model == str(model_folder())
    with pytest.raises(TypeError, match="config"):
        LLM("x", config=EngineConfig())
    with pytest.raises(TypeError, match="config"):
        LLM(config=EngineConfig(), block_size=4)


# ---------------------------------------------------------------- models


def test_skip_tokenizer_init() -> None:
    bare = folder("no tokenizer")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(model_folder() / name, bare / name)
    with make(bare, skip_tokenizer_init=True, enforce_eager=True) as llm:
        (output,) = generate(llm, [PROMPT])
        assert output.outputs[0].token_ids == greedy_tokens(tuple(PROMPT))
        assert output.outputs[0].text == ""
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            llm.get_tokenizer()
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            llm.chat(MESSAGES, GREEDY)
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            llm.generate("text", GREEDY)


def test_dummy_weights_come_from_the_seed() -> None:
    bare = folder("config only")
    shutil.copy(model_folder() / "config.json", bare / "config.json")
    drawn = []
    for seed in (0, 0, 1):
        settings = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
        with make(bare, seed=seed, **settings) as llm:
            weights = llm.engine.runner._weights
            assert weights is not None
            largest = max(weights.layers[0], key=lambda leaf: leaf.size)  # norms are all ones
            drawn.append(np.array(largest))
            (output,) = generate(llm, [PROMPT])
            assert len(output.outputs[0].token_ids) == 8
    assert (drawn[0] == drawn[1]).all() and not (drawn[0] == drawn[2]).all()


def test_gguf_and_folder_give_the_same_tokens() -> None:
    path = tiny_gguf(folder("gguf") / "tiny.gguf")
    with make(path) as llm:
        prompts = [PROMPT, [60, 61], [99] * 70]
        assert ids_of(generate(llm, prompts)) == [greedy_tokens(tuple(p)) for p in prompts]
        (text,) = generate(llm, ["the dog"])
        assert text.outputs[0].text == llm.get_tokenizer().decode(text.outputs[0].token_ids)


GENERATION = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "max_new_tokens": 5,
    "eos_token_id": 1,
    "do_sample": True,
}


def folder_with_defaults(name: str, fields: dict[str, Any]) -> Path:
    path = folder(name)
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder() / file, path / file)
    (path / "generation_config.json").write_text(json.dumps(fields))
    return path


def test_defaults_come_from_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """LD-14: they are logged once, used where no parameters are given, and never mixed in."""
    path = folder_with_defaults("defaults", GENERATION)
    with (
        caplog.at_level(logging.INFO, logger="jaxpaged"),
        make(path, enforce_eager=True) as llm,
    ):
        want = SamplingParams(
            temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05, max_tokens=5
        )
        assert llm.default_sampling_params() == want
        lines = [r.getMessage() for r in caplog.records if "generation_config" in r.getMessage()]
        assert len(lines) == 1
        for part in ("temperature=0.6", "top_p=0.9", "top_k=20", "max_tokens=5", '"none"'):
            assert part in lines[0]
        (defaults,) = generate(llm, [PROMPT], None)
        assert len(defaults.outputs[0].token_ids) <= 5
        explicit = SamplingParams(temperature=0.0, top_p=1.0, max_tokens=8, ignore_eos=True)
        assert ids_of(generate(llm, [PROMPT], explicit)) == [greedy_tokens(tuple(PROMPT))]
    with make(path, generation_config="none", enforce_eager=True) as llm:
        assert llm.default_sampling_params() == SamplingParams()
        assert llm.engine.intake.limits.eos_token_ids == (1,), "EOS is no sampling default"


def test_an_unusable_default_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    path = folder_with_defaults("bad defaults", {"temperature": -3, "top_k": 5})
    with make(path, enforce_eager=True) as llm:
        assert llm.default_sampling_params() == SamplingParams(top_k=5)
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "generation_config.json" in warning.getMessage() and "-3" in warning.getMessage()


# ---------------------------------------------------------------- statistics


def test_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = shared_llm()
    monkeypatch.setattr(llm, "engine", fresh_engine(num_blocks=50))
    prompt = list(range(20, 60))
    generate(llm, [prompt] * 3, dataclasses.replace(GREEDY, max_tokens=20))
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert (stats.num_blocks, stats.block_size, stats.peak_running) == (50, 4, 3)
    assert stats.generation_tokens == 60
    assert stats.prefix_query_tokens == 120
    # Equal prompts of one wave are computed once.
    assert (stats.prefix_hit_tokens, stats.prompt_tokens) == (2 * 40, 40)
    assert 20 <= stats.steps <= 24
    assert 0 < stats.peak_blocks_used <= 49
    assert 0.0 < stats.kv_waste < 0.5
    assert (stats.preemptions, stats.recomputed_tokens, stats.failed_steps) == (0, 0, 0)
    assert stats.requests_finished == {"length": 3}
    generate(llm, [[60 + i] * 20 for i in range(8)], dataclasses.replace(GREEDY, max_tokens=20))
    assert llm.stats().preemptions > 0
    llm.engine.add_request("a", prompt, GREEDY)
    llm.engine.step()
    assert llm.stats().num_running == 1 and 0.0 < llm.stats().kv_usage <= 1.0
    assert not llm.reset_prefix_cache()
    llm.engine.abort("a")
    llm.engine.step()
    assert llm.reset_prefix_cache()
    (cold,) = generate(llm, [prompt])
    assert cold.num_cached_tokens == 0


# ---------------------------------------------------------------- beside the engine, and its log


def test_generate_does_not_swallow_the_requests_of_others() -> None:
    llm = shared_llm()
    llm.engine.add_request("mine", PROMPT, GREEDY)
    with pytest.raises(InvalidRequestError, match="unfinished requests"):
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
    finished = []
    while llm.engine.has_unfinished_requests():
        finished += [output for output in llm.engine.step() if output.finished]
    assert [output.request_id for output in finished] == ["mine"]
    assert ids_of(generate(llm, [PROMPT])) == ids_of(finished)


def test_a_length_beyond_the_model_is_refused_before_the_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("jaxpaged.device.model_loader.load_parameters", never)
    with pytest.raises(ConfigError, match="max_model_len=257 is beyond the model's 256 positions"):
        make(max_model_len=257)


def test_the_memory_plan_is_shown_where_nobody_set_up_logging() -> None:
    """In a process of its own: pytest has handlers on the root logger."""
    code = (
        "import sys; from jaxpaged import LLM; "
        "LLM(sys.argv[1], max_model_len=64, num_gpu_blocks_override=9, enforce_eager=True)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(model_folder())],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert "Memory plan:" in run.stderr
    assert "Maximum concurrency for 64 tokens per request: 2.00x" in run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {1, 2}], ids=str)
def test_what_is_no_prompt(prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompts must be a prompt"):
        shared_llm().generate(prompts, GREEDY, use_tqdm=False)


def test_what_is_no_conversation() -> None:
    llm = shared_llm()
    for messages in (None, "hi", {"role": "user", "content": "hi"}):
        with pytest.raises(InvalidRequestError, match="messages must be a conversation"):
            llm.chat(messages, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs must not hold 'tools'"):
        llm.render_chat([{"role": "user", "content": "hi"}], chat_template_kwargs={"tools": []})


def test_results_are_told_as_they_end() -> None:
    told: dict[int, RequestOutput] = {}
    lengths = [9, 2, 5]
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in lengths]
    outputs = generate(shared_llm(), [PROMPT] * 3, params, on_finished=told.__setitem__)
    assert list(told) == [1, 2, 0], "the shortest first"
    assert all(told[i] is output for i, output in enumerate(outputs))


def test_errors_carry_the_index_of_the_prompt() -> None:
    with pytest.raises(InvalidRequestError, match="prompt 1: ") as error:
        generate(shared_llm(), [PROMPT, [9999]])
    assert error.value.index == 1

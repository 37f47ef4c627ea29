"""A refused request leaves no trace in the engine, online and offline."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.engine import Engine
from jaxpaged.errors import InvalidRequestError
from tests.e2e.engine_support import (
    GREEDY,
    PROMPT,
    assert_idle,
    drain,
    fresh_engine,
    greedy_tokens,
    run_one,
    shared_llm,
)
from tests.test_intake import BAD_OPTIONS, BAD_PARAMS, BAD_PROMPTS

CONTEXT_ERRORS = [name for name in BAD_PROMPTS if "context" in name]


def bad_requests() -> list[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """(name, prompt, params, options); those about the context are made longer than ours."""
    cases: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = []
    for name, (prompt, _) in BAD_PROMPTS.items():
        if name in CONTEXT_ERRORS:
            prompt = list(prompt) * 9 if isinstance(prompt, list) else prompt * 9
        cases.append((name, prompt, {}, {}))
    for name, (fields, _, _) in BAD_PARAMS.items():
        if "min_tokens" in fields:
            fields = {"min_tokens": 127, "max_tokens": 200}
        cases.append((name, PROMPT, fields, {}))
    cases += [(name, PROMPT, {}, options) for name, (options, _, _) in BAD_OPTIONS.items()]
    return cases


def refuse_all(engine: Engine) -> None:
    for name, prompt, fields, options in bad_requests():
        with pytest.raises(InvalidRequestError) as caught:
            engine.add_request("bad", prompt, SamplingParams(**fields), **options)
        assert caught.value.param, name
        assert not any(state.startswith("bad") for state in engine._states), name


def test_nothing_is_scheduled_for_bad_requests() -> None:
    engine = fresh_engine()
    refuse_all(engine)
    assert_idle(engine)
    stats = engine.stats()
    assert (stats.steps, stats.prefix_query_tokens, stats.requests_finished) == (0, 0, {})
    assert engine.step() == []
    assert run_one(engine, PROMPT, GREEDY).outputs[0].token_ids == greedy_tokens(tuple(PROMPT))


def test_bad_requests_among_running_ones() -> None:
    engine = fresh_engine()
    engine.add_request("good", PROMPT, GREEDY)
    steps = 0
    while engine.has_unfinished_requests():
        refuse_all(engine)
        outputs = engine.step()
        steps += 1
    assert steps == 8
    assert outputs[0].outputs[0].token_ids == greedy_tokens(tuple(PROMPT))
    assert engine.stats().requests_finished == {"length": 1}


def test_bad_requests_offline() -> None:
    """One bad prompt refuses the whole call before anything runs, and says which it is."""
    llm = shared_llm()
    (before,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    steps = llm.stats().steps
    for name, prompt, fields, options in bad_requests():
        if options or prompt is None or isinstance(prompt, (bytes, int, set, dict)):
            continue
        if not isinstance(prompt, (str, list)):
            continue
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate([PROMPT, prompt], SamplingParams(**fields), use_tqdm=False)
        at = 0 if prompt is PROMPT else 1
        assert str(caught.value).startswith(f"prompt {at}: "), name
        assert_idle(llm.engine)
    assert llm.stats().steps == steps
    (after,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert after.outputs == before.outputs


def test_a_request_id_in_use() -> None:
    engine = fresh_engine()
    engine.add_request("same", PROMPT, GREEDY)
    with pytest.raises(InvalidRequestError, match="request_id 'same' is in use") as caught:
        engine.add_request("same", [5], GREEDY)
    assert caught.value.param == "request_id"
    done = drain(engine)
    assert done["same"].outputs[0].token_ids == greedy_tokens(tuple(PROMPT))
    engine.add_request("same", PROMPT, GREEDY)
    assert drain(engine)["same"].finished


@pytest.mark.parametrize("order", [("r", "0_r"), ("0_r", "r"), ("r", "1_r"), ("1_r", "r")])
def test_request_ids_of_samples_never_clash_with_others(order: tuple[str, str]) -> None:
    engine = fresh_engine()
    for request_id in order:
        n = 2 if request_id == "r" else 1
        engine.add_request(request_id, PROMPT, SamplingParams(n=n, seed=1, max_tokens=4))
    done = drain(engine)
    assert [len(done[key].outputs) for key in ("r", order[order[0] == "r"])] == [2, 1]
    assert set(engine.stats().requests_finished) <= {"length", "stop"}


def test_text_without_tokenizer() -> None:
    engine = fresh_engine(tokenizer=False)
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        engine.add_request("text", "some text", GREEDY)
    with pytest.raises(InvalidRequestError, match="stop needs a tokenizer"):
        engine.add_request("stop", PROMPT, SamplingParams(stop="x"))
    output = run_one(engine, PROMPT, dataclasses.replace(GREEDY, logprobs=1)).outputs[0]
    assert (output.token_ids, output.text) == (greedy_tokens(tuple(PROMPT)), "")
    assert output.logprobs is not None
    assert all(e.decoded_token is None for entry in output.logprobs for e in entry.values())


@pytest.mark.parametrize(
    ("params", "count"),
    [([GREEDY], 1), ([GREEDY] * 3, 3), ([], 0)],
)
def test_a_list_of_params_of_the_wrong_length(params: list[SamplingParams], count: int) -> None:
    llm: LLM = shared_llm()
    with pytest.raises(InvalidRequestError, match=f"{count} sampling_params.*2 prompts") as caught:
        llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert caught.value.param == "sampling_params"
    with pytest.raises(InvalidRequestError, match="3 priorities.*2 prompts") as caught:
        llm.generate([PROMPT, PROMPT], GREEDY, priority=[1, 2, 3], use_tqdm=False)
    assert caught.value.param == "priority"


@pytest.mark.parametrize("params", [{"max_tokens": 4}, "greedy", 5, ["x"], [{"max_tokens": 4}]])
def test_params_of_another_type_offline(params: Any) -> None:
    llm = shared_llm()
    with pytest.raises(InvalidRequestError, match="SamplingParams") as caught:
        llm.generate([PROMPT], params, use_tqdm=False)
    assert caught.value.param == "sampling_params"
    assert_idle(llm.engine)

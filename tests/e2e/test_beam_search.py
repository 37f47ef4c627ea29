"""Beam search in the engine: what transformers finds, whatever runs beside it and however the
blocks are shared, taken away and given back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged import LLM, BeamSearchParams, SamplingParams
from jaxpaged.engine import Engine
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import CompletionOutput, RequestOutput
from tests.beams import HAS_TORCH, Floats, Network, run_search, stored_networks
from tests.e2e.engine_support import FaultyRunner, assert_idle
from tests.e2e.support import engine_over, small_llm
from tests.zoo.case import all_cases, write_case

WIDE: dict[str, Any] = {
    "max_num_seqs": 40,
    "decode_buckets": (40,),
    "num_gpu_blocks_override": 500,
}
"""On top of `SMALL`: room for a search of width 33 and for others beside it."""
LLAMA = "llama-theta"
MODELS = (LLAMA, "gemma2", "opt", "mixtral", "deepseek-v3-one-group")
TOLERANCE = {"rel": 1e-5, "abs": 1e-4}
"""Of scores, which a penalty below 0 makes large."""
EOS = 1
SMALL_POOL = {"gemma2": 130, "opt": 55}
"""Blocks that are too few for all searches at once; Gemma has three tables of them."""
PROMPT = [11, 12, 13, 14, 15, 16, 17]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a checkpoint of tests/zoo when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            (case,) = (case for case in all_cases() if case.name == name)
            made[name] = write_case(tmp_path_factory.mktemp("beams") / name, case)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def llm(folder_of: Callable[[str], Path]) -> Iterator[LLM]:
    with small_llm(folder_of(LLAMA), **WIDE) as llm:
        yield llm
        assert llm.stats().compiles_after_warmup == 0


def told(output: RequestOutput) -> list[tuple[Any, ...]]:
    """All that a search has found, to the last bit."""
    return [
        (c.token_ids, c.score, c.cumulative_logprob, c.text, c.finish_reason, c.stop_reason)
        for c in output.outputs
    ]


def check_form(output: RequestOutput, params: BeamSearchParams) -> None:
    """What holds for every finished search that was not cut off."""
    found = output.outputs
    assert output.finished
    assert [c.index for c in found] == list(range(params.beam_width))
    assert [c.score for c in found] == sorted((c.score or 0.0 for c in found), reverse=True)
    assert len({tuple(c.token_ids) for c in found}) == len(found)
    ending = {EOS, *(params.stop_token_ids or ())}
    for c in found:
        assert c.score is not None
        assert c.cumulative_logprob is not None
        assert c.score * len(c.token_ids) ** params.length_penalty == pytest.approx(
            c.cumulative_logprob, rel=1e-5
        )
        last = c.token_ids[-1]
        assert c.finish_reason == ("stop" if last in ending else "length")
        assert c.stop_reason == (last if last in ending - {EOS} else None)
        assert not ending & set(c.token_ids[:-1])
        if c.finish_reason == "length":
            assert len(c.token_ids) == params.max_tokens


def check(output: RequestOutput, wanted: Network) -> None:
    found = output.outputs
    assert [c.token_ids for c in found] == wanted.token_ids
    assert [c.score for c in found] == pytest.approx(wanted.scores, **TOLERANCE)


def search(engine: Engine, searches: Sequence[Network]) -> list[RequestOutput]:
    """All of them at once, through a bare engine."""
    for i, one in enumerate(searches):
        engine.add_request(str(i), one.prompt, one.beam_params)
    done = drain(engine)
    return [done[str(i)] for i in range(len(searches))]


def drain(engine: Engine, *, max_steps: int = 2000) -> dict[str, RequestOutput]:
    """Step to the end. A search is reported once, and all blocks are free then."""
    done: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            assert_idle(engine)
            return done
        for output in engine.step():
            assert output.request_id not in done
            if output.finished:
                done[output.request_id] = output
    raise AssertionError(f"still busy after {max_steps} steps: {engine.stats()}")


# ------------------------------------------------------------------ transformers


@pytest.mark.parametrize("name", MODELS)
def test_the_hypotheses_of_transformers(
    name: str, folder_of: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    """Widths 2, 4, 8, 12 and 33, every penalty and way of stopping, all in one call."""
    searches = stored_networks(name)
    assert {s.beam_params.beam_width for s in searches} == {2, 4, 8, 12, 33}
    if name == LLAMA:
        check_all(request.getfixturevalue("llm"), searches)
    else:
        with small_llm(folder_of(name), **WIDE) as llm:
            check_all(llm, searches)
            check_small_pool(llm, searches, SMALL_POOL.get(name, 90))


def check_all(llm: LLM, searches: list[Network]) -> None:
    params = [s.beam_params for s in searches]
    for output, one in zip(
        llm.beam_search([s.prompt for s in searches], params, use_tqdm=False), searches, strict=True
    ):
        check(output, one)
        check_form(output, one.beam_params)


def check_small_pool(llm: LLM, searches: list[Network], num_blocks: int) -> None:
    """Some are put back and recomputed; windows, latent caches and experts do not mind."""
    narrow = [s for s in searches if s.beam_params.beam_width < 33]
    engine = engine_over(llm, num_blocks=num_blocks)
    for output, one in zip(search(engine, narrow), narrow, strict=True):
        check(output, one)
    assert engine.stats().preemptions > 0


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch, the oracle")
@pytest.mark.parametrize("name", MODELS)
def test_the_stored_hypotheses_are_those_of_transformers(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    from tests.e2e import oracle

    check_stored(oracle.from_folder(folder_of(name)), stored_networks(name), [EOS])


def check_stored(model: Any, searches: list[Network], eos: Sequence[int]) -> None:
    from tests.beam_oracle import beams

    for one in searches:
        params = one.beam_params
        found = beams(
            model,
            one.prompt,
            width=params.beam_width,
            max_tokens=one.params["max_tokens"],
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos=sorted({*eos, *(params.stop_token_ids or ())}),
        )
        assert [tokens for tokens, _ in found] == one.token_ids
        assert [score for _, score in found] == pytest.approx(one.scores, **TOLERANCE)


@pytest.mark.slow
def test_smollm2_finds_the_hypotheses_of_transformers(smollm2_llm: LLM) -> None:
    searches = stored_networks("smollm2")
    assert {s.beam_params.beam_width for s in searches} == {2, 4, 8, 12}
    params = [s.beam_params for s in searches]
    prompts = [s.prompt for s in searches]
    ended = 0
    for output, one in zip(
        smollm2_llm.beam_search(prompts, params, use_tqdm=False), searches, strict=True
    ):
        assert [c.token_ids for c in output.outputs] == one.token_ids
        assert [c.score for c in output.outputs] == pytest.approx(one.scores, **TOLERANCE)
        ended += sum(c.finish_reason == "stop" for c in output.outputs)
    assert ended > 5, "no hypothesis came to its end-of-sequence token"


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCH, reason="needs torch, the oracle")
def test_the_stored_hypotheses_of_smollm2(smollm2_llm: LLM, smollm2_path: Path) -> None:
    from tests.e2e import oracle

    eos = smollm2_llm.engine.intake.limits.eos_token_ids
    check_stored(oracle.from_gguf(smollm2_path), stored_networks("smollm2")[:2], eos)


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch, the oracle")
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(
    temperature: float, llm: LLM, folder_of: Callable[[str], Path]
) -> None:
    from tests.beam_oracle import predictions
    from tests.e2e import oracle

    model = oracle.from_folder(folder_of(LLAMA))

    def cooled(sequences: list[list[int]]) -> Floats:
        raw = predictions(model, sequences).astype(np.float64) / temperature
        return (raw - np.log(np.exp(raw).sum(axis=-1, keepdims=True))).astype(np.float32)

    params = BeamSearchParams(beam_width=4, max_tokens=12, temperature=temperature)
    (output,) = llm.beam_search([PROMPT], params, use_tqdm=False)
    wanted = run_search(params, PROMPT, cooled, eos=[EOS])
    assert [c.token_ids for c in output.outputs] == [h.token_ids for h in wanted]
    scores = [c.score for c in output.outputs]
    assert scores == pytest.approx([h.score for h in wanted], **TOLERANCE)
    (plain,) = llm.beam_search(
        [PROMPT], dataclasses.replace(params, temperature=0.0), use_tqdm=False
    )
    assert [c.score for c in plain.outputs] != pytest.approx(scores, abs=0.01)


def test_temperatures_0_and_1_are_the_model_itself(llm: LLM) -> None:
    params = [
        BeamSearchParams(beam_width=3, max_tokens=8, temperature=temperature)
        for temperature in (0.0, 1.0)
    ]
    one, two = llm.beam_search([PROMPT, PROMPT], params, use_tqdm=False)
    assert told(one) == told(two)


def test_one_beam_is_greedy_with_a_score(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    (ours,) = llm.beam_search([PROMPT], params, use_tqdm=False)[0].outputs
    (theirs,) = llm.generate([PROMPT], greedy, use_tqdm=False)[0].outputs
    assert ours.token_ids == theirs.token_ids
    assert ours.text == theirs.text
    assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)
    assert ours.score == pytest.approx((theirs.cumulative_logprob or 0.0) / 12, abs=1e-5)


# ------------------------------------------------------------------ blocks


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    """Each stored search by itself, on an empty cache."""
    outputs = []
    for one in stored_networks(LLAMA):
        assert llm.reset_prefix_cache()
        outputs += llm.beam_search([one.prompt], one.beam_params, use_tqdm=False)
    return outputs


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
def test_searches_together_find_what_each_finds_alone(
    llm: LLM, alone: list[RequestOutput], caching: bool, overlap: bool
) -> None:
    engine = engine_over(llm, async_scheduling=overlap, enable_prefix_caching=caching)
    searches = stored_networks(LLAMA)
    assert [told(o) for o in search(engine, searches)] == [told(o) for o in alone]
    assert engine.stats().peak_running > 33


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("num_blocks", [60, 90])
def test_a_small_pool_changes_nothing(
    llm: LLM, alone: list[RequestOutput], caching: bool, num_blocks: int
) -> None:
    """Searches are put back and recomputed, shared parts and all."""
    pairs = [
        (one, output)
        for one, output in zip(stored_networks(LLAMA), alone, strict=True)
        if one.beam_params.beam_width < 33
    ]
    engine = engine_over(llm, num_blocks=num_blocks, enable_prefix_caching=caching)
    outputs = search(engine, [one for one, _ in pairs])
    assert [told(o) for o in outputs] == [told(o) for _, o in pairs]
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    assert sum(o.num_preemptions for o in outputs) > 0


def test_a_search_too_large_for_the_pool_ends_with_numbers(llm: LLM) -> None:
    engine = engine_over(llm, num_blocks=20)
    engine.add_request("wide", PROMPT, BeamSearchParams(beam_width=33, max_tokens=60))
    engine.add_request("small", PROMPT, BeamSearchParams(beam_width=2, max_tokens=8))
    done = drain(engine)
    wide = done["wide"].outputs
    assert {c.finish_reason for c in wide} == {"error"}
    assert "33 beams" in (wide[0].error or "")
    assert "19" in (wide[0].error or "")
    assert {c.finish_reason for c in done["small"].outputs} == {"length"}


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_beside_ordinary_requests(llm: LLM, alone: list[RequestOutput], caching: bool) -> None:
    """Arriving by turns, in a pool that is too small for all of them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 512, n).tolist() for n in (3, 20, 50, 7, 33, 1, 12, 64)]
    given = [
        SamplingParams(temperature=t, n=n, seed=5, max_tokens=20, ignore_eos=True, logprobs=1)
        for t, n in zip([0.0, 0.9] * 4, [1, 1, 3, 2, 1, 2, 1, 1], strict=True)
    ]
    plain = []
    for prompt, params in zip(prompts, given, strict=True):
        assert llm.reset_prefix_cache()
        plain += llm.generate([prompt], params, use_tqdm=False)
    searches = [s for s in stored_networks(LLAMA) if s.beam_params.beam_width in (4, 8, 12)]
    wanted = [o for o in alone if len(o.outputs) in (4, 8, 12)]
    engine = engine_over(llm, num_blocks=80, enable_prefix_caching=caching)
    done: dict[str, RequestOutput] = {}
    for i, (prompt, params) in enumerate(zip(prompts, given, strict=True)):
        engine.add_request(f"plain {i}", prompt, params)
        if i < len(searches):
            engine.add_request(f"beams {i}", searches[i].prompt, searches[i].beam_params)
        for _ in range(2):
            done |= {o.request_id: o for o in engine.step() if o.finished}
    done |= drain(engine)
    assert engine.stats().preemptions > 0
    for i, one in enumerate(wanted):
        assert told(done[f"beams {i}"]) == told(one)
    for i, two in enumerate(plain):
        assert [c.token_ids for c in done[f"plain {i}"].outputs] == [
            c.token_ids for c in two.outputs
        ]
        assert [c.logprobs for c in done[f"plain {i}"].outputs] == [c.logprobs for c in two.outputs]


@pytest.mark.parametrize("width", [1, 2, 5, 33])
@pytest.mark.parametrize("prompt_len", [1, 7, 8, 30])
def test_one_token_a_beam_and_step(llm: LLM, width: int, prompt_len: int) -> None:
    """The prompt once, by one beam; then each beam one token a step, however blocks are shared."""
    prompt = np.random.default_rng(prompt_len).integers(3, 512, prompt_len).tolist()
    params = BeamSearchParams(beam_width=width, max_tokens=9, ignore_eos=True)
    engine = engine_over(llm, enable_prefix_caching=False)
    tokens = count_tokens(engine)
    engine.add_request("one", prompt, params)
    drain(engine)
    stats = engine.stats()
    assert sum(tokens) == prompt_len + width * 8
    assert tokens == [prompt_len] + [width] * 8
    assert (stats.prompt_tokens, stats.recomputed_tokens) == (prompt_len, 0)
    # Without sharing, every beam would hold the prompt and its own tokens.
    most = width * -(-(prompt_len + 8) // 4)
    assert stats.peak_blocks_used <= most
    if width > 1 and prompt_len == 30:
        assert stats.peak_blocks_used < 0.6 * most
        assert stats.forks >= width - 1
        assert stats.copied_blocks > 0


def count_tokens(engine: Engine) -> list[int]:
    """Tokens computed in each step from now on."""
    counts: list[int] = []
    plan = engine.scheduler.schedule

    def schedule() -> Any:
        step = plan()
        if step is not None:
            counts.append(step.num_tokens)
        return step

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    return counts


def test_a_prompt_searched_before_costs_one_token(llm: LLM) -> None:
    prompt = np.random.default_rng(7).integers(3, 512, 41).tolist()
    params = BeamSearchParams(beam_width=4, max_tokens=6)
    engine = engine_over(llm)
    engine.add_request("first", prompt, params)
    first = drain(engine)["first"]
    before = engine.stats().prompt_tokens
    engine.add_request("second", prompt, params)
    second = drain(engine)["second"]
    assert told(first) == told(second)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)
    assert engine.stats().prompt_tokens - before == 1


def test_an_ordinary_request_finds_what_a_search_has_left(llm: LLM) -> None:
    """The winner's blocks are findable as any request's are, and hold what they should."""
    engine = engine_over(llm)
    engine.add_request(
        "beams", PROMPT, BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
    )
    best = drain(engine)["beams"].outputs[0].token_ids
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
    engine.add_request("after", PROMPT + best, greedy)
    after = drain(engine)["after"]
    assert after.num_cached_tokens >= 20
    assert llm.reset_prefix_cache()
    (fresh,) = llm.generate([PROMPT + best], greedy, use_tqdm=False)
    assert after.outputs[0].token_ids == fresh.outputs[0].token_ids
    assert after.outputs[0].logprobs == fresh.outputs[0].logprobs


# ------------------------------------------------------------------ endings


def test_aborted_at_any_time_it_gives_what_it_has(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    prompt = np.random.default_rng(3).integers(3, 512, 100).tolist()  # two chunks
    counts = []
    for steps in range(14):
        engine = engine_over(llm)
        engine.add_request("gone", prompt, params)
        for _ in range(steps):
            if engine.has_unfinished_requests():
                engine.step()
        if not engine.has_unfinished_requests():
            break
        engine.abort("gone")
        found = drain(engine)["gone"].outputs
        check_aborted(found)
        counts.append(len(found[0].token_ids))
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] >= 8


def check_aborted(found: Sequence[CompletionOutput]) -> None:
    assert {c.finish_reason for c in found} == {"abort"}
    assert len({tuple(c.token_ids) for c in found}) == len(found) in (1, 4)
    scores = [c.score or 0.0 for c in found]
    assert scores == sorted(scores, reverse=True)


def test_aborted_while_it_waits_and_while_it_is_put_back(llm: LLM) -> None:
    """In a pool too small for all, some search is out at any moment; none leaves a block."""
    searches = [s for s in stored_networks(LLAMA) if s.beam_params.beam_width in (8, 12)]
    for steps in range(1, 30, 2):
        engine = engine_over(llm, num_blocks=90)
        for i, one in enumerate(searches):
            engine.add_request(str(i), one.prompt, one.beam_params)
        ended = {}
        for _ in range(steps):
            ended |= {o.request_id: o for o in engine.step() if o.finished}
        engine.abort([str(i) for i in range(len(searches)) if i % 2])
        ended |= drain(engine)
        assert set(ended) == {str(i) for i in range(len(searches))}
        for i in range(0, len(searches), 2):
            check(ended[str(i)], searches[i])


def test_a_discarded_search_leaves_nothing(llm: LLM) -> None:
    engine = engine_over(llm)
    engine.add_request("gone", PROMPT, BeamSearchParams(beam_width=8, max_tokens=30))
    for _ in range(5):
        engine.step()
    engine.discard(["gone"])
    assert drain(engine) == {}


def test_the_context_ends_a_search(llm: LLM) -> None:
    """Hypotheses of at most max_model_len tokens, prompt included, as if max_tokens said so."""
    prompt = np.random.default_rng(4).integers(3, 512, 120).tolist()
    params = [
        BeamSearchParams(beam_width=5, max_tokens=most, early_stopping="never")
        for most in (None, 500, 8)
    ]
    found = [told(output) for output in llm.beam_search([prompt] * 3, params, use_tqdm=False)]
    assert {len(tokens) for tokens, *_ in found[0]} == {8}
    assert found[0] == found[1] == found[2]
    last = np.random.default_rng(5).integers(3, 512, 127).tolist()
    (output,) = llm.beam_search([last], params[0], use_tqdm=False)
    assert [len(c.token_ids) for c in output.outputs] == [1] * 5
    with pytest.raises(InvalidRequestError, match="128"):
        llm.beam_search([[*last, 3]], params[0], use_tqdm=False)


def test_a_failed_step_ends_the_search_and_no_other(llm: LLM) -> None:
    def fault() -> None:
        raise RuntimeError("the device is gone")

    engine = engine_over(llm)
    engine.runner = FaultyRunner(engine.runner, "read", 4, fault)  # type: ignore[assignment]
    engine.add_request("hit", PROMPT, BeamSearchParams(beam_width=4, max_tokens=20))
    done = {}
    for _ in range(6):
        done |= {o.request_id: o for o in engine.step() if o.finished}
    assert {c.finish_reason for c in done["hit"].outputs} == {"error"}
    assert "the device is gone" in (done["hit"].outputs[0].error or "")
    one = stored_networks(LLAMA)[0]
    (output,) = search(engine, [one])
    check(output, one)


# ------------------------------------------------------------------ texts and arguments


def test_texts(llm: LLM) -> None:
    """The tokens' text, without the token that ended a hypothesis unless it is asked for."""
    (one,) = (s for s in stored_networks(LLAMA)[:10:2] if s.beam_params.beam_width == 8)
    tokenizer = llm.get_tokenizer()
    bare, ending, special, none = llm.beam_search(
        [one.prompt] * 4,
        [
            one.beam_params,
            dataclasses.replace(one.beam_params, include_stop_str_in_output=True),
            dataclasses.replace(one.beam_params, skip_special_tokens=False),
            dataclasses.replace(one.beam_params, detokenize=False),
        ],
        use_tqdm=False,
    )

    def check_text(c: CompletionOutput, *, cut: bool, skip: bool = True) -> None:
        tokens = c.token_ids[:-1] if cut else c.token_ids
        whole = tokenizer.backend.decode(one.prompt + tokens, skip_special_tokens=skip)
        assert c.text
        assert whole.endswith(c.text)

    stopped = [c.finish_reason == "stop" for c in bare.outputs]
    assert any(stopped)
    for i, ends in enumerate(stopped):
        check_text(bare.outputs[i], cut=ends)
        check_text(ending.outputs[i], cut=False)
        check_text(special.outputs[i], cut=ends, skip=False)
        assert (ending.outputs[i].text != bare.outputs[i].text) == ends
    assert any("<|" in c.text for c in special.outputs)
    assert not any("<|" in c.text for c in bare.outputs)
    assert {c.text for c in none.outputs} == {""}
    assert [c.token_ids for c in none.outputs] == [c.token_ids for c in bare.outputs]


def test_prompts_and_parameters_come_in_all_forms(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    text = "The quick brown fox"
    ids = llm.get_tokenizer().encode(text)
    one = llm.beam_search(text, params, use_tqdm=False)
    two = llm.beam_search(ids, [params], use_tqdm=False)
    three = llm.beam_search([{"prompt": text}, {"prompt_token_ids": ids}], params, use_tqdm=False)
    assert one[0].prompt == text
    assert one[0].prompt_token_ids == ids
    assert [told(o) for o in (*two, *three)] == [told(one[0])] * 3
    assert llm.beam_search([], params, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "params", "param", "message"),
    [
        ([PROMPT], SamplingParams(), "params", "BeamSearchParams or a list"),
        ([PROMPT], None, "params", "BeamSearchParams or a list"),
        ([PROMPT], "wide", "params", "BeamSearchParams or a list"),
        ([PROMPT], [SamplingParams()], "params", "SamplingParams at position 0"),
        (
            [PROMPT] * 2,
            [BeamSearchParams(beam_width=2)],
            "params",
            "1 params were given for 2 prompts",
        ),
        ([PROMPT], BeamSearchParams(beam_width=41), "beam_width", "max_num_seqs=40"),
        (
            [PROMPT],
            BeamSearchParams(beam_width=2, stop_token_ids=[512]),
            "stop_token_ids",
            r"512.*\[0, 512\)",
        ),
        ([PROMPT, []], BeamSearchParams(beam_width=2), "prompt", "prompt 1: .*empty"),
        ([[600]], BeamSearchParams(beam_width=2), "prompt", "600"),
    ],
)
def test_arguments_of_no_use(llm: LLM, prompts: Any, params: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        llm.beam_search(prompts, params, use_tqdm=False)
    assert caught.value.param == param
    assert_idle(llm.engine)


def test_generate_takes_no_parameters_of_a_search(llm: LLM) -> None:
    params: Any = BeamSearchParams(beam_width=2)
    for given in (params, [params]):
        with pytest.raises(InvalidRequestError, match="SamplingParams") as caught:
            llm.generate([PROMPT], given, use_tqdm=False)
        assert caught.value.param == "sampling_params"

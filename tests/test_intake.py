"""Requests are checked before anything is queued: each error names argument, value and limit."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from jaxpaged import SamplingParams
from jaxpaged.completion import RequestState
from jaxpaged.errors import InvalidRequestError
from jaxpaged.intake import MAX_SALT_CHARS, Intake, Limits
from jaxpaged.text.tokenizer import Tokenizer
from tests.tiny_models import BOS, EOS, tiny_tokenizer

VOCAB, MAX_LEN, MAX_LOGPROBS = 512, 32, 20
LIMITS = Limits(
    vocab_size=VOCAB,
    max_model_len=MAX_LEN,
    max_logprobs=MAX_LOGPROBS,
    eos_token_ids=(1,),
)
OK = [11, 12, 13]

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty ids": ([], "empty"),
    "empty text": ("", "empty"),
    "empty in a mapping": ({"prompt_token_ids": []}, "empty"),
    "first id past the vocabulary": ([11, VOCAB], r"512.*\[0, 512\)"),
    "negative id": ([11, -1], r"-1.*\[0, 512\)"),
    "id past int32": ([2**40], r"1099511627776.*\[0, 512\)"),
    "id past int64": ([2**63], r"9223372036854775808.*\[0, 512\)"),
    "float id": ([11, 12.0], "integers.*12.0 at position 1"),
    "bool id": ([11, True], "integers.*True at position 1"),
    "text id": ([11, "12"], "integers.*'12' at position 1"),
    "no id": ([None], "integers.*None at position 0"),
    "nested ids": ([[11, 12]], "integers.*at position 0"),
    "bytes": (b"abc", "bytes"),
    "number": (7, "int"),
    "nothing": (None, "NoneType"),
    "set": ({11, 12}, "set"),
    "float array": (np.array([1.0, 2.0]), "ndarray"),
    "matrix": (np.array([[1, 2]]), "ndarray"),
    "unknown key": ({"prompt_token_ids": OK, "salt": "x"}, "'salt'.*cache_salt"),
    "no prompt in a mapping": ({"cache_salt": "x"}, "exactly one"),
    "two prompts in a mapping": ({"prompt": "a", "prompt_token_ids": OK}, "exactly one"),
    "text as ids": ({"prompt_token_ids": 5}, "int"),
    "ids as long as the context": ([11] * MAX_LEN, "32.*contains 32 input"),
    "ids longer than the context": ([11] * 1000, "32.*contains 1000 input"),
    "text longer than the context": ("water " * 40, "32.*contains .* input"),
    "lone surrogate": ("a\ud800b", "surrogate"),
}
BAD_PARAMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "min_tokens past the room": ({"min_tokens": 30, "max_tokens": 99}, "min_tokens", "30.*29"),
    "logprobs": ({"logprobs": 21}, "logprobs", "21.*max_logprobs=20"),
    "logprobs of all": ({"logprobs": -1}, "logprobs", "-1.*max_logprobs=20"),
    "prompt_logprobs": ({"prompt_logprobs": 21}, "prompt_logprobs", "21.*max_logprobs=20"),
    "prompt_logprobs of all": ({"prompt_logprobs": -1}, "prompt_logprobs", "max_logprobs=20"),
    "logit_bias": ({"logit_bias": {"512": 1}}, "logit_bias", r"512.*\[0, 512\)"),
    "logit_bias past int32": ({"logit_bias": {2**32 + 7: 1}}, "logit_bias", "4294967303"),
    "stop_token_ids": ({"stop_token_ids": [5, 999]}, "stop_token_ids", "999"),
    "stop id past int32": ({"stop_token_ids": [2**40]}, "stop_token_ids", "1099511627776"),
    "allowed_token_ids": ({"allowed_token_ids": [512]}, "allowed_token_ids", "512"),
    "bad_words too long": ({"bad_words": ["0123456789" * 4]}, "bad_words", "40.*16"),
}
BAD_OPTIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "empty salt": ({"cache_salt": ""}, "cache_salt", "1 to 1024.*0 characters"),
    "long salt": ({"cache_salt": "x" * 1025}, "cache_salt", "1 to 1024.*1025 characters"),
    "salt of no text": ({"cache_salt": 5}, "cache_salt", "5"),
    "salt of bytes": ({"cache_salt": b"x"}, "cache_salt", "b'x'"),
    "float priority": ({"priority": 1.5}, "priority", "1.5"),
    "bool priority": ({"priority": True}, "priority", "True"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(400), special_tokens={"bos_token": BOS, "eos_token": EOS})


@pytest.fixture
def intake(tokenizer: Tokenizer) -> Intake:
    return Intake(LIMITS, tokenizer, 0)


def build(
    intake: Intake, prompt: Any = OK, params: SamplingParams | None = None, **options: Any
) -> RequestState:
    options = {"priority": 0, "arrival_time": 0.0} | options
    return intake.build("r", prompt, params or SamplingParams(), **options)


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(intake: Intake, name: str) -> None:
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(InvalidRequestError, match=message) as caught:
        build(intake, prompt)
    assert caught.value.param == ("input_tokens" if "context" in name else "prompt")


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_params(intake: Intake, name: str) -> None:
    fields, param, message = BAD_PARAMS[name]
    with pytest.raises(InvalidRequestError, match=message) as caught:
        build(intake, OK, SamplingParams(**fields))
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(intake: Intake, name: str) -> None:
    options, param, message = BAD_OPTIONS[name]
    with pytest.raises(InvalidRequestError, match=message) as caught:
        build(intake, **options)
    assert caught.value.param == param
    if param == "cache_salt":
        with pytest.raises(InvalidRequestError, match=message):
            build(intake, {"prompt_token_ids": OK, **options})


@pytest.mark.parametrize("request_id", ["", 5, None, b"r"])
def test_bad_request_ids(intake: Intake, request_id: Any) -> None:
    with pytest.raises(InvalidRequestError, match="request_id") as caught:
        intake.build(request_id, OK, SamplingParams(), priority=0, arrival_time=0.0)
    assert caught.value.param == "request_id"


@pytest.mark.parametrize("params", [{"max_tokens": 5}, "max_tokens=5", 5])
def test_params_of_another_type(intake: Intake, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="SamplingParams") as caught:
        build(intake, OK, params)
    assert caught.value.param == "sampling_params"


def test_stop_ids_and_eos_ids_fill_a_slot_together(tokenizer: Tokenizer) -> None:
    many = Limits(VOCAB, MAX_LEN, MAX_LOGPROBS, tuple(range(200)))
    params = SamplingParams(stop_token_ids=list(range(300, 357)), min_tokens=1)
    with pytest.raises(InvalidRequestError, match="257.*256") as caught:
        build(Intake(many, tokenizer, 0), OK, params)
    assert caught.value.param == "stop_token_ids"


@pytest.mark.parametrize(
    ("params", "name"), [({"stop": "x"}, "stop"), ({"bad_words": ["x"]}, "bad_words")]
)
def test_without_tokenizer(params: dict[str, Any], name: str) -> None:
    plain = Intake(LIMITS, None, 0)
    with pytest.raises(InvalidRequestError, match=f"{name}.*tokenizer") as caught:
        build(plain, OK, SamplingParams(**params))
    assert caught.value.param == name
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init.*token ids"):
        build(plain, "text")
    assert build(plain, OK).prompt_token_ids == OK


def test_a_tokenizer_that_knows_more_ids_than_the_model(tokenizer: Tokenizer) -> None:
    small = Intake(Limits(100, MAX_LEN, MAX_LOGPROBS, ()), tokenizer, 0)
    text = "中"  # made of the last bytes of the alphabet
    beyond = max(tokenizer.encode(text))
    assert beyond >= 100
    with pytest.raises(InvalidRequestError, match=r"token id \d+.*\[0, 100\)"):
        build(small, text)


@pytest.mark.parametrize(
    "prompt",
    [
        OK,
        tuple(OK),
        np.array(OK),
        np.array(OK, np.uint16),
        [np.int32(11), 12, 13],
        {"prompt_token_ids": OK},
        {"prompt_token_ids": np.array(OK)},
        {"prompt_token_ids": OK, "prompt": None, "cache_salt": None},
    ],
)
def test_forms_of_a_prompt(intake: Intake, prompt: Any) -> None:
    state = build(intake, prompt)
    assert state.prompt_token_ids == OK and state.prompt is None
    assert all(type(token) is int for token in state.prompt_token_ids)


def test_text_prompts_keep_their_text(intake: Intake, tokenizer: Tokenizer) -> None:
    for prompt in ("the dog", {"prompt": "the dog"}):
        state = build(intake, prompt)
        assert (state.prompt, state.prompt_token_ids) == ("the dog", tokenizer.encode("the dog"))


def test_the_list_of_the_caller_is_copied(intake: Intake) -> None:
    mine = list(OK)
    state = build(intake, mine)
    mine[0] = 999
    assert state.prompt_token_ids == OK


def test_a_salt_comes_with_the_prompt_or_beside_it(intake: Intake) -> None:
    longest = "x" * MAX_SALT_CHARS
    assert build(intake, OK, cache_salt=longest).completions[0].core.cache_salt == longest
    state = build(intake, {"prompt_token_ids": OK, "cache_salt": "mine"}, cache_salt="other")
    assert state.completions[0].core.cache_salt == "mine"


@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"),
    [
        *((31, 1, True), (32, 1, False), (33, 1, False), (31, 2, True), (30, 3, True)),
        *((32, 0, True), (33, 0, False), (1, 31, True), (1, 32, True)),
        *((1, None, True), (32, None, False)),
    ],
)
def test_the_edges_of_the_context(
    intake: Intake, length: int, max_tokens: int | None, fits: bool
) -> None:
    """SC-08."""
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if max_tokens == 0 else None)
    if fits:
        assert len(build(intake, [11] * length, params).prompt_token_ids) == length
        return
    with pytest.raises(InvalidRequestError, match=f"{MAX_LEN}.*{length}") as caught:
        build(intake, [11] * length, params)
    assert caught.value.param == "input_tokens"


@pytest.mark.parametrize(("min_tokens", "fits"), [(29, True), (30, False)])
def test_min_tokens_must_fit_the_context(intake: Intake, min_tokens: int, fits: bool) -> None:
    params = SamplingParams(min_tokens=min_tokens, max_tokens=None)
    if fits:
        build(intake, OK, params)
    else:
        with pytest.raises(InvalidRequestError, match="min_tokens=30.*3 tokens.*32.*29"):
            build(intake, OK, params)


def test_n_completions(intake: Intake) -> None:
    state = build(intake, OK, SamplingParams(n=3, seed=5, max_tokens=None, prompt_logprobs=1))
    cores = [c.core for c in state.completions]
    assert [c.index for c in state.completions] == [c.row.sample_index for c in state.completions]
    assert len({core.request_id for core in cores}) == 3
    assert {core.max_tokens for core in cores} == {MAX_LEN - len(OK)}
    # The prompt is scored once.
    assert [c.row.wants_prompt_logprobs for c in state.completions] == [True, False, False]
    assert [core.skip_prefix_cache for core in cores] == [True, False, False]
    assert {(c.row.fields.seed_lo, c.row.fields.seed_hi) for c in state.completions} == {(5, 0)}


def test_seeds_of_unseeded_requests_repeat_with_the_engine(tokenizer: Tokenizer) -> None:
    def seeds(engine_seed: int) -> list[tuple[int, int]]:
        intake = Intake(LIMITS, tokenizer, engine_seed)
        fields = [build(intake).completions[0].row.fields for _ in range(5)]
        return [(f.seed_lo, f.seed_hi) for f in fields]

    assert seeds(0) == seeds(0) != seeds(1)
    assert len(set(seeds(0))) == 5


def test_a_bad_request_draws_no_seed(tokenizer: Tokenizer) -> None:
    """A refused request leaves no trace: the next one is what it would have been without it."""
    disturbed, quiet = Intake(LIMITS, tokenizer, 0), Intake(LIMITS, tokenizer, 0)
    for fields, _, _ in BAD_PARAMS.values():
        with pytest.raises(InvalidRequestError):
            build(disturbed, OK, SamplingParams(**fields))
    assert build(disturbed).completions[0].row == build(quiet).completions[0].row


def test_ignore_eos_and_stop_ids(intake: Intake) -> None:
    core = (
        build(intake, OK, SamplingParams(ignore_eos=True, stop_token_ids=[9])).completions[0].core
    )
    assert (core.eos_token_ids, core.stop_token_ids) == (frozenset(), {9})
    assert build(intake).completions[0].core.eos_token_ids == {1}


def test_the_slot_holds_all_known_tokens(intake: Intake) -> None:
    """Also those drawn before a preemption."""
    completion = build(intake, OK, SamplingParams(min_tokens=2, stop_token_ids=[9])).completions[0]
    completion.core.token_ids += [21, 22]
    slot = completion.parent.slot
    assert slot is not None
    values = slot.pack(completion.core.token_ids)
    assert values.history[:6].tolist() == [*OK, 21, 22, -1]
    assert values.stop_ids[:3].tolist() == [1, 9, -1]
    assert build(intake).slot is None


def test_a_queued_request_holds_no_arrays(intake: Intake) -> None:
    """100,000 of them may wait; the slot's kilobytes are made at admission."""
    state = build(intake, OK, SamplingParams(repetition_penalty=1.5, min_tokens=3))
    assert state.slot is not None
    assert len(pickle.dumps((state.slot.stop_ids, state.slot.bad_words))) < 100


@pytest.mark.parametrize("arrival_time", ["x", None, True, float("nan"), float("inf")])
def test_arrival_time_must_be_a_time(intake: Intake, arrival_time: Any) -> None:
    with pytest.raises(InvalidRequestError, match="arrival_time must be a finite number"):
        intake.build("r", OK, SamplingParams(), priority=0, arrival_time=arrival_time)

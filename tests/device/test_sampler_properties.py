"""A row's result is the same to the bit whatever else is in the step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.device.sampler import HostSamples
from jaxpaged.sampling_params import SamplingParams
from tests.device.sampler_reference import Ask, sample

VOCAB = 503


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    """Each field is off half of the time, so that every combination of rules meets."""

    def maybe(name: str, values: st.SearchStrategy[object]) -> dict[str, object]:
        return {name: draw(values)} if draw(st.booleans()) else {}

    ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)
    chosen = (
        maybe("temperature", st.sampled_from([0.0, 0.01, 0.5, 2.0]))
        | maybe("top_k", st.sampled_from([1, 2, 63, 64, 65, 200, 502, 503]))
        | maybe("top_p", st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999999]))
        | maybe("min_p", st.sampled_from([1e-6, 0.01, 0.5, 1.0]))
        | maybe("logprobs", st.integers(0, 6))
        | maybe("min_tokens", st.integers(0, 6))
    )
    if draw(st.booleans()):
        chosen |= maybe("repetition_penalty", st.sampled_from([0.5, 1.3]))
        chosen |= maybe("frequency_penalty", st.sampled_from([-0.7, 0.3]))
        chosen |= maybe("presence_penalty", st.sampled_from([-0.7, 0.3]))
        chosen |= maybe("allowed_token_ids", ids)
        chosen |= maybe("logit_bias", st.just({3: 2.5, 4: -7.0}))
        chosen |= maybe("bad_words", st.just(["x"]))
    return SamplingParams.from_dict({"max_tokens": 50, **chosen})


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.normal(size=VOCAB).astype(np.float32) * draw(st.sampled_from([0.1, 1.0, 3.0, 30.0]))
    shape = draw(st.sampled_from(["plain", "ties", "sparse", "broken"]))
    if shape == "ties":
        x = np.round(x)
    elif shape == "sparse":
        x[rng.random(VOCAB) < 0.99] = -np.inf
    elif shape == "broken":
        x[rng.integers(VOCAB)] = np.nan
    token = st.integers(0, 30)
    return Ask(
        x,
        draw(params()),
        seed=draw(st.integers(0, 2**64 - 1)),
        prompt=draw(st.lists(token, min_size=1, max_size=9)),
        outputs=draw(st.lists(token, max_size=9)) * draw(st.sampled_from([1, 40])),
        stop_ids=draw(st.lists(token, max_size=4)),
        bad_words=draw(st.lists(st.lists(token, min_size=1, max_size=2), max_size=4)),
        sample_index=draw(st.integers(0, 3)),
    )


def result(out: HostSamples, row: int, ask: Ask) -> tuple[object, ...]:
    """What the request asked for, as bits (NaN equals itself)."""
    token, k = (int(out.tokens[row]), int(out.status[row])), ask.params.logprobs
    if k is None:
        return token
    logprobs = out.logprob[row].tobytes(), out.top_logprobs[row, :k].tobytes()
    return *token, int(out.rank[row]), out.top_ids[row, :k].tolist(), *logprobs


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_a_row_does_not_see_its_neighbours(data: st.DataObject) -> None:
    crowd = data.draw(st.lists(asks(), min_size=1, max_size=12))
    num_rows = data.draw(st.sampled_from([16, 32]))
    slots = data.draw(st.permutations(range(40)))
    together = sample(crowd, num_rows=num_rows, slots=slots[: len(crowd)])
    row = data.draw(st.integers(0, len(crowd) - 1))
    ask = crowd[row]
    place = data.draw(st.integers(0, 7))
    # Alone but for plain greedy rows: none of the conditional parts runs for another's sake.
    quiet = Ask(np.zeros(VOCAB, np.float32), SamplingParams(temperature=0.0))
    alone = sample([quiet] * place + [ask], num_rows=8)
    assert result(together, row, ask) == result(alone, place, ask)

"""Beam search on the host: against every path there is, against transformers, and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.beam_search import BeamSearch, Candidates, Hypothesis
from tests.beams import (
    HAS_TORCH,
    Case,
    Floats,
    best_candidates,
    log_softmax,
    places,
    run_search,
    search_table,
    stored,
)

EOS = 4


def found(hypotheses: Sequence[Hypothesis]) -> list[tuple[list[int], float]]:
    return [(h.token_ids, h.score) for h in hypotheses]


# ------------------------------------------------------------------ every path


def exhaustive(
    follow: Callable[[list[int]], Floats], depth: int, penalty: float
) -> list[tuple[list[int], float]]:
    """All ways through five tokens, each up to its EOS or the depth, best score first."""
    best: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(5), repeat=depth):
        tokens = path[: path.index(EOS) + 1] if EOS in path else path
        total = sum(float(follow(list(tokens[:i]))[t]) for i, t in enumerate(tokens))
        best[tokens] = total / len(tokens) ** penalty
    return sorted(((list(t), s) for t, s in best.items()), key=lambda entry: -entry[1])


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("prompt_len", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("endings", [0.0, 3.0])
def test_wide_enough_it_finds_the_best_of_all_paths(
    penalty: float, prompt_len: int, endings: float
) -> None:
    """64 beams hold all that five tokens can make in three steps, and 625 are tried in the last."""
    for seed in range(4):
        case = Case(seed, 5, 64, 4, penalty, "never", (EOS,), endings, prompt_len)
        logprobs = log_softmax(case.table())

        def follow(tokens: list[int], case: Case = case, logprobs: Floats = logprobs) -> Floats:
            row: Floats = logprobs[places([case.prompt + tokens])[0]]
            return row

        expected = exhaustive(follow, 4, penalty)
        assert len(expected) == 1 + 4 + 16 + 64 * 5
        hypotheses = search_table(case)
        assert len(hypotheses) == 64
        check(hypotheses[:10], expected[:10])


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_three_beams_find_the_best_three_where_the_past_does_not_matter(penalty: float) -> None:
    """What is best after one beginning is then best after all, so three beams lose nothing. EOS is
    likely at once: the first hypothesis is one token long."""
    by_position = log_softmax(
        np.array(
            [
                [0.0, -1.0, -2.0, -0.5, 1.5],
                [-0.3, 0.4, -1.0, -2.0, 0.9],
                [1.0, -0.2, 0.3, -0.9, 0.5],
                [-1.1, 0.2, 0.6, 0.1, 1.2],
            ],
            np.float32,
        )
    )
    expected = exhaustive(lambda tokens: by_position[len(tokens)], 4, penalty)
    lengths = {len(tokens) for tokens, _ in expected[:3]}
    assert lengths == {0.0: {1, 2}, 1.0: {1, 2, 4}, 2.0: {4}}[penalty]
    for prompt in ([3], [1, 2, 3, 0, 1, 2]):
        hypotheses = run_search(
            BeamSearchParams(
                beam_width=3, max_tokens=4, length_penalty=penalty, early_stopping="never"
            ),
            prompt,
            lambda rows, prompt=prompt: by_position[[len(r) - len(prompt) for r in rows]],  # type: ignore[misc]
            eos=[EOS],
        )
        check(hypotheses, expected[:3])


def check(hypotheses: Sequence[Hypothesis], expected: list[tuple[list[int], float]]) -> None:
    assert [h.token_ids for h in hypotheses] == [tokens for tokens, _ in expected]
    assert [h.score for h in hypotheses] == pytest.approx([score for _, score in expected])
    for h in hypotheses:
        assert h.finish_reason == ("stop" if h.token_ids[-1] == EOS else "length")
        assert h.stop_reason is None


# ------------------------------------------------------------------ transformers

CASES = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    vocab=st.just(64),
    width=st.sampled_from([2, 3, 4, 8, 12]),
    max_tokens=st.integers(1, 24),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    eos=st.lists(st.integers(0, 63), max_size=3, unique=True).map(tuple),
    endings=st.sampled_from([0.0, 2.0, 4.0, 6.0]),
    prompt_len=st.integers(1, 5),
)


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch, the oracle")
@given(CASES)
def test_equal_to_transformers_to_the_last_bit(case: Case) -> None:
    from tests.beam_oracle import TableModel, table_beams

    model = TableModel(case)
    assert found(search_table(case, model.logprobs())) == table_beams(case, model)


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch, the oracle")
@pytest.mark.parametrize("width", [16, 24, 33, 64])
def test_equal_to_transformers_when_wide(width: int) -> None:
    from tests.beam_oracle import TableModel, table_beams

    for seed, stopping in enumerate([False, True, "never"]):
        case = Case(seed, 150, width, 12, 1.0, stopping, (1, 5), 4.0)
        model = TableModel(case)
        assert found(search_table(case, model.logprobs())) == table_beams(case, model)


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch, the oracle")
@pytest.mark.parametrize(
    ("width", "penalty", "stopping"),
    [(2, -1.0, False), (3, 0.5, True), (4, 0.0, "never"), (8, 1.0, False), (12, 2.0, "never")],
)
def test_equal_to_transformers_with_a_network(
    network: Any, width: int, penalty: float, stopping: bool | str
) -> None:
    from tests.beam_oracle import beams, predictions

    rng = np.random.default_rng(width)
    lengths = set()
    for max_tokens, eos in ((1, [1]), (24, []), (24, [*range(20, 60)][:width]), (9, [1, 7])):
        prompt = rng.integers(3, 512, rng.integers(1, 30)).tolist()
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=max_tokens,
            length_penalty=penalty,
            early_stopping=stopping,  # type: ignore[arg-type]
        )
        expected = beams(
            network,
            prompt,
            width=width,
            max_tokens=max_tokens,
            length_penalty=penalty,
            early_stopping=stopping,
            eos=eos,
        )
        ours = run_search(params, prompt, lambda rows: predictions(network, rows), eos=eos)
        assert [h.token_ids for h in ours] == [tokens for tokens, _ in expected]
        assert [h.score for h in ours] == pytest.approx(
            [s for _, s in expected], rel=1e-5, abs=1e-4
        )
        lengths |= {len(h.token_ids) for h in ours}
    assert len(lengths) > 2, "no hypothesis has ended early"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import torch

    from tests.e2e import oracle
    from tests.tiny_models import tiny_llama

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one only waits for the first in a model this small
    yield oracle.from_folder(tiny_llama(tmp_path_factory.mktemp("beams") / "llama"))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("entry", stored()["tables"], ids=lambda e: str(e["case"]["seed"]))
def test_equal_to_the_stored_results_of_transformers(entry: dict[str, Any]) -> None:
    case = Case(**{**entry["case"], "eos": tuple(entry["case"]["eos"])})
    ours = search_table(case)
    assert [h.token_ids for h in ours] == entry["token_ids"]
    assert [h.score for h in ours] == pytest.approx(entry["scores"], rel=1e-5, abs=1e-4)


def test_the_stored_results_have_every_kind_of_ending() -> None:
    entries = stored()["tables"]
    for name, least in (("width", 4), ("length_penalty", 5), ("early_stopping", 3), ("eos", 4)):
        assert len({str(entry["case"][name]) for entry in entries}) >= least
    ended = [len(t) < e["case"]["max_tokens"] for e in entries for t in e["token_ids"]]
    assert 0.2 < sum(ended) / len(ended) < 0.8


# ------------------------------------------------------------------ by hand


@dataclass
class Script:
    """A search that is told its candidates as {token: probability}, one dict a live beam."""

    search: BeamSearch

    def __call__(self, *beams: dict[int, float]) -> list[tuple[int, int]]:
        shown = []
        for beam in beams:
            ranked = sorted(beam.items(), key=lambda item: (-item[1], item[0]))
            logs = [math.log(p) if p else -math.inf for _, p in ranked]
            shown.append(Candidates([t for t, _ in ranked], logs))
        return self.search.advance(shown)


def script(**settings: Any) -> tuple[BeamSearch, Script]:
    limits = {"eos_token_ids": (9,), "prompt_len": 3, "max_model_len": 100}
    limits |= {name: settings.pop(name) for name in list(limits) if name in settings}
    search = BeamSearch(BeamSearchParams(**{"beam_width": 2, **settings}), **limits)
    return search, Script(search)


def test_one_beam_becomes_as_many_as_asked_for() -> None:
    search, step = script(beam_width=3)
    assert (search.num_live, search.num_candidates) == (1, 6)
    assert step({1: 0.5, 2: 0.2, 3: 0.2, 4: 0.1}) == [(0, 1), (0, 2), (0, 3)]
    assert search.num_live == 3
    assert step({1: 0.1}, {1: 0.9, 5: 0.8}, {1: 0.3}) == [(1, 1), (1, 5), (2, 1)]
    # 0.18, 0.16 and 0.06, against 0.05: the first beam has died.
    assert [h.token_ids for h in search.hypotheses()] == [[2, 1], [2, 5], [3, 1]]


def test_an_ending_frees_a_place_for_the_next_best() -> None:
    search, step = script()
    assert step({9: 0.6, 1: 0.3, 2: 0.1}) == [(0, 1), (0, 2)]
    (ended, *live) = search.hypotheses()
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([9], "stop", None)
    assert (ended.score, ended.cumulative_logprob) == pytest.approx((math.log(0.6),) * 2)
    assert [h.finish_reason for h in live] == [None]


def test_an_ending_below_the_width_is_lost() -> None:
    search, step = script()
    assert step({1: 0.5, 2: 0.3, 9: 0.2}) == [(0, 1), (0, 2)]
    assert [h.token_ids for h in search.hypotheses()] == [[1], [2]]


def test_the_score_counts_the_ending_token_and_not_the_prompt() -> None:
    search, step = script(length_penalty=2.0, prompt_len=50)
    step({1: 0.5, 2: 0.25})
    step({9: 0.5, 1: 0.25}, {1: 0.125, 2: 0.06})
    best = search.hypotheses()[0]
    assert best.token_ids == [1, 9]
    assert best.cumulative_logprob == pytest.approx(math.log(0.25))
    assert best.score == pytest.approx(math.log(0.25) / 4)


def test_at_the_limit_the_best_end_where_they_are() -> None:
    search, step = script(max_tokens=2)
    step({1: 0.5, 2: 0.4})
    assert step({3: 0.5, 9: 0.4}, {3: 0.1}) == []
    assert (search.done, search.num_live) == (True, 0)
    assert [(h.token_ids, h.finish_reason) for h in search.hypotheses()] == [
        ([1, 3], "length"),
        ([1, 9], "stop"),
    ]


@pytest.mark.parametrize(("max_tokens", "room", "limit"), [(7, 9, 7), (9, 7, 7), (None, 5, 5)])
def test_the_limit_is_the_shorter_of_wish_and_room(
    max_tokens: int | None, room: int, limit: int
) -> None:
    search, step = script(max_tokens=max_tokens, prompt_len=20, max_model_len=20 + room)
    steps = 0
    while not search.done:
        step(*[{1: 0.5, 2: 0.3}] * search.num_live)
        steps += 1
    assert search.limit == steps == limit
    assert {len(h.token_ids) for h in search.hypotheses()} == {limit}


def steps_until_done(early_stopping: Any, penalty: float) -> int:
    """Of at most 30. One hypothesis ends at step 2, worth 0.24, a second at step 3, worth 0.081."""
    search, step = script(early_stopping=early_stopping, length_penalty=penalty, max_tokens=30)
    step({1: 0.6, 2: 0.3})
    step({9: 0.4, 3: 0.2}, {1: 0.3})
    step({3: 0.9, 4: 0.02}, {9: 0.9, 4: 0.02})
    steps = 3
    while not search.done:
        step(*[{1: 0.9, 2: 0.05}] * search.num_live)
        steps += 1
    return steps


def test_when_it_ends() -> None:
    assert steps_until_done(True, 0.0) == 3
    # The best live beam is worth 0.108 then, and a tenth less with every further step.
    assert steps_until_done(False, 0.0) == steps_until_done("never", 0.0) == 6
    # Per token every step makes it better.
    assert steps_until_done(False, 1.0) == steps_until_done("never", 1.0) == 30
    # With a negative penalty a longer one is worth less: one step more is the last.
    assert steps_until_done(False, -1.0) == steps_until_done("never", -1.0) == 4


def test_never_reckons_with_the_longest_where_length_pays() -> None:
    lengths = {}
    for stopping in (False, "never"):
        search, step = script(early_stopping=stopping, max_tokens=20)
        step({9: 0.5, 1: 0.1, 2: 0.1})
        step({9: 0.9, 1: 0.05}, {9: 0.8, 1: 0.05})
        steps = 2
        while not search.done:
            step(*[{1: 0.5, 2: 0.2}] * search.num_live)
            steps += 1
        lengths[stopping] = steps
    # log 0.005 over 2 tokens is worse than log 0.09 over 2, over 20 it would be better.
    assert lengths == {False: 2, "never": 20}


def test_equal_sums_keep_the_order_of_beams_and_candidates() -> None:
    search, step = script(beam_width=3)
    assert step({4: 0.25, 3: 0.25, 7: 0.25, 1: 0.25}) == [(0, 1), (0, 3), (0, 4)]
    assert step({5: 0.5, 6: 0.5}, {8: 0.5, 2: 0.5}, {1: 0.5}) == [(0, 5), (0, 6), (1, 2)]
    assert [h.token_ids for h in search.hypotheses()] == [[1, 5], [1, 6], [3, 2]]


def test_of_equal_hypotheses_the_older_comes_first() -> None:
    search, step = script(length_penalty=0.0, early_stopping="never")
    step({9: 0.25, 1: 0.25, 2: 0.125})
    step({9: 1.0, 1: 1.0}, {9: 0.125})
    assert [h.token_ids for h in search.hypotheses()] == [[9], [1, 9]]


def test_stop_ids_end_as_eos_does_and_are_named() -> None:
    search, step = script(stop_token_ids=[5, 9], max_tokens=3)
    step({5: 0.5, 9: 0.3, 1: 0.1, 2: 0.1})
    assert search.done
    assert [(h.token_ids, h.finish_reason, h.stop_reason) for h in search.hypotheses()] == [
        ([5], "stop", 5),
        ([9], "stop", None),
    ]


def test_eos_can_be_ignored() -> None:
    search, step = script(ignore_eos=True, stop_token_ids=[9, 5])
    assert step({9: 0.6, 1: 0.3, 2: 0.1}) == [(0, 1), (0, 2)]
    assert search.hypotheses()[0].stop_reason == 9
    search, step = script(ignore_eos=True)
    assert step({9: 0.6, 1: 0.3, 2: 0.1}) == [(0, 9), (0, 1)]


def test_many_ending_ids_ask_for_more_candidates() -> None:
    search, step = script(eos_token_ids=(7, 8, 9), early_stopping="never")
    assert search.num_candidates == 5
    assert step({7: 0.3, 8: 0.2, 9: 0.2, 1: 0.1, 2: 0.1}) == [(0, 1), (0, 2)]
    assert [h.token_ids for h in search.hypotheses()] == [[7], [8]]
    assert search.num_live == 2


def test_more_candidates_than_needed_change_nothing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        one, two = script(beam_width=4)[0], script(beam_width=4)[0]
        for _ in range(6):
            rows = log_softmax(rng.normal(0, 2, (one.num_live, 30)).astype(np.float32))
            few = one.advance([best_candidates(row, one.num_candidates) for row in rows])
            assert few == two.advance([best_candidates(row, 30) for row in rows])
            if one.done:
                break
        assert one.hypotheses() == two.hypotheses()


def test_fewer_tokens_than_beams() -> None:
    """Beams of which there are none are left out; nothing is made up."""
    search, step = script(beam_width=4, max_tokens=3)
    assert step({1: 0.7, 9: 0.3, 2: 0.0}) == [(0, 1)]
    assert step({1: 0.6, 2: 0.2, 9: 0.2}) == [(0, 1), (0, 2)]
    assert step({1: 0.9, 9: 0.1}, {1: 1.0}) == []
    assert [h.token_ids for h in search.hypotheses()] == [[1, 1, 1], [1, 2, 1], [1, 9], [1, 1, 9]]


def test_no_token_but_eos() -> None:
    search, step = script(beam_width=4)
    assert step({9: 1.0, 1: 0.0}) == []
    assert search.done
    assert found(search.hypotheses()) == [([9], 0.0)]
    search, step = script()
    assert step({}) == []
    assert (search.done, search.hypotheses()) == (True, [])


def test_what_an_aborted_search_has() -> None:
    search, step = script()
    (nothing,) = search.hypotheses()
    assert nothing == Hypothesis([], 0.0, 0.0, None)
    step({9: 0.5, 1: 0.3, 2: 0.2})
    step({3: 0.9, 4: 0.1}, {3: 0.1})
    ended, live = search.hypotheses()
    assert live.token_ids == [9]
    assert (ended.token_ids, ended.finish_reason) == ([1, 3], None)
    assert ended.score == pytest.approx(math.log(0.27) / 2)
    assert not search.done


def test_sums_are_made_in_float32() -> None:
    search, step = script(beam_width=1, max_tokens=400, ignore_eos=True, max_model_len=500)
    wide, narrow = 0.0, np.float32(0.0)
    for _ in range(400):
        chosen = step({1: 0.7, 2: 0.3})
        assert chosen == ([] if search.done else [(0, 1)])
        wide += math.log(0.7)
        narrow += np.float32(math.log(0.7))
    (only,) = search.hypotheses()
    assert only.cumulative_logprob == float(narrow) != wide
    assert only.score == float(narrow / np.float32(400))


def test_misuse_is_seen() -> None:
    _, step = script(max_tokens=1)
    with pytest.raises(AssertionError, match="2 for 1 beams"):
        step({1: 0.5}, {1: 0.5})
    step({1: 0.5, 2: 0.5})
    with pytest.raises(AssertionError, match="over"):
        step()
    with pytest.raises(AssertionError, match="no room"):
        script(prompt_len=100)


def test_a_long_wide_search_is_quick_and_deep() -> None:
    """Beams share what they have in common; thousands of tokens are no recursion."""
    search, _ = script(beam_width=2, max_tokens=None, max_model_len=4_003)
    shown = Candidates([1, 2, 3, 4], [-0.1, -2.5, -3.0, -4.0])
    while not search.done:
        search.advance([shown] * search.num_live)
    assert [len(h.token_ids) for h in search.hypotheses()] == [4_000] * 2

"""What the engine tells its metrics, through the scripted engine."""

from __future__ import annotations

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.metrics import EngineMetrics
from jaxpaged.sampling_params import SamplingParams
from tests.server.scripted import Script, scripted_engine


def finish(script: Script, params: SamplingParams | BeamSearchParams) -> EngineMetrics:
    engine = scripted_engine(script)
    engine.metrics = metrics = EngineMetrics()
    engine.add_request("a", [1, 2, 3], params)
    while engine.has_unfinished_requests():
        engine.step()
    return metrics


def test_tokens_and_requests() -> None:
    metrics = finish(Script([5, 6, 7], end=False), SamplingParams(max_tokens=4))
    assert metrics.time_to_first_token.count == 1
    assert metrics.inter_token_latency.count == 3
    assert metrics.generation_tokens.sum == 4
    assert metrics.finished == {"length": 1}


def test_samples_of_one_request_count_together() -> None:
    metrics = finish(Script([5, 6, 7], end=False), SamplingParams(max_tokens=4, n=3))
    assert metrics.generation_tokens.sum == 12
    assert metrics.max_generation_tokens.sum == 4
    assert metrics.time_to_first_token.count == 1
    assert sum(metrics.finished.values()) == 1


def test_a_search_counts_as_its_answers() -> None:
    metrics = finish(Script([5, 6, 7], end=False), BeamSearchParams(beam_width=3, max_tokens=4))
    assert metrics.params_n.sum == 3
    assert metrics.generation_tokens.sum == 12
    assert metrics.max_generation_tokens.sum == 4
    assert (metrics.time_to_first_token.count, metrics.inter_token_latency.count) == (1, 3)
    assert metrics.finished == {"length": 1}


def test_every_step_counts_its_tokens_and_padding() -> None:
    metrics = finish(Script([5, 6, 7], end=False), SamplingParams(max_tokens=4))
    # One prefill of 3 tokens, then decode rows in the smallest bucket, one token too many at most.
    assert metrics.iteration_tokens.sum in (3 + 3, 3 + 4)
    assert metrics.padding_tokens["decode[8]"] in (3 * 7, 4 * 7)

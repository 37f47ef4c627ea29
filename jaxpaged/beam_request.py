"""What the engine keeps of one beam search beside the scheduler's view of its beams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.beam_search import BeamSearch, Floats, Hypothesis, Ints
from jaxpaged.core.groups import Group
from jaxpaged.core.request import Request
from jaxpaged.device.packing import RowRequest
from jaxpaged.outputs import CompletionOutput, RequestOutput, RequestTimes
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.text.detokenizer import IncrementalDetokenizer
from jaxpaged.text.tokenizer import Tokenizer

StepBeams = tuple[Ints, Floats]
"""Ids and log-probabilities [rows of a step, candidates]."""


@dataclass(slots=True)
class Beam:
    """One row of a search. It is the payload of its scheduler request, whose tokens change as the
    search goes on.
    """

    parent: BeamState
    row: RowRequest
    core: Request = field(init=False)
    found: StepBeams | None = None
    """What its row has been computed to go on with, until the search has gone on from it."""
    place: int = -1
    """Its row there."""
    _epoch: int = -1

    def collect(self, found: StepBeams, place: int) -> None:
        """Its row has been computed."""
        self.found, self.place, self._epoch = found, place, self.core.epoch

    @property
    def is_computed(self) -> bool:
        """False also if it must be again after a preemption."""
        return self.found is not None and self._epoch == self.core.epoch

    def close_text(self) -> None:
        """Its text is made when it is shown."""


@dataclass(slots=True)
class BeamState:
    """One beam search as its user sees it: nothing until it has ended, then its hypotheses."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    """What of the search's parameters has a name there."""
    beam_params: BeamSearchParams
    tokenizer: Tokenizer | None
    search: BeamSearch
    times: RequestTimes
    delta_interval: int = 0
    slot: None = None
    beams: list[Beam] = field(default_factory=list)
    _told: bool = False

    @property
    def completions(self) -> list[Beam]:
        """What to end to end the request: one beam's end is that of all."""
        return self.beams[:1]

    @property
    def core(self) -> Request:
        """One that tells how the search has ended."""
        return self.beams[0].core

    @property
    def finished(self) -> bool:
        return self.core.is_finished

    @property
    def group(self) -> Group:
        group = self.core.group
        assert group is not None
        return group

    def advance(self) -> Sequence[tuple[int, int]] | None:
        """The next live beams, as (index of a live beam, token), if all that are live have been
        computed, else None. Empty: the search is over.
        """
        live = [_beam(core) for core in self.group.live]
        if not all(beam.is_computed for beam in live):
            return None
        count, found = self.search.num_candidates, live[0].found
        assert found is not None
        if all(beam.found is found for beam in live):
            places = [beam.place for beam in live]
            token_ids, logprobs = found[0].take(places, 0), found[1].take(places, 0)
        else:  # not all in one step, as after a preemption
            each = [(beam.found or found, beam.place) for beam in live]
            token_ids = np.stack([values[0][place] for values, place in each])
            logprobs = np.stack([values[1][place] for values, place in each])
        for beam in live:
            beam.found = None
        return self.search.advance_table(token_ids[:, :count], logprobs[:, :count])

    @property
    def finish_reason(self) -> str:
        """Of the best hypothesis."""
        return self.search.hypotheses()[0].finish_reason or "length"

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self._outputs(),
            finished=self.finished,
            num_cached_tokens=self.core.num_cached_tokens,
            times=self.times,
            num_preemptions=self.core.num_preemptions,
        )

    def delta(self) -> RequestOutput | None:
        """Everything at once, at the end."""
        if self._told or not self.finished:
            return None
        self._told = True
        return self.output()

    def _outputs(self) -> list[CompletionOutput]:
        """Best first. An ended search shows what it has: all its hypotheses, as ended if it was cut
        off. There are as many as it is wide, whatever happened to it.
        """
        core = self.core
        if not core.is_finished:
            return []
        cut_off = core.finish_reason in ("abort", "error")
        outputs = []
        for index, found in enumerate(self.search.hypotheses()):
            own = found.finish_reason
            outputs.append(
                CompletionOutput(
                    index=index,
                    text=self._text(found),
                    token_ids=found.token_ids,
                    cumulative_logprob=found.cumulative_logprob,
                    finish_reason=core.finish_reason if cut_off else own,
                    stop_reason=None if cut_off else found.stop_reason,
                    error=core.error,
                    score=found.score,
                )
            )
        return outputs

    def _text(self, found: Hypothesis) -> str:
        params = self.beam_params
        if self.tokenizer is None or not params.detokenize:
            return ""
        detokenizer = IncrementalDetokenizer(
            self.tokenizer, self.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        hide = found.finish_reason == "stop" and not params.include_stop_str_in_output
        shown = found.token_ids[:-1] if hide else found.token_ids
        return "".join([*map(detokenizer.push, shown), detokenizer.finish()])


def _beam(core: Request) -> Beam:
    assert isinstance(core.payload, Beam)
    return core.payload

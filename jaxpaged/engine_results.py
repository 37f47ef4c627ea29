"""From the results of a step to the texts of the requests: what the engine makes of its tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from jaxpaged.beam_request import Beam, BeamState
from jaxpaged.completion import Completion, RequestState
from jaxpaged.core.plan import ScheduledStep
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.device.runner import StepResult
from jaxpaged.device.sampler import STATUS_ALL_MASKED, STATUS_NOT_FINITE, HostSamples
from jaxpaged.errors import told
from jaxpaged.observer import EngineObserver
from jaxpaged.recording import Recorder

_log = logging.getLogger(__name__)

_ROW_ERRORS = {
    STATUS_NOT_FINITE: "The model's logits are not finite (NaN or infinity) for this request.",
    STATUS_ALL_MASKED: "No token can be drawn: allowed_token_ids, bad_words and min_tokens "
    "together forbid them all.",
}


class Results:
    """The requests of an engine, and what becomes of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.observer: EngineObserver | None = None
        """Who is told of all that decides what is computed, such as a recording."""
        self._states: dict[str, RequestState | BeamState] = {}
        self._changed: dict[str, RequestState | BeamState] = {}
        """Requests to report at the end of this step, in the order in which they changed."""
        self._recorder = Recorder()
        self._queued: dict[str, int] = {}
        """Requests of which nothing has been admitted yet, and the tokens of their prompts."""
        self._queued_tokens = 0

    @property
    def num_queued(self) -> int:
        """Requests that wait for their first admission, each once whatever its samples or beams."""
        return len(self._queued)

    @property
    def num_queued_tokens(self) -> int:
        """Of their prompts."""
        return self._queued_tokens

    def _enqueue(self, state: RequestState | BeamState) -> None:
        self._states[state.request_id] = state
        self._queued[state.request_id] = len(state.prompt_token_ids)
        self._queued_tokens += len(state.prompt_token_ids)

    def _dequeue(self, request_id: str) -> None:
        """It waits no more: admitted, or ended before that."""
        self._queued_tokens -= self._queued.pop(request_id, 0)

    def _finish_step(self, step: ScheduledStep, result: StepResult) -> None:
        places, samples, now = result.packed.order, result.samples, time.monotonic()
        if result.prompt is not None:
            self._finish_prompts(step, result.prompt, result.packed.prompt_start)
        if samples.status.any():
            self._end_faulty_rows(step, places, samples.status.tolist())
        drawn = samples.tokens.tolist()
        updates = self.scheduler.update(step, [drawn[place] for place in places])
        if self.observer is not None:
            self.observer.read(step, updates)
        with_token: list[Any] = [u.request.payload for u in updates if u.token is not None]
        self._recorder.tokens(with_token, now)
        searches: dict[str, BeamState] = {}
        for update in updates:
            completion, token = update.request.payload, update.token
            try:
                if isinstance(completion, Completion):
                    if token is not None:
                        if completion.row.fields.num_logprobs >= 0:
                            completion.add_logprobs(samples, places[update.index])
                        self._deliver(completion, token, finished=update.finished)
                    elif update.finished:
                        self._ended(completion)
                elif isinstance(completion, Beam):
                    assert result.beams is not None
                    completion.collect(result.beams, places[update.index])
                    searches[completion.parent.request_id] = completion.parent
            except Exception as error:  # one request's text must not end the others
                self._fail_on_host(completion_of(update.request), error)
        for state in searches.values():
            try:
                if not state.finished:
                    self._advance(state)
            except Exception as error:
                self._fail_on_host(state.beams[0], error)

    def _finish_prompts(
        self, step: ScheduledStep, scored: HostSamples, starts: Sequence[int]
    ) -> None:
        """Give the prompts that this step has scored their logprobs."""
        for row, start in zip(step.rows, starts, strict=True):
            completion = completion_of(row.request)
            if (
                start < 0
                or not isinstance(completion, Completion)
                or not completion.row.wants_prompt_logprobs
                or row.epoch != row.request.epoch
            ):
                continue
            status = int(scored.status[start : start + row.num_tokens].max())
            if status in _ROW_ERRORS:
                self._finish(completion, "error", error=_ROW_ERRORS[status])
                continue
            try:
                completion.parent.add_prompt_logprobs(scored, start, row.start, row.num_tokens)
            except Exception as error:
                self._fail_on_host(completion, error)

    def _end_faulty_rows(
        self, step: ScheduledStep, places: Sequence[int], status: Sequence[int]
    ) -> None:
        for row, place in zip(step.rows, places, strict=True):
            message = _ROW_ERRORS.get(status[place]) if row.samples else None
            if message is not None and row.epoch == row.request.epoch:
                self._finish(completion_of(row.request), "error", error=message)

    def _advance(self, state: BeamState) -> None:
        """Go on with a search if all its live beams have been computed."""
        continuations = state.advance()
        if continuations is None:
            return
        if self.observer is not None:
            self.observer.branched(state.request_id, continuations)
        self._recorder.search(state, time.monotonic())
        if continuations:
            self.scheduler.advance_beams(state.group, continuations)
        else:
            self.scheduler.finish(state.core, state.finish_reason)
            self._ended(state.beams[0])

    def _deliver(self, completion: Completion, token: int, *, finished: bool) -> None:
        """Take a token, with which the request has `finished` or not."""
        if not finished:
            matched = completion.append(token)
            if matched is None:
                parent = completion.parent
                self._changed[parent.request_id] = parent
                return
            self.scheduler.finish(completion.core, "stop", stop_reason=matched)
        else:
            core = completion.core
            matched = completion.append(token, last=core.finish_reason == "stop")
            if matched is not None:  # the same token also reached a length cap
                self.scheduler.amend_ending(core, "stop", stop_reason=matched)
        self._ended(completion)

    # ------------------------------------------------------------------ endings

    def _finish(
        self, completion: Completion | Beam, reason: str, *, error: str | None = None
    ) -> None:
        self.scheduler.finish(completion.core, reason, error=error)
        self._ended(completion)

    def _ended(self, completion: Completion | Beam) -> None:
        """A completion has ended in the scheduler: close its text and report it."""
        self._close_text(completion)
        if completion.parent.request_id in self._queued and completion.parent.finished:
            self._dequeue(completion.parent.request_id)
        if self.observer is not None:
            self.observer.ended(completion)

    def _close_text(self, completion: Completion | Beam) -> None:
        core = completion.core
        self._changed[completion.parent.request_id] = completion.parent
        try:
            matched = completion.close_text()
        except Exception as error:
            _log.exception("The text of request %s could not be closed.", core.request_id)
            if core.error is None:
                self.scheduler.amend_ending(core, "error", error=told(error))
            return
        if matched is not None and core.finish_reason == "length":
            self.scheduler.amend_ending(core, "stop", stop_reason=matched)

    def _fail_on_host(self, completion: Completion | Beam, error: Exception) -> None:
        """What the host makes of one request's tokens went wrong: it ends, and nobody else."""
        core = completion.core
        _log.error("Request %s failed on the host.", core.request_id, exc_info=error)
        if core.is_finished:  # the same token also ended it
            self.scheduler.amend_ending(core, "error", error=told(error))
            self._ended(completion)
        else:
            self._finish(completion, "error", error=told(error))


def completion_of(core: Request) -> Completion | Beam:
    assert isinstance(core.payload, (Completion, Beam))
    return core.payload

"""The loop: schedule and launch step N+1, then finish step N."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.beam_request import BeamState
from jaxpaged.completion import RequestState
from jaxpaged.core.plan import ScheduledStep
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.device.packing import RowRequest
from jaxpaged.device.runner import Launched, Runner
from jaxpaged.engine_results import Results, completion_of
from jaxpaged.errors import EngineDeadError, InvalidRequestError, UnavailableError, told
from jaxpaged.intake import Intake, Prompt
from jaxpaged.metrics import EngineMetrics
from jaxpaged.outputs import EngineStats, RequestOutput
from jaxpaged.sampling_params import SamplingParams

_log = logging.getLogger(__name__)
_ASLEEP_RETRY = 5.0
"""Seconds that HTTP clients are told to wait."""


@dataclass(slots=True)
class _InFlight:
    step: ScheduledStep
    launched: Launched
    launch_seconds: float
    host_gap: float | None
    """Seconds that the device had nothing to do before, at most; None after an idle time."""


class Engine(Results):
    """Continuous batching over one model. Single-threaded: one thread calls everything.

    `add_request`, then `step` until `has_unfinished_requests` is false. Each step returns the
    requests that made progress, cumulatively. A bad request raises and changes nothing; a failed
    request ends alone with finish_reason "error"; after a failed step the requests in it end with
    an error and all others are recomputed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        intake: Intake,
        default_params: SamplingParams,
        *,
        async_scheduling: bool,
        check_integrity: bool,
        eager: bool,
    ) -> None:
        super().__init__(scheduler)
        self.runner = runner
        self.intake = intake
        self.default_params = default_params
        self._depth = 2 if async_scheduling else 1
        self._check_integrity = check_integrity
        self._eager = eager
        self._in_flight: deque[_InFlight] = deque()
        self._held: list[RequestOutput] = []
        """Outputs of steps that nobody asked for, as weights came; the next step returns them."""
        self._closed = False

    @property
    def metrics(self) -> EngineMetrics | None:
        """Where times and sizes are recorded; None records nothing."""
        return self._recorder.metrics

    @metrics.setter
    def metrics(self, metrics: EngineMetrics | None) -> None:
        self._recorder.metrics = metrics

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        delta_interval: int = 0,
    ) -> None:
        """Queue a request. `priority`: smaller is sooner, under the priority policy only.

        With `delta_interval` N above 0 the outputs of this request tell only what is new, and come
        with its first token, then every N tokens, and at its end. A beam search is reported at its
        end only.

        Raises `InvalidRequestError` (nothing is queued then), `UnavailableError` while asleep and
        `EngineDeadError` after `close`.
        """
        self._check_open()
        if self.runner.unready is not None:
            raise UnavailableError(self.runner.unready, _ASLEEP_RETRY)
        if request_id in self._states:
            raise InvalidRequestError(
                f"request_id {request_id!r} is in use; wait for it to end or take another.",
                param="request_id",
            )
        state = self.intake.build(
            request_id,
            prompt,
            self.default_params if params is None else params,
            priority=priority,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            cache_salt=cache_salt,
        )
        if isinstance(state, BeamState):
            self.scheduler.add_beams([beam.core for beam in state.beams])
        else:
            self.scheduler.add_group([completion.core for completion in state.completions])
        state.delta_interval = delta_interval
        self._enqueue(state)
        if self.observer is not None:
            self.observer.added(state)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests in whatever phase they are; unknown and finished ids are ignored.

        The next `step` reports each once more, with what it has so far and finish_reason "abort".
        """
        given = [request_ids] if isinstance(request_ids, str) else request_ids
        ids = [i for i in dict.fromkeys(given) if i in self._states]
        if self.observer is not None and ids:
            self.observer.aborted(ids)
        self._abort(ids)

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for completion in self._states[request_id].completions:
                if not completion.core.is_finished:
                    self._finish(completion, "abort")

    def discard(self, request_ids: Iterable[str]) -> None:
        """Abort requests and never report them: their caller is gone."""
        ids = [i for i in dict.fromkeys(request_ids) if i in self._states]
        if self.observer is not None and ids:
            self.observer.discarded(ids)
        self._abort(ids)
        for request_id in ids:
            del self._states[request_id]
            self._changed.pop(request_id, None)
        self._held = [output for output in self._held if output.request_id not in ids]

    def has_unfinished_requests(self) -> bool:
        """True while any request has not been reported as finished; while the engine is asleep
        those that wait for it to wake do not count.
        """
        waiting = bool(self._states) and self.runner.unready is None
        return waiting or bool(self._changed or self._held)

    # ------------------------------------------------------------------ the loop

    def step(self, *, ended_only: bool = False) -> list[RequestOutput]:
        """Launch the next step, then read the oldest one in flight. Returns requests that changed;
        with `ended_only` those that have ended, which saves telling each text so far again and
        again.

        May return an empty list, for example while a long prompt is computed in chunks.
        """
        self._check_open()
        held, self._held = self._held, []
        return held + self._step(ended_only=ended_only)

    def _step(self, *, ended_only: bool = False) -> list[RequestOutput]:
        try:
            while len(self._in_flight) < self._depth and self._launch_next():
                pass
            if self._in_flight:
                self._finish_oldest()
        except BaseException as error:  # Ctrl-C, or a fault of ours: leave no step half done
            self._drop_in_flight(error)
            raise
        if self._check_integrity:
            self.scheduler.check_integrity()
        outputs = self._report(ended_only=ended_only)
        if self.observer is not None:
            self.observer.stepped(idle=not self._states)
        return outputs

    def _launch_next(self) -> bool:
        if self.runner.unready is not None:
            return False
        step = self.scheduler.schedule()
        for core in self.scheduler.take_failed():
            self._ended(completion_of(core))
        if step is None:
            return False
        if self.observer is not None:
            self.observer.planned(step)
        newest = self._in_flight[-1].launched if self._in_flight else None
        gap = self._recorder.host_gap(newest, self.runner)
        start = time.monotonic()
        try:
            launched = self._launch(step, start)
            seconds = time.monotonic() - start
            self._in_flight.append(_InFlight(step, launched, seconds, gap))
        except Exception as error:
            self._recover([step], error)
            return False
        return True

    def _launch(self, step: ScheduledStep, now: float) -> Launched:
        if step.copies:
            self.runner.copy_blocks(step.copies)
        for row in step.rows:
            if row.admitted:
                self._admit(row.request, now)
        payloads: list[Any] = [row.request.payload for row in step.rows]
        requests: list[RowRequest] = [completion.row for completion in payloads]
        packed = self.runner.pack(step.rows, requests)
        wants_prompt = packed.layout.shape.tokens > 0 and any(
            request.wants_prompt_logprobs for request in requests
        )
        return self.runner.launch(packed, wants_prompt=wants_prompt)

    def _admit(self, core: Request, now: float) -> None:
        """Before the first row of a request in its slot."""
        parent = completion_of(core).parent
        if parent.times.scheduled is None:
            parent.times.scheduled = now
            self._dequeue(parent.request_id)
        if parent.slot is not None:
            self.runner.admit(core.slot, parent.slot.pack(core.token_ids))

    def _finish_oldest(self) -> None:
        oldest = self._in_flight[0]
        start = time.monotonic()
        try:
            result = self.runner.read(oldest.launched)
        except Exception as error:
            failed = [entry.step for entry in self._in_flight]
            self._in_flight.clear()
            self._recover(failed, error)
            return
        self._in_flight.popleft()
        self._recorder.step(
            result.packed,
            oldest.step.num_tokens,
            launch_seconds=oldest.launch_seconds,
            wait_seconds=time.monotonic() - start,
            host_gap=oldest.host_gap,
        )
        self._finish_step(oldest.step, result)

    def _report(self, *, ended_only: bool = False) -> list[RequestOutput]:
        outputs = []
        for request_id, state in self._changed.items():
            if ended_only and not state.finished:
                continue
            output = state.delta() if state.delta_interval else state.output()
            if output is not None:
                outputs.append(output)
            if state.finished if output is None else output.finished:
                self._states.pop(request_id, None)
                self._recorder.finished(state)
        self._changed.clear()
        if not self._in_flight:
            self._recorder.idle()
        return outputs

    def _recover(self, failed: list[ScheduledStep], error: Exception) -> None:
        """After a failed step the donated pool is gone: end what was in it, recompute the rest on a
        new pool.

        Raises `EngineDeadError` where other processes run the same steps: they would go on.
        """
        if not self.runner.alone:
            self._closed = True
            raise EngineDeadError(
                f"A step failed, and the other processes cannot start over with this one: "
                f"{told(error)}. Start all of them again."
            ) from error
        _log.error("A step failed; recomputing all other requests.", exc_info=error)
        # Steps launched before the failed one do not depend on it: their tokens are good.
        while self._in_flight:
            entry = self._in_flight.popleft()
            try:
                result = self.runner.read(entry.launched)
            except Exception:
                failed = [entry.step, *(e.step for e in self._in_flight), *failed]
                self._in_flight.clear()
            else:
                self._finish_step(entry.step, result)
        self._start_over(failed, f"The step that computed this request failed: {told(error)}")

    def _drop_in_flight(self, error: BaseException) -> None:
        """A step was cut off anywhere: what is on its way is lost, all others are recomputed."""
        if not self.runner.alone:
            self._closed = True
            return
        self._in_flight.clear()
        text = f"The step that computed this request was cut off: {told(error)}"
        self._start_over(list(self.scheduler.in_flight), text)

    def _start_over(self, failed: list[ScheduledStep], text: str) -> None:
        """On a new pool: what was in the failed steps ends with this error."""
        if self.observer is not None:
            self.observer.failed(text)
        for core in self.scheduler.fail_steps(failed, text):
            self._ended(completion_of(core))
        self.runner.reset()

    # ------------------------------------------------------------------ weights, sleep

    def update_weights(self, source: Any, *, running: str = "finish") -> None:
        """New weights in the place of the old ones; see `LLM.update_weights`."""
        self._check_open()
        _check_running(running, ("finish", "recompute", "abort"))
        update = self.runner.check_weights(source)
        try:
            self._settle(running, "update_weights")
            self.runner.replace_weights(update)
        finally:
            update.close()

    def sleep(self, *, weights: bool | str = False, running: str = "refuse") -> None:
        """Give device memory back until `wake`; see `LLM.sleep`."""
        self._check_open()
        if not isinstance(weights, bool) and weights != "discard":
            raise InvalidRequestError(
                f'weights must be True, False or "discard", got {weights!r}.', param="weights"
            )
        _check_running(running, ("refuse", "finish", "recompute", "abort"))
        if running == "refuse" and self._states:
            raise InvalidRequestError(
                f"The engine has {len(self._states)} unfinished requests; step them to their end, "
                'or say what becomes of them: running="finish", "recompute" or "abort".',
                param="running",
            )
        self._settle(running, "sleep")
        self.runner.sleep(weights)

    def wake(self) -> None:
        """The opposite of `sleep`."""
        self._check_open()
        self.runner.wake()
        if self.observer is not None:
            self.observer.event("wake")

    def _settle(self, running: str, why: str) -> None:
        """No step is in flight afterwards, no request holds a block, and no prefix is cached.

        What requests have produced meanwhile is returned by the next step.
        """
        if running == "finish" and self._states and self.runner.unready is not None:
            raise InvalidRequestError(
                f"{len(self._states)} requests cannot be finished now. "
                f'{self.runner.unready} Or pass running="recompute" or "abort".',
                param="running",
            )
        if self.observer is not None:
            self.observer.event(why, running=running)
        if running == "abort":
            self._abort(list(self._states))
        elif running == "finish":
            while self._states:
                self._held += self._step()
        try:
            while self._in_flight:
                self._finish_oldest()
        except BaseException as error:
            self._drop_in_flight(error)
            raise
        self._held += self._report()
        for state in self._states.values():
            if isinstance(state, RequestState):
                state.forget_unfinished_prompt()
        if not self.scheduler.reset_prefix_cache(preempt_running=True):
            raise AssertionError("blocks are held though nothing runs")

    # ------------------------------------------------------------------ the rest

    def stats(self) -> EngineStats:
        """Counters since start, and gauges of this moment."""
        scheduler, ledger = self.scheduler, self.runner.ledger
        stats = scheduler.stats
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            peak_running=stats.peak_running,
            steps=stats.steps,
            preemptions=stats.preemptions,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            prompt_tokens=stats.prompt_tokens,
            generation_tokens=stats.generation_tokens,
            recomputed_tokens=stats.recomputed_tokens,
            forks=stats.forks,
            copied_blocks=stats.copied_blocks,
            kv_usage=scheduler.kv_usage,
            num_blocks=scheduler.config.num_blocks,
            block_size=scheduler.config.block_size,
            peak_blocks_used=stats.peak_blocks_used,
            kv_waste=stats.kv_waste,
            compiles=ledger.compiles,
            compiles_after_warmup=ledger.after_warmup,
            lazy_compiles=ledger.compiles if self._eager else 0,
            compile_seconds=ledger.seconds,
            failed_steps=stats.failed_steps,
            requests_finished=dict(stats.requests_finished),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing changed, while requests hold blocks."""
        done = self.scheduler.reset_prefix_cache()
        if self.observer is not None:
            self.observer.cache_reset(done=done)
        return done

    def close(self) -> None:
        """Abort everything and give the device memory back. Idempotent."""
        if self._closed:
            return
        if self.observer is not None:
            self.observer.closed()
        self._abort(list(self._states))
        self._states.clear()
        self._changed.clear()
        self._held.clear()
        self._in_flight.clear()
        self._closed = True
        self.runner.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("The engine was closed; make a new one.")


def _check_running(value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidRequestError(
            f"running must be one of {', '.join(choices)}, got {value!r}.", param="running"
        )

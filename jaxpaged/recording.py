"""What the engine notes of its steps and requests in `EngineMetrics`, if it was given one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from jaxpaged.beam_request import BeamState
from jaxpaged.completion import Completion, RequestState
from jaxpaged.device.packing import PackedStep
from jaxpaged.device.runner import Launched, Runner
from jaxpaged.metrics import EngineMetrics, FinishedRequest


class Recorder:
    """Keeps the clocks of one engine, on its thread."""

    def __init__(self) -> None:
        self.metrics: EngineMetrics | None = None
        """Where to record; None records nothing."""
        self._last_read: float | None = None
        """When the results of the last step came; None if nothing has run since it was idle."""

    def host_gap(self, newest: Launched | None, runner: Runner) -> float | None:
        """Seconds that the device has had nothing to do when a step is about to be launched, at
        most; None after an idle time, and if nobody wants to know.

        `newest` is the step launched before, if it has not been read.
        """
        if self.metrics is None:
            return None
        if newest is not None and not runner.is_ready(newest):
            return 0.0
        if self._last_read is None:
            return None if newest is None else 0.0
        return time.monotonic() - self._last_read

    def step(
        self,
        packed: PackedStep,
        num_tokens: int,
        *,
        launch_seconds: float,
        wait_seconds: float,
        host_gap: float | None,
    ) -> None:
        """A step has been read."""
        self._last_read = time.monotonic()
        if self.metrics is None:
            return
        shape = packed.layout.shape
        self.metrics.step(
            tokens=num_tokens,
            padding=shape.rows + shape.tokens - num_tokens,
            bucket=str(shape),
            launch_s=launch_seconds,
            wait_s=wait_seconds,
            host_gap_s=host_gap,
        )

    def idle(self) -> None:
        """Nothing is in flight."""
        self._last_read = None

    def tokens(self, completions: Sequence[Completion], now: float) -> None:
        """Each of these has got a token."""
        befores: list[float] = []
        for completion in completions:
            times, before = completion.parent.times, completion.last_token_time
            completion.last_token_time = times.last_token = now
            if before is not None:
                befores.append(before)
            elif times.first_token is None:
                times.first_token = now
                if self.metrics is not None:
                    self.metrics.first_token(now - times.arrival)
        if self.metrics is not None:
            # Rows of one step got their tokens before this one together, too.
            for before, count in Counter(befores).items():
                self.metrics.next_token(now - before, count)

    def search(self, state: BeamState, now: float) -> None:
        """A beam search has gone on by one token."""
        times, before = state.times, state.times.last_token
        times.last_token = now
        if times.first_token is None:
            times.first_token = now
            if self.metrics is not None:
                self.metrics.first_token(now - times.arrival)
        elif before is not None and self.metrics is not None:
            self.metrics.next_token(now - before)

    def finished(self, state: RequestState | BeamState) -> None:
        """All samples of a request have ended."""
        if self.metrics is None:
            return
        cores = [completion.core for completion in state.completions]
        reasons = [core.finish_reason or "error" for core in cores]
        times = state.times
        if isinstance(state, BeamState):
            lengths = [len(found.token_ids) for found in state.search.hypotheses()]
        else:
            lengths = [core.num_output_tokens for core in cores]
        self.metrics.request_finished(
            FinishedRequest(
                reason="error" if "error" in reasons else reasons[0],
                num_prompt_tokens=len(state.prompt_token_ids),
                num_cached_tokens=cores[0].num_cached_tokens,
                num_generated_tokens=sum(lengths),
                longest_sample=max(lengths),
                max_tokens=state.params.max_tokens,
                n=state.params.n,
                num_preemptions=sum(core.num_preemptions for core in cores),
                arrival=times.arrival,
                scheduled=times.scheduled,
                first_token=times.first_token,
                last_token=times.last_token,
                finished=time.monotonic(),
            )
        )

"""One HTTP request's generation: one or more prompts, n samples each, as one stream of pieces."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import LogprobDict, RequestOutput
from jaxpaged.sampling_params import SamplingParams
from server.context import Context
from server.errors import ApiError, as_api_error, without_internals

if TYPE_CHECKING:
    from jaxpaged.intake import Prompt
    from jaxpaged.request_stream import RequestStream


_AT_ONCE = 64
"""Outputs that are taken in a row before others run."""


@dataclass(slots=True)
class Piece:
    """What is new for one choice."""

    index: int
    """prompt_index * n + sample."""
    text: str
    token_ids: list[int]
    logprobs: list[LogprobDict] | None
    """One entry a token, if asked for."""
    finish_reason: str | None
    """stop or length, with the choice's last piece."""
    stop_reason: int | str | None
    prompt_logprobs: list[LogprobDict | None] | None = None
    """Once a prompt, with the first piece of it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens so far. Each prompt counts once, whatever its n."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Run:
    """Async iterator of `Piece`, in the order in which things happen. Made by `start_run`. Those of
    a beam search come all at its end, the best choice first.

    A choice that fails raises `ApiError` and ends the run. Call `close` when done with it, whatever
    happened: it aborts what has not ended.
    """

    def __init__(self, streams: Sequence[RequestStream], n: int) -> None:
        self.prompts = list(streams)
        self.n = n
        self._cached = [0] * len(streams)
        self._completion_tokens = 0
        self._pieces: deque[Piece] = deque()
        self._left = set(range(len(streams)))
        self._told: deque[int] = deque()
        """Places of the streams that have something to tell, in the order in which it came."""
        self._waiter: asyncio.Future[None] | None = None
        self._taken = 0
        """Outputs taken since others could run."""
        self.before_waiting: Callable[[], Awaitable[None]] | None = None
        """Called whenever there is nothing to read."""
        for place, stream in enumerate(streams):
            stream.notify(partial(self._note, place))

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if not self._left:
                raise StopAsyncIteration
            await self._read()
        return self._pieces.popleft()

    def usage(self) -> Usage:
        prompt_tokens = sum(len(stream.prompt_token_ids) for stream in self.prompts)
        return Usage(prompt_tokens, self._completion_tokens, sum(self._cached))

    def close(self) -> None:
        """Abort what has not ended. Idempotent."""
        self._left.clear()
        self._pieces.clear()
        for stream in self.prompts:
            stream.close()

    def _note(self, place: int) -> None:
        """A stream has something to tell."""
        self._told.append(place)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _read(self) -> None:
        """Take the next output of any stream."""
        self._taken += 1
        if not self._told and self.before_waiting is not None:
            await self.before_waiting()
        if not self._told:
            self._taken = 0
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        elif self._taken >= _AT_ONCE:  # one that catches up lets others run, too
            self._taken = 0
            await asyncio.sleep(0)
        if not self._told:
            return
        place = self._told.popleft()
        stream = self.prompts[place]
        if place not in self._left or not stream.ready:
            return
        try:
            output = stream.take()
        except Exception as error:
            raise as_api_error(error) from error
        self._take(place, output)

    def _take(self, place: int, output: RequestOutput | None) -> None:
        if output is None:
            self._left.discard(place)
            return
        self._cached[place] = output.num_cached_tokens
        prompt_logprobs = output.prompt_logprobs
        for sample in output.outputs:
            if sample.finish_reason == "error":
                raise ApiError(500, without_internals(sample.error or "The request failed."))
            if sample.finish_reason == "abort":
                raise ApiError(503, "The server is shutting down.", retry_after=5.0)
            if sample.index >= self.n:
                continue  # of a search that is wider than what was asked for
            self._completion_tokens += len(sample.token_ids)
            piece = Piece(
                index=place * self.n + sample.index,
                text=sample.text,
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                prompt_logprobs=prompt_logprobs,
            )
            prompt_logprobs = None
            self._pieces.append(piece)
        if output.finished:
            self._left.discard(place)


async def start_run(
    context: Context,
    request_id: str,
    prompts: Sequence[Prompt],
    params: SamplingParams | BeamSearchParams,
    *,
    n: int | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    stream_interval: int | None = None,
) -> Run:
    """Submit all prompts, or none. `n` choices of each are told; None is all that are computed.

    Raises `ApiError`; where several prompts were given it names the place of the offending one.
    """
    if n is None:
        n = params.beam_width if isinstance(params, BeamSearchParams) else params.n
    interval = context.settings.stream_interval if stream_interval is None else stream_interval

    def submit(place: int, prompt: Prompt) -> Coroutine[Any, Any, RequestStream]:
        return context.engine.submit(
            request_id if len(prompts) == 1 else f"{request_id}-{place}",
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            stream_interval=interval,
        )

    # All at once: the engine answers between two steps, and each step may take long.
    tasks = [asyncio.ensure_future(submit(*numbered)) for numbered in enumerate(prompts)]
    try:
        await asyncio.wait(tasks)
        return Run([_accepted(task, i, len(tasks)) for i, task in enumerate(tasks)], n)
    except BaseException as error:
        for task in tasks:
            task.cancel()  # those that are not done
            task.add_done_callback(_close_accepted)
        if isinstance(error, Exception):
            raise as_api_error(error) from error
        raise


def _accepted(task: asyncio.Future[RequestStream], place: int, count: int) -> RequestStream:
    """Raises what the submission raised, with the prompt's place where there are several."""
    try:
        return task.result()
    except InvalidRequestError as error:
        if count == 1:
            raise
        raise InvalidRequestError(f"prompt {place}: {error}", error.param, place) from error


def _close_accepted(task: asyncio.Future[RequestStream]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()

"""What comes out of one request in an `AsyncEngine`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxpaged.outputs import RequestOutput

if TYPE_CHECKING:  # importing it starts JAX
    from jaxpaged.intake import ParsedPrompt


_AT_ONCE = 64
"""Outputs that a reader who catches up is given before others run."""


class RequestStream:
    """Async iterator over the deltas of one request; made by `AsyncEngine.submit`.

    The last delta has `finished` set. Raises `EngineDeadError` if the engine dies before. Call
    `close` when done with it, whatever happened: it aborts a request that has not ended.
    """

    def __init__(self, request_id: str, prompt: ParsedPrompt, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.prompt = prompt.text
        self.prompt_token_ids = prompt.token_ids
        self._abort = abort
        self._outputs: deque[RequestOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._notify: Callable[[], None] | None = None
        self._given = 0
        """Outputs since the reader last waited."""
        self._error: Exception | None = None
        self._ended = False
        self._closed = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        self._given += 1
        if self._given >= _AT_ONCE:
            self._given = 0
            await asyncio.sleep(0)
        while not self.ready:
            self._given = 0
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output = self.take()
        if output is None:
            raise StopAsyncIteration
        return output

    @property
    def ready(self) -> bool:
        """True if `take` has something to tell."""
        return bool(self._outputs or self._ended or self._closed or self._error is not None)

    def take(self) -> RequestOutput | None:
        """The next output, without waiting; None after the last one. Raises what iterating raises.
        Call it when `ready`.
        """
        if self._outputs:
            return self._outputs.popleft()
        if self._error is not None:
            raise self._error
        return None

    def notify(self, function: Callable[[], None]) -> None:
        """Call this once for each output, and when there will be none any more."""
        self._notify = function
        for _ in self._outputs:
            function()
        # The last output tells of an end, but none of a failure.
        if self._error is not None or (self.ready and not self._outputs):
            function()

    def close(self) -> None:
        """Abort the request if it has not ended. Idempotent; call it on the event loop."""
        if self._closed:
            return
        self._closed = True
        self._outputs.clear()
        self._wake()
        if not self._ended and self._error is None:
            self._abort(self.request_id)

    def push(self, output: RequestOutput) -> None:
        """The engine has made progress."""
        self._ended = output.finished
        if not self._closed:
            self._outputs.append(output)
            self._wake()

    def fail(self, error: Exception) -> None:
        """No output will come any more."""
        if not self._ended:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._notify is not None:
            self._notify()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

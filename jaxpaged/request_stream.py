"""What comes out of one request in an `AsyncEngine`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxpaged.outputs import RequestOutput

if TYPE_CHECKING:  # importing it starts JAX
    from jaxpaged.intake import ParsedPrompt


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
        self._error: Exception | None = None
        self._ended = False
        self._closed = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._outputs:  # a reader that catches up must let others run, too
            await asyncio.sleep(0)
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self._ended or self._closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

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
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

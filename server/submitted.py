"""A generation that has been submitted, and how it is answered: what chat and plain completions
have in common.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response

from server import sse
from server.chunks import Envelope, UsageTeller
from server.context import Context
from server.errors import json_response
from server.logprobs import TokenNames
from server.parts import Splitter
from server.protocol_common import GenerationRequest, PromptTokensDetails
from server.request_log import RequestLog
from server.runs import Run, Usage

R = TypeVar("R", bound=GenerationRequest)


class SubmittedRun(ABC, Generic[R]):
    """Close it, whatever happens."""

    def __init__(
        self,
        context: Context,
        request: R,
        envelope: Envelope,
        run: Run,
        log: RequestLog,
        *,
        needs_prompt: bool,
    ) -> None:
        """`needs_prompt`: nothing of a prompt's choices can be told before its prompt_logprobs."""
        self.run = run
        self.envelope = envelope
        self._request = request
        self._log = log
        self._details = context.settings.enable_prompt_tokens_details
        self._usage = UsageTeller(context, request, run, self._usage_of)
        as_ids = request.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = context.settings.return_tokens_as_token_ids
        self._names = TokenNames(context.engine.tokenizer, as_ids=as_ids)
        self._splitter = Splitter(
            run.n, tells_tokens=bool(request.return_token_ids), needs_prompt=needs_prompt
        )

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes]:
        """The stream: one event for each news, then the usage if asked for, then DONE."""

    @abstractmethod
    async def whole(self) -> msgspec.Struct:
        """The answer without stream: the news put together."""

    @abstractmethod
    def _usage_of(self, usage: Usage) -> Any:
        """As this endpoint tells it."""

    def close(self) -> None:
        """Abort what has not ended. Idempotent."""
        self.run.close()
        self._log.ended()

    def before_waiting(self, function: sse.Flush) -> None:
        """Have this called whenever the next event has to be waited for."""
        self.run.before_waiting = function

    def _last_events(self) -> bytes:
        if self._usage.at_end:
            return self.envelope.usage_chunk(self._usage.total()) + sse.DONE
        return sse.DONE

    def _prompt_details(self, usage: Usage) -> PromptTokensDetails | None:
        return PromptTokensDetails(usage.cached_tokens) if self._details else None


async def reply(context: Context, submitted: SubmittedRun[Any], *, stream: bool | None) -> Response:
    """The response, as a stream or at once. Closes what was submitted at its end."""
    if stream:
        return await sse.event_response(
            submitted.events(),
            keep_alive=context.settings.sse_keep_alive_interval,
            close=submitted.close,
            before_waiting=submitted.before_waiting,
        )
    try:
        answer = await submitted.whole()
    finally:
        submitted.close()
    return json_response(answer)

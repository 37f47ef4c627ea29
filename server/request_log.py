"""--enable-log-requests: what was asked for; with --enable-log-outputs what was answered, too."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.sampling_params import SamplingParams
from server.context import Context
from server.parts import Part

_log = logging.getLogger(__name__)


class RequestLog:
    """Logs one request: its parameters at once, its output when it has ended."""

    def __init__(
        self,
        context: Context,
        request_id: str,
        params: SamplingParams | BeamSearchParams,
        prompts: Sequence[str | list[int]],
    ) -> None:
        """Prompts are logged at level debug only."""
        settings = context.settings
        self._id = request_id
        self._most = settings.max_log_len
        self._outputs: dict[int, list[str]] | None = None
        self._ends: dict[int, str] = {}
        if not settings.enable_log_requests:
            return
        if settings.enable_log_outputs:
            self._outputs = defaultdict(list)
        _log.info("Request %s: %d prompts, %r", request_id, len(prompts), params)
        if _log.isEnabledFor(logging.DEBUG):
            for i, prompt in enumerate(prompts):
                _log.debug("Request %s: prompt %d: %r", request_id, i, prompt[: self._most])

    def output(self, part: Part) -> None:
        if self._outputs is None:
            return
        self._outputs[part.index].append(part.text)
        if part.finish_reason is not None:
            self._ends[part.index] = part.finish_reason

    def ended(self) -> None:
        """Idempotent."""
        outputs, self._outputs = self._outputs, None
        for index, texts in (outputs or {}).items():
            text, end = "".join(texts)[: self._most], self._ends.get(index, "cut off")
            _log.info("Request %s: choice %d (%s): %r", self._id, index, end, text)

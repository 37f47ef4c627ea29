"""Who may watch an engine: everything that decides what it computes, told as it happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # those who only implement it need neither
    from jaxpaged.beam_request import Beam, BeamState
    from jaxpaged.completion import Completion, RequestState
    from jaxpaged.core.plan import ScheduledStep, TokenResult


class EngineObserver(Protocol):
    """Called by `Engine` on its thread, in the order in which things happen. Must not raise.

    What comes from outside (`added` to `event`) comes between two `stepped`, never within a step.
    """

    def added(self, state: RequestState | BeamState) -> None:
        """A request has been accepted, its seed drawn."""

    def aborted(self, request_ids: Sequence[str]) -> None:
        """These unfinished requests are about to be ended."""

    def discarded(self, request_ids: Sequence[str]) -> None:
        """The same, and nobody will be told of them."""

    def cache_reset(self, *, done: bool) -> None:
        """The prefix cache was to be forgotten; not `done` if requests held blocks."""

    def event(self, name: str, *, running: str = "") -> None:
        """What else later results depend on is about to happen: "update_weights" or "sleep" (with
        what becomes of `running` requests, see `LLM.sleep`), or has: "wake".
        """

    def planned(self, step: ScheduledStep) -> None:
        """The scheduler has planned a step, which is launched next."""

    def read(self, step: ScheduledStep, results: Sequence[TokenResult]) -> None:
        """The tokens of a step have come; `results` are those that count."""

    def branched(self, request_id: str, continuations: Sequence[tuple[int, int]]) -> None:
        """A beam search goes on with these beams, best first: the index of a beam that was live,
        and the token that follows it.
        """

    def ended(self, completion: Completion | Beam) -> None:
        """A completion has ended; told again if its ending was corrected."""

    def failed(self, error: str) -> None:
        """A step failed on the device or was cut off; what was in flight is lost."""

    def stepped(self, *, idle: bool) -> None:
        """`Engine.step` is over. `idle`: no request is left."""

    def closed(self) -> None:
        """The engine is closed; nothing follows."""

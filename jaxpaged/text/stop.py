"""Stop strings, found in the text as it grows, whatever tokens it is made of."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Holds back text that may still become a stop string; releases the rest at once.

    The match that completes first wins; of those that complete at the same character the one that
    starts first. How the text is cut into deltas makes no difference.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False, min_tokens: int = 0) -> None:
        """`include` keeps the stop string itself in the text.

        A stop string counts only if its last character comes with an output token after the first
        `min_tokens`.
        """
        assert all(stops), "empty stop strings are refused with the request"
        self._stops = list(dict.fromkeys(stops))
        self._include = include
        self._min_tokens = min_tokens
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, delta: str, num_outputs: int) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string if `delta` completed one.

        `num_outputs` counts output tokens up to the one that `delta` came with. After a match there
        is nothing more to show: the rest of the text is dropped.
        """
        assert self.matched is None, "the text has already ended at a stop string"
        if not self._stops:
            return delta, None
        text = self._held + delta
        match = self._first_match(text) if num_outputs > self._min_tokens else None
        if match is not None:
            end, start, self.matched = match
            self._held = ""
            return text[: end if self._include else start], self.matched
        held = self._possible_start(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """The text still held back, when the request ends for another reason."""
        rest, self._held = self._held, ""
        return rest

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """(end, start, stop) of the earliest completion within the new text."""
        found = []
        for stop in self._stops:
            # Only matches that end in new characters: older ones came before min_tokens.
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found, default=None)

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

"""Which sequence a record speaks of: numbers and ids of sequences, as users know them."""

from __future__ import annotations

from typing import Any

from jaxpaged.record.format import Record
from jaxpaged.record.reader import RecordingError


class Names:
    """Follows the records of one run. Raises `RecordingError` for what was never introduced."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._sequence_of: dict[int, str] = {}
        self._prompt_len: dict[str, int] = {}
        self._rank: dict[str, int] = {}

    def take(self, record: Record) -> None:
        if record["kind"] == "add":
            request = record["request"]
            self._rank[request] = self.num_requests
            self._prompt_len[request] = len(record["prompt"])
            self.num_requests += 1
        elif record["kind"] == "plan":
            for number, sequence in record.get("names", ()):
                self._sequence_of[number] = sequence

    def sequence(self, number: Any) -> str:
        """The id of the sequence with this number."""
        found = self._sequence_of.get(number) if isinstance(number, int) else None
        if found is None:
            raise RecordingError(f"the recording has no sequence with the number {number!r}.")
        return found

    def rank(self, request: str) -> int:
        """How many requests were added before the newest one with this id."""
        self._known(request)
        return self._rank[request]

    def prompt_len(self, request: str) -> int:
        """Tokens in the prompt of the newest request with this id."""
        self._known(request)
        return self._prompt_len[request]

    def _known(self, request: str) -> None:
        if request not in self._rank:
            raise RecordingError(f"the recording has no request {request!r}.")


def request_of(sequence: str) -> str:
    return sequence.partition("_")[2]


def told(sequence: str) -> str:
    """The name of a sequence in messages: its request, and which of its samples it is."""
    sample, _, request = sequence.partition("_")
    return f"request {request!r}" + ("" if sample == "0" else f" (sample {sample})")

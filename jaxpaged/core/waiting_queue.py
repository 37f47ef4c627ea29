"""Requests that wait for admission, first come first served or by priority.

Removal is lazy: an ended request stays in the structure until it reaches the head or until the
ended ones outnumber the live ones, so that aborting n of n waiting requests costs O(n).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from jaxpaged.core.request import Request, RequestStatus

_MIN_DEAD = 64
"""Fewer ended requests than this are not worth a clean-up."""


class FcfsQueue:
    """Arrival order; preempted requests go back to the front."""

    def __init__(self) -> None:
        self._items: deque[Request] = deque()
        self._dead = 0

    def push(self, request: Request) -> None:
        if request.status is RequestStatus.PREEMPTED:
            self._items.appendleft(request)
        else:
            self._items.append(request)

    def peek(self) -> Request | None:
        while self._items and self._items[0].is_finished:
            self._items.popleft()
            self._dead -= 1
        return self._items[0] if self._items else None

    def pop(self) -> Request:
        """Take the head; call `peek` first."""
        return self._items.popleft()

    def note_finished(self) -> None:
        """One of the waiting requests has just got the status FINISHED."""
        self._dead += 1
        if self._dead >= _MIN_DEAD and 2 * self._dead > len(self._items):
            self._items = deque(self)
            self._dead = 0

    def __len__(self) -> int:
        return len(self._items) - self._dead

    def __iter__(self) -> Iterator[Request]:
        return (r for r in self._items if not r.is_finished)


class PriorityQueue:
    """Smaller priority first; among equals preempted ones first, then by arrival."""

    def __init__(self) -> None:
        self._items: list[tuple[int, bool, float, int, Request]] = []
        self._dead = 0

    def push(self, request: Request) -> None:
        fresh = request.status is not RequestStatus.PREEMPTED
        # queue_order is unique, so a comparison never reaches the request itself.
        key = (request.priority, fresh, request.arrival_time, request.queue_order)
        heapq.heappush(self._items, (*key, request))

    def peek(self) -> Request | None:
        while self._items and self._items[0][-1].is_finished:
            heapq.heappop(self._items)
            self._dead -= 1
        return self._items[0][-1] if self._items else None

    def pop(self) -> Request:
        """Take the head; call `peek` first."""
        return heapq.heappop(self._items)[-1]

    def note_finished(self) -> None:
        """One of the waiting requests has just got the status FINISHED."""
        self._dead += 1
        if self._dead >= _MIN_DEAD and 2 * self._dead > len(self._items):
            self._items = [item for item in self._items if not item[-1].is_finished]
            heapq.heapify(self._items)
            self._dead = 0

    def __len__(self) -> int:
        return len(self._items) - self._dead

    def __iter__(self) -> Iterator[Request]:
        return (item[-1] for item in sorted(self._items) if not item[-1].is_finished)


WaitingQueue = FcfsQueue | PriorityQueue

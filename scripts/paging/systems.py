"""Ways to give memory to requests, all of them in this engine's own scheduler.

Each kernel of this engine goes through a block table, so a contiguous range would cost it nothing
and gain it nothing. The systems that reserve therefore take the *blocks* of the length that they
reserve, all at once at the admission, and keep them to the end: these stand for a range. That
ranges of several lengths leave gaps between them is not counted, in their favour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpaged.core.kv_manager import KVManager
from jaxpaged.core.plan import ScheduledRow
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler, SchedulerConfig

Reserve = Callable[[Request, int], int]
"""Of a request and max_model_len: the tokens to reserve for it."""


def whole_model_len(request: Request, max_model_len: int) -> int:
    return max_model_len


def power_of_two(request: Request, max_model_len: int) -> int:
    """The output's length is known up to a factor of two."""
    room = 1 << (request.max_tokens - 1).bit_length()
    return min(request.num_prompt_tokens + room, max_model_len)


def oracle(request: Request, max_model_len: int) -> int:
    """The output's length is known."""
    return min(request.num_prompt_tokens + request.max_tokens, max_model_len)


@dataclass(frozen=True)
class System:
    """`reserve` None is paging. `static`: nobody is admitted until the batch has ended."""

    name: str
    reserve: Reserve | None = None
    static: bool = False


SYSTEMS = (
    System("static batches", whole_model_len, static=True),
    System("reserve max", whole_model_len),
    System("reserve power of two", power_of_two),
    System("reserve oracle", oracle),
    System("paged"),
)


class ReservingKV(KVManager):
    """Takes all blocks of a request when it is admitted."""

    reserve: Reserve
    max_model_len: int

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *, headroom: int = 0, **more: Any
    ) -> bool:
        if request.capacity:
            return super().allocate_slots(request, num_new_tokens, headroom=headroom, **more)
        whole = self.blocks_for(self.reserve(request, self.max_model_len))
        if whole + headroom > self.pool.num_free:
            return False
        taken = super().allocate_slots(request, num_new_tokens, **more)
        assert taken, "a request that does not fit what is reserved for it"
        for table in request.tables:
            table.extend(self.pool.get_new_blocks(whole - len(table)))
        request.capacity = whole * self.block_size
        return True

    def blocks_to_come(self, request: Request) -> int:
        return 0


class BenchScheduler(Scheduler):
    """The engine's scheduler with the memory and the batches of a system."""

    def __init__(self, config: SchedulerConfig, system: System) -> None:
        super().__init__(config)
        self._static, self._is_open = system.static, True
        if system.reserve is not None:
            assert not config.enable_prefix_caching and config.windows == (None,)
            kv = ReservingKV(config.num_blocks, config.block_size, enable_caching=False)
            kv.reserve, kv.max_model_len = system.reserve, config.max_model_len
            self.kv = kv

    def _admit(self, rows: list[ScheduledRow], budget: int) -> int:
        if not self._static:
            return super()._admit(rows, budget)
        if not self.num_running:
            self._is_open = True
        if not self._is_open:
            return budget
        left = super()._admit(rows, budget)
        self._is_open = left == 0  # else nobody else fits, and the batch is complete
        return left

"""The line that the server logs every ten seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from jaxpaged.outputs import EngineStats

if TYPE_CHECKING:
    from jaxpaged.async_engine import AsyncEngine

_log = logging.getLogger(__name__)


class LogLine:
    """Rates between one line and the next. People and scripts search for its words: they stay."""

    def __init__(self, stats: EngineStats, now: float) -> None:
        self._stats = stats
        self._time = now
        self._hit_rate = 0.0
        self._was_busy = False

    def next(self, stats: EngineStats, now: float) -> tuple[int, str]:
        """(logging level, text) for the time since the last line. `now`: monotonic seconds.

        INFO while anything goes on and once more after it, so that the last line shows the end;
        DEBUG while idle.
        """
        before, seconds = self._stats, max(now - self._time, 1e-9)
        prompt = stats.prompt_tokens - before.prompt_tokens
        generated = stats.generation_tokens - before.generation_tokens
        queries = stats.prefix_query_tokens - before.prefix_query_tokens
        if queries:  # else the rate of the last look-ups still says most
            hits = stats.prefix_hit_tokens - before.prefix_hit_tokens
            self._hit_rate = hits / queries
        busy = bool(prompt or generated or stats.num_running or stats.num_waiting)
        level = logging.INFO if busy or self._was_busy else logging.DEBUG
        self._stats, self._time, self._was_busy = stats, now, busy
        return level, (
            f"Engine 000: Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"GPU KV cache usage: {100 * stats.kv_usage:.1f}%, "
            f"Prefix cache hit rate: {100 * self._hit_rate:.1f}%"
        )


async def log_stats(engine: AsyncEngine, interval: float = 10.0) -> None:
    """Log a line every `interval` seconds while the engine serves; ends when it is gone.

    Run it as a task, and cancel it to stop.
    """
    await engine.wait_ready()
    line = LogLine(engine.stats(), time.monotonic())
    while engine.status in ("ready", "draining"):
        await asyncio.sleep(interval)
        level, text = line.next(engine.stats(), time.monotonic())
        _log.log(level, "%s", text)

"""Why a request cannot run, in numbers, with the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpaged.core.plan import SchedulerConfig
from jaxpaged.core.request import Request
from jaxpaged.errors import InvalidRequestError

if TYPE_CHECKING:
    from jaxpaged.core.scheduler import Scheduler

_MORE_ROOM = (
    "raise --gpu-memory-utilization, --kv-cache-memory-bytes or --num-gpu-blocks-override, "
    "or lower --max-model-len"
)


def check_prompt(request: Request, config: SchedulerConfig) -> None:
    """Raises `InvalidRequestError` if the prompt alone can never be computed."""
    length, limit = request.num_prompt_tokens, config.max_model_len
    if length == 0:
        raise InvalidRequestError("The prompt has no tokens; give at least one.", param="prompt")
    if length + (not request.only_scores) > limit:
        raise InvalidRequestError(
            f"The prompt has {length} tokens and max_model_len is {limit}, which counts the "
            "output too. Shorten the prompt or raise --max-model-len.",
            param="prompt",
        )
    needed, usable = -(-length // config.block_size), config.num_blocks - 1
    if needed > usable:
        raise InvalidRequestError(
            f"The prompt has {length} tokens and needs {needed} KV blocks of "
            f"{config.block_size} tokens, but the pool has {usable}. Shorten the prompt; "
            f"or {_MORE_ROOM}.",
            param="prompt",
        )


def outgrown_text(request: Request, config: SchedulerConfig) -> str:
    """For a request whose known tokens no longer fit even in an empty pool."""
    length, block_size = request.num_tokens, config.block_size
    return (
        f"The request has grown to {length} tokens and needs {-(-length // block_size)} KV blocks "
        f"of {block_size} tokens, but the pool has {config.num_blocks - 1}. Ask for fewer "
        f"max_tokens; or {_MORE_ROOM}."
    )


def stalled_text(scheduler: Scheduler, request: Request) -> str:
    """For a request that the watchdog ends."""
    pool = scheduler.kv.pool
    return (
        f"The scheduler made no progress with {scheduler.num_running} running and "
        f"{scheduler.num_waiting} waiting requests, {pool.num_free} of {pool.num_usable} KV "
        f"blocks free, and ended {request!r} to go on. Please report this as a bug."
    )

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
    needed, usable = config.blocks_for_sequence(length), config.num_blocks - 1
    if needed > usable:
        raise InvalidRequestError(
            f"The prompt has {length} tokens and needs {needed} KV blocks of "
            f"{_of_what(config)}, but the pool has {usable}. Shorten the prompt; "
            f"or {_MORE_ROOM}.",
            param="prompt",
        )


def outgrown_text(request: Request, config: SchedulerConfig, needed: int) -> str:
    """For a request whose known tokens no longer fit even in an empty pool."""
    what, fewer = f"request has grown to {request.num_tokens} tokens", "max_tokens"
    if request.is_beam:
        assert request.group is not None
        width = len(request.group.members)
        what = f"beam search has grown to {width} beams of {request.num_tokens} tokens"
        fewer = "beams or max_tokens"
    return (
        f"The {what} and needs {needed} KV blocks of {_of_what(config)}, but the pool has "
        f"{config.num_blocks - 1}. Ask for fewer {fewer}; or {_MORE_ROOM}."
    )


def _of_what(config: SchedulerConfig) -> str:
    if config.windows == (None,):
        return f"{config.block_size} tokens"
    groups = ", ".join("full" if w is None else f"window {w}" for w in config.windows)
    return (
        f"{config.block_size} tokens (over groups of layers with attention {groups}, and with "
        f"--max-num-batched-tokens {config.max_num_batched_tokens} in a step)"
    )


def stalled_text(scheduler: Scheduler, request: Request) -> str:
    """For a request that the watchdog ends."""
    pool = scheduler.kv.pool
    return (
        f"The scheduler made no progress with {scheduler.num_running} running and "
        f"{scheduler.num_waiting} waiting requests, {pool.num_free} of {pool.num_usable} KV "
        f"blocks free, and ended {request!r} to go on. Please report this as a bug."
    )

"""Requests that do nothing but decode: how long a step can be planned without a closer look."""

from __future__ import annotations

from jaxpaged.core.kv_manager import KVManager
from jaxpaged.core.request import Request


def steady_until(request: Request, kv: KVManager, max_model_len: int) -> int:
    """Position below which the next rows of a running request, one token each, all go the same way:
    they draw, neither take a block nor fill one, and follow no token that is sure to be the last.
    0 if its next row must be looked at in full.

    Stays true until the request gives up its blocks or is forked.
    """
    computed = request.num_computed_tokens
    decodes = computed == len(request.token_ids) + request.num_inflight - 1
    waits = request.awaits_fork or request.fork_at or request.is_beam
    if (
        not decodes
        or waits
        or computed < request.num_prompt_tokens
        or computed < request.recompute_until
        or request.shares_tail
        or kv.has_windows
    ):
        return 0
    until = min(request.capacity, request.longest - 1, max_model_len - 1)
    if kv.enable_caching:  # the row that fills a block makes it findable
        until = min(until, (request.num_registered_blocks + 1) * kv.block_size - 1)
    return until

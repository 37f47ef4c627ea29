"""Rotary frequencies that depend on a sequence's length, and what this means for its KV.

With such a rule equal tokens at equal positions may have different keys, so a sequence has a
regime, fixed at its admission and part of its block hashes:

fixed     one set of frequencies; every sequence is in the same regime.
dynamic   (dynamic NTK) beyond the threshold the frequencies follow from the prompt's length.
longrope  a sequence longer than the threshold has other frequencies, at all of its positions. One
          that grows beyond it is started over, with all its tokens known, in the long regime.
"""

from __future__ import annotations

from jaxpaged.core.request import Request

ROPE_RULES = ("fixed", "longrope", "dynamic")


def enter_regime(request: Request, rule: str, threshold: int) -> None:
    """Set the regime of a request that holds no KV from its known tokens.

    Hashes of another regime are dropped; extend them afterwards.
    """
    if rule == "fixed":
        return
    dynamic = rule == "dynamic"
    request.rope_length = request.num_prompt_tokens if dynamic else request.num_tokens
    if request.rope_length <= threshold:
        return  # a sequence only grows, so it never comes back from another regime
    regime = request.rope_length if dynamic else "long"
    if request.rope_regime != regime:
        request.rope_regime = regime
        request.block_hashes.clear()
        request.tail_hash = None


def must_restart(request: Request, threshold: int, max_model_len: int) -> bool:
    """True if the next row of a running request under "longrope" crosses the threshold."""
    return (
        request.rope_regime is None
        and request.num_tokens_with_inflight > threshold
        and not request.end_is_in_flight(max_model_len)
    )

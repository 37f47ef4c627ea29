"""How many KV blocks a sequence holds when its layers are split into groups.

Layers of one group share a block table; all groups take their blocks, equal in size, from one pool
and cut a sequence at the same positions. A group of full attention keeps every block. A group with
a window of W tokens needs only the last W - 1 positions before the next one, so the blocks behind
are given back. Admission, refusals and the sizing at start-up must agree on the numbers, or a
request is let in that can never run; so all of them count with these functions.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxpaged.core.block_pool import NULL_BLOCK

Copy = tuple[int, int]
"""A block whose content is to be copied, and the block that it goes to."""
Windows = tuple[int | None, ...]
"""The window of each group in tokens, the token itself included; None is full attention."""

MAX_GROUPS = 256
"""A group's number is one byte of its blocks' names."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def window_cap(window: int, block_size: int, max_tokens_in_step: int, max_model_len: int) -> int:
    """The most blocks that one request ever holds in a group with this window (all in tokens).

    Before a step of n tokens W - 1 positions are kept, after it n more. The block on top is for a
    range that does not start at the edge of one.
    """
    return ceil_div(min(window - 1 + max_tokens_in_step, max_model_len), block_size) + 1


def blocks_for_sequence(
    num_tokens: int,
    *,
    block_size: int,
    windows: Windows,
    max_tokens_in_step: int,
    max_model_len: int,
) -> int:
    """The most blocks, over all groups, that a request holds on its way to `num_tokens` tokens."""
    whole = ceil_div(num_tokens, block_size)
    return sum(
        whole
        if window is None
        else min(whole, window_cap(window, block_size, max_tokens_in_step, max_model_len))
        for window in windows
    )


def blocks_behind(window: int | None, num_computed: int, block_size: int) -> int:
    """Leading blocks without any position that the token after `num_computed` others sees."""
    return 0 if window is None else max(0, num_computed - window + 1) // block_size


class WindowHit:
    """The blocks that one window group has cached of a prefix, found from right to left.

    A prefix can be continued if its last `need` blocks are cached, or all of it if it is shorter.
    `lookup` gives the cached block at an index or None; `end` is the longest prefix to think of, in
    blocks. No index is looked up twice, however often the prefix is cut.
    """

    def __init__(self, lookup: Callable[[int], int | None], need: int, end: int) -> None:
        self._lookup = lookup
        self._need = need
        self._start = end
        self._found: dict[int, int] = {}
        """Index -> cached block; has all from `_start` to where the prefix was cut last."""

    def cut(self, end: int) -> int:
        """The longest prefix of at most `end` blocks that can be continued."""
        self._start = min(self._start, end)
        while self._start > 0 and end - self._start < self._need:
            self._start -= 1
            block = self._lookup(self._start)
            if block is None:
                end = self._start
            else:
                self._found[self._start] = block
        return end

    def table(self, end: int) -> list[int]:
        """The entries for a prefix of `end` blocks, which `cut` has returned last."""
        return [NULL_BLOCK] * self._start + [self._found[i] for i in range(self._start, end)]

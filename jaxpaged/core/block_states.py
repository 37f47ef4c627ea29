"""What each block of the pool is at a moment, from copies of its reference counts and hashes."""

from __future__ import annotations

from collections.abc import Sequence

NULL, FREE, CACHED, HELD, SHARED = "0fchs"
"""A block's state: the null block; free; free, but findable by its hash; held by one request; held
by several."""

STATE_NAMES = {FREE: "free", CACHED: "cached", HELD: "held", SHARED: "shared", NULL: "null"}

_HOLDERS = bytes(min(refs, 2) for refs in range(256))
_LETTERS = bytes.maketrans(
    bytes([0, 1, 2, 4, 5, 6]), f"{FREE}{HELD}{SHARED}{CACHED}{HELD}{SHARED}".encode()
)
"""From holders (at most 2) plus 4 if there is a hash."""


def block_states(refs: Sequence[int], hashes: Sequence[bytes | None]) -> str:
    """One letter a block: NULL, FREE, CACHED, HELD or SHARED. Index = id in all three."""
    # Both are bytes below 4, added as two large numbers: no loop over blocks in Python.
    holders = _capped(refs).translate(_HOLDERS)
    hashed = bytes(map(bool, hashes))
    kinds = int.from_bytes(holders, "little") + (int.from_bytes(hashed, "little") << 2)
    letters = kinds.to_bytes(len(refs), "little").translate(_LETTERS).decode("ascii")
    return NULL + letters[1:]


def count_states(states: str) -> dict[str, int]:
    """Blocks in each state, by its name in STATE_NAMES; they add up to the number of blocks."""
    return {name: states.count(letter) for letter, name in STATE_NAMES.items()}


def _capped(refs: Sequence[int]) -> bytes:
    try:
        return bytes(refs)
    except ValueError:  # more than 255 share a block
        return bytes([min(count, 255) for count in refs])

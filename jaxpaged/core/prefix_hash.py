"""Names of KV blocks: a SHA-256 chain over tokens, equal in every process and Python version.

The hash of a full block covers the hash of the block before it, so it identifies the whole prefix
up to its end: if one block is not cached, none after it can be. A cryptographic digest makes a
second comparison of tokens on a hit unnecessary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

Extra = tuple[str | int | bytes, ...]
"""What else decides the content of a block, besides its tokens and the blocks before it."""

_ROOT = hashlib.sha256(b"jaxpaged prefix chain, version 1").digest()
"""Stands for the parent of block 0. Change the version when the encoding changes."""


def hash_block(parent: bytes | None, tokens: Sequence[int], extra: Extra | None = None) -> bytes:
    """The 32-byte hash of one block. `parent` is the hash of the block before it, None for the
    first. Different (parent, tokens, extra) never share an encoding; no extras and () are the same.

    Raises `struct.error` for a token id outside int64, `TypeError` for an extra of another type.
    """
    # Both counts come before what they count, so no split of the bytes reads in two ways.
    size = len(tokens)
    message = (parent or _ROOT) + struct.pack(f"<Q{size}q", size, *tokens)
    if extra:
        message += _encode_extra(extra)
    return hashlib.sha256(message).digest()


def _encode_extra(extra: Extra) -> bytes:
    parts = [struct.pack("<Q", len(extra))]
    for item in extra:
        if isinstance(item, str):
            # JSON may carry lone surrogates; they are legal in a salt and must not fail here.
            tag, data = b"s", item.encode("utf-8", "surrogatepass")
        elif isinstance(item, bytes):
            tag, data = b"b", item
        elif isinstance(item, int):
            tag, data = b"i", str(int(item)).encode()
        else:
            raise TypeError(f"a hash extra must be str, int or bytes, got {type(item).__name__}")
        parts.append(tag + struct.pack("<Q", len(data)) + data)
    return b"".join(parts)


def block_extra(
    index: int,
    *,
    cache_salt: str | None,
    adapter: str | None = None,
    rope_regime: int | str | None = None,
) -> Extra | None:
    """Extras of block number `index` of a request.

    The adapter changes the KV of every block; the salt and the regime of the rotary frequencies,
    which a whole sequence has in common, only have to enter once, at block 0, and the chain
    carries them on.
    """
    extra: Extra = ()
    if adapter is not None:
        extra += ("adapter", adapter)
    if cache_salt is not None and index == 0:
        extra += ("cache_salt", cache_salt)
    if rope_regime is not None and index == 0:
        extra += ("rope", rope_regime)
    return extra or None


def hash_tail(
    hashes: Sequence[bytes],
    prompt: Sequence[int],
    block_size: int,
    *,
    cache_salt: str | None = None,
    adapter: str | None = None,
    rope_regime: int | str | None = None,
) -> bytes | None:
    """Name of the last block of a prompt that does not fill it, None if it does.

    `hashes` name the prompt's full blocks. No full block has the name of a tail.
    """
    index = len(prompt) // block_size
    tail = prompt[index * block_size :]
    if not tail:
        return None
    extra = block_extra(index, cache_salt=cache_salt, adapter=adapter, rope_regime=rope_regime)
    return hash_block(hashes[index - 1] if index else None, tail, (*(extra or ()), "tail"))


def extend_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    *,
    cache_salt: str | None = None,
    adapter: str | None = None,
    rope_regime: int | str | None = None,
) -> None:
    """Append to `hashes` until it names every full block of `token_ids` (in place).

    Touches nothing else, so a long prompt can be hashed in any thread before it is queued.
    """
    for index in range(len(hashes), len(token_ids) // block_size):
        hashes.append(
            hash_block(
                hashes[-1] if hashes else None,
                token_ids[index * block_size : (index + 1) * block_size],
                block_extra(index, cache_salt=cache_salt, adapter=adapter, rope_regime=rope_regime),
            )
        )

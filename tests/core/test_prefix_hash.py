from __future__ import annotations

import hashlib
import itertools
import random
import struct
import subprocess
import sys
import time

import pytest

from jaxpaged.core.prefix_hash import block_extra, extend_hashes, hash_block


def chain(tokens: list[int], block_size: int = 4, salt: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size, cache_salt=salt)
    return hashes


def test_the_encoding_is_the_documented_one() -> None:
    """Spelled out by hand: other processes and later versions must find the same names."""
    root = hashlib.sha256(b"jaxpaged prefix chain, version 1").digest()
    body = struct.pack("<Q3q", 3, 1, 2, 3)
    assert hash_block(None, [1, 2, 3]) == hashlib.sha256(root + body).digest()
    parent = bytes(range(32))
    extra = struct.pack("<Q", 1) + b"s" + struct.pack("<Q", 2) + b"ab"
    assert hash_block(parent, [1, 2, 3], ("ab",)) == hashlib.sha256(parent + body + extra).digest()


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_other_processes_find_the_same_hashes(seed: str) -> None:
    code = (
        "from jaxpaged.core.prefix_hash import hash_block as h;"
        "print(h(h(None, [5, 6], ('cache_salt', 'x')), [7, 8]).hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    here = hash_block(hash_block(None, [5, 6], ("cache_salt", "x")), [7, 8])
    assert done.stdout.strip() == here.hex()


def test_only_full_blocks_have_a_hash() -> None:
    for length in range(14):
        assert len(chain(list(range(length)))) == length // 4


def test_extending_in_any_pieces_gives_the_same_chain() -> None:
    tokens = list(range(37))
    pieces: list[bytes] = []
    for end in (3, 4, 5, 16, 17, 37):
        extend_hashes(pieces, tokens[:end], 4, cache_salt="s")
    assert pieces == chain(tokens, salt="s")


@pytest.mark.parametrize("changed", range(16))
def test_a_changed_token_changes_its_block_and_all_later_ones(changed: int) -> None:
    tokens = list(range(16))
    other = [*tokens]
    other[changed] += 100
    same = [a == b for a, b in zip(chain(tokens), chain(other), strict=True)]
    assert same == [i < changed // 4 for i in range(4)]


def test_salt_enters_at_block_0_and_the_chain_carries_it_on() -> None:
    tokens = list(range(12))
    assert block_extra(0, cache_salt="a") == ("cache_salt", "a")
    assert block_extra(1, cache_salt="a") is None
    chains = [chain(tokens, salt=salt) for salt in (None, "a", "b", "")]
    for one, two in itertools.combinations(chains, 2):
        assert not set(one) & set(two)
    assert chain(tokens, salt="a") == chains[1]
    assert chains[1][1] == hash_block(chains[1][0], tokens[4:8])


def test_the_adapter_enters_in_every_block() -> None:
    assert block_extra(3, cache_salt="a", adapter="m") == ("adapter", "m")
    assert block_extra(0, cache_salt="a", adapter="m") == ("adapter", "m", "cache_salt", "a")
    assert block_extra(0, cache_salt="m") != block_extra(0, cache_salt=None, adapter="m")


def test_weak_keys_of_other_systems_are_told_apart() -> None:
    parent = hash_block(None, [9, 9, 9, 9])
    keys = [
        hash_block(None, [1, 2, 3, 4]),
        hash_block(None, [4, 3, 2, 1]),
        hash_block(None, [2, 2, 2, 4]),
        hash_block(None, [1, 2]),
        hash_block(None, [2, 1 - 31]),
        hash_block(None, [1, 23]),
        hash_block(None, [12, 3]),
        hash_block(None, [-1, 2, 3, 4]),
        hash_block(None, [0, 2, 3, 4]),
        hash_block(parent, [1, 2, 3, 4]),
        hash_block(hash_block(None, [8, 8, 8, 8]), [1, 2, 3, 4]),
        hash_block(None, [1, 2, 3, 4], ("",)),
        hash_block(None, [1, 2, 3, 4], ("ab", "c")),
        hash_block(None, [1, 2, 3, 4], ("a", "bc")),
        hash_block(None, [1, 2, 3, 4], ("abc",)),
        hash_block(None, [1, 2, 3, 4], (b"abc",)),
        hash_block(None, [1, 2, 3, 4], (1,)),
        hash_block(None, [1, 2, 3, 4], ("1",)),
        hash_block(None, []),
    ]
    assert len(set(keys)) == len(keys)
    assert hash_block(None, [1, 2, 3, 4], ()) == keys[0]


def test_random_prefixes_share_a_key_only_if_equal() -> None:
    rng = random.Random(1)
    seen: dict[bytes, tuple[object, ...]] = {}
    collisions_of_content = 0
    for _ in range(100_000):
        content = (
            rng.choice([None, "a", "b"]),
            tuple(rng.randrange(-1, 3) for _ in range(rng.choice([2, 4, 8]))),
        )
        key = hash_block(None, content[1], block_extra(0, cache_salt=content[0]))
        if key in seen:
            collisions_of_content += 1
            assert seen[key] == content
        seen[key] = content
    assert collisions_of_content > 1000
    assert len(set(seen.values())) == len(seen)


def test_any_string_can_be_a_salt() -> None:
    salts = ["\ud800", "\udfff", "é", "e\u0301", "\x00", "\x00\x00"]
    assert len({chain([1, 2, 3, 4], salt=salt)[0] for salt in salts}) == len(salts)


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        hash_block(None, [1], (1.5,))  # type: ignore[arg-type]
    with pytest.raises(struct.error):
        hash_block(None, [2**63])


def test_hashing_is_fast_enough_to_ignore() -> None:
    tokens = list(range(20_000))
    best = min(_seconds(tokens) for _ in range(5))
    # 0.3 µs a token is the promise on a quiet machine; the factor is for a busy one.
    assert best / len(tokens) < 3 * 0.3e-6


def _seconds(tokens: list[int]) -> float:
    start = time.process_time()
    chain(tokens, 16)
    return time.process_time() - start

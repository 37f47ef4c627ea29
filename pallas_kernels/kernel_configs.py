"""Sizes that a kernel is compiled with. They change its speed, not (beyond rounding) its result.

All three raise `ValueError` for values that no kernel could be compiled with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pallas_kernels.support import MAX_HEAD_DIM

MIN_TILE = 16
"""The tensor cores take no fewer rows or columns."""
MAX_SPLITS = 32
_MAX_HEADS = 64
_MAX_HEADS_WIDE = 16


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Of the decode kernels."""

    block_kv: int = 64
    """Context tokens in one tile; a power of two, at least 16."""
    num_warps: int = 4
    num_stages: int = 3
    """Software pipeline stages; with carried page ids, `num_stages - 1` tiles are in flight."""
    splits: int = 8
    """Most programs that share the context of one row and KV head; a power of two up to 32."""
    min_split_tokens: int = 256
    """A row is split only so far that every program has this many tokens."""
    carry_pages: bool = True
    """Read the page ids of the next tile before this one is used."""

    def __post_init__(self) -> None:
        _check_power_of_two("block_kv", self.block_kv, MIN_TILE, 1024)
        _check_power_of_two("num_warps", self.num_warps, 1, 16)
        _check_range("num_stages", self.num_stages, 1, 16)
        _check_power_of_two("splits", self.splits, 1, MAX_SPLITS)
        _check_range("min_split_tokens", self.min_split_tokens, 1, 2**31 - 1)
        if type(self.carry_pages) is not bool:
            raise ValueError(f"carry_pages is {self.carry_pages!r}, but must be true or false.")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Of the prefill kernels."""

    block_rows: int = 64
    """Query rows (tokens x heads) of one program; a power of two, at least 16."""
    block_kv: int = 64
    """Context tokens in one tile; a power of two, at least 16."""
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        _check_power_of_two("block_rows", self.block_rows, MIN_TILE, 1024)
        _check_power_of_two("block_kv", self.block_kv, MIN_TILE, 1024)
        _check_power_of_two("num_warps", self.num_warps, 1, 16)
        _check_range("num_stages", self.num_stages, 1, 16)


@dataclass(frozen=True, slots=True)
class WriteConfig:
    """Of the kernel that writes new K and V."""

    block_tokens: int = 8
    """Tokens of one program; a power of two."""
    num_warps: int = 4

    def __post_init__(self) -> None:
        _check_power_of_two("block_tokens", self.block_tokens, 1, 1024)
        _check_power_of_two("num_warps", self.num_warps, 1, 16)


KernelConfig: TypeAlias = DecodeConfig | PrefillConfig | WriteConfig


def heads_per_program(
    group: int, value_dim: int, num_warps: int, *, cache_8_bit: bool = False
) -> int:
    """Query heads of one KV head that one program of the Triton decode kernel takes; the next
    program reads the same K and V, mostly from the L2 cache. With values as wide as those of a
    latent cache, eight warps have the registers for many heads, if nothing has to be converted.
    """
    many = value_dim <= MAX_HEAD_DIM or (num_warps >= 8 and not cache_8_bit)
    return min(group, _MAX_HEADS if many else _MAX_HEADS_WIDE)


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, but must be a whole number from {low} to {high}.")


def _check_power_of_two(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high or value & (value - 1):
        raise ValueError(f"{name} is {value!r}, but must be a power of two from {low} to {high}.")

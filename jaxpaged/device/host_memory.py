"""Memory of the process: what the C library keeps of freed memory, and the size of pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import jax

_HUGE = 2**21
"""Of a huge page where there are such pages of anonymous memory: x86-64, and aarch64 mostly."""
_NEIGHBOURS = 2**16
"""Ranges that are no further apart are one: the C library's own notes lie between arrays."""
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of linux/mman.h; the latter since Linux 6.1


def give_back_freed() -> bool:
    """Hand freed heap pages back to the system; False where the C library has no way to.

    glibc maps blocks above 32 MiB by themselves only when its heap has no hole for them. In a
    process that has freed much, arrays lie in such holes, and freeing them gives the system
    nothing: malloc_trim(3) does, for the holes of all arenas.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is None:
        return False
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    trim(0)
    return True


def prefer_huge_pages(arrays: Iterable[jax.Array]) -> int:
    """Put arrays that lie in the process's memory on pages of 2 MiB as far as they can be, and say
    how many bytes that was asked for.

    A step reads all weights, and KV blocks all over the pools: with pages of 4 KiB the processor
    looks up where each of them lies, and in a virtual machine every look-up is several. Nothing
    happens where the system has no such pages, or none left.
    """
    if not sys.platform.startswith("linux"):
        return 0
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    asked = 0
    for start, end in _ranges(arrays):
        if end - end % _HUGE <= start + -start % _HUGE:
            continue  # no whole one fits
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            advise(start, end - start, advice)
        asked += end - start
    return asked


def _ranges(arrays: Iterable[jax.Array]) -> list[tuple[int, int]]:
    """Addresses of whole pages that the arrays lie on."""
    pieces = []
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.device.platform == "cpu":
                start = shard.data.unsafe_buffer_pointer()
                pieces.append((start, start + shard.data.nbytes))
    ranges: list[tuple[int, int]] = []
    for start, end in sorted(pieces):
        start, end = start - start % mmap.PAGESIZE, end + -end % mmap.PAGESIZE
        if ranges and start - ranges[-1][1] <= _NEIGHBOURS:
            start, before = ranges.pop()
            end = max(before, end)
        ranges.append((start, end))
    return ranges

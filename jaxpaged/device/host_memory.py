"""Memory of the process: what the C library keeps of freed memory, and the size of pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable, Iterator

import jax

_HUGE = 2**21
"""Of a huge page where there are such pages of anonymous memory: x86-64, and aarch64 mostly."""
_PIECE = 2**25
"""Bytes that are asked for at a time."""
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


class HugePages:
    """Puts arrays that lie in the process's memory on pages of 2 MiB as far as they can be, on a
    thread of its own: the system copies a gigabyte in a second or two, and lets nobody else map
    memory meanwhile.

    A step reads all weights: with pages of 4 KiB the processor looks up where each of them lies,
    and in a virtual machine every look-up is several. Nothing happens where the system has no such
    pages, or none left.
    """

    def __init__(self, arrays: Iterable[jax.Array]) -> None:
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.pieces = list(_pieces(_ranges(arrays)))
        """Addresses, first and last, of what is asked for at a time."""
        if self.pieces and sys.platform.startswith("linux"):
            self._thread = threading.Thread(target=self._run, name="jaxpaged-pages", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until all of it is done."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """To be called before the arrays are given back. Idempotent; waits for at most a piece."""
        self._stopped.set()
        self.wait()

    def _run(self) -> None:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise.restype = ctypes.c_int
        for start, end in self.pieces:
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                if self._stopped.is_set():
                    return
                advise(start, end - start, advice)


def _pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The whole huge pages in the ranges, some at a time."""
    for start, end in ranges:
        start, end = start + -start % _HUGE, end - end % _HUGE
        for first in range(start, end, _PIECE):
            yield first, min(first + _PIECE, end)


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

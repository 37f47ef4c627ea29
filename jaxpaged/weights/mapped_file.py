"""A file of weights in the address space, and as little of it as can be in memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt


class MappedFile:
    """Bytes of a file, read only. Of all that was cut out, the last piece stays in memory.

    Pages that were looked at count as the process's memory until they are given back: with weights
    that are read one after the other and copied, twice the model. A piece whose pages are gone can
    still be used, as the system gets them from its cache or the file again.
    """

    def __init__(self, path: Path) -> None:
        """Raises `OSError`, and `ValueError` for an empty file."""
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._last = (0, 0)

    def cut(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes `start` up to `stop`; a view, which keeps the file mapped."""
        first, end = self._last
        first -= first % mmap.PAGESIZE
        if first < end and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
        self._last = (start, stop)
        return self._bytes[start:stop]

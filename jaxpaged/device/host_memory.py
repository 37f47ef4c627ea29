"""What the C library keeps of freed memory."""

from __future__ import annotations

import ctypes
import sys


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

"""Pages of arrays in the process's own memory."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.device.host_memory import HugePages, _ranges

MIB = 2**20


def huge_bytes(start: int, size: int) -> int:
    """Of the mappings that [start, start + size) lies in."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            low, high = (int(part, 16) for part in line.split(" ")[0].split("-"))
            inside = low < start + size and start < high
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found


def test_arrays_get_huge_pages() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("Linux's advice")
    array = jnp.asarray(np.arange(32 * MIB, dtype=np.uint8))
    pages = HugePages([array])
    pages.wait()
    assert sum(end - start for start, end in pages.pieces) >= 30 * MIB
    if huge_bytes(array.unsafe_buffer_pointer(), array.nbytes) == 0:
        pytest.skip("this system gives no huge pages")
    assert huge_bytes(array.unsafe_buffer_pointer(), array.nbytes) >= 20 * MIB
    np.testing.assert_array_equal(np.asarray(array), np.arange(32 * MIB, dtype=np.uint8))


def test_small_arrays_are_left_alone() -> None:
    for arrays in ([jnp.ones(1000)], []):
        pages = HugePages(arrays)
        assert not pages.pieces
        pages.stop()


class Shard:
    def __init__(self, start: int, nbytes: int, platform: str) -> None:
        self.device = type("Device", (), {"platform": platform})()
        self.data = self
        self.nbytes = nbytes
        self._start = start

    def unsafe_buffer_pointer(self) -> int:
        return self._start


def lying_at(start: int, nbytes: int, platform: str = "cpu") -> Any:
    return type("Array", (), {"addressable_shards": [Shard(start, nbytes, platform)]})()


def test_neighbours_are_one_range() -> None:
    page, far = 4096, 64 * MIB
    arrays = [
        lying_at(far + 10 * page + 64, 3 * page),
        lying_at(far + 64, 5 * page),
        lying_at(far + 40 * MIB, page),
        lying_at(0, MIB, "gpu"),
    ]
    assert _ranges(arrays) == [
        (far, far + 14 * page),
        (far + 40 * MIB, far + 40 * MIB + page),
    ]


def test_a_system_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice that is not taken is no error."""
    if not sys.platform.startswith("linux"):
        pytest.skip("Linux's advice")
    calls = []
    asked, go_on = threading.Event(), threading.Event()

    class Library:
        @staticmethod
        def madvise(start: int, size: int, advice: int) -> int:
            calls.append(advice)
            asked.set()
            assert go_on.wait(60)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    array = jax.device_put(np.zeros(100 * MIB, np.uint8))
    go_on.set()
    pages = HugePages([array])
    pages.wait()
    assert len(pages.pieces) >= 3 and calls == [14, 25] * len(pages.pieces)

    # Stopped, it asks for no more.
    calls.clear()
    asked.clear()
    go_on.clear()
    pages = HugePages([array])
    assert asked.wait(60)
    stopping = threading.Thread(target=pages.stop)
    stopping.start()
    while not pages._stopped.is_set():
        stopping.join(0.001)
    go_on.set()
    stopping.join()
    pages.stop()
    assert len(calls) < 2 * len(pages.pieces)

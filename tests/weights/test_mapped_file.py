"""Weights that were read do not stay in memory, and are right all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxpaged.weights.mapped_file import MappedFile

PIECE = 1 << 22


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_only_the_last_piece_stays_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    values = np.random.default_rng(0).integers(0, 256, 8 * PIECE + 999, np.uint8)
    values.tofile(path)
    file = MappedFile(path)
    cuts = []
    for start in range(77, len(values), PIECE):
        cuts.append(file.cut(start, min(start + PIECE, len(values))))
        assert (cuts[-1] == values[start : start + PIECE]).all()
        assert PIECE // 2 < resident(path) < 2 * PIECE or len(cuts[-1]) < PIECE
    file.cut(0, 0)
    assert resident(path) < PIECE
    np.testing.assert_array_equal(np.concatenate(cuts), values[77:])  # earlier pieces still do
    del file
    assert resident(path) > 0, "they keep the file mapped"
    cuts.clear()
    assert resident(path) == 0


def test_pieces_are_read_only_and_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(10)))
    file = MappedFile(path)
    assert [file.cut(*ends).tolist() for ends in ((7, 10), (0, 2), (4, 4), (0, 10))] == [
        [7, 8, 9], [0, 1], [], list(range(10)),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="read-only"):
        file.cut(0, 1)[0] = 1


def resident(path: Path) -> int:
    """Bytes of the file that are this process's memory."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found
